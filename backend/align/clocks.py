"""Clock offsets of all ranks as intervals, from two kinds of hard evidence.

* A collective completes on no member before its last member has entered. With ``o`` the offset of a
  clock (``job = own - o``), E the entry and C the completion in own time, and M the moment at which the
  last member entered: ``E_j - o_j <= M <= C_i - o_i`` for all members. So M is bounded by the known
  offsets, and each unknown offset by M: bounds are handed from member to member through the slots
  (interval propagation, linear in the number of calls), across groups as well.
* A ping/pong with the backend (t0 sent, t1 received, t2 answered, t3 back; t1, t2 on the server):
  ``t0 - t1 <= o <= t3 - t2``. Where there is any, the server's clock is the job clock; else the clock of
  the lowest rank's host is.

Ranks of one host share one clock. Time is cut into windows, and into segments where a rank's wall clock
jumped against its monotonic clock (NTP step, suspend), or, unseen by that, against
all others. Bounds are carried between the windows of a
segment and widened by the largest drift (``DRIFT_MAX_PPM``, a worst case for crystal oscillators; after a
first pass by what the segment itself shows). What members' common
exits add is in ``exits``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lanterne.backend.align import exits
from lanterne.backend.align.clock_table import UNKNOWN_NS, Clocks, Snapshot
from lanterne.backend.align.frame import Floats, Frame, Ints
from lanterne.backend.align.matching import Calls, completion_spread_ns

__all__ = ["UNKNOWN_NS", "Clocks", "Snapshot", "estimate", "snapshots_of", "units_of"]
DRIFT_MAX_PPM = 100.0
DRIFT_RESIDUAL_PPM = 2.0
DRIFT_WINDOWS = 10
WINDOW_NS = 1_000_000_000
JUMP_NS = 50_000
SAME_HOST_ERROR_NS = 1_000
PASSES = 4


@dataclass(slots=True)
class _Rows:
    """Working set: calls joined with keys. Times are ns since ``base``, float64 (exact below 104 days)."""

    entered: Floats
    completed: Floats  # inf = pending
    slot: Ints
    first: Ints
    key: Ints
    together: np.ndarray  # exits of this op are simultaneous


@dataclass(slots=True)
class _Keys:
    unit: Ints
    segment: Ints
    window: Ints
    begin: Floats
    low: Floats  # from snapshots; -inf where none
    high: Floats
    anchor: np.ndarray  # known to be 0: the reference clock
    monotonic: Floats  # at ``begin``; 0 = not known


def units_of(ranks: Sequence[int], hosts: Mapping[int, str]) -> dict[int, int]:
    """Rank -> clock unit: ranks of one named host share one; a rank with no host name is its own."""
    names: dict[str, int] = {}
    return {rank: names.setdefault(hosts.get(rank) or f"rank {rank}", len(names)) for rank in sorted(ranks)}


def snapshots_of(frame: Frame) -> list[Snapshot]:
    """Clock exchanges among the frame's events; half-filled ones are skipped."""
    found = []
    for log in frame.logs:
        if log.name == "clock_snapshot":
            t = [log.attributes.get(f"t{i}_ns") for i in range(4)]
            if all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in t):
                t0, t1, t2, t3 = (int(x) for x in t if x is not None)
                found.append(
                    Snapshot(rank=log.rank, t0_ns=t0, t1_ns=t1, t2_ns=t2, t3_ns=t3, monotonic_ns=log.monotonic_ns)
                )
    return found


def estimate(
    calls: Calls,
    *,
    hosts: Mapping[int, str] | None = None,
    snapshots: Sequence[Snapshot] = (),
    ranks: Sequence[int] = (),
    window_ns: int = WINDOW_NS,
) -> Clocks:
    """Offset intervals of every rank seen in ``calls``, ``snapshots`` or ``ranks``. Linear in their number."""
    seen = sorted({*np.unique(calls.rank).tolist(), *(s.rank for s in snapshots), *ranks} - {-1})
    unit = units_of(seen, hosts or {})
    count = len(set(unit.values()))
    if count <= 1:
        return _one_clock(unit, calls, snapshots)
    if not len(calls) and not snapshots:
        return _no_evidence(unit)
    rows, keys, base = _prepare(calls, unit, snapshots, window_ns)
    rows, keys = _uncross(rows, keys, window_ns)
    rho = np.full(len(keys.unit), DRIFT_MAX_PPM * 1e-6)
    low, high, point = _solve(rows, keys, window_ns, rho)
    jump = _at_jumps(keys, low, high, point, window_ns)
    if jump.any():
        rows, keys = _without(rows, keys, jump)
        low, high, point = _solve(rows, keys, window_ns, rho)
    slope = np.zeros(len(rho))
    for _ in range(2):  # better bounds give a better slope, which gives better bounds
        tilt, rest = _drift(keys, point, low, high)
        if not np.any(tilt) and not np.any(rest < rho):
            break
        low2, high2, point2 = _solve(*_without_drift(rows, keys, tilt), window_ns, rest)
        if not np.all(low2 <= high2):
            break
        shift, slope, rho = tilt * keys.begin, tilt, rest
        low, high, point = low2 + shift, high2 + shift, point2 + shift
    return _result(unit, keys, base, low, high, point, slope, bool(snapshots), window_ns)


