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
from dataclasses import replace

import numpy as np

from lanterne.backend.align import exits
from lanterne.backend.align.clock_keys import Keys, Marks, Rows, prepare, units_of
from lanterne.backend.align.clock_table import UNKNOWN_NS, Bounds, Clocks, Snapshot
from lanterne.backend.align.frame import Floats, Frame, Ints
from lanterne.backend.align.matching import Calls

__all__ = ["UNKNOWN_NS", "Clocks", "Snapshot", "estimate", "snapshots_of", "units_of"]
DRIFT_MAX_PPM = 100.0
DRIFT_RESIDUAL_PPM = 2.0
DRIFT_WINDOWS = 10
WINDOW_NS = 1_000_000_000
SAME_HOST_ERROR_NS = 1_000
PASSES = 4


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
    return bounded(calls, unit, Bounds.of(snapshots, unit), window_ns=window_ns, server=bool(snapshots))


def bounded(
    calls: Calls, unit: Mapping[int, int], bounds: Bounds, *, past: int = 0, window_ns: int = WINDOW_NS,
    server: bool = False,
) -> Clocks:  # fmt: skip
    """Offset intervals from calls and outside bounds. ``unit`` maps every rank to its clock; 0 is the reference,
    unless ``server``. The last ``past`` rows of ``bounds`` are what earlier windows left: no key is made of them."""
    if len(set(unit.values())) <= 1:
        return _one_clock(unit, calls, bounds, window_ns)
    if not len(calls) and not len(bounds):
        return _no_evidence(unit, window_ns)
    rows, marks, keys, base = prepare(calls, unit, bounds, past, window_ns, server=server)
    rows, marks, keys = _uncross(rows, marks, keys, window_ns)
    rho = np.full(len(keys.unit), DRIFT_MAX_PPM * 1e-6)
    low, high, point = _solve(rows, marks, keys, window_ns, rho)
    jump = _at_jumps(keys, low, high, point, window_ns)
    if jump.any():
        rows, marks, keys = _without(rows, marks, keys, jump)
        low, high, point = _solve(rows, marks, keys, window_ns, rho)
    slope = np.zeros(len(rho))
    for _ in range(2):  # better bounds give a better slope, which gives better bounds
        tilt, rest = _drift(keys, point, low, high)
        if not np.any(tilt) and not np.any(rest < rho):
            break
        low2, high2, point2 = _solve(*_without_drift(rows, marks, tilt), keys, window_ns, rest)
        if not np.all(low2 <= high2):
            break
        shift, slope, rho = tilt * keys.begin, tilt, rest
        low, high, point = low2 + shift, high2 + shift, point2 + shift
    return _result(unit, keys, base, (low, high, point, slope, rho), server, window_ns)


def _solve(rows: Rows, marks: Marks, keys: Keys, window_ns: int, rho: Floats) -> tuple[Floats, Floats, Floats]:
    """(low, high, point) of each key: causal bounds, then what the exits add."""
    low, high = _propagate(rows, marks, keys, window_ns, rho)
    point = _points(rows, keys, low, high)
    found = exits.of(rows.completed, rows.slot, rows.key, rows.together)
    return exits.tighten(found, keys.lines(), low, high, point, rho * window_ns)


def _uncross(rows: Rows, marks: Marks, keys: Keys, window_ns: int) -> tuple[Rows, Marks, Keys]:
    """Where bounds contradict each other a clock stepped unseen: cut it into windows, then drop the window itself."""
    rho = np.full(len(keys.unit), DRIFT_MAX_PPM * 1e-6)
    low, high = _propagate(rows, marks, keys, window_ns, rho)
    if np.all(low <= high):
        return rows, marks, keys
    line = keys.lines()
    broken = np.isin(line, line[low > high])
    cut = np.where(broken, keys.segment * (int(keys.window.max()) + 2) + keys.window + 1, keys.segment)
    keys = replace(keys, segment=cut)
    low, high = _propagate(rows, marks, keys, window_ns, rho)
    bad = low > high
    if not bad.any():
        return rows, marks, keys
    return _without(rows, marks, keys, bad)


def _without(rows: Rows, marks: Marks, keys: Keys, bad: np.ndarray) -> tuple[Rows, Marks, Keys]:
    """Forget the evidence of keys in which a clock stepped unseen, and carry nothing across them."""
    lost, none = bad[rows.key], (bad & ~keys.anchor)[marks.key]
    rows = replace(
        rows, entered=np.where(lost, -np.inf, rows.entered), completed=np.where(lost, np.inf, rows.completed)
    )
    edge = np.cumsum(np.diff(bad.astype(np.int64), prepend=0) != 0)
    segment = np.where(keys.anchor, keys.segment, keys.segment * (int(edge.max(initial=0)) + 1) + edge)
    marks = replace(marks, low=np.where(none, -np.inf, marks.low), high=np.where(none, np.inf, marks.high))
    return rows, marks, replace(keys, segment=segment)


