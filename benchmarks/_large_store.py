"""A store of 50 million events in the real schema, written by SQL in the order in which ingest would have.

One job of ``ranks`` x ``steps`` (step, four phases, two collectives, five training metrics, three of hardware, and
heartbeats, with the roll-ups that ingest and alignment keep) in which one rank is slow from three fifths on; the
rest are finished jobs of a million events each. All of them stand in the control store, so the fleet lists them.
"""

from __future__ import annotations

import time
from typing import Any

from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.nouns import Identity
from lanterne.settings import ServerSettings

JOB = "large"
OTHER_RANKS = 256
OTHER_EVENTS = 1_000_000
STEP_NS = 100_000_000
LATE_NS = 30_000_000
BLOCK_RANK_STEPS = 81_920
_GRID = """
WITH grid AS (
  SELECT $job AS job, s.step, r.rank, 'n' || (r.rank // 8) AS host, $start + s.step * 100000000 AS t0,
    (hash(s.step * 4096 + r.rank) % 2000000)::BIGINT AS noise,
    CASE WHEN s.step >= $onset THEN 30000000 ELSE 0 END AS late, r.rank = $culprit AS guilty
  FROM range($first, $last) s(step), range($ranks) r(rank))
"""
_SPANS = (
    "INSERT INTO spans"
    + _GRID
    + """
SELECT job, 0, rank::INTEGER, step * 13 + p.n, step * 13 + p.n, p.kind, p.name, step,
  t0 + p.a + CASE WHEN p.n = 5 AND guilty THEN late ELSE 0 END,
  CASE p.n WHEN 0 THEN t0 + 97000000 + noise + late
    WHEN 5 THEN t0 + 93000000 + late + noise // 8
    WHEN 3 THEN t0 + p.b + CASE WHEN guilty THEN late ELSE 0 END + noise // 2
    ELSE t0 + p.b + noise // 2 END,
  step * 100000000 + p.a, CASE WHEN p.n >= 5 THEN '0-' || ($ranks - 1) ELSE '' END,
  CASE WHEN p.n >= 5 THEN step * 2 + p.n - 5 ELSE -1 END, CASE WHEN p.n >= 5 THEN 25000000 ELSE 0 END, '',
  host, 'lanterne', ''::BLOB, ''::BLOB, NULL, t0 + 1000000000
FROM grid, (VALUES
  (0, 'training.step', 'step', 0, 0), (1, 'training.phase', 'data_wait', 0, 2000000),
  (2, 'training.phase', 'forward', 2000000, 35000000), (3, 'training.phase', 'backward', 35000000, 85000000),
  (4, 'training.phase', 'optimizer', 93000000, 96000000), (5, 'training.collective', 'all_reduce', 85000000, 0),
  (6, 'training.collective', 'all_reduce', 94000000, 95000000)) p(n, kind, name, a, b)
ORDER BY step, rank, p.n
"""
)
_POINTS = (
    "INSERT INTO points"
    + _GRID
    + """
SELECT job, 0, rank::INTEGER, step * 13 + p.n, step * 13 + p.n, p.name, step, t0 + 97000000, step * 100000000,
  p.base * (1 + noise / 2e7) / (1 + p.falls * step), p.unit, '', host, 'lanterne', NULL, t0 + 1000000000
FROM grid, (VALUES
  (7, 'training.loss', 10.0, 0.002, '1'), (8, 'training.grad_norm', 2.0, 0.001, '1'),
  (9, 'training.lr', 3e-4, 0.0, '1'), (10, 'training.throughput', 320.0, 0.0, '{sample}/s'),
  (11, 'training.loss_spikeness', 0.4, 0.0, '1'), (12, 'hw.gpu.memory.usage', 6e10, 0.0, 'By'),
  (12, 'hw.gpu.utilization', 0.95, 0.0, '1'), (12, 'hw.temperature', 61.0, 0.0, 'Cel')) p(n, name, base, falls, unit)
WHERE p.n < 12 OR step % 10 = 0
ORDER BY step, rank, p.n
"""
)
_LOGS = (
    "INSERT INTO logs"
    + _GRID
    + """
SELECT job, 0, rank::INTEGER, step * 13 + 12, step * 13 + 12, 'heartbeat', step, t0, step * 100000000, 9, '', host,
  'lanterne', MAP {'phase': 'backward', 'ring_dropped': '0'}, t0 + 1000000000
FROM grid WHERE step % 10 = 0
"""
)
_CLOSED = """INSERT INTO logs
SELECT job, attempt, rank, $steps * 13, $steps * 13, 'closed', step, end_ns, monotonic_ns + 100000000, 9, '', host,
  service, NULL, received_ns
FROM spans WHERE job = $job AND kind = 'training.step' AND step = $steps - 1 AND rank < $ranks
"""
_WAITS = (
    "INSERT INTO waits"
    + _GRID
    + """
SELECT job, 0, '0-' || ($ranks - 1), step * 2 + c.n, step, rank::INTEGER, 'all_reduce', 25000000,
  CASE WHEN guilty AND c.n = 0 THEN late / 1e6 ELSE noise / 4e6 END,
  CASE WHEN guilty THEN 0 ELSE (c.n = 0)::INTEGER * late / 1e6 + (2000000 - noise) / 4e6 END, 1.0 + noise / 1e8, 0.02,
  t0 + 1000000000
FROM grid, (VALUES (0), (1)) c(n)
"""
)
_ROLL_UPS = (
    "INSERT INTO rank_steps"
    + _GRID
    + """
SELECT job, 0, m.name, rank::INTEGER, step, t0, m.base + noise / m.scale
  + CASE WHEN m.name = 'step_ms' OR guilty AND m.name = 'backward_ms' THEN late / 1e6 ELSE 0 END, t0 + 1000000000
FROM grid, (VALUES ('step_ms', 97.0, 1e6), ('data_wait_ms', 2.0, 2e6), ('forward_ms', 33.0, 2e6),
  ('backward_ms', 50.0, 2e6), ('optimizer_ms', 3.0, 2e6)) m(name, base, scale)
ORDER BY step, rank""",
    """INSERT INTO rank_steps
SELECT job, attempt, unnest(['lateness_ms', 'wait_ms', 'transfer_ms']), rank, step, 0,
  unnest([max(lateness_ms), sum(wait_ms), sum(transfer_ms)]), max(received_ns)
FROM waits WHERE job = $job AND step >= $first AND step < $last GROUP BY job, attempt, rank, step""",
)
_TABLES = (_SPANS, _POINTS, _LOGS, _WAITS)
_COUNT = "SELECT (SELECT count(*) FROM spans) + (SELECT count(*) FROM points) + (SELECT count(*) FROM logs) AS n"