def _solve(rows: _Rows, keys: _Keys, window_ns: int, rho: Floats) -> tuple[Floats, Floats, Floats]:
    """(low, high, point) of each key: causal bounds, then what the exits add."""
    low, high = _propagate(rows, keys, window_ns, rho)
    point = _points(rows, keys, low, high)
    found = exits.of(rows.completed, rows.slot, rows.key, rows.together)
    return exits.tighten(found, _lines(keys), low, high, point, rho * window_ns)


def _uncross(rows: _Rows, keys: _Keys, window_ns: int) -> tuple[_Rows, _Keys]:
    """Where bounds contradict each other a clock stepped unseen: cut it into windows, then drop the window itself."""
    rho = np.full(len(keys.unit), DRIFT_MAX_PPM * 1e-6)
    low, high = _propagate(rows, keys, window_ns, rho)
    if np.all(low <= high):
        return rows, keys
    line = _lines(keys)
    broken = np.isin(line, line[low > high])
    cut = np.where(broken, keys.segment * (int(keys.window.max()) + 2) + keys.window + 1, keys.segment)
    keys = replace(keys, segment=cut)
    low, high = _propagate(rows, keys, window_ns, rho)
    bad = low > high
    if not bad.any():
        return rows, keys
    return _without(rows, keys, bad)


def _without(rows: _Rows, keys: _Keys, bad: np.ndarray) -> tuple[_Rows, _Keys]:
    """Forget the evidence of keys in which a clock stepped unseen, and carry nothing across them."""
    lost, none = bad[rows.key], bad & ~keys.anchor
    rows = replace(
        rows, entered=np.where(lost, -np.inf, rows.entered), completed=np.where(lost, np.inf, rows.completed)
    )
    edge = np.cumsum(np.diff(bad.astype(np.int64), prepend=0) != 0)
    segment = np.where(keys.anchor, keys.segment, keys.segment * (int(edge.max(initial=0)) + 1) + edge)
    low, high = np.where(none, -np.inf, keys.low), np.where(none, np.inf, keys.high)
    return rows, replace(keys, segment=segment, low=low, high=high)


def _at_jumps(keys: _Keys, low: Floats, high: Floats, point: Floats, window_ns: int) -> np.ndarray:
    """Keys [K] on either side of a jump: neighbours whose intervals lie further apart than drift can carry them."""
    line, drift = _lines(keys), DRIFT_MAX_PPM * 1e-6 * window_ns
    known = np.isfinite(low) & np.isfinite(high)
    error = np.where(known, np.maximum(high - point, point - low), np.inf)
    apart = np.abs(np.diff(point)) > error[1:] + error[:-1] + drift * np.diff(keys.window)
    apart &= (line[1:] == line[:-1]) & ~keys.anchor[1:]
    jump = np.zeros(len(line), bool)
    jump[1:] |= apart
    jump[:-1] |= apart
    return jump


def _lines(keys: _Keys) -> Ints:
    """Number of the clock x segment of each key, [K]; keys are sorted by it."""
    new = np.diff(keys.unit, prepend=-1).astype(bool) | np.diff(keys.segment, prepend=-1).astype(bool)
    line: Ints = np.cumsum(new) - 1
    return line


def _one_clock(unit: Mapping[int, int], calls: Calls, snapshots: Sequence[Snapshot]) -> Clocks:
    begin = int(calls.entered_ns.min()) if len(calls) else (snapshots[0].t0_ns if snapshots else 0)
    return Clocks(
        unit=unit,
        key_unit=np.zeros(1, np.int64),
        begin_ns=np.array([begin], np.int64),
        offset_ns=np.zeros(1),
        error_ns=np.array([float(SAME_HOST_ERROR_NS)]),
        drift_ppm=np.zeros(1),
        monotonic_ns=np.zeros(1, np.int64),
        twice_ns=np.zeros(1),
    )


