"""Alignment while data comes in: by blocks of steps, in bounded memory, with the answer of a batch.

A *block* holds the slots of ``BLOCK_STEPS`` steps (a slot belongs to the step of its first member). Its clocks
follow from its own calls and exchanges and from a short history of offset intervals that the blocks before it
left; its waits follow from these clocks and from the entries of the block after it. Nothing else goes in, and
tables are in order of name: so the answer does not depend on the order of arrival, and a batch is the same
blocks with all data at once. What changes is computed anew from the first changed block on.

Blocks further behind the newest step than ``keep_steps`` are sealed: only their history stays. What comes for
them later is counted in ``late`` and left out. A rank that is silent, late or gone holds up nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lanterne.backend.align import clocks as clock
from lanterne.backend.align import matching, waits
from lanterne.backend.align.clock_keys import unit_name
from lanterne.backend.align.clock_table import UNKNOWN_NS, Bounds, Clocks, Snapshot
from lanterne.backend.align.frame import Ints
from lanterne.backend.align.matching import Calls
from lanterne.backend.align.waits import Attribution

BLOCK_STEPS = 32
ROWS_MAX = 6_000_000
"""Calls kept at most, about 400 bytes each; older blocks are sealed before their time."""
RECENT, SPARSE, EVERY = 8, 24, 8
"""History of each clock: its last windows, and every 8th window before them."""
SNAPSHOTS_MAX = 4_096  # of each clock, the newest

_Slots = frozenset[tuple[str, int]]
_Members = Mapping[str, frozenset[int]]


def _none() -> Calls:
    return matching.joined([])


@dataclass(frozen=True, slots=True)
class _Past:
    """What a block inherits: clocks by name (0 is the reference), whose time the job clock is, and the history."""

    names: tuple[str, ...] = ()
    unit: Mapping[int, int] = field(default_factory=dict)
    pinged: bool = False
    reference: str = ""
    bounds: Bounds = field(default_factory=lambda: Bounds.of((), {}))

    def same(self, other: _Past) -> bool:
        """Equal in everything that the next block can see."""
        mine = (self.names, dict(self.unit), self.pinged, self.reference)
        if mine != (other.names, dict(other.unit), other.pinged, other.reference):
            return False
        return all(np.array_equal(getattr(self.bounds, f.name), getattr(other.bounds, f.name)) for f in fields(Bounds))


@dataclass(slots=True)
class _Block:
    own: Calls = field(default_factory=_none)  # rows by their own step
    fresh: list[Calls] = field(default_factory=list)
    short: _Slots = frozenset()  # slots that lack members
    moved: bool = False  # ``calls`` is not ``own``: a slot of two blocks
    members: _Members = field(default_factory=dict)  # who made a call in each group
    reporting: Mapping[str, int] = field(default_factory=dict)  # how many did here or in the blocks beside it
    calls: Calls = field(default_factory=_none)
    edges: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # clock -> first (monotonic, Unix) ns
    snapshots: list[Snapshot] = field(default_factory=list)
    begins_with: _Past = field(default_factory=_Past)
    leaves: _Past = field(default_factory=_Past)
    clocks: Clocks | None = None
    found: Attribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """The blocks that are kept, as one: ``attribution`` is parallel to ``calls``, ``clocks`` are all ranks'."""

    calls: Calls
    attribution: Attribution
    clocks: Clocks

    def since(self, step: int) -> Aligned:
        """Without calls of earlier steps (those of no step stay); the clocks stay whole."""
        keep = (self.calls.step >= step) | (self.calls.step < 0)
        if keep.all():
            return self
        found = {f.name: getattr(self.attribution, f.name)[keep] for f in fields(Attribution)}
        return replace(self, calls=matching.picked(self.calls, keep), attribution=Attribution(**found))


