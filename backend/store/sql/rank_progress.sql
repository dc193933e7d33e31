-- One row a rank: the last step that it closed and the last span that it sent.
-- job: job id
-- attempt: restart count of the job, from 0
-- rank: global rank
-- step: last closed step; -1 = none yet
-- last_ns: end of the last span, in the rank's own Unix ns
-- received_ns: server Unix ns at which the last span came in
SELECT job, attempt, rank, coalesce(max(step) FILTER (WHERE kind = 'training.step'), -1) AS step,
       max(end_ns) AS last_ns, max(received_ns) AS received_ns
FROM spans WHERE rank >= 0
GROUP BY job, attempt, rank