def _no_evidence(unit: Mapping[int, int]) -> Clocks:
    """Several clocks and nothing that ties them: offset 0, error 2**60."""
    units = np.array(sorted(set(unit.values())), np.int64)
    zero = np.zeros(len(units))
    return Clocks(
        unit=unit,
        key_unit=units,
        begin_ns=np.zeros(len(units), np.int64),
        offset_ns=zero,
        error_ns=np.full(len(units), UNKNOWN_NS),
        drift_ppm=zero,
        monotonic_ns=np.zeros(len(units), np.int64),
        twice_ns=zero,
    )


def _prepare(
    calls: Calls, unit: Mapping[int, int], snapshots: Sequence[Snapshot], window_ns: int
) -> tuple[_Rows, _Keys, int]:
    units = np.array([unit[int(r)] for r in calls.rank], np.int64)
    snap_units = np.array([unit[s.rank] for s in snapshots], np.int64)
    base = int(calls.entered_ns.min()) if len(calls) else min(s.t0_ns for s in snapshots)
    entered = (calls.entered_ns - base).astype(np.float64)
    completed = np.where(calls.completed_ns > 0, (calls.completed_ns - base).astype(np.float64), np.inf)
    coarse = _coarse(calls, units, snap_units, snapshots)
    when = entered - coarse[units]
    if len(calls):  # one time a slot: the median member, so that one stepped clock does not move it
        middle = calls.first + calls.sizes // 2
        order = np.lexsort((when, calls.slot))
        when = when[order][middle][calls.slot]
    snap_when = np.array([s.t0_ns - base for s in snapshots], np.float64) - coarse[snap_units]
    both_units = np.concatenate([units, snap_units])
    both_when = np.concatenate([when, snap_when])
    gap = np.concatenate(
        [
            np.where(calls.monotonic_ns > 0, calls.entered_ns - calls.monotonic_ns, 0),
            np.array([s.t0_ns - s.monotonic_ns if s.monotonic_ns > 0 else 0 for s in snapshots], np.int64),
        ]
    )
    segment = _segments(both_units, both_when, gap)
    window = np.floor_divide(both_when - both_when.min(initial=0.0), window_ns).astype(np.int64)
    packed = np.stack([both_units, segment, window])
    distinct, key = np.unique(packed, axis=1, return_inverse=True)
    key = key.reshape(-1)
    own = np.concatenate([entered, np.array([s.t0_ns - base for s in snapshots], np.float64)])
    begin = np.full(distinct.shape[1], np.inf)
    np.minimum.at(begin, key, own)
    low, high = np.full(len(begin), -np.inf), np.full(len(begin), np.inf)
    tail = key[len(calls) :]
    np.maximum.at(low, tail, np.array([s.t0_ns - s.t1_ns for s in snapshots], np.float64))
    np.minimum.at(high, tail, np.array([s.t3_ns - s.t2_ns for s in snapshots], np.float64))
    anchor = np.zeros(len(begin), bool) if snapshots else (distinct[0] == 0) & (distinct[1] == 0)
    mono = np.concatenate([calls.monotonic_ns, np.array([s.monotonic_ns for s in snapshots], np.int64)])
    earliest = np.full(len(begin), np.inf)
    np.minimum.at(earliest, key, np.where(mono > 0, mono.astype(np.float64), np.inf))
    earliest = np.where(np.isfinite(earliest), earliest, 0.0)
    keys = _Keys(distinct[0], distinct[1], distinct[2], begin, low, high, anchor, earliest)
    together = np.array([any(op in name.lower() for op in exits.TOGETHER) for name in calls.ops] or [False], bool)
    rows = _Rows(entered, completed, calls.slot, calls.first, key[: len(calls)], together[calls.op])
    return rows, keys, base


def _coarse(calls: Calls, units: Ints, snap_units: Ints, snapshots: Sequence[Snapshot]) -> Floats:
    """Rough offset of each unit, good to milliseconds, only used to cut time into windows."""
    count = int(max(units.max(initial=-1), snap_units.max(initial=-1))) + 1
    rough = np.zeros(count)
    if snapshots:
        middle = np.array([(s.t0_ns + s.t3_ns - s.t1_ns - s.t2_ns) / 2 for s in snapshots])
        for u in np.unique(snap_units):
            rough[u] = np.median(middle[snap_units == u])
    if not len(calls):
        return rough
    spread = completion_spread_ns(calls)
    spread = np.where(np.isfinite(spread), spread, 0.0)
    order = np.argsort(units, kind="stable")
    edges = np.flatnonzero(np.diff(units[order], prepend=-1))
    known = set(np.unique(snap_units).tolist())
    for part in np.split(order, edges[1:]):
        u = int(units[part[0]])
        if u not in known:
            rough[u] = np.median(spread[part])
    return rough


