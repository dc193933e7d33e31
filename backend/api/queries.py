"""Queries shared by several routes. Each takes the store and bound values; none builds SQL from a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lanterne.backend.store.events import EventStore

Key = tuple[str, int]
"""Job and attempt."""

_SIGNS = """
SELECT rank,
  max(time_ns) FILTER (name = 'exited') AS exited_at, max(time_ns) FILTER (name = 'closed') AS closed_at,
  arg_max(TRY_CAST(attributes['exit_code'] AS INTEGER), time_ns) FILTER (name = 'exited') AS exit_code,
  arg_max(TRY_CAST(attributes['signal'] AS INTEGER), time_ns) FILTER (name = 'exited') AS signal,
  max(time_ns) FILTER (name = 'stall') AS stall_at, max(time_ns) FILTER (name = 'stall_ended') AS stall_ended_at,
  max(received_ns) AS received_ns
FROM logs
WHERE job = $job AND attempt = $attempt AND rank >= 0 AND name <> 'heartbeat' AND received_ns >= $since GROUP BY rank
"""
_BEATS = """
SELECT rank, {what} max(received_ns) AS received_ns
FROM logs WHERE job = $job AND attempt = $attempt AND rank >= 0 AND name = 'heartbeat' AND received_ns > $since
GROUP BY rank
"""
_WHERE = "arg_max(attributes['phase'], sequence) AS phase, arg_max(step, sequence) AS step,"
_DROPPED = """
SELECT rank, sum(n)::BIGINT AS dropped FROM (
  SELECT rank, counter, max(TRY_CAST(attributes[counter] AS BIGINT)) AS n
  FROM logs, unnest(['ring_dropped', 'ring_torn', 'notes_dropped', 'spool_dropped', 'export_rejected']) AS c(counter)
  WHERE job = ? AND attempt = ? AND rank >= 0 AND name = 'heartbeat' AND attributes[counter] IS NOT NULL
  GROUP BY rank, counter)
GROUP BY rank
"""
_PACE = """
SELECT step, median(value) AS ms FROM rank_steps
WHERE job = $job AND attempt = $attempt AND metric = 'step_ms' AND step >= $low GROUP BY step ORDER BY step DESC
"""
_LAST_STEP = "SELECT max(step) AS step FROM rank_steps WHERE job = ? AND attempt = ? AND metric = 'step_ms'"
_LAST_STEPS = """
SELECT rank, max(step) AS step FROM rank_steps
WHERE job = $job AND attempt = $attempt AND metric = 'step_ms' GROUP BY rank
"""
_LAST_VALUES = """
SELECT name, median(last) AS value FROM (
  SELECT name, rank, arg_max(value, time_ns) AS last FROM points
  WHERE job = $job AND attempt = $attempt AND name IN ('training.loss', 'training.throughput') AND label = ''
    AND step > $after
  GROUP BY name, rank)
GROUP BY name
"""
PACE_STEPS = 50
_BEAT_WINDOW_NS = 120_000_000_000


def _at(key: Key) -> dict[str, Any]:
    return {"job": key[0], "attempt": key[1]}


def sign_rows(store: EventStore, key: Key, since_ns: int = 0) -> list[dict[str, Any]]:
    """Rows for :func:`lanterne.backend.api.states.signs`, of what came in at ``since_ns`` (server Unix ns) or later."""
    return store.rows(_SIGNS, _at(key) | {"since": since_ns})


def beats(store: EventStore, key: Key, now_ns: int, *, where: bool = True) -> dict[int, dict[str, Any]]:
    """Newest heartbeat within two minutes by rank: received_ns and, if asked ``where``, its phase and step."""
    sql = _BEATS.format(what=_WHERE if where else "")
    return {row["rank"]: row for row in store.rows(sql, _at(key) | {"since": now_ns - _BEAT_WINDOW_NS})}


def dropped(store: EventStore, job: str, attempt: int) -> dict[int, int]:
    """Records that the collector of each rank says it lost."""
    return {row["rank"]: int(row["dropped"] or 0) for row in store.rows(_DROPPED, [job, attempt])}


def last_step(store: EventStore, job: str, attempt: int) -> int | None:
    step = store.rows(_LAST_STEP, [job, attempt])[0]["step"]
    return None if step is None else int(step)


def pace(store: EventStore, key: Key, low: int) -> tuple[int, float | None] | None:
    """Last step and median ms of a step over the last 50, looked for from step ``low`` on; None without a step."""
    rows = store.rows(_PACE, _at(key) | {"low": low})
    if not rows:
        return None
    last = int(rows[0]["step"])
    return last, float(np.median([row["ms"] for row in rows if row["step"] > last - PACE_STEPS]))


def last_values(store: EventStore, key: Key, last: int) -> dict[str, float]:
    """Newest loss and throughput, median over ranks, of the 50 steps up to ``last``."""
    rows = store.rows(_LAST_VALUES, _at(key) | {"after": last - PACE_STEPS})
    return {row["name"]: row["value"] for row in rows}


def last_steps(store: EventStore, key: Key) -> dict[int, int]:
    """The last step that each rank closed."""
    rows = store.rows(_LAST_STEPS, _at(key))
    return {row["rank"]: row["step"] for row in rows}


def finite(value: Any) -> float | None:
    """A float for JSON: NaN and infinities become None."""
    if value is None:
        return None
    number = float(value)
    return number if np.isfinite(number) else None


def listed(column: pa.ChunkedArray) -> list[Any]:
    """A numeric column for JSON: NaN and infinities become None."""
    array = column.to_numpy()
    if array.dtype.kind != "f":
        found: list[Any] = column.to_pylist()
        return found
    return [None if bad else v for v, bad in zip(array.tolist(), ~np.isfinite(array), strict=True)]


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of events for JSON: ids as hex, attributes as an object, NaN as null."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            found[name] = value.hex()
        elif name == "attributes":
            found[name] = dict(value or ())
        elif isinstance(value, float):
            found[name] = finite(value)
        else:
            found[name] = value
    return found


def ranks_seen(store: EventStore, job: str, attempt: int) -> Sequence[int]:
    rows = store.rows(
        "SELECT DISTINCT rank FROM rank_steps WHERE job = ? AND attempt = ? ORDER BY rank", [job, attempt]
    )
    return [row["rank"] for row in rows]
