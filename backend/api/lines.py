"""Curves over steps out of the arrays kept in memory: one line over all ranks, or those of the ranks that stray."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lanterne import limits
from lanterne.backend.api.context import Context
from lanterne.backend.api.grids import Grid, Grids
from lanterne.backend.api.queries import Key
from lanterne.backend.store.changes import BEYOND

DECIMALS = 4
"""Of milliseconds, which are kept as float32."""


@dataclass(frozen=True, slots=True)
class Line:
    """``rank`` -1 = over all ranks; three arrays of one length."""

    rank: int
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


def of(
    grids: Grids, at: Key, name: str, aggregate: str, from_step: int | None, to_step: int | None, most: int
) -> list[Line] | None:
    """The lines of a metric in a window; None where it is no series of one value a rank and step."""
    grid = grids.of(*at, name)
    low, high = from_step or 0, limits.STEP_MAX if to_step is None else to_step
    if not grid.plain:
        return None
    rows = grid.rows(low, high)
    times = grid.time_ns[rows]
    steps = np.arange(len(grid.values), dtype=np.int64)[rows] + grid.first
    sent = grid.sent(rows) if aggregate == "none" else None
    digits = DECIMALS if name.endswith("_ms") else None
    if sent is None:
        value = grid.over(aggregate)[rows]
        known = grid.time_ns[rows] < np.iinfo(np.int64).max
        return [Line(-1, steps[known], times[known], _rounded(value[known], digits))] if known.any() else []
    return [
        Line(rank, steps[there], times[there], _rounded(grid.values[rows, rank][there].astype(np.float64), digits))
        for rank in straying(grid, rows, most)
        if (there := sent[:, rank]).any()
    ]


def _rounded(value: NDArray[np.float64], digits: int | None) -> NDArray[np.float64]:
    return value if digits is None else np.round(value, digits)


def straying(grid: Grid, rows: slice, most: int) -> list[int]:
    """Of more than ``most`` ranks those furthest from the median of a step, in rank order."""
    if grid.ranks <= most:
        return list(range(grid.ranks))
    far = np.abs(grid.values[rows] - grid.over("median")[rows, None].astype(grid.values.dtype))
    worst = np.fmax.reduce(far, axis=0, initial=-1.0)
    return sorted(np.argsort(-worst, kind="stable")[:most].tolist())


def bounds(context: Context, at: Key) -> tuple[int, int, int]:
    """First and last step and largest rank of what is rolled up; (0, 0, 0) where there is nothing."""
    changes = context.store.changes
    version = context.store.version(*at)
    known = context.bounds.get(at)
    low = None if known is None else changes.lowest(*at, known[0])
    if known is not None and low is not None and low >= BEYOND:
        return known[1]
    row = context.store.rows(
        "SELECT min(step) AS a, max(step) AS b, max(rank) AS r FROM rank_steps"
        " WHERE job = ? AND attempt = ? AND step >= ?",
        [*at, low or 0],
    )[0]
    if row["a"] is None:
        return (0, 0, 0) if known is None else known[1]
    found = (row["a"], row["b"], row["r"])
    if known is not None and low is not None:
        old = known[1]
        found = (min(old[0], found[0]), max(old[1], found[1]), max(old[2], found[2]))
    if len(context.bounds) > limits.PAGE_ROWS_MAX:
        context.bounds.clear()
    context.bounds[at] = (version, found)
    return found