def _segments(units: Ints, when: Floats, gap: Ints) -> Ints:
    """Segment number of each row within its unit: up by one where wall minus monotonic clock jumps."""
    segment = np.zeros(len(units), np.int64)
    usable = np.flatnonzero(gap != 0)
    if not len(usable):
        return segment
    order = usable[np.lexsort((when[usable], units[usable]))]
    same = units[order][1:] == units[order][:-1]
    jump = np.zeros(len(order), np.int64)
    jump[1:] = same & (np.abs(np.diff(gap[order])) > JUMP_NS)
    total = np.cumsum(jump)
    start = np.concatenate([[True], ~same])
    segment[order] = total - np.maximum.accumulate(np.where(start, total, 0))
    return segment


def _propagate(rows: _Rows, keys: _Keys, window_ns: int, rho: Floats) -> tuple[Floats, Floats]:
    """Bounds of each key's offset that hold through its whole window; ``rho`` [K] is the drift bound (ns/ns)."""
    low, high = keys.low - rho * window_ns, keys.high + rho * window_ns
    low[keys.anchor], high[keys.anchor] = 0.0, 0.0
    order = np.argsort(rows.key, kind="stable")
    present, first = np.unique(rows.key[order], return_index=True)
    for _ in range(PASSES):
        before = (low.copy(), high.copy())
        low, high = _carry(keys, low, high, rho, window_ns)
        if len(rows.key):
            last = np.maximum.reduceat(rows.entered - high[rows.key], rows.first)
            done = np.minimum.reduceat(rows.completed - low[rows.key], rows.first)
            above = np.minimum.reduceat((rows.completed - last[rows.slot])[order], first)
            below = np.maximum.reduceat((rows.entered - done[rows.slot])[order], first)
            high[present] = np.minimum(high[present], above + (rho * window_ns)[present])
            low[present] = np.maximum(low[present], below - (rho * window_ns)[present])
            low[keys.anchor], high[keys.anchor] = 0.0, 0.0
        if np.array_equal(before[0], low) and np.array_equal(before[1], high):
            break
    return _carry(keys, low, high, rho, window_ns)


def _carry(keys: _Keys, low: Floats, high: Floats, rho: Floats, window_ns: int) -> tuple[Floats, Floats]:
    """Hand bounds to the neighbouring windows of the same unit and segment, widened by the drift."""
    line = _lines(keys)
    at = keys.window.astype(np.float64) * window_ns * rho
    return -_envelope(line, at, -low), _envelope(line, at, high)


def _envelope(line: Ints, at: Floats, high: Floats) -> Floats:
    """min over k of ``high_k + |at - at_k|`` within each line, by a running minimum forwards and backwards.

    Lines lie one after another; each is lifted clear of its neighbours so that one accumulate serves all.
    """

    def forward(values: Floats, x: Floats, lines: Ints) -> Floats:
        relative = values - x
        finite = np.isfinite(relative)
        if not finite.any():
            return values
        span = float(relative[finite].max() - relative[finite].min()) + 1.0
        capped = np.where(finite, relative, relative[finite].max() + span)
        lifted = capped - lines * (3.0 * span)
        run = np.minimum.accumulate(lifted) + lines * (3.0 * span)
        return np.where(run <= relative[finite].max() + span / 2, run + x, np.inf)

    once = forward(high, at, line - line.min(initial=0))
    flipped = (line.max(initial=0) - line)[::-1]
    return np.minimum(once, forward(once[::-1], -at[::-1], flipped)[::-1])


def _points(rows: _Rows, keys: _Keys, low: Floats, high: Floats) -> Floats:
    """Best point inside each interval: where members complete together; the middle where nothing completes."""
    width = high - low
    low0, high0 = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)
    middle = np.where(np.isfinite(width), (low0 + high0) / 2, low0 + high0)  # one-sided: the bound that is known
    if not len(rows.key):
        return middle
    done = np.isfinite(rows.completed)
    weight = 1.0 / np.maximum(np.where(np.isfinite(width), width, 1e15), 1e3) ** 2
    point = middle
    for _ in range(3):
        w = np.where(done, weight[rows.key], 0.0)
        left = np.where(done, rows.completed, 0.0) - point[rows.key]
        total = np.add.reduceat(w, rows.first)
        mean = np.add.reduceat(w * left, rows.first) / np.where(total > 0, total, 1.0)
        behind = np.where(done, rows.completed - mean[rows.slot], 0.0)
        share = np.where(done & (total[rows.slot] > 0), 1.0, 0.0)
        n = np.bincount(rows.key, share, len(low))
        found = np.bincount(rows.key, np.where(share > 0, behind, 0.0), len(low)) / np.maximum(n, 1)
        point = np.where(n > 0, np.clip(found, low, np.maximum(high, low)), middle)
        point = np.where(keys.anchor, 0.0, point)
    return point


