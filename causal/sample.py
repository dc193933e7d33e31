"""A short sample with nothing before it (profiler traces, dumps): who is late beyond its peers in nearly all of it.

The other stages want many steps and an onset. Here peers are the only yardstick: members of one group and one role.
``excess[u, r]`` is how much later rank r enters than the median of the other members: in all calls of step u together,
as far as the others' waiting shows it (late calls that overlap cost once), and no less than in its latest call; of
call u, where calls carry no step. A rank is late when that is large against the step, the spread of the others
and the clocks' error, nearly always. Where clocks do not tell, durations do: the last to enter has the shortest call;
where that is another rank than the one that seems late, nobody is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lanterne.causal import stats
from lanterne.causal.facts import Facts, Place
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame
from lanterne.causal.straggler import cost_of
from lanterne.nouns import CauseCategory, Cost, Evidence, Subject, group_ranks

C = CauseCategory
Floats = NDArray[np.float64]
LIVE = frozenset({"live", "simulator", "spool"})
STEPS_MAX = 200
"""Longer windows have a past, and detectors and stages of their own."""
STEPS_MIN, PAIR_STEPS_MIN, CALLS_MIN = 2, 3, 8
FLOOR_MS = 4.0
SHARE = 0.04
"""Of a step; twice what a straggler of a whole run must save, for there is no past to confirm it."""
SPREADS, OWN_SPREADS, ERRORS = 4.0, 2.0, 2.0
STEADY = 0.8
EXPLAINED = 0.5
"""Share of the lateness that what a rank did must explain to be its cause."""
ROLE = 1.1
"""A rank with this many times the kernels of its peers has other work, not slower work."""
EXACT_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """``rank`` None: somebody is waited for, and it cannot be told who. ``level_ms``: typical excess per step or call.

    ``first``, ``last``: steps, -1 where calls carry none. ``saving_ms``: a step's, 0 where not known.
    """

    rank: int | None
    group: str
    category: CauseCategory
    score: float
    level_ms: float
    spread_ms: float
    saving_ms: float
    first: int
    last: int
    evidence: Sequence[Evidence]
    needs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Group:
    """One group's calls: ``excess``, ``shorter`` [units, members] ms; ``error``, ``noise`` [members] ms.

    ``noise``: how much a unit's excess changes by chance, told by how each of its calls differs from unit to unit.
    """

    name: str
    members: tuple[int, ...]
    units: NDArray[np.int64]
    stepped: bool
    excess: Floats
    shorter: Floats
    error: Floats
    noise: Floats


def late(facts: Facts) -> list[Late]:
    """Late ranks of a short offline sample, the latest first; each rank once. Empty for live jobs and long windows."""
    w = facts.waits
    if LIVE & set(facts.sources) or not len(w.rank) or len(facts.steps) >= STEPS_MAX:
        return []
    apart = _pipelines(facts)
    found: dict[int | None, Late] = {}
    for index in range(len(w.group)):
        group = _group(facts, index)
        if group is None or _share_a_pipeline(group.members, apart):
            continue
        for one in _judged(facts, group):
            known = found.get(one.rank)
            if known is None or one.level_ms > known.level_ms:
                found[one.rank] = one
    if len(found) > 1:
        found.pop(None, None)
    return sorted(found.values(), key=lambda x: -x.level_ms)


def _pipelines(facts: Facts) -> list[frozenset[int]]:
    """Sets of ranks that send to each other: stages of one pipeline, with different work by design."""
    sets: list[frozenset[int]] = []
    for event in facts.events:
        for name in str(event.attributes.get("pairwise", "")).split() if event.name == "trace" else ():
            ranks = frozenset(facts.ranks if name == "?" else group_ranks(name))
            for other in [s for s in sets if s & ranks]:
                sets.remove(other)
                ranks |= other
            sets.append(ranks)
    return sets


def _share_a_pipeline(members: tuple[int, ...], pipelines: list[frozenset[int]]) -> bool:
    return any(len(p.intersection(members)) > 1 for p in pipelines)


def _group(facts: Facts, index: int) -> _Group | None:
    w = facts.waits
    pairwise = np.array([op.lower().startswith(("send", "recv")) for op in w.op] or [False])
    keep = w.group_index == index
    if len(w.op):
        keep &= ~pairwise[w.op_index]
    rows = np.flatnonzero(keep)
    members, column = np.unique(w.rank[rows], return_inverse=True)
    if len(members) < 2:
        return None
    slots, slot = np.unique(w.sequence[rows], return_inverse=True)
    shape = (len(slots), len(members))
    entry, length = np.full(shape, np.nan), np.full(shape, np.nan)
    entry[slot, column] = w.lateness_ms[rows]
    length[slot, column] = w.wait_ms[rows] + w.transfer_ms[rows]
    step = np.full(len(slots), -1)
    step[slot] = w.step[rows]
    stepped = bool(len(facts.steps)) and bool((step >= 0).any())
    whole = np.isfinite(entry).all(axis=1) & ((step >= 0) | (not stepped))
    units, unit = np.unique(step[whole] if stepped else slots[whole], return_inverse=True)
    if not len(units):
        return None
    beyond = _beyond(entry[whole])
    excess = _worst(beyond, unit, len(units))
    if stepped:
        excess = np.maximum(excess, _together(facts, beyond, unit, units, members))
    error = [stats.rows_median(w.error_ms[rows][column == c]) for c in range(len(members))]
    return _Group(
        w.group[index], tuple(int(m) for m in members), units.astype(np.int64), stepped, excess,
        _worst(-_beyond(length[whole]), unit, len(units)), np.array(error),
        _noise(beyond, unit),
    )  # fmt: skip


def _beyond(x: Floats) -> Floats:
    """Less the median of the other members (of all, where they are many)."""
    if x.shape[1] > EXACT_MAX:
        return x - np.median(x, axis=1)[:, None]
    others = [np.median(np.delete(x, c, axis=1), axis=1) for c in range(x.shape[1])]
    return np.asarray(x - np.stack(others, axis=1), np.float64)


def _noise(x: Floats, unit: NDArray[np.int64]) -> Floats:
    """Of a sum over the calls of a unit: root mean square of each call's change between units, by rank."""
    order = np.argsort(unit, kind="stable")
    size = np.bincount(unit)
    place = np.empty(len(unit), np.int64)
    place[order] = np.arange(len(unit)) - np.repeat(np.cumsum(size) - size, size)
    count = np.bincount(place)[:, None]
    mean = np.zeros((len(count), x.shape[1]))
    np.add.at(mean, place, x)
    rest = x - (mean / count)[place]
    free = max(1, len(x) - len(count))
    return np.asarray(np.sqrt((rest**2).sum(axis=0) / free * len(x) / len(size)), np.float64)


