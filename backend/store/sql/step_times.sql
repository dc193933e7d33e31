-- One row a step: how long it took and who took longest. Ranks of synchronous training show the same
-- duration, so the slowest here is not yet the culprit: see the incident.
-- job: job id
-- attempt: restart count of the job, from 0
-- step: optimizer step
-- start_ns: earliest start over ranks, in those ranks' own Unix ns
-- median_ms: median duration over ranks
-- max_ms: longest duration over ranks
-- slowest_rank: rank of the longest duration
-- ranks: how many ranks reported the step
SELECT job, attempt, step, min(start_ns) AS start_ns, median(value) AS median_ms, max(value) AS max_ms,
       arg_max(rank, value) AS slowest_rank, count(DISTINCT rank) AS ranks
FROM rank_steps WHERE metric = 'step_ms'
GROUP BY job, attempt, step
