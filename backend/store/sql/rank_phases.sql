-- One row a rank, step and phase: time spent in it, summed when a phase was entered more than once.
-- job: job id
-- attempt: restart count of the job, from 0
-- rank: global rank
-- step: optimizer step
-- phase: data_wait, h2d, forward, backward, optimizer, checkpoint, eval, compile or other
-- duration_ms: time in the phase as the host saw it (a blocked collective lengthens it)
SELECT job, attempt, rank, step, name AS phase, sum(end_ns - start_ns) / 1e6 AS duration_ms
FROM spans WHERE kind = 'training.phase'
GROUP BY job, attempt, rank, step, name
