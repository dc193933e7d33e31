"""What if: one step replayed with some of its work at its normal length, across all groups at once.

A step is a recurrence of maxima and sums. On a rank, work follows the rank's previous entry and the latest of its
calls that had completed by then; a call completes its transfer after the last of its members has entered. With
the observed work this gives the observed step again; with other work, the step that would have been. (The
same idea at operation level is the what-if analysis of Lin et al., OSDI 2025; ``causal.counterfactual``
replays pipelines from operation traces.)

*Normal* is what the rank's peers need between the same two calls: ranks whose calls in the step are the same
operations in the same order, the rank itself left out; their medians over the steps around. A rank
with no peer is compared with its own other steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.backend.align.frame import Floats, Ints
from lanterne.backend.align.matching import Calls
from lanterne.backend.align.waits import Attribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Begin and end of each (step, rank) on the job clock, ns; arrays [L] sorted by (step, rank)."""

    step: Ints
    rank: Ints
    begin_ns: Ints
    end_ns: Ints

    def lane(self, step: Ints, rank: Ints) -> Ints:
        """Row of each (step, rank) here, -1 where there is none."""
        if not len(self.step):
            return np.full(len(step), -1)
        shift = int(max(self.rank.max(), rank.max(initial=0))) + 1
        packed, wanted = self.step * shift + self.rank, step * shift + rank
        at = np.minimum(np.searchsorted(packed, wanted), len(packed) - 1)
        return np.where(packed[at] == wanted, at, -1)


@dataclass(frozen=True, slots=True)
class Work:
    """Calls as stretches of work before them, in order of (lane, entry); arrays [N], lanes [L].

    ``previous`` is the lane's row before (-1: none), ``after`` the row whose completion the work followed (-1: none),
    ``tail`` the work after the last call, which followed row ``tail_after`` and row ``last`` (-1: none).
    """

    rows: Ints  # into the calls
    lane: Ints
    place: Ints
    entered: Ints
    completed: Ints
    previous: Ints
    after: Ints
    length: Floats
    last: Ints
    tail_after: Ints
    tail: Floats
    pattern: Ints  # of each lane: the same number = the same operations in the same order


def work_of(calls: Calls, a: Attribution, bounds: Bounds) -> Work:
    """Cut the lanes into work and calls. Calls that are pending or miss members are passed over."""
    lane = bounds.lane(calls.step, calls.rank)
    rows = np.flatnonzero((lane >= 0) & a.whole & (a.completed_ns > 0))
    rows = rows[np.lexsort((calls.sequence[rows], a.entered_ns[rows], lane[rows]))]
    lane, entered, completed = lane[rows], a.entered_ns[rows], a.completed_ns[rows]
    n, lanes = len(rows), len(bounds.step)
    first = np.ones(n, bool)
    first[1:] = lane[1:] != lane[:-1]
    at = np.arange(n)
    begin = np.maximum.accumulate(np.where(first, at, 0))
    previous = np.where(first, -1, at - 1)
    base = int(bounds.begin_ns.min(initial=1 << 62))
    shift = int(max(bounds.end_ns.max(initial=base), completed.max(initial=base))) - base + 2
    order = np.argsort(lane * shift + np.clip(completed - base, 0, shift - 1), kind="stable")
    packed = (lane * shift + np.clip(completed - base, 0, shift - 1))[order]

    def latest(of: Ints, until: Ints) -> Ints:
        """Row of each lane's latest completion by ``until``; -1 where there is none."""
        found = np.searchsorted(packed, of * shift + np.clip(until - base, 0, shift - 1), side="right") - 1
        row = order[np.maximum(found, 0)] if n else found
        return np.where((found >= 0) & (lane[row] == of), row, -1) if n else np.full(len(of), -1)

    after = latest(lane, entered)
    start = bounds.begin_ns[lane]
    for row, time in ((previous, entered), (after, completed)):
        start = np.maximum(start, np.where(row >= 0, time[row], start)) if n else start
    last = np.full(lanes, -1)
    last[lane] = at
    ends = np.arange(lanes)
    tail_after = latest(ends, bounds.end_ns)
    free = bounds.begin_ns.copy()
    for row, time in ((last, entered), (tail_after, completed)):
        free = np.maximum(free, np.where(row >= 0, time[row], free)) if n else free
    place = at - begin
    weight = np.power(np.uint64(1_000_003), place.astype(np.uint64))
    mix = np.zeros(lanes, np.uint64)
    np.add.at(mix, lane, (calls.op[rows].astype(np.uint64) + np.uint64(7)) * weight)
    pattern = np.unique(mix, return_inverse=True)[1].reshape(-1)
    return Work(
        rows, lane, place, entered, completed, previous, after, np.maximum(entered - start, 0).astype(np.float64),
        last, tail_after, np.maximum(bounds.end_ns - free, 0).astype(np.float64), pattern,
    )  # fmt: skip


