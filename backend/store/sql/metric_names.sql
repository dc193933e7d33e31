-- One row a metric: what was recorded for a job.
-- job: job id
-- attempt: restart count of the job, from 0
-- name: metric name
-- unit: UCUM unit; empty = not known
-- ranks: how many ranks sent it
-- points: how many numbers there are
-- last_step: largest step
SELECT job, attempt, name, max(unit) AS unit, count(DISTINCT rank) AS ranks, count(*) AS points,
       max(step) AS last_step
FROM points
GROUP BY job, attempt, name
