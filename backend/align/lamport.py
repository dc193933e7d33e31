"""Logical time of all ranks, free of any clock: Lamport stamps and "happened before" by vector clocks.

Each call gives two events, entry and exit. A rank's own events follow its own clock readings; a
synchronising collective puts every entry before every exit; the sender's entry of a point-to-point pair comes
before the receiver's exit; a message (store, command) puts the sending before the receipt. Collectives with
missing members or a root order nothing.

A *gate* (a collective, a pair, a message) opens when all that it waits for has happened, and holds back exits.
Between two held exits the events of a rank are a *run*: one stamp at its head gives them all. So stamps are a
walk over runs and gates, a wave of all that are ready at a time, linear in the number of events. Vector
clocks are never stored (they would be events x ranks): a question walks back from the later event through the
gates, latest stamp first, until it has seen the rank that it asks for.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lanterne.backend.align.exits import TOGETHER
from lanterne.backend.align.frame import Ints, Log
from lanterne.backend.align.matching import Calls
from lanterne.blackbox_files import POINT_TO_POINT
from lanterne.nouns import EventName

ENTRY, EXIT = 0, 1
PAIR = "sendrecv"
Order = Literal["before", "after"]
_PRECEDES: Mapping[str, frozenset[str]] = {
    "received": frozenset({"voted", "applied", "failed", "undone"}),
    "prepared": frozenset({"voted", "applied", "failed", "undone"}),
    "voted": frozenset({"committed"}),
    "committed": frozenset({"applied", "failed", "undone"}),
}
"""Phases of a command on one rank that come before phases on every other rank, whatever the clocks say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Rank ``source`` sent at its own time ``sent_ns`` what ``target`` had at its own ``received_ns`` (Unix ns).

    The monotonic times stand beside them; 0 = not known.
    """

    source: int
    sent_ns: int
    target: int
    received_ns: int
    sent_monotonic_ns: int = 0
    received_monotonic_ns: int = 0


def command_messages(logs: Sequence[Log]) -> list[Message]:
    """Messages that the events of signed commands prove: they travel over the job's own store, by its protocol."""
    phases: dict[tuple[str, str], list[Log]] = {}
    for log in logs:
        if log.name == EventName.COMMAND and log.attributes.get("id"):
            phases.setdefault((str(log.attributes["id"]), str(log.attributes.get("phase", ""))), []).append(log)
    return [
        Message(
            source=a.rank, sent_ns=a.time_ns, sent_monotonic_ns=a.monotonic_ns,
            target=b.rank, received_ns=b.time_ns, received_monotonic_ns=b.monotonic_ns,
        )
        for (order, phase), sent in phases.items()
        for later in sorted(_PRECEDES.get(phase, ()))
        for a in sent
        for b in phases.get((order, later), ())
        if a.rank != b.rank
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """Events [E]: entries of the calls' rows [0, N), exits [N, 2 N), then sends and receipts of messages by turns.

    ``stamp`` is the Lamport clock (0 = the event never happened: a pending exit, or part of a contradiction),
    ``place`` the event's number on its rank, ``column`` its rank's place in ``ranks``.
    """

    rows: int
    ranks: tuple[int, ...]
    stamp: Ints
    place: Ints
    column: Ints
    _graph: _Graph = field(repr=False)

    def event(self, row: int, side: int = ENTRY) -> int:
        """Number of the entry or exit of the calls' row ``row``."""
        return row + side * self.rows

    def order(self, a: int, b: int) -> Order | None:
        """Is event ``a`` ``before`` or ``after`` event ``b``; None = neither, or one of them never happened."""
        if a == b or not (self.stamp[a] and self.stamp[b]) or self.stamp[a] == self.stamp[b]:
            return None
        early, late = (a, b) if self.stamp[a] < self.stamp[b] else (b, a)
        seen = self._past(late, wanted=int(self.column[early]), floor=int(self.stamp[early]))
        if seen.get(int(self.column[early]), -1) < self.place[early]:
            return None
        return "before" if early == a else "after"

    def clock(self, event: int) -> dict[int, int]:
        """Vector clock: rank -> how many of its events lie in the past of ``event``, itself included."""
        if not self.stamp[event]:
            return {}
        return {self.ranks[column]: place + 1 for column, place in sorted(self._past(event).items())}

    def _past(self, event: int, wanted: int = -1, floor: int = 0) -> dict[int, int]:
        """Column -> place of the rank's last event in the past of ``event``; stops at ``wanted``, or below ``floor``.

        Events are taken latest stamp first, so the first one of a rank is its last.
        """
        graph, stamp = self._graph, self.stamp
        seen: dict[int, int] = {}
        todo: list[tuple[int, int, int]] = [(-int(stamp[event]), event, -1)]  # an event, or the head of a run
        queued = {event}
        while todo:
            minus, which, run = heapq.heappop(todo)
            if -minus < floor:
                break
            if run < 0:
                column = int(self.column[which])
                if column in seen:
                    continue
                seen[column] = int(self.place[which])
                if column == wanted:
                    break
                run = int(graph.run[which])
            else:
                for entry in graph.opened_by(run):
                    if entry not in queued and int(self.column[entry]) not in seen:
                        queued.add(entry)
                        heapq.heappush(todo, (-int(stamp[entry]), entry, -1))
                run = int(graph.before[run])
            while run >= 0 and graph.gate[run] < 0:
                run = int(graph.before[run])
            if run >= 0:
                heapq.heappush(todo, (-int(stamp[graph.head[run]]), int(graph.head[run]), run))
        return seen


def logical(calls: Calls, messages: Sequence[Message] = ()) -> Logical:
    """Lamport stamps of all calls and messages. Linear but for the sort by each rank's own time.

    Events in a contradiction (a cycle, which clocks that went back can make) and what follows keep stamp 0.
    """
    graph = _Graph(calls, messages)
    floor = np.ones(len(graph.head), np.int64)  # the least stamp that a run's head can have
    gate_stamp = np.zeros(graph.gates, np.int64)
    run_needs = (graph.before >= 0).astype(np.int64) + (graph.gate >= 0)
    gate_needs = np.diff(graph.entry_start)
    done = np.zeros(len(graph.head), bool)
    ready = np.flatnonzero(run_needs == 0)
    while len(ready):
        done[ready] = True
        after = graph.next[ready]
        has = after >= 0
        after = after[has]
        floor[after] = np.maximum(floor[after], (floor[ready] + graph.length[ready])[has])
        run_needs[after] -= 1
        inside, of = _spread(graph.run_start, ready)
        opens = graph.run_gate[inside]
        np.maximum.at(gate_stamp, opens, floor[ready][of] + graph.run_offset[inside])
        np.subtract.at(gate_needs, opens, 1)
        opened = np.unique(opens[gate_needs[opens] == 0])
        held, by = _spread(graph.held_start, opened)
        runs = graph.held_run[held]
        floor[runs] = np.maximum(floor[runs], gate_stamp[opened][by] + 1)
        run_needs[runs] -= 1
        touched = np.concatenate([after, runs])
        ready = np.unique(touched[run_needs[touched] == 0])
    stamp = np.zeros(len(graph.rank), np.int64)
    at = graph.run >= 0
    run = graph.run[at]
    stamp[at] = np.where(done[run], floor[run] + graph.offset[at], 0)
    return Logical(
        rows=len(calls), ranks=graph.ranks, stamp=stamp, place=graph.place, column=graph.column, _graph=graph
    )


def _spread(start: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """(items, position in ``groups`` of each) of groups whose items stand at ``start[g] .. start[g + 1]``."""
    count = start[groups + 1] - start[groups]
    of = np.repeat(np.arange(len(groups)), count)
    shift = start[groups] - (np.cumsum(count) - count)
    return np.arange(len(of)) + shift[of], of


class _Graph:
    """Runs and gates. Of runs [R]: head event, length, run before and after on the rank, gate that holds the head."""

    def __init__(self, calls: Calls, messages: Sequence[Message]) -> None:
        n, m = len(calls), len(messages)
        sides = np.array(
            [(x.source, x.sent_ns, x.sent_monotonic_ns, x.target, x.received_ns, x.received_monotonic_ns)
             for x in messages], np.int64,
        ).reshape(m, 6)  # fmt: skip
        self.rank = np.concatenate([calls.rank, calls.rank, sides[:, 0], sides[:, 3]])
        when = np.concatenate([calls.entered_ns, calls.completed_ns, sides[:, 1], sides[:, 4]])
        length = np.maximum(calls.completed_ns - calls.entered_ns, 0)
        if np.all(calls.monotonic_ns > 0) and np.all(sides > 0) and n:  # a wall clock can go back, this one cannot
            when = np.concatenate([calls.monotonic_ns, calls.monotonic_ns + length, sides[:, 2], sides[:, 5]])
        happened = np.concatenate([np.ones(n, bool), calls.completed_ns > 0, np.ones(2 * m, bool)])
        found, column = np.unique(self.rank, return_inverse=True)
        self.ranks = tuple(int(r) for r in found)
        self.column = column.reshape(-1).astype(np.int64)
        kind = np.repeat([0, 1, 0, 1], [n, n, m, m])
        order = np.lexsort((kind, when, self.column))
        order = order[happened[order]]
        opens, after = _gates(calls, m)
        self.gates = len(calls.first) + m
        self._runs(order, np.where(happened, after, -1))
        self._tables(order, opens)

    def _runs(self, order: Ints, after: Ints) -> None:
        """Cut each rank's events into runs at the events that a gate holds."""
        total = len(self.rank)
        columns = self.column[order]
        first = np.ones(len(order), bool)
        first[1:] = columns[1:] != columns[:-1]
        begin = first | (after[order] >= 0)
        at, starts = np.arange(len(order)), np.flatnonzero(begin)
        number = np.cumsum(begin) - 1
        self.run, self.offset, self.place = np.full(total, -1), np.zeros(total, np.int64), np.zeros(total, np.int64)
        self.run[order] = number
        self.offset[order] = at - starts[number] if len(starts) else at
        self.place[order] = at - np.maximum.accumulate(np.where(first, at, 0))
        self.head = order[starts]
        self.length = np.diff(np.append(starts, len(order)))
        self.gate = after[self.head]
        runs = np.arange(len(starts))
        self.before = np.where(first[starts], -1, runs - 1)
        self.next = np.full(len(starts), -1)
        self.next[self.before[self.before >= 0]] = runs[self.before >= 0]

    def _tables(self, order: Ints, opens: Ints) -> None:
        """Entries by run and by gate, held runs by gate: each an array of items and where a group starts in it."""
        entries = order[opens[order] >= 0]  # in order of run
        self.run_gate, self.run_offset = opens[entries], self.offset[entries]
        self.run_start = np.searchsorted(self.run[entries], np.arange(len(self.head) + 1))
        by_gate = np.argsort(opens[entries], kind="stable")
        self.entries = entries[by_gate]
        self.entry_start = np.searchsorted(opens[self.entries], np.arange(self.gates + 1))
        held = np.flatnonzero(self.gate >= 0)
        self.held_run = held[np.argsort(self.gate[held], kind="stable")]
        self.held_start = np.searchsorted(self.gate[self.held_run], np.arange(self.gates + 1))

    def opened_by(self, run: int) -> list[int]:
        """Events that the gate before this run waited for."""
        gate = int(self.gate[run])
        found: Any = self.entries[self.entry_start[gate] : self.entry_start[gate + 1]].tolist()
        return list(found)


def _gates(calls: Calls, messages: int) -> tuple[Ints, Ints]:
    """(gate that each event opens, gate that holds it), -1 where none, [E].

    A slot holds its exits until all its members entered, where all leave together; a pair holds its receiver's
    exit until its sender entered.
    """
    together = np.array([any(t in op.lower() for t in TOGETHER) for op in calls.ops] or [False], bool)[calls.op]
    pair = np.array([op == PAIR for op in calls.ops] or [False], bool)[calls.op] & (calls.sequence >= POINT_TO_POINT)
    sizes, expected = calls.sizes[calls.slot], calls.expected()[calls.slot]
    tied = together & (sizes >= np.maximum(expected, 1))
    pair &= (sizes == 2) & (expected == 2)
    lower = np.arange(len(calls)) == calls.first[calls.slot]  # rows of a slot are in order of rank
    sends = lower == (calls.sequence % 2 == 0)
    opens = np.where(tied | (pair & sends), calls.slot, -1)
    held = np.where(tied | (pair & ~sends), calls.slot, -1)
    none, gates = np.full(messages, -1, np.int64), len(calls.first) + np.arange(messages)
    never = np.full(len(calls), -1, np.int64)
    return np.concatenate([opens, never, gates, none]), np.concatenate([never, held, none, gates])