def _worst(x: Floats, unit: NDArray[np.int64], units: int) -> Floats:
    out = np.full((units, x.shape[1]), -np.inf)
    np.maximum.at(out, unit, x)
    return out


def _together(
    facts: Facts, beyond: Floats, unit: NDArray[np.int64], units: NDArray[np.int64], members: NDArray[np.int64]
) -> Floats:
    """Excess of all calls of a step, but no more than the other members wait longer in it than the rank itself."""
    summed = np.zeros((len(units), len(members)))
    np.add.at(summed, unit, beyond)
    row = np.searchsorted(facts.steps, units)
    known = row < len(facts.steps)
    known[known] = facts.steps[row[known]] == units[known]
    shorter = np.full(summed.shape, -np.inf)
    columns = [facts.ranks.index(int(m)) for m in members]
    shorter[known] = np.nan_to_num(-_beyond(facts.get("wait_ms")[row[known]][:, columns]), nan=-np.inf)
    return np.asarray(np.minimum(summed, shorter), np.float64)


def _judged(facts: Facts, g: _Group) -> list[Late]:
    least = CALLS_MIN if not g.stepped else PAIR_STEPS_MIN if len(g.members) == 2 else STEPS_MIN
    if len(g.units) < least:
        return []
    columns = [facts.ranks.index(r) for r in g.members if r in facts.ranks]
    step_ms = stats.rows_median(facts.get("step_ms")[:, columns].reshape(-1)) if len(facts.steps) else float("nan")
    bar = max(FLOOR_MS, SHARE * step_ms) if np.isfinite(step_ms) else FLOOR_MS
    clear = ERRORS * g.error <= np.median(g.excess, axis=0)
    hits = [c for c in _hits(g.excess, g.noise, bar) if clear[c]]
    if hits:
        return [_told(facts, g, c, g.excess, bar, step_ms) for c in hits]
    blurred = ERRORS * float(np.median(g.error)) > bar
    if not blurred or not np.isfinite(g.shorter).all():
        return []
    hits = _hits(g.shorter, g.noise, bar)
    entered = _hits(g.excess, g.noise, bar)
    if hits and entered and not set(hits) & set(entered):
        return [_unknown(g, hits[0], entered[0])]
    return [_told(facts, g, c, g.shorter, bar, step_ms) for c in hits]