def _at_jumps(keys: Keys, low: Floats, high: Floats, point: Floats, window_ns: int) -> np.ndarray:
    """Keys [K] on either side of a jump: neighbours whose intervals lie further apart than drift can carry them."""
    line, drift = keys.lines(), DRIFT_MAX_PPM * 1e-6 * window_ns
    known = np.isfinite(low) & np.isfinite(high)
    error = np.where(known, np.maximum(high - point, point - low), np.inf)
    apart = np.abs(np.diff(point)) > error[1:] + error[:-1] + drift * np.diff(keys.window)
    apart &= (line[1:] == line[:-1]) & ~keys.anchor[1:]
    jump = np.zeros(len(line), bool)
    jump[1:] |= apart
    jump[:-1] |= apart
    return jump


def _one_clock(unit: Mapping[int, int], calls: Calls, bounds: Bounds, window_ns: int) -> Clocks:
    """One clock for all: its offset is 0."""
    begin = int(calls.entered_ns.min()) if len(calls) else int(bounds.at_ns.min(initial=0))
    return _flat(unit, begin, float(SAME_HOST_ERROR_NS), window_ns)


def _no_evidence(unit: Mapping[int, int], window_ns: int) -> Clocks:
    """Several clocks and nothing that ties them: offset 0, error 2**60."""
    return _flat(unit, 0, UNKNOWN_NS, window_ns)


def _flat(unit: Mapping[int, int], begin_ns: int, error_ns: float, window_ns: int) -> Clocks:
    units = np.array(sorted(set(unit.values())) or [0], np.int64)
    zero = np.zeros(len(units))
    return Clocks(
        unit=unit,
        key_unit=units,
        begin_ns=np.full(len(units), begin_ns, np.int64),
        offset_ns=zero,
        error_ns=np.full(len(units), error_ns),
        drift_ppm=zero,
        monotonic_ns=np.zeros(len(units), np.int64),
        twice_ns=zero,
        rest_ppm=zero,
        anchor=np.full(len(units), error_ns < UNKNOWN_NS),
        window_ns=window_ns,
    )


def _propagate(rows: Rows, marks: Marks, keys: Keys, window_ns: int, rho: Floats) -> tuple[Floats, Floats]:
    """Bounds of each key's offset that hold through its whole window; ``rho`` [K] is the drift bound (ns/ns)."""
    low, high = np.full(len(rho), -np.inf), np.full(len(rho), np.inf)
    np.maximum.at(low, marks.key, marks.low - (rho * window_ns)[marks.key])
    np.minimum.at(high, marks.key, marks.high + (rho * window_ns)[marks.key])
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


def _carry(keys: Keys, low: Floats, high: Floats, rho: Floats, window_ns: int) -> tuple[Floats, Floats]:
    """Hand bounds to the neighbouring windows of the same unit and segment, widened by the drift."""
    line = keys.lines()
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


def _points(rows: Rows, keys: Keys, low: Floats, high: Floats) -> Floats:
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


def _drift(keys: Keys, point: Floats, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """(slope, bound on what is left of the drift) of each key, ns/ns [K].

    Least squares a line (clock x segment); kept where the line is long enough to say more than the worst case,
    and straight: points that each lie within e of the truth give a slope within 3 e / span.
    """
    line = keys.lines()
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


def _without_drift(rows: Rows, marks: Marks, slope: Floats) -> tuple[Rows, Marks]:
    """The same evidence as clocks without that drift would have shown it."""
    move = slope[rows.key]
    moved = move * np.where(np.isfinite(rows.entered), rows.entered, 0.0)
    shift = slope[marks.key] * marks.at
    flat = replace(rows, entered=rows.entered - moved, completed=rows.completed - moved)
    return flat, replace(marks, low=marks.low - shift, high=marks.high - shift)


def _result(
    unit: Mapping[int, int], keys: Keys, base: int, solved: tuple[Floats, ...], server: bool, window_ns: int
) -> Clocks:
    low, high, point, slope, rho = solved
    error = np.where(low <= high, np.maximum(high - point, point - low), np.inf)  # crossed: nothing is known
    error = np.where(np.isfinite(error), np.maximum(error, SAME_HOST_ERROR_NS), UNKNOWN_NS)
    twice = show_twice(keys.unit, keys.window, keys.begin, point, window_ns)
    order = np.lexsort((keys.begin, keys.unit))
    order = order[keys.told[order]]
    return Clocks(
        unit=unit,
        key_unit=keys.unit[order],
        begin_ns=keys.begin[order].astype(np.int64) + base,
        offset_ns=point[order],
        error_ns=error[order],
        drift_ppm=slope[order] * 1e6,
        monotonic_ns=keys.monotonic[order].astype(np.int64),
        twice_ns=twice[order],
        rest_ppm=rho[order] * 1e6,
        anchor=keys.anchor[order],
        window_ns=window_ns,
        reference="server" if server else "rank",
    )


def show_twice(units: Ints, turn: Ints, begin: Floats, point: Floats, window_ns: int) -> Floats:
    """Spread of a clock's offsets where its wall went back over a key's time, else 0; ns [K]. ``turn``: true order."""
    found = np.zeros(len(point))
    for unit in np.unique(units):
        mine = np.flatnonzero(units == unit)
        mine = mine[np.argsort(turn[mine], kind="stable")]
        at = begin[mine]
        behind = at < np.maximum.accumulate(at)
        ahead = at > np.minimum.accumulate(at[::-1])[::-1]
        if behind.any():
            low, high = at[behind].min() - 2 * window_ns, at[ahead].max() + 2 * window_ns
            found[mine[(at >= low) & (at <= high)]] = np.ptp(point[mine])
    return found
