"""Cells of the heat map: ranks by steps, pooled by maximum. Rows of the store in, an array out."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lanterne.backend.api.grids import Grid, Grids
from lanterne.backend.store.events import EventStore

Cells = NDArray[np.floating[Any]]
ONE_ROW = frozenset({"step_ms", "lateness_ms", "wait_ms", "transfer_ms"})
"""Metrics pooled row by row; of the others ``rank_steps`` may hold several rows a rank and step, summed first."""
BLOCK_CELLS_MAX = 4_000_000
_POOLED = """
SELECT (rank - $r0) // $rw AS y, (step - $s0) // $sw AS x, max(value) AS v FROM {source}
WHERE job = $job AND attempt = $attempt AND rank BETWEEN $r0 AND $r1 AND step BETWEEN $s0 AND $s1 AND {where}
GROUP BY ALL
"""
_SUMMED = """(
  SELECT job, attempt, rank, step, sum(value) AS value FROM rank_steps
  WHERE job = $job AND attempt = $attempt AND metric = $metric GROUP BY job, attempt, rank, step)"""
_ROWS = """
SELECT rank, step, value FROM rank_steps
WHERE job = $job AND attempt = $attempt AND metric = $metric AND rank BETWEEN $r0 AND $r1 AND step BETWEEN $s0 AND $s1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Inclusive bounds of ranks and steps, and how many of each a cell holds."""

    ranks: tuple[int, int]
    steps: tuple[int, int]
    rank_width: int = 1
    step_width: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Cells: [rank buckets, step buckets]."""
        rows = (self.ranks[1] - self.ranks[0]) // self.rank_width + 1
        return rows, (self.steps[1] - self.steps[0]) // self.step_width + 1

    def bounds(self) -> dict[str, int]:
        """The window as parameters of SQL."""
        return {"r0": self.ranks[0], "r1": self.ranks[1], "s0": self.steps[0], "s1": self.steps[1]}

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last step of parts that hold at most ``BLOCK_CELLS_MAX`` rank-steps, cut between cells."""
        many = max(1, BLOCK_CELLS_MAX // (self.ranks[1] - self.ranks[0] + 1) // self.step_width) * self.step_width
        for first in range(self.steps[0], self.steps[1] + 1, many):
            yield first, min(first + many - 1, self.steps[1])


def pooled(store: EventStore, grids: Grids, job: str, attempt: int, metric: str, window: Window) -> Cells:
    """The maximum of each cell, float64 ``[rank buckets, step buckets]``; NaN = nothing was sent."""
    block = _block(grids, job, attempt, metric, window)
    if block is None:
        return _asked(store, job, attempt, metric, window)
    return pool(block, window.step_width, window.rank_width).T.astype(np.float64)


def _block(grids: Grids, job: str, attempt: int, metric: str, window: Window) -> Cells | None:
    """The window as ``[steps, ranks]`` from the arrays kept; None where the metric has none."""
    grid = _grid(grids, job, attempt, "step_ms" if metric == "busy_ms" else metric, window)
    if not grid.plain:
        return None
    found = _cut(grid, window)
    if metric == "busy_ms":  # own work: the step without what it waited
        waits = _grid(grids, job, attempt, "wait_ms", window)
        if not waits.plain:
            return None
        found = found - np.nan_to_num(_cut(waits, window), nan=0.0)
    return found


def _grid(grids: Grids, job: str, attempt: int, metric: str, window: Window) -> Grid:
    whole = grids.of(job, attempt, metric) if window.step_width > 1 else None
    return whole if whole is not None and whole.plain else grids.part(job, attempt, metric, *window.steps)


def _cut(grid: Grid, window: Window) -> Cells:
    """The grid's values in the window, ``[steps, ranks]``, with NaN where the grid does not reach."""
    part = grid.values[grid.rows(*window.steps), window.ranks[0] : window.ranks[1] + 1]
    shape = (window.steps[1] - window.steps[0] + 1, window.ranks[1] - window.ranks[0] + 1)
    if part.shape == shape:
        return part
    found = np.full(shape, np.nan, part.dtype)
    low = max(grid.first - window.steps[0], 0)
    found[low : low + part.shape[0], : part.shape[1]] = part
    return found


def _asked(store: EventStore, job: str, attempt: int, metric: str, window: Window) -> Cells:
    """The same by the store alone, for what is too large or too irregular to be kept as an array."""
    key: dict[str, Any] = {"job": job, "attempt": attempt, **window.bounds()}
    if metric == "busy_ms":
        return _busy(store, key, window)
    if metric in ONE_ROW:
        source, where = "rank_steps", "metric = $metric"
    elif metric.endswith("_ms"):
        source, where = _SUMMED, "true"
    else:
        source, where = "points", "name = $metric AND label = ''"
    widths = {"rw": window.rank_width, "sw": window.step_width}
    table = store.query(_POOLED.format(source=source, where=where), key | widths | {"metric": metric})
    cells = np.full(window.shape, np.nan)
    y, x = (table.column(c).to_numpy().astype(np.int64) for c in ("y", "x"))
    cells[y, x] = table.column("v").to_numpy(zero_copy_only=False)
    return cells


def _busy(store: EventStore, key: dict[str, Any], window: Window) -> Cells:
    """Own work: the step without what it waited, rank by rank before pooling (an array is faster than a GROUP BY)."""
    cells = np.full(window.shape, np.nan)
    ranks = window.ranks[1] - window.ranks[0] + 1
    for first, last in window.blocks():
        at = key | {"s0": first, "s1": last}
        block = np.full((ranks, last - first + 1), np.nan)
        _place(block, store.query(_ROWS, at | {"metric": "step_ms"}), window.ranks[0], first, sign=0)
        _place(block, store.query(_ROWS, at | {"metric": "wait_ms"}), window.ranks[0], first, sign=-1)
        column = (first - window.steps[0]) // window.step_width
        found = pool(block, window.rank_width, window.step_width)
        cells[:, column : column + found.shape[1]] = found
    return cells


def _place(block: Cells, table: pa.Table, rank0: int, step0: int, *, sign: int) -> None:
    if not table.num_rows:
        return
    y = table.column("rank").to_numpy().astype(np.int64) - rank0
    x = table.column("step").to_numpy().astype(np.int64) - step0
    value = table.column("value").to_numpy(zero_copy_only=False)
    if sign:
        np.add.at(block, (y, x), sign * value)
    else:
        block[y, x] = value


def pool(block: Cells, high: int, wide: int) -> Cells:
    """The maximum of each ``high`` x ``wide`` tile, passing over NaN; the last tiles may be smaller."""
    rows = np.arange(0, block.shape[0], high)
    columns = np.arange(0, block.shape[1], wide)
    found: Cells = np.fmax.reduceat(np.fmax.reduceat(block, columns, axis=1), rows, axis=0)
    return found


def typed(cells: Cells) -> dict[str, str]:
    """Cells as plotly.js and numpy read them without parsing numbers: base64 of little-endian float32."""
    data = base64.b64encode(np.ascontiguousarray(cells, dtype="<f4").tobytes()).decode("ascii")
    return {"dtype": "f4", "bdata": data, "shape": ",".join(str(n) for n in cells.shape)}
