"""Hangs and broken collective streams: who did not come, and why everybody else waits.

The rank that reports a time-out is a victim. The steps:

1. per group, what each member has enqueued and completed (:func:`views`);
2. a rank whose peers have completed calls that it still shows as pending has a dead device stream;
3. a call that some members entered and others did not makes waiters and absentees; an absentee that
   itself waits elsewhere is a link, one that waits for nobody is a root (:func:`roots`);
4. two members with different descriptors in one slot: shifted stream = divergence, else mismatch;
5. what the root's own log says (exception, caught OOM, progress bar, end of data) decides the category
   (:mod:`lanterne.causal.liveness_causes`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.streams import Divergence, differ, numel
from lanterne.nouns import Anomaly, Cause, Collective

DEVICE_LAG_MIN = 2
"""Calls completed by all peers but not by the rank: one may be the watchdog's polling, two are not."""

LIVE = frozenset({"live", "spool", "simulator"})
"""Sources that our own collector fills."""

_ONE_SIDED = ("broadcast", "reduce", "scatter", "gather", "send", "recv", "coalesced")
"""Calls that one side may complete before the other has entered (``all_`` forms are symmetric)."""


@dataclass
class View:
    """One process group as the evidence shows it. ``calls[rank][sequence]``; ``enqueued``/``completed`` by rank."""

    group: str
    members: tuple[int, ...]
    calls: dict[int, dict[int, Collective]] = field(default_factory=lambda: defaultdict(dict))
    enqueued: dict[int, int] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)

    def pending(self, rank: int) -> Collective | None:
        """The rank's first call in this group that has not completed."""
        open_calls = [c for c in self.calls.get(rank, {}).values() if not c.completed_ns]
        return min(open_calls, key=lambda c: c.sequence, default=None)


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiters`` are in call ``sequence`` of ``group``; ``absent`` have not entered it."""

    group: str
    sequence: int
    op: str
    numel: int
    waiters: tuple[int, ...]
    absent: tuple[int, ...]
    started_ns: int = 0
    site: str = ""
    source: str = "flight_recorder"


@dataclass(frozen=True, slots=True)
class Stall:
    """The whole picture: ``roots`` wait for nobody, ``dead`` have a dead device stream, ``unseen`` left no trace."""

    waits: tuple[Wait, ...] = ()
    roots: tuple[int, ...] = ()
    dead: Mapping[int, tuple[str, int, int]] = field(default_factory=dict)  # rank -> group, sequence, lag
    unseen: tuple[int, ...] = ()
    links: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # rank -> the ranks it waits for
    divergences: tuple[Divergence, ...] = ()
    all_present: tuple[Wait, ...] = ()  # calls that every member entered and nobody completed

    @property
    def hung(self) -> bool:
        return bool(self.waits or self.dead or self.divergences or self.all_present)


def live(facts: Facts) -> bool:
    """Facts of our own collector: it reports stalls, and calls that are open for a moment are no hang."""
    return bool(LIVE & set(facts.sources))


def symmetric(op: str) -> bool:
    """True for calls that no member can complete before all have entered."""
    name = op.lower().lstrip("_")
    if "coalesced" in name:
        return False
    return name.startswith(("all", "barrier", "reduce_scatter")) or not name.startswith(_ONE_SIDED)


def views(facts: Facts) -> dict[str, View]:
    """Group the calls; counters of ``group_status`` events raise what the ring of calls no longer holds."""
    found: dict[str, View] = {}
    for call in facts.collectives:
        if call.group not in found:
            found[call.group] = View(call.group, facts.groups.get(call.group, ()))
        view = found[call.group]
        kept = view.calls[call.rank].setdefault(call.sequence, call)
        if kept is not call and not call.completed_ns:
            view.calls[call.rank][call.sequence] = call
    for event in facts.events:
        group = str(event.attributes.get("group", ""))
        if event.name == "group_status" and group in found and event.rank >= 0:
            view = found[group]
            view.enqueued[event.rank] = int(event.attributes.get("last_enqueued_collective", -1))
            view.completed[event.rank] = int(event.attributes.get("last_completed_collective", -1))
    for view in found.values():
        if not view.members:
            view.members = tuple(sorted(view.calls))
        for rank, calls in view.calls.items():
            view.enqueued[rank] = max(view.enqueued.get(rank, -1), *calls)
            done = [s for s, c in calls.items() if c.completed_ns]
            floor = min((s for s, c in calls.items() if not c.completed_ns), default=max(calls) + 1) - 1
            view.completed[rank] = max(view.completed.get(rank, -1), min(floor, max(done, default=floor)))
    return found


def dead_streams(found: Mapping[str, View]) -> dict[int, tuple[str, int, int]]:
    """Ranks that show calls as pending which all other members, being in them too, have completed."""
    lag: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    for view in found.values():
        far = sorted(((view.completed[m], m) for m in view.members if m in view.completed), reverse=True)[:2]
        for rank in view.calls:
            first = view.pending(rank)
            others = [completed for completed, member in far if member != rank]
            if first is None or not others or not symmetric(first.op):
                continue
            behind = others[0] - first.sequence + 1
            if behind > 0:
                lag[rank].append((behind, view.group, first.sequence))
    dead = {}
    for rank, rows in lag.items():
        if sum(n for n, _, _ in rows) >= DEVICE_LAG_MIN:
            behind, group, sequence = max(rows)
            dead[rank] = (group, sequence, behind)
    return dead


def _group_waits(view: View, dead: Mapping[int, object], source: str) -> tuple[list[Wait], Wait | None]:
    """The first call of the group that is entered by some members and not by all."""
    pending = {r: c for r in view.calls if r not in dead and (c := view.pending(r)) is not None}
    if not pending:
        return [], None
    sequence = min(c.sequence for c in pending.values())
    first = next(c for c in pending.values() if c.sequence == sequence)
    waits = []
    upper = max(c.sequence for c in pending.values())
    for at in range(sequence, min(upper, sequence + 64) + 1):
        waiters = tuple(sorted(r for r in view.members if view.enqueued.get(r, -1) >= at))
        absent = tuple(r for r in view.members if r not in waiters)
        if not absent:
            continue
        call = next((c for r in waiters if (c := view.calls.get(r, {}).get(at))), first)
        waits.append(_wait(view, call, waiters, absent, source))
        break
    whole = None
    if not waits and set(pending) == set(view.members) and all(c.sequence == sequence for c in pending.values()):
        whole = _wait(view, first, view.members, (), source)
    return waits, whole


def _wait(view: View, call: Collective, waiters: Sequence[int], absent: Sequence[int], source: str) -> Wait:
    started = [c.entered_ns for r in waiters if (c := view.calls.get(r, {}).get(call.sequence))]
    return Wait(
        group=view.group,
        sequence=call.sequence,
        op=call.op,
        numel=numel(call.shape),
        waiters=tuple(waiters),
        absent=tuple(absent),
        started_ns=min(started, default=0),
        site=call.site,
        source=source,
    )


def _links(facts: Facts, waits: Sequence[Wait], dead: Mapping[int, object]) -> dict[int, set[int]]:
    links: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        for rank in wait.waiters:
            if rank not in dead:
                links[rank].update(wait.absent)
    for event in facts.events:
        if event.name == "p2p_pending" and event.rank not in dead:
            links[event.rank].add(int(event.attributes.get("peer", -1)))
    return links


def roots(links: Mapping[int, set[int]], waits: Sequence[Wait]) -> tuple[int, ...]:
    """Absentees that wait for nobody; when every absentee waits, the cycle's earliest absentees."""
    absent = {r for w in waits for r in w.absent}
    free = tuple(sorted(r for r in absent if not links.get(r)))
    if free or not waits:
        return free
    score = Counter(r for w in waits for r in w.absent)
    oldest = min(waits, key=lambda w: (w.started_ns or 1 << 63, w.sequence))
    return tuple(sorted(oldest.absent, key=lambda r: (-score[r], r)))[:4]


