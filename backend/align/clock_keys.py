"""The working set of clock alignment: calls and outside bounds, cut into keys (clock x segment x window).

A segment ends where a wall clock jumps against its monotonic clock (an NTP step, a suspended host); windows cut
time, each clock's own but for a rough offset, so that all members of a call fall into the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.backend.align import exits
from lanterne.backend.align.clock_table import Bounds, unit_table
from lanterne.backend.align.frame import Floats, Ints
from lanterne.backend.align.matching import Calls, completion_spread_ns

JUMP_NS = 50_000


@dataclass(slots=True)
class Rows:
    """Calls joined with keys. Times are ns since ``base``, float64 (exact below 104 days)."""

    entered: Floats
    completed: Floats  # inf = pending
    slot: Ints
    first: Ints
    key: Ints
    together: np.ndarray  # exits of this op are simultaneous


@dataclass(slots=True)
class Marks:
    """Bounds joined with keys: ``low <= offset <= high`` of the key's clock at own time ``at`` (ns since ``base``)."""

    at: Floats
    low: Floats
    high: Floats
    key: Ints


@dataclass(slots=True)
class Keys:
    """One row a (clock, segment, window), sorted by it; arrays [K]."""

    unit: Ints
    segment: Ints
    window: Ints
    begin: Floats
    anchor: np.ndarray  # known to be 0: the reference clock
    monotonic: Floats  # at ``begin``; 0 = not known
    told: np.ndarray  # holds a call, or an exchange of this window: not only what was known before

    def lines(self) -> Ints:
        """Number of the clock x segment of each key, [K]."""
        new = np.diff(self.unit, prepend=-1).astype(bool) | np.diff(self.segment, prepend=-1).astype(bool)
        line: Ints = np.cumsum(new) - 1
        return line


def units_of(ranks: Sequence[int], hosts: Mapping[int, str]) -> dict[int, int]:
    """Rank -> clock unit: ranks of one named host share one; a rank with no host name is its own."""
    names: dict[str, int] = {}
    return {rank: names.setdefault(unit_name(rank, hosts), len(names)) for rank in sorted(ranks)}


def unit_name(rank: int, hosts: Mapping[int, str]) -> str:
    """What the clock of a rank is called."""
    return hosts.get(rank) or f"rank {rank}"


def prepare(
    calls: Calls, unit: Mapping[int, int], bounds: Bounds, past: int, window_ns: int, *, server: bool
) -> tuple[Rows, Marks, Keys, int]:
    """Working set and its zero of time (Unix ns). The last ``past`` bounds are what earlier windows left."""
    n = len(calls)
    units = unit_table(unit, int(calls.rank.max(initial=0)))[calls.rank]
    base = int(calls.entered_ns.min()) if n else int(bounds.at_ns.min())
    entered = (calls.entered_ns - base).astype(np.float64)
    completed = np.where(calls.completed_ns > 0, (calls.completed_ns - base).astype(np.float64), np.inf)
    both = np.concatenate([units, bounds.unit])
    own = np.concatenate([entered, (bounds.at_ns - base).astype(np.float64)])
    mono = np.concatenate([calls.monotonic_ns, bounds.monotonic_ns])
    wall = np.concatenate([calls.entered_ns, bounds.at_ns])
    segment = _segments(both, mono, np.where(mono > 0, wall - mono, 0))
    piece = both * (int(segment.max(initial=0)) + 1) + segment
    when = own - _coarse(calls, piece, bounds)[piece]
    if n:  # one time a slot: the median member, so that one stepped clock does not move it
        middle = calls.first + calls.sizes // 2
        order = np.lexsort((when[:n], calls.slot))
        when[:n] = when[:n][order][middle][calls.slot]
    window = np.floor_divide(when - when.min(initial=0.0), window_ns).astype(np.int64)
    wide = int(window.max(initial=0)) + 1
    distinct, at, key = np.unique(piece * wide + window, return_index=True, return_inverse=True)
    begin, earliest = np.full(len(distinct), np.inf), np.full(len(distinct), np.inf)
    np.minimum.at(begin, key, own)
    np.minimum.at(earliest, key, np.where(mono > 0, mono.astype(np.float64), np.inf))
    told = np.zeros(len(distinct), bool)
    told[key[: len(key) - past]] = True
    together = np.array([any(op in name.lower() for op in exits.TOGETHER) for name in calls.ops] or [False], bool)
    rows = Rows(entered, completed, calls.slot, calls.first, key[:n], together[calls.op])
    marks = Marks(own[n:], bounds.low_ns, bounds.high_ns, key[n:])
    keys = Keys(
        both[at], segment[at], window[at], begin, _anchor(both, segment, bounds, server)[at],
        np.where(np.isfinite(earliest), earliest, 0.0), told,
    )  # fmt: skip
    return rows, marks, keys, base


def _anchor(units: Ints, segment: Ints, bounds: Bounds, server: bool) -> np.ndarray:
    """Rows [N] that define the job clock: unit 0 until its wall clock jumps, unless the server's clock is it."""
    none = np.zeros(len(units), bool)
    if server:
        return none
    known = len(units) - len(bounds)
    old = (bounds.unit == 0).nonzero()[0] + known
    kept = segment[old[bounds.anchor[old - known]]] if len(old) else np.zeros(1, np.int64)
    anchor: np.ndarray = (units == 0) & np.isin(segment, kept)
    return anchor


def _coarse(calls: Calls, piece: Ints, bounds: Bounds) -> Floats:
    """Rough offset of each clock x segment, good to milliseconds, only used to cut time into windows."""
    rough = np.zeros(int(piece.max(initial=0)) + 1)
    spread = completion_spread_ns(calls)
    spread = np.where(np.isfinite(spread), spread, 0.0)
    for values, of in ((spread, piece[: len(calls)]), ((bounds.low_ns + bounds.high_ns) / 2, piece[len(calls) :])):
        if len(of):
            order = np.lexsort((values, of))
            edges = np.flatnonzero(np.diff(of[order], prepend=-1))
            middle = edges + np.diff(np.append(edges, len(order))) // 2
            rough[of[order][edges]] = values[order][middle]
    return rough


def _segments(units: Ints, mono: Ints, gap: Ints) -> Ints:
    """Segment number of each row within its unit: up by one where wall minus monotonic clock jumps."""
    segment = np.zeros(len(units), np.int64)
    usable = np.flatnonzero(gap != 0)
    if not len(usable):
        return segment
    order = usable[np.lexsort((mono[usable], units[usable]))]
    same = units[order][1:] == units[order][:-1]
    jump = np.zeros(len(order), np.int64)
    jump[1:] = same & (np.abs(np.diff(gap[order])) > JUMP_NS)
    total = np.cumsum(jump)
    start = np.concatenate([[True], ~same])
    segment[order] = total - np.maximum.accumulate(np.where(start, total, 0))
    return segment