class Aligner:
    """Streaming alignment of one attempt. Not thread-safe. ``keep_steps`` None: nothing is ever sealed."""

    def __init__(self, *, keep_steps: int | None = None, rows_max: int = ROWS_MAX) -> None:
        self.keep_steps, self.rows_max = keep_steps, rows_max
        self.late = 0
        self.hosts: dict[int, str] = {}
        self._blocks: dict[int, _Block] = {}
        self._sealed_until: int | None = None  # the newest sealed block
        self._past, self._sealed_short = _Past(), frozenset[tuple[str, int]]()
        self._sealed_members: _Members = {}
        self._snapshots: dict[str, dict[Snapshot, None]] = {}
        self._answer: Aligned | None = None

    # --- what comes in ---

    def push(self, calls: Calls, snapshots: Sequence[Snapshot] = (), hosts: Mapping[int, str] | None = None) -> None:
        """Take rows in any order, repeated ones too. ``hosts`` must name a rank's host no later than its first row."""
        self.hosts.update(hosts or {})
        self._answer = None if len(calls) or snapshots or hosts else self._answer
        number = calls.step // BLOCK_STEPS
        for block in np.unique(number).tolist():
            mine = number == block
            if self._sealed_until is not None and block <= self._sealed_until:
                self.late += int(mine.sum())
                continue
            self._blocks.setdefault(block, _Block()).fresh.append(matching.joined([calls], [mine]))
        for snapshot in snapshots:
            self._snapshots.setdefault(self._name(snapshot.rank), {})[snapshot] = None

    def _name(self, rank: int) -> str:
        return unit_name(rank, self.hosts)

    @property
    def rows(self) -> int:
        """Calls in memory."""
        return sum(len(b.own) + sum(map(len, b.fresh)) for b in self._blocks.values())

    @property
    def first_step(self) -> int:
        """The first step that is not sealed; what is older is refused."""
        return 0 if self._sealed_until is None else (self._sealed_until + 1) * BLOCK_STEPS

    # --- what comes out ---

    def aligned(self, ranks: Sequence[int] = ()) -> Aligned:
        """The answer on what is there now; ``ranks``: further ranks whose clock is asked for."""
        if self._answer is None:
            self._update()
            self._answer = _merged([self._blocks[b] for b in sorted(self._blocks)])
            self._seal()
        answer = self._answer
        if not self._blocks:
            told = [s for pool in self._snapshots.values() for s in pool]
            found = clock.estimate(answer.calls, hosts=self.hosts, snapshots=told, ranks=ranks)
            return Aligned(calls=answer.calls, attribution=answer.attribution, clocks=found)
        names = {name: i for i, name in enumerate(self._newest().names)}
        seen = sorted({*ranks, *answer.clocks.unit})
        unit = {rank: names.setdefault(self._name(rank), len(names)) for rank in seen}
        return Aligned(calls=answer.calls, attribution=answer.attribution, clocks=replace(answer.clocks, unit=unit))

    def _newest(self) -> _Past:
        return self._blocks[max(self._blocks)].leaves if self._blocks else self._past

    def _update(self) -> None:
        self._match()
        self._share_snapshots()
        order = sorted(self._blocks)
        before, anew = self._past, set()
        for number in order:
            block = self._blocks[number]
            if block.clocks is None or not block.begins_with.same(before):
                self._solve(block, before)
                anew.add(number)
            before = block.leaves
        for here, following in zip(order, [*order, None][1:], strict=True):
            block = self._blocks[here]
            reporting = self._reporting(here)
            if block.found is None or here in anew or following in anew or reporting != block.reporting:
                assert block.clocks is not None
                count = np.array([reporting[name] for name in block.calls.groups] or [0], np.int64)
                told = count[block.calls.group[block.calls.first]]
                block.found = waits.attribute(block.calls, block.clocks, self._later(here, following), told)
                block.reporting = reporting

    def _reporting(self, here: int) -> dict[str, int]:
        """Members of each group that made a call in this block or beside it: a late rank is not yet a silent one."""
        beside = [self._blocks[n].members for n in (here, here + 1) if n in self._blocks]
        beside.append(self._blocks[here - 1].members if here - 1 in self._blocks else (
            self._sealed_members if here - 1 == self._sealed_until else {}))  # fmt: skip
        found = {name: frozenset[int]().union(*(m.get(name, ()) for m in beside)) for name in beside[0]}
        return {name: len(ranks) for name, ranks in found.items()}

    def _later(self, here: int, following: int | None) -> tuple[Ints, Ints] | None:
        """Entries of the next block on the same job clock."""
        if following != here + 1:
            return None
        after, own = self._blocks[following], self._blocks[here].leaves.reference
        if after.clocks is None or (after.leaves.reference == "server") != (own == "server"):
            return None
        offset, _ = after.clocks.offsets(after.calls.rank, after.calls.entered_ns, after.calls.monotonic_ns)
        return after.calls.rank, after.calls.entered_ns - offset.astype(np.int64)

    # --- the parts of an update ---

    def _match(self) -> None:
        """Take in fresh rows; a slot whose members stand in two blocks goes to the earlier one."""
        changed = {number for number, block in self._blocks.items() if block.fresh}
        for number in changed:
            block = self._blocks[number]
            block.own = matching.joined([block.own, *block.fresh]) if len(block.own) or len(block.fresh) > 1 else (
                block.fresh[0])  # fmt: skip
            block.fresh = []
            block.short, block.members = _short(block.own), _members(block.own)
        for number, block in self._blocks.items():
            if not changed & {number - 1, number, number + 1}:
                continue
            before = self._blocks[number - 1].short if number - 1 in self._blocks else (
                self._sealed_short if number - 1 == self._sealed_until else frozenset())  # fmt: skip
            after = self._blocks.get(number + 1)
            gone = block.short & before
            come = (block.short & after.short) - gone if after is not None else frozenset()
            moves = bool(gone or come)
            if number not in changed and not moves and not block.moved:
                continue
            block.calls, block.moved = block.own, moves
            if moves:
                parts, rows = [block.own], [~_among(block.own, gone)]
                if after is not None:
                    parts, rows = [*parts, after.own], [*rows, _among(after.own, come)]
                block.calls = matching.joined(parts, rows)
            block.clocks = block.found = None
            block.edges = self._edges(block.calls)

    def _edges(self, calls: Calls) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        late = np.iinfo(np.int64).max
        size = int(calls.rank.max(initial=-1)) + 1
        mono, unix = np.full(size, late), np.full(size, late)
        np.minimum.at(unix, calls.rank, calls.entered_ns)
        np.minimum.at(mono, calls.rank, np.where(calls.monotonic_ns > 0, calls.monotonic_ns, late))
        for rank in np.flatnonzero(unix < late).tolist():
            name = self._name(rank)
            old = found.get(name, (late, late))
            found[name] = (min(old[0], int(mono[rank])), min(old[1], int(unix[rank])))
        return found

    def _share_snapshots(self) -> None:
        """Give each exchange to the block that its host was in, by the host's monotonic clock where there is one."""
        share: dict[int, list[Snapshot]] = {number: [] for number in self._blocks}
        if not share:
            return
        order = sorted(self._blocks)
        for name, pool in self._snapshots.items():
            kept = sorted(pool, key=lambda s: (s.own_monotonic_ns, s.t0_ns))[-SNAPSHOTS_MAX:]
            own = [(n, *self._blocks[n].edges[name]) for n in order if name in self._blocks[n].edges]
            if not own:
                share[order[-1]] += kept
                continue
            used: dict[Snapshot, None] = {}
            for snapshot in kept:
                at, side = (snapshot.own_monotonic_ns, 1) if snapshot.monotonic_ns > 0 else (snapshot.t0_ns, 2)
                known = [edge[0] for edge in own if edge[side] <= at]
                if known or self._sealed_until is None:
                    share[max(known, default=own[0][0])].append(snapshot)
                    used[snapshot] = None
            self._snapshots[name] = used
        for number, found in share.items():
            block = self._blocks[number]
            found.sort(key=lambda s: (s.rank, s.t0_ns, s.t3_ns, s.t1_ns))
            if found != block.snapshots:
                block.snapshots, block.clocks = found, None

    def _solve(self, block: _Block, before: _Past) -> None:
        names, unit = {name: i for i, name in enumerate(before.names)}, dict(before.unit)
        for rank in sorted({*np.unique(block.calls.rank).tolist(), *(s.rank for s in block.snapshots)}):
            unit[rank] = names.setdefault(self._name(rank), len(names))
        pinged = before.pinged or bool(block.snapshots)
        server = pinged and len(names) > 1
        keep = before.bounds if (before.reference == "server") == server else Bounds.of((), {})
        bounds = (Bounds.of(block.snapshots, unit) if server else Bounds.of((), {})).joined(keep)
        block.clocks = clock.bounded(block.calls, unit, bounds, past=len(keep), server=server)
        block.begins_with = before
        block.leaves = _Past(
            tuple(names), unit, pinged, "server" if server else "rank", _history(keep, block.clocks)
        )  # fmt: skip

    def _seal(self) -> None:
        """Let go of blocks that are far behind the newest step, or that memory has no room for."""
        while len(self._blocks) > 2:
            oldest, newest = min(self._blocks), max(self._blocks)
            far = self.keep_steps is not None and (newest - oldest) * BLOCK_STEPS > self.keep_steps + BLOCK_STEPS
            if not far and (self.keep_steps is None or self.rows <= self.rows_max):
                return
            block = self._blocks.pop(oldest)
            self._past, self._sealed_until = block.leaves, oldest
            self._sealed_short, self._sealed_members = block.short, block.members