def _hits(x: Floats, noise: Floats, bar: float) -> list[int]:
    """Members that stand out, at most a quarter of them: more is the shape of the job, not a straggler."""
    level = np.median(x, axis=0)
    hits = [c for c in range(x.shape[1]) if level[c] >= bar and _stands_out(x, noise, c, level)]
    return hits if len(hits) <= max(1, x.shape[1] // 4) else []


def _stands_out(x: Floats, noise: Floats, c: int, level: Floats) -> bool:
    mine, top = x[:, c], float(level[c])
    own = _mad(mine)
    steady = float(np.mean(mine >= 0.5 * top)) >= (STEADY if len(mine) > 4 else 1.0)
    if x.shape[1] == 2:
        return steady and top >= SPREADS * max(own, float(noise[c]))
    others = np.delete(x, c, axis=1)
    usual = others[:, np.median(others, axis=0) < 0.5 * top]
    if not usual.shape[1] or not steady:
        return False
    return top >= SPREADS * max(_mad(usual), float(np.median(np.delete(noise, c)))) and top >= OWN_SPREADS * own


def _mad(x: Floats) -> float:
    return float(stats.MAD_TO_SIGMA * np.median(np.abs(x - np.median(x))))


def _told(facts: Facts, g: _Group, c: int, x: Floats, bar: float, step_ms: float) -> Late:
    rank, level = g.members[c], float(np.median(x[:, c]))
    others = np.delete(x, c, axis=1)
    spread = _mad(others) if others.shape[1] > 1 else _mad(x[:, c])
    hit = int((x[:, c] >= 0.5 * level).sum())
    clocked = x is g.excess
    what = "enters its collectives" if clocked else "has collectives"
    how = "later than its peers" if clocked else "shorter than its peers', who wait for it,"
    often = f"in {hit} of {len(g.units)} {'steps' if g.stepped else 'calls'}"
    says = f"rank {rank} {what} {number(level, 'ms')} {how} {often}"
    first = Evidence(says=says, value=level, unit="ms", baseline=spread, ref="lateness_ms")
    if (role := _other_role(facts, g, c)) is not None:
        design = f"whether rank {rank} has other work by design (pipeline stage, evaluation, logging)"
        return _late(g, None, C.UNKNOWN, 0.5, level, spread, 0.0, (first, role), (design,))
    category, score, proof, needs = _why(facts, g, c, level)
    score *= (0.85 if len(g.members) == 2 else 1.0) * (1.0 if clocked else 0.85) * (1.0 if g.stepped else 0.8)
    lead = float(np.median(x[:, c] - others.max(axis=1))) if others.shape[1] > 1 else level
    saving = min(level, _saving(facts, g, c, max(lead, 0.0), step_ms)) if g.stepped else 0.0
    return _late(g, rank, category, score, level, spread, saving, (first, *proof), needs)


def _late(
    g: _Group, rank: int | None, category: CauseCategory, score: float, level: float, spread: float, saving: float,
    evidence: Sequence[Evidence], needs: Sequence[str],
) -> Late:  # fmt: skip
    first, last = (int(g.units[0]), int(g.units[-1])) if g.stepped else (-1, -1)
    return Late(
        rank=rank, group=g.name, category=category, score=score, level_ms=level, spread_ms=spread, saving_ms=saving,
        first=first, last=last, evidence=tuple(evidence), needs=tuple(needs),
    )  # fmt: skip


def _unknown(g: _Group, shortest: int, latest: int) -> Late:
    level, error = float(np.median(g.shorter[:, shortest])), float(np.median(g.error))
    says = (
        f"ranks of group {g.name.split('#')[0]} wait {number(level, 'ms')} for one of them: rank {g.members[shortest]}"
        f" has the shortest calls, rank {g.members[latest]} seems to enter last, clocks are known to"
        f" {number(error, 'ms')}"
    )
    proof = (Evidence(says=says, value=level, unit="ms", baseline=error, ref="wait_ms"),)
    needs = ("clocks of the hosts on one time (NTP, PTP), or the ranks' own time in each step",)
    return _late(g, None, C.UNKNOWN, 0.5, level, 0.0, 0.0, proof, needs)


def _other_role(facts: Facts, g: _Group, c: int) -> Evidence | None:
    work = {e.rank: float(e.attributes.get("work", 0.0)) for e in facts.events if e.name == "trace"}
    mine, peers = work.get(g.members[c], 0.0), [work.get(r, 0.0) for i, r in enumerate(g.members) if i != c]
    usual = float(np.median(peers))
    if not usual or mine <= ROLE * usual:
        return None
    says = f"rank {g.members[c]} runs {mine:.0f} kernels or operators a step, its peers {usual:.0f}"
    return Evidence(says=says, value=mine, unit="1", baseline=usual, ref="trace")


def _saving(facts: Facts, g: _Group, c: int, lead: float, step_ms: float) -> float:
    """What the next latest member waits more than it does, over all calls of a step; at least the lead of one call."""
    wait = facts.get("wait_ms")[:, [facts.ranks.index(r) for r in g.members]]
    wait = wait[np.isfinite(wait).all(axis=1)]
    more = float(np.median(np.delete(wait, c, axis=1).min(axis=1) - wait[:, c])) if len(wait) else 0.0
    most = 0.95 * step_ms if np.isfinite(step_ms) else lead
    return min(max(lead, more), most)


def _why(
    facts: Facts, g: _Group, c: int, level: float
) -> tuple[CauseCategory, float, tuple[Evidence, ...], tuple[str, ...]]:
    """(category, score, evidence, needs) by what the rank did longer than its peers in that time."""
    rank = g.members[c]

    def longer(name: str, what: str) -> Evidence | None:
        x = facts.get(name)
        mine = stats.rows_median(x[:, facts.ranks.index(rank)])
        others = [stats.rows_median(x[:, facts.ranks.index(r)]) for r in g.members if r != rank]
        usual = stats.rows_median(np.array(others))
        usual = 0.0 if name == "gc_ms" and not np.isfinite(usual) else usual
        if not mine - usual >= EXPLAINED * level:
            return None
        says = f"rank {rank} {what} {number(mine, 'ms')} a step, its peers {number(usual, 'ms')}"
        return Evidence(says=says, value=mine, unit="ms", baseline=usual, ref=name)

    if len(facts.steps):
        for name, what, category in (
            ("gc_ms", "collects garbage for", C.GC_PAUSE),
            ("data_wait_ms", "waits for its data loader for", C.DATA_STALL),
            ("device_ms", "runs kernels for", C.SLOW_COMPUTE),
        ):
            if (proof := longer(name, what)) is not None:
                return category, 0.92, (proof,), ()
        device = np.isfinite(facts.get("device_ms")).any()
        if (proof := longer("operators_ms", "runs operators on the host for")) is not None:
            if not device:
                return C.SLOW_COMPUTE, 0.9, (proof,), ()
            needs = (f"CPU time and run queue of the host of rank {rank}: its kernels are as fast as its peers'",)
            return C.HOST_CONTENTION, 0.72, (proof,), needs
        seen = [
            what
            for name, what in (("device_ms", "kernels"), ("operators_ms", "operators"), ("data_wait_ms", "data loader"))
            if np.isfinite(facts.get(name)).any()
        ]
        if device or "operators" in seen:
            says = f"rank {rank} takes as long as its peers for: {', '.join(seen)}"
            needs = (f"Python stacks, CPU time and run queue of rank {rank}: the delay lies between these",)
            return C.HOST_CONTENTION, 0.6, (Evidence(says=says, ref="trace"),), needs
    return C.SLOW_COMPUTE, 0.6, (), (f"what rank {rank} does before it enters: kernels, data loader, host load",)


def findings(frame: Frame) -> list[Finding]:
    """The stage of the engine: late ranks of a short sample as causes."""
    out = []
    for one in late(frame.facts):
        host = None if one.rank is None else frame.facts.places.get(one.rank, Place()).host or None
        subject = Subject(rank=one.rank, host=host)
        saving = one.saving_ms
        says = one.evidence[0].says
        out.append(
            make(
                one.category, "straggler", confidence=one.score, subject=subject,
                since_step=one.first if one.first >= 0 else None,
                cost=cost_of(frame, saving, 0) if saving > 0 else Cost(),
                evidence=one.evidence, needs=one.needs,
                path=(Link(metric="own_ms", label="late at the collectives", weight=0.97, says=says),),
            )
        )  # fmt: skip
    return out