def _write(store: EventStore, job: str, ranks: int, steps: int, start_ns: int) -> None:
    at = {"job": job, "ranks": ranks, "start": start_ns, "onset": steps * 3 // 5, "culprit": ranks * 3 // 4}
    width = BLOCK_RANK_STEPS // ranks
    for first in range(0, steps, width):
        block = {**at, "first": first, "last": min(first + width, steps)}

        def write(connection: Any, block: dict[str, Any] = block) -> None:
            execute = connection.execute
            execute("BEGIN")
            for sql in _TABLES:
                execute(sql, block)
            execute(_ROLL_UPS[0], block)
            execute(_ROLL_UPS[1], {k: block[k] for k in ("job", "first", "last")})
            execute("COMMIT")

        store.work(write)


def _seen(control: ControlStore, job: str, ranks: int, first_ns: int, last_ns: int) -> None:
    found = [
        Identity(job=job, rank=r, local_rank=r % 8, world_size=ranks, host=f"n{r // 8}", mesh={"dp_replicate": r})
        for r in range(ranks)
    ]
    for at in (first_ns, last_ns):
        control.touch(found, at)


def fill(settings: ServerSettings, ranks: int, steps: int, events: int) -> int:
    """Write the job and as many others as it takes to ``events``, unless the store has the job already; how many
    events there are."""
    migrate.upgrade(settings)
    store, control = EventStore.open(settings), ControlStore.open(settings)
    try:
        now = time.time_ns()
        if control.job(JOB) is not None:
            return int(store.rows(_COUNT)[0]["n"])
        others = -(-max(0, events - int(ranks * steps * 12.4)) // OTHER_EVENTS)
        for number in range(others):
            job, length = f"run-{number:02d}", OTHER_EVENTS * 10 // (124 * OTHER_RANKS)
            start = now - (number + 1) * 3_600 * 10**9
            _write(store, job, OTHER_RANKS, length, start)
            store.work(lambda c, at={"job": job, "ranks": OTHER_RANKS, "steps": length}: c.execute(_CLOSED, at))
            _seen(control, job, OTHER_RANKS, start, start + length * STEP_NS)
        _write(store, JOB, ranks, steps, now - steps * STEP_NS)
        _seen(control, JOB, ranks, now - steps * STEP_NS, now)
        return int(store.rows(_COUNT)[0]["n"])
    finally:
        store.close()
        control.close()
