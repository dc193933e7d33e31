-- One row a collective call, members joined by group and order of the call: the last to arrive made the
-- others wait. Times are aligned by the clock offsets known when the row was made.
-- job: job id
-- attempt: restart count of the job, from 0
-- group_name: process group as a rank set, like 0-3
-- group_sequence: order of the call within the group
-- step: optimizer step
-- op: collective operation; empty = not known
-- bytes: payload in bytes
-- members: ranks that entered
-- last_rank: rank that entered last
-- skew_ms: longest wait of a member for the last one
-- transfer_ms: last arrival to completion (median member)
-- error_ms: half-width of the clock interval: a skew below it is noise
SELECT job, attempt, group_name, group_sequence, any_value(step) AS step, any_value(op) AS op,
       max(bytes) AS bytes, count(*) AS members, arg_max(rank, lateness_ms) AS last_rank, max(wait_ms) AS skew_ms,
       median(transfer_ms) AS transfer_ms, max(error_ms) AS error_ms
FROM waits
GROUP BY job, attempt, group_name, group_sequence