def _drift(keys: _Keys, point: Floats, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """(slope, bound on what is left of the drift) of each key, ns/ns [K].

    Least squares a line (clock x segment); kept where the line is long enough to say more than the worst case,
    and straight: points that each lie within e of the truth give a slope within 3 e / span.
    """
    line = _lines(keys)
    count = int(line.max(initial=-1)) + 1
    error = np.maximum(high - point, point - low)
    good = np.isfinite(error) & (error < UNKNOWN_NS / 2)
    x, y = np.where(good, keys.begin, 0.0), np.where(good, point, 0.0)

    def total(values: Floats) -> Floats:
        return np.asarray(np.bincount(line, np.where(good, values, 0.0), count), np.float64)

    n = np.maximum(total(np.ones(len(line))), 1.0)
    dx, dy = x - (total(x) / n)[line], y - (total(y) / n)[line]
    square = total(dx * dx)
    slope = np.divide(total(dx * dy), square, out=np.zeros(count), where=square > 0)
    off = np.where(good, np.abs(dy - slope[line] * dx), 0.0)
    begin = np.flatnonzero(np.diff(line, prepend=-1))
    worst = np.maximum.reduceat(off, begin)
    widest = np.maximum.reduceat(np.where(good, error, 0.0), begin)
    span = np.maximum.reduceat(np.where(good, keys.begin, -np.inf), begin) - np.minimum.reduceat(
        np.where(good, keys.begin, np.inf), begin
    )
    mean = total(error) / n
    left = np.maximum(DRIFT_RESIDUAL_PPM * 1e-6, 3.0 * mean / np.maximum(span, 1.0))
    limit = DRIFT_MAX_PPM * 1e-6
    kept = (n >= DRIFT_WINDOWS) & (left < limit) & (np.abs(slope) < limit) & (worst <= np.maximum(widest, 3.0 * mean))
    return np.where(kept, slope, 0.0)[line], np.where(kept, left, limit)[line]


def _without_drift(rows: _Rows, keys: _Keys, slope: Floats) -> tuple[_Rows, _Keys]:
    move = slope[rows.key]
    moved = move * np.where(np.isfinite(rows.entered), rows.entered, 0.0)
    flat = replace(rows, entered=rows.entered - moved, completed=rows.completed - moved)
    shift = slope * keys.begin
    return flat, replace(keys, low=keys.low - shift, high=keys.high - shift)


def _result(
    unit: Mapping[int, int],
    keys: _Keys,
    base: int,
    low: Floats,
    high: Floats,
    point: Floats,
    slope: Floats,
    server: bool,
    window_ns: int,
) -> Clocks:
    error = np.where(low <= high, np.maximum(high - point, point - low), np.inf)  # crossed: nothing is known
    error = np.where(np.isfinite(error), np.maximum(error, SAME_HOST_ERROR_NS), UNKNOWN_NS)
    order = np.lexsort((keys.begin, keys.unit))
    return Clocks(
        unit=unit,
        key_unit=keys.unit[order],
        begin_ns=keys.begin[order].astype(np.int64) + base,
        offset_ns=point[order],
        error_ns=error[order],
        drift_ppm=slope[order] * 1e6,
        monotonic_ns=keys.monotonic[order].astype(np.int64),
        twice_ns=_twice(keys, point, window_ns)[order],
        reference="server" if server else "rank",
    )


def _twice(keys: _Keys, point: Floats, window_ns: int) -> Floats:
    """Spread of the unit's offsets where its wall clock went back over this key's time, else 0; ns [K]."""
    found = np.zeros(len(point))
    for unit in np.unique(keys.unit):
        mine = np.flatnonzero(keys.unit == unit)
        mine = mine[np.argsort(keys.window[mine], kind="stable")]
        begin = keys.begin[mine]
        behind = begin < np.maximum.accumulate(begin)
        ahead = begin > np.minimum.accumulate(begin[::-1])[::-1]
        if behind.any():
            low, high = begin[behind].min() - 2 * window_ns, begin[ahead].max() + 2 * window_ns
            found[mine[(begin >= low) & (begin <= high)]] = np.ptp(point[mine])
    return found
