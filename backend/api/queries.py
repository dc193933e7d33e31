"""Queries shared by several routes. Each takes the store and bound values; none builds SQL from a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lanterne.backend.store.events import EventStore

Key = tuple[str, int]
"""Job and attempt."""

_ASKED = "WITH asked AS (SELECT unnest($jobs) AS job, unnest($attempts)::INTEGER AS attempt)"
_SIGNS = f"""{_ASKED}
SELECT job, attempt, rank,
  max(time_ns) FILTER (name = 'exited') AS exited_at, max(time_ns) FILTER (name = 'closed') AS closed_at,
  arg_max(TRY_CAST(attributes['exit_code'] AS INTEGER), time_ns) FILTER (name = 'exited') AS exit_code,
  arg_max(TRY_CAST(attributes['signal'] AS INTEGER), time_ns) FILTER (name = 'exited') AS signal,
  max(time_ns) FILTER (name = 'stall') AS stall_at, max(time_ns) FILTER (name = 'stall_ended') AS stall_ended_at,
  max(received_ns) AS received_ns
FROM logs JOIN asked USING (job, attempt) WHERE rank >= 0 AND name <> 'heartbeat' GROUP BY job, attempt, rank
"""
_BEATS = f"""{_ASKED}
SELECT job, attempt, rank, arg_max(attributes['phase'], sequence) AS phase, arg_max(step, sequence) AS step,
  max(received_ns) AS received_ns
FROM logs JOIN asked USING (job, attempt)
WHERE rank >= 0 AND name = 'heartbeat' AND received_ns > $since GROUP BY job, attempt, rank
"""
_DROPPED = """
SELECT rank, sum(n)::BIGINT AS dropped FROM (
  SELECT rank, counter, max(TRY_CAST(attributes[counter] AS BIGINT)) AS n
  FROM logs, unnest(['ring_dropped', 'ring_torn', 'notes_dropped', 'spool_dropped', 'export_rejected']) AS c(counter)
  WHERE job = ? AND attempt = ? AND rank >= 0 AND name = 'heartbeat' AND attributes[counter] IS NOT NULL
  GROUP BY rank, counter)
GROUP BY rank
"""
_PACES = f"""{_ASKED},
mine AS (SELECT job, attempt, step, value FROM rank_steps JOIN asked USING (job, attempt) WHERE metric = 'step_ms'),
ends AS (SELECT job, attempt, max(step) AS last FROM mine GROUP BY job, attempt),
steps AS (SELECT job, attempt, last, step, median(value) AS ms FROM mine JOIN ends USING (job, attempt)
  WHERE step > last - 50 GROUP BY job, attempt, last, step)
SELECT job, attempt, last, median(ms) AS ms FROM steps GROUP BY job, attempt, last
"""
_LAST_STEP = "SELECT max(step) AS step FROM rank_steps WHERE job = ? AND attempt = ? AND metric = 'step_ms'"
_LAST_VALUES = """
WITH asked AS (SELECT unnest($jobs) AS job, unnest($attempts)::INTEGER AS attempt, unnest($steps)::BIGINT AS after)
SELECT job, attempt, name, median(last) AS value FROM (
  SELECT job, attempt, name, rank, arg_max(value, time_ns) AS last FROM points JOIN asked USING (job, attempt)
  WHERE name IN ('training.loss', 'training.throughput') AND label = '' AND step > after
  GROUP BY job, attempt, name, rank)
GROUP BY job, attempt, name
"""
_BEAT_WINDOW_NS = 120_000_000_000


def _asked(keys: Iterable[Key]) -> dict[str, Any]:
    found = list(keys)
    return {"jobs": [job for job, _ in found], "attempts": [attempt for _, attempt in found]}


def sign_rows(store: EventStore, keys: Iterable[Key]) -> list[dict[str, Any]]:
    """Rows for :func:`lanterne.backend.api.states.signs`, with the job and attempt of each."""
    return store.rows(_SIGNS, _asked(keys))


def beats(store: EventStore, keys: Iterable[Key], now_ns: int) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Newest heartbeat within two minutes, by (job, attempt, rank): phase, step, received_ns."""
    rows = store.rows(_BEATS, _asked(keys) | {"since": now_ns - _BEAT_WINDOW_NS})
    return {(row["job"], row["attempt"], row["rank"]): row for row in rows}


def dropped(store: EventStore, job: str, attempt: int) -> dict[int, int]:
    """Records that the collector of each rank says it lost."""
    return {row["rank"]: int(row["dropped"] or 0) for row in store.rows(_DROPPED, [job, attempt])}


def last_step(store: EventStore, job: str, attempt: int) -> int | None:
    step = store.rows(_LAST_STEP, [job, attempt])[0]["step"]
    return None if step is None else int(step)


def paces(store: EventStore, keys: Iterable[Key]) -> dict[Key, tuple[int, float | None]]:
    """(last step, median ms of a step over the last 50 steps) by (job, attempt); those without a step are left out."""
    rows = store.rows(_PACES, _asked(keys))
    return {(row["job"], row["attempt"]): (int(row["last"]), row["ms"]) for row in rows}


def last_values(store: EventStore, paces: Mapping[Key, tuple[int, float | None]]) -> dict[Key, dict[str, float]]:
    """Newest loss and throughput, median over ranks, of the last 50 steps, by (job, attempt)."""
    found: dict[Key, dict[str, float]] = {}
    for row in store.rows(_LAST_VALUES, _asked(paces) | {"steps": [last - 50 for last, _ in paces.values()]}):
        found.setdefault((row["job"], row["attempt"]), {})[row["name"]] = row["value"]
    return found


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
