-- One row a rank: its newest clock offset. job_ns = unix_ns - offset_ns, true within error_ns.
-- job: job id
-- attempt: restart count of the job, from 0
-- rank: global rank
-- at_ns: when the offset was measured, in the rank's own Unix ns
-- offset_ns: the rank's clock less the job clock
-- error_ns: half-width of the interval
-- drift_ppm: drift against the job clock in parts per million
SELECT job, attempt, rank, max(at_ns) AS at_ns, arg_max(offset_ns, at_ns) AS offset_ns,
       arg_max(error_ns, at_ns) AS error_ns, arg_max(drift_ppm, at_ns) AS drift_ppm
FROM clocks
GROUP BY job, attempt, rank