def _short(calls: Calls) -> _Slots:
    """Slots that lack members, by name and sequence."""
    lack = np.flatnonzero(calls.sizes < calls.expected())
    rows = calls.first[lack]
    names = zip(calls.group[rows].tolist(), calls.sequence[rows].tolist(), strict=True)
    return frozenset((calls.groups[g], s) for g, s in names)


def _members(calls: Calls) -> _Members:
    """Ranks that made a call, by group."""
    span = int(calls.rank.max(initial=0)) + 1
    found: dict[str, list[int]] = {name: [] for name in calls.groups}
    for pair in np.unique(calls.group * span + calls.rank).tolist():
        found[calls.groups[pair // span]].append(pair % span)
    return {name: frozenset(ranks) for name, ranks in found.items()}


def _among(calls: Calls, slots: _Slots | frozenset[Any]) -> np.ndarray:
    """Rows of these slots, as a mask [N]."""
    rows = calls.first
    names = zip(calls.group[rows].tolist(), calls.sequence[rows].tolist(), strict=True)
    hit = np.array([(calls.groups[g], s) in slots for g, s in names], bool)
    found: np.ndarray = hit[calls.slot] if len(hit) else np.zeros(len(calls), bool)
    return found


def _history(old: Bounds, found: Clocks) -> Bounds:
    """Of each clock the last ``RECENT`` windows, and every ``EVERY``-th before them, ``SPARSE`` at most.

    A clock that shows no monotonic time beside it leaves none: nobody could tell that it stepped in between.
    """
    known = (found.error_ns < UNKNOWN_NS / 2) & (found.monotonic_ns > 0)
    new = Bounds(
        unit=found.key_unit[known],
        at_ns=found.begin_ns[known],
        monotonic_ns=found.monotonic_ns[known],
        low_ns=(found.offset_ns - found.error_ns)[known],
        high_ns=(found.offset_ns + found.error_ns)[known],
        anchor=found.anchor[known],
    )
    both = old.joined(new)
    turn = np.repeat([0, 1], [len(old), len(new)])
    order = np.lexsort((both.at_ns, both.monotonic_ns, turn, both.unit))
    end = np.searchsorted(both.unit[order], both.unit[order], side="right")
    behind = end - 1 - np.arange(len(order))  # windows of the clock after this one
    sparse = (both.at_ns[order] // found.window_ns) % EVERY == 0
    counted = np.cumsum((sparse & (behind >= RECENT))[::-1])[::-1]
    after = np.append(counted, 0)[end]
    keep = (behind < RECENT) | (sparse & (counted - after <= SPARSE))
    kept = order[keep]
    return Bounds(**{f.name: getattr(both, f.name)[kept] for f in fields(Bounds)})


def _merged(blocks: Sequence[_Block]) -> Aligned:
    """The blocks' answers as one, slots in order of (group, sequence)."""
    if not blocks:
        none = _none()
        empty = clock.estimate(none)
        return Aligned(calls=none, attribution=waits.attribute(none, empty), clocks=empty)
    found = [(b.calls, b.found, b.clocks) for b in blocks if b.found is not None and b.clocks is not None]
    calls, order = matching.stacked([c for c, _, _ in found])
    names = [f.name for f in fields(Attribution)]
    columns = {n: np.concatenate([getattr(a, n) for _, a, _ in found])[order] for n in names}
    return Aligned(calls=calls, attribution=Attribution(**columns), clocks=_timeline([c for _, _, c in found]))


def _timeline(parts: Sequence[Clocks]) -> Clocks:
    """Clocks of consecutive blocks as one; every unit keeps its number from block to block."""
    last = parts[-1]
    columns = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts])
        for f in fields(Clocks)
        if isinstance(getattr(last, f.name), np.ndarray)
    }
    part = np.repeat(np.arange(len(parts)), [len(p.begin_ns) for p in parts])
    turn = np.empty(len(part), np.int64)
    turn[np.lexsort((columns["begin_ns"], columns["monotonic_ns"], part))] = np.arange(len(part))
    begin = columns["begin_ns"].astype(np.float64)
    twice = clock.show_twice(columns["key_unit"], turn, begin, columns["offset_ns"], last.window_ns)
    columns["twice_ns"] = np.maximum(columns["twice_ns"], twice)
    order = np.lexsort((turn, columns["begin_ns"], columns["key_unit"]))
    columns = {name: values[order] for name, values in columns.items()}
    return Clocks(unit=last.unit, window_ns=last.window_ns, reference=last.reference, **columns)


def whole(calls: Calls, snapshots: Sequence[Snapshot], hosts: Mapping[int, str], ranks: Sequence[int] = ()) -> Aligned:
    """The batch: everything at once, through the same blocks."""
    aligner = Aligner()
    aligner.push(calls, snapshots, hosts)
    return aligner.aligned(ranks)
