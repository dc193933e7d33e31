"""One metric of one attempt as an array of steps by ranks, kept in memory and brought up to date by what changed.

The heat map, its zooms and the curves over ranks are all views of such an array; read once from the store, a window
of it costs milliseconds where a ``GROUP BY`` over two million rows costs a second. After new rows only the steps that
they touched are read again (:mod:`lanterne.backend.store.changes`), so the array is always what the store holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lanterne import limits
from lanterne.backend.store.changes import BEYOND
from lanterne.backend.store.events import EventStore

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
KEPT_MAX = 1_000
_STEPS = """
SELECT rank, step, start_ns AS time_ns, value FROM rank_steps
WHERE job = $job AND attempt = $attempt AND metric = $metric AND step BETWEEN $low AND $high
LIMIT $most
"""
_POINTS = """
SELECT rank, step, time_ns, value, label <> '' OR step < 0 OR rank < 0 AS other FROM points
WHERE job = $job AND attempt = $attempt AND name = $metric AND (step BETWEEN $low AND $high OR step < 0)
LIMIT $most
"""
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Grid:
    """``values`` ``[steps, ranks]`` from step ``first`` on, NaN = nothing was sent, float32
    for ``*_ms`` and float64 for points; ``time_ns`` ``[steps]`` is
    the earliest over ranks. ``version`` is the store's when it was read; ``plain`` is false for a series that is none
    of one value a rank and step, which then has no values here. ``odd`` ``[steps, ranks]`` is true where NaN itself
    was sent, None = nowhere."""

    version: int
    first: int = 0
    values: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    time_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    plain: bool = True
    odd: Bools | None = None
    _over: dict[str, Doubles] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    @property
    def last(self) -> int:
        """The last step; ``first - 1`` where there is none."""
        return self.first + len(self.values) - 1

    @property
    def ranks(self) -> int:
        return int(self.values.shape[1])

    def rows(self, low: int, high: int) -> slice:
        """The rows of the steps ``low`` to ``high``, both inclusive, as far as there are any."""
        return slice(max(low - self.first, 0), max(high - self.first + 1, 0))

    def sent(self, rows: slice) -> Bools:
        """Where a value was sent, ``[rows, ranks]``; NaN is one too."""
        there = ~np.isnan(self.values[rows])
        return there if self.odd is None else there | self.odd[rows]

    def over(self, how: str) -> Doubles:
        """``median`` or ``max`` over ranks of each step, float64 ``[steps]``; kept."""
        if how not in self._over:
            self._over[how] = over_ranks(self.values, how)
        return self._over[how]

    def joined(self, fresh: Grid) -> Grid:
        """This grid with the steps from ``fresh.first`` on replaced by those of ``fresh``."""
        kept = fresh.first - self.first
        ranks = max(self.ranks, fresh.ranks)
        values = np.full((kept + len(fresh.values), ranks), np.nan, self.values.dtype)
        values[:kept, : self.ranks] = self.values[:kept]
        values[kept:, : fresh.ranks] = fresh.values
        times = np.concatenate([self.time_ns[:kept], fresh.time_ns])
        odd = None
        if self.odd is not None or fresh.odd is not None:
            odd = np.zeros(values.shape, bool)
            for part, where in ((self.odd, slice(0, kept)), (fresh.odd, slice(kept, None))):
                if part is not None:
                    odd[where, : part.shape[1]] = part[:kept] if where.start == 0 else part
        over = {how: np.concatenate([found[:kept], fresh.over(how)]) for how, found in self._over.items()}
        return Grid(fresh.version, self.first, values, times, odd=odd, _over=over)


def over_ranks(values: Floats, how: str) -> Doubles:
    """``median`` or ``max`` of each row ``[steps, ranks]``, passing over NaN; NaN where there is nothing."""
    found = np.full(len(values), np.nan)
    if not values.size:
        return found
    if how == "max":
        found[:] = np.fmax.reduce(values, axis=1)
        return found
    gaps = np.isnan(values)
    whole = ~gaps.any(axis=1)
    found[whole] = np.median(values[whole], axis=1)
    for row in np.flatnonzero(~whole & ~gaps.all(axis=1)):
        found[row] = np.median(values[row][~gaps[row]])
    return found


def read(table: pa.Table, version: int, first: int | None, *, summed: bool) -> Grid:
    """Rows (rank, step, time_ns, value) as a grid from step ``first`` on, None = from the first there is.

    Several values of one rank and step are added (``summed``: a phase entered twice) or make the grid not plain.
    """
    if not table.num_rows:
        return Grid(version, first or 0)
    if table.num_rows > limits.GRID_CELLS_MAX:
        return Grid(version, plain=False)
    if "other" in table.column_names and pc.any(table.column("other")).as_py():
        return Grid(version, plain=False)
    y, x = (table.column(c).to_numpy().astype(np.int64) for c in ("rank", "step"))
    first = int(x.min()) if first is None else first
    x -= first
    shape = (int(x.max()) + 1, int(y.max()) + 1)
    if shape[0] * shape[1] > limits.GRID_CELLS_MAX:
        return Grid(version, plain=False)
    at = x * shape[1] + y
    many = np.bincount(at, minlength=shape[0] * shape[1])
    if not summed and many.max() > 1:
        return Grid(version, plain=False)
    value = table.column("value").to_numpy(zero_copy_only=False).astype(np.float64)
    found: Floats = np.bincount(at, weights=value, minlength=many.size).astype(np.float32 if summed else np.float64)
    found[many == 0] = np.nan
    odd: Bools | None = None
    if not summed and np.isnan(value).any():
        odd = np.zeros(shape, bool)
        odd.reshape(-1)[at[np.isnan(value)]] = True
    times = np.full(shape[0], _NEVER)
    np.minimum.at(times, x, table.column("time_ns").to_numpy())
    return Grid(version, first, found.reshape(shape), times, odd=odd)


class Grids:
    """The grids asked for lately, ``limits.GRID_BYTES_MAX`` of them at most."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int, str], Grid] = OrderedDict()
        self._gates: dict[tuple[str, int, str], threading.Lock] = {}

    def of(self, job: str, attempt: int, metric: str) -> Grid:
        """The grid of a metric of ``rank_steps`` (``*_ms``) or of points; see :class:`Grid` for what has none."""
        key = (job, attempt, metric)
        with self._lock:
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:  # two plots of one page must not read the same rows twice
            with self._lock:
                old = self._known.get(key)
            found = self._fresh(key, old)
            self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, int, str], grid: Grid) -> None:
        with self._lock:
            self._known[key] = grid
            self._known.move_to_end(key)
            total = sum(g.nbytes for g in self._known.values())
            while (total > limits.GRID_BYTES_MAX or len(self._known) > KEPT_MAX) and len(self._known) > 1:
                gone, out = self._known.popitem(last=False)
                total -= out.nbytes
                self._gates.pop(gone, None)

    def _fresh(self, key: tuple[str, int, str], old: Grid | None) -> Grid:
        job, attempt = key[:2]
        version = self._store.version(job, attempt)
        low = None if old is None else self._store.changes.lowest(job, attempt, old.version)
        if old is not None and low is not None:
            if low >= BEYOND or not old.plain:
                return replace(old, version=version)
            if old.values.size and low >= old.first:
                start = min(low, old.last + 1)
                fresh = self._rows(key, version, start)
                return old.joined(fresh) if fresh.plain else fresh
        return self._rows(key, version, None)

    def part(self, job: str, attempt: int, metric: str, low: int, high: int) -> Grid:
        """The grid of the steps ``low`` to ``high`` alone: out of the whole one where that is at hand, else read."""
        key = (job, attempt, metric)
        version = self._store.version(job, attempt)
        with self._lock:
            known = self._known.get(key)
        if known is None or known.version != version or not known.plain:
            return self._rows(key, version, None, low, high)
        rows = known.rows(low, high)
        odd = None if known.odd is None else known.odd[rows]
        return Grid(version, max(low, known.first), known.values[rows], known.time_ns[rows], odd=odd)

    def _rows(
        self, key: tuple[str, int, str], version: int, first: int | None, low: int = 0, high: int = limits.STEP_MAX
    ) -> Grid:
        summed = key[2].endswith("_ms")
        values = {
            "job": key[0], "attempt": key[1], "metric": key[2], "low": first or low, "high": high,
            "most": limits.GRID_CELLS_MAX + 1,
        }  # fmt: skip
        return read(self._store.query(_STEPS if summed else _POINTS, values), version, first, summed=summed)