def normal(values: Floats, kind: Ints, rank: Ints) -> Floats:
    """What each row [N] would be if its rank were like its peers: of the others' medians in this kind, the median.

    ``kind`` says which rows are comparable. A rank alone in its kind: its own median.
    """
    if not len(values):
        return values
    order = np.lexsort((values, rank, kind))
    k, r, v = kind[order], rank[order], values[order]
    edge = np.ones(len(order), bool)
    edge[1:] = (k[1:] != k[:-1]) | (r[1:] != r[:-1])
    begins = np.flatnonzero(edge)
    sizes = np.diff(np.append(begins, len(order)))
    medians = v[begins + (sizes - 1) // 2]
    part = np.empty(len(order), np.int64)
    part[order] = np.cumsum(edge) - 1
    of = k[begins]
    ranked = np.lexsort((medians, of))
    place = np.empty(len(ranked), np.int64)
    first = np.searchsorted(of, of)
    place[ranked] = np.arange(len(ranked)) - first  # ``of`` is sorted, and sorting within keeps its blocks
    count = np.searchsorted(of, of, side="right") - first
    middle = np.maximum(count - 2, 0) // 2
    skip = (place <= middle) & (count > 1)
    peer: Floats = medians[ranked[first + middle + skip]]
    return peer[part]


class Replay:
    """One step, ready to be replayed. ``lanes`` are the lanes of the step; rows are those of its work."""

    def __init__(self, calls: Calls, a: Attribution, bounds: Bounds, work: Work, step: int) -> None:
        self.lanes = np.flatnonzero(bounds.step == step)
        self.rows = np.flatnonzero(bounds.step[work.lane] == step)
        self.rank = bounds.rank[self.lanes]
        to = np.full(len(work.lane) + 1, -1)  # the last one stands for "none"
        to[self.rows] = np.arange(len(self.rows))
        self.previous, self.after = to[work.previous[self.rows]], to[work.after[self.rows]]
        self.last, self.tail_after = to[work.last[self.lanes]], to[work.tail_after[self.lanes]]
        self.lane = np.searchsorted(self.lanes, work.lane[self.rows])
        zero = int(bounds.begin_ns[self.lanes].min(initial=1 << 62))
        self.begin = (bounds.begin_ns[self.lanes] - zero).astype(np.float64)
        source = work.rows[self.rows]
        self.slot = np.unique(calls.slot[source], return_inverse=True)[1].reshape(-1)
        transfer = (a.completed_ns[source] - a.last_ns[source]).astype(np.float64)
        self.alone = transfer < 0  # left before the last member came: it did not wait for it
        own = (a.completed_ns[source] - a.entered_ns[source]).astype(np.float64)
        self.delay = np.where(self.alone, own, transfer)
        self.waves = self._waves()

    def _waves(self) -> list[Ints] | None:
        """Rows in an order in which every cause comes first; None where the clocks make a circle."""
        rows, slots = len(self.rows), int(self.slot.max(initial=-1)) + 1
        waits_for = np.where((self.after >= 0) & ~self.alone[self.after], self.slot[self.after], -1)
        needs = (self.previous >= 0).astype(np.int64) + (waits_for >= 0)
        missing = np.bincount(self.slot, minlength=slots)
        following = np.full(rows, -1)
        following[self.previous[self.previous >= 0]] = np.flatnonzero(self.previous >= 0)
        held = np.flatnonzero(waits_for >= 0)
        held = held[np.argsort(waits_for[held], kind="stable")]
        start = np.searchsorted(waits_for[held], np.arange(slots + 1))
        ready, waves, seen = np.flatnonzero(needs == 0), list[Ints](), 0
        while len(ready):
            seen += len(ready)
            np.subtract.at(missing, self.slot[ready], 1)
            done = np.unique(self.slot[ready][missing[self.slot[ready]] == 0])
            waves.append(ready)
            freed = [held[start[s] : start[s + 1]] for s in done]
            touched = np.concatenate([following[ready][following[ready] >= 0], *freed])
            np.subtract.at(needs, touched, 1)
            touched = np.unique(touched)
            ready = touched[needs[touched] == 0]
        return waves if seen == rows else None

    def step_ns(self, length: Floats, tail: Floats) -> Floats:
        """Length of the step for each of S scenarios: work ``[N, S]`` and tails ``[lanes, S]`` in, ``[S]`` out."""
        assert self.waves is not None
        scenarios = length.shape[1]
        entered = np.zeros((len(self.rows), scenarios))
        arrived = np.zeros((int(self.slot.max(initial=-1)) + 1, scenarios))
        for rows in self.waves:
            base = np.where(
                self.previous[rows, None] >= 0, entered[self.previous[rows]], self.begin[self.lane[rows], None]
            )
            entered[rows] = self._after(base, self.after[rows], entered, arrived) + length[rows]
            np.maximum.at(arrived, self.slot[rows], entered[rows])
        base = np.where(self.last[:, None] >= 0, entered[self.last], self.begin[:, None]) if len(self.rows) else (
            np.repeat(self.begin[:, None], scenarios, 1))  # fmt: skip
        ends = self._after(base, self.tail_after, entered, arrived) + tail
        found: Floats = ends.max(axis=0) - self.begin.min()
        return found

    def _after(self, base: Floats, row: Ints, entered: Floats, arrived: Floats) -> Floats:
        """The later of ``base`` and the completion of ``row`` (-1: none)."""
        if not len(self.rows):
            return base
        came = np.where(self.alone[row, None], entered[row], arrived[self.slot[row]])
        return np.where(row[:, None] >= 0, np.maximum(base, came + self.delay[row, None]), base)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Step times, ns. ``observed`` is the replay of what was; the others say what had been with that one repaired."""

    observed_ns: float
    all_normal_ns: float
    ranks: Mapping[int, float]
    stages: Mapping[int, float]
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a rank in a step on the job clock; arrays [P]; ``name`` is shared."""

    name: str
    step: Ints
    rank: Ints
    start_ns: Ints
    end_ns: Ints


def what_if(
    calls: Calls, a: Attribution, bounds: Bounds, step: int, *, ranks: Sequence[int], stages: Mapping[int, int],
    phases: Sequence[Phase] = (),
) -> WhatIf | None:  # fmt: skip
    """Step time had each of ``ranks``, each pipeline stage (rank -> stage) or each phase been normal; only work that
    was longer than normal is shortened. None where the step cannot be replayed."""
    work = work_of(calls, a, bounds)
    replay = Replay(calls, a, bounds, work, step)
    if replay.waves is None or not len(replay.lanes):
        return None
    kind = work.pattern[work.lane] * (int(work.place.max(initial=0)) + 1) + work.place
    length = work.length[replay.rows]
    tail = work.tail[replay.lanes]
    good = np.minimum(length, normal(work.length, kind, bounds.rank[work.lane])[replay.rows])
    good_tail = np.minimum(tail, normal(work.tail, work.pattern, bounds.rank)[replay.lanes])
    row_rank = replay.rank[replay.lane]
    plans: list[tuple[Floats, Floats]] = [(length, tail), (good, good_tail)]
    plans += [(np.where(row_rank == r, good, length), np.where(replay.rank == r, good_tail, tail)) for r in ranks]
    stage = np.array([stages.get(int(r), -1) for r in replay.rank], np.int64)
    names = [int(s) for s in np.unique(stage) if s >= 0]
    names = names if len(names) > 1 else []
    plans += [_stage(length, tail, replay, stage, s) for s in names]
    plans += [_phase(length, tail, replay, work, bounds, phase) for phase in phases]
    found = replay.step_ns(np.stack([p for p, _ in plans], 1), np.stack([t for _, t in plans], 1)).tolist()
    rest = iter(found[2:])
    return WhatIf(
        observed_ns=found[0],
        all_normal_ns=found[1],
        ranks={rank: next(rest) for rank in ranks},
        stages={s: next(rest) for s in names},
        phases={phase.name: next(rest) for phase in phases},
    )


def _stage(length: Floats, tail: Floats, replay: Replay, stage: Ints, which: int) -> tuple[Floats, Floats]:
    """The stage's work shrunk to what a stage has in the median."""
    total = tail + np.bincount(replay.lane, length, len(tail))
    typical = {int(s): float(np.median(total[stage == s])) for s in np.unique(stage) if s >= 0}
    others = np.median([t for s, t in typical.items() if s != which])
    factor = min(1.0, float(others) / typical[which]) if typical[which] > 0 else 1.0
    mine = stage == which
    return np.where(mine[replay.lane], length * factor, length), np.where(mine, tail * factor, tail)


def _phase(
    length: Floats, tail: Floats, replay: Replay, work: Work, bounds: Bounds, phase: Phase
) -> tuple[Floats, Floats]:
    """Each rank's work without what it did longer than its peers in this phase; waiting in the phase is no work."""
    lane = bounds.lane(phase.step, phase.rank)
    on = lane >= 0
    spans = (lane[on], phase.start_ns[on], phase.end_ns[on])
    ends = bounds.end_ns - work.tail.astype(np.int64)
    lanes = np.arange(len(bounds.step))
    begins = work.entered - work.length.astype(np.int64)
    stretches = tuple(
        np.concatenate(pair) for pair in ((work.lane, lanes), (begins, ends), (work.entered, bounds.end_ns))
    )
    spent = np.bincount(lane[on], covered(stretches, *spans), len(lanes))
    seen = np.bincount(lane[on], minlength=len(lanes)) > 0
    usual = np.zeros(len(spent))
    usual[seen] = normal(spent[seen].astype(np.float64), work.pattern[seen], bounds.rank[seen])
    share = np.divide(np.maximum(spent - usual, 0.0), spent, out=np.zeros(len(spent)), where=spent > 0)
    mine, own = work.lane[replay.rows], replay.lanes
    cut = covered(spans, mine, begins[replay.rows], work.entered[replay.rows]) * share[mine]
    cut_tail = covered(spans, own, ends[own], bounds.end_ns[own]) * share[own]
    return np.maximum(length - cut, 0.0), np.maximum(tail - cut_tail, 0.0)


def covered(by: tuple[Ints, ...], lane: Ints, start: Ints, end: Ints) -> Floats:
    """How much of each interval (lane, start, end) [N] the disjoint intervals ``by`` (lane, start, end) cover, ns."""
    if not len(by[0]) or not len(lane):
        return np.zeros(len(lane))
    order = np.lexsort((by[2], by[0]))
    at, low, high = (column[order] for column in by)
    base = int(min(low.min(), start.min()))
    shift = int(max(high.max(), end.max())) - base + 2
    packed, total = at * shift + (high - base), np.append(0, np.cumsum(high - low))

    def until(time: Ints) -> Ints:
        found = np.searchsorted(packed, lane * shift + (time - base), side="right")
        here = np.minimum(found, len(at) - 1)
        part = np.where((found < len(at)) & (at[here] == lane), np.clip(time - low[here], 0, high[here] - low[here]), 0)
        whole: Ints = total[found] + part
        return whole

    found: Floats = (until(end) - until(start)).astype(np.float64)
    return found