def stall(facts: Facts) -> Stall:
    """Analyse recorded calls (Flight Recorder, live taps). Times out of reach of clocks: only order is used."""
    found = views(facts)
    dead = dead_streams(found)
    seen = frozenset(facts.ranks)
    waits: list[Wait] = []
    whole: list[Wait] = []
    for view in found.values():
        part, full = _group_waits(view, dead, "collectives" if live(facts) else "flight_recorder")
        waits.extend(part)
        if full is not None:
            whole.append(full)
    divergences = tuple(d for view in found.values() if (d := differ(view.group, view.members, view.calls)) is not None)
    links = _links(facts, waits, dead)
    root = roots(links, waits)
    unseen = tuple(r for r in root if r not in seen)
    earliest = _first_open(found)
    whole = [w for w in whole if all(earliest.get(r) == (w.group, w.sequence) for r in w.waiters)]
    return Stall(
        waits=tuple(sorted(waits, key=lambda w: (w.started_ns, w.group))),
        roots=tuple(r for r in root if r not in dead),
        dead=dead,
        unseen=unseen,
        links={r: tuple(sorted(v)) for r, v in links.items()},
        divergences=divergences,
        all_present=tuple(whole) if not waits and not dead and not divergences else (),
    )


def _first_open(found: Mapping[str, View]) -> dict[int, tuple[str, int]]:
    """The oldest open call of each rank over all groups."""
    oldest: dict[int, Collective] = {}
    for view in found.values():
        for rank in view.calls:
            call = view.pending(rank)
            if call and (rank not in oldest or call.entered_ns < oldest[rank].entered_ns):
                oldest[rank] = call
    return {rank: (c.group, c.sequence) for rank, c in oldest.items()}


def last_words(facts: Facts, rank: int) -> list[FactEvent]:
    """Everything the rank's own log said, oldest first."""
    return [e for e in facts.events if e.rank == rank]


def candidates(facts: Facts, anomalies: Sequence[Anomaly] = ()) -> list[Cause]:
    """Causes of hangs, divergences, mismatches and missing ranks, best first; empty when nothing of the kind shows.

    ``anomalies`` is not needed: recorded calls and log events carry their own evidence.
    """
    del anomalies
    from lanterne.causal.liveness_causes import explain  # the other half of this module; it needs the types above

    return explain(facts, stall(facts))
