"""Logical time of all ranks, free of any clock: Lamport stamps and "happened before" by vector clocks.

Each call gives two events, entry and exit. A rank's own events follow its own clock readings; a
synchronising collective puts every entry before every exit; a point-to-point pair or a message (store,
command) puts the sending before the receipt. Collectives with missing members or a root order nothing.
Stamps are one pass over the events in that order, linear in their number. A vector clock keeps, for each
slot, how far each rank had come when it finished: rows are shared by the members, so memory is slots x ranks,
and ``order`` is two look-ups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lanterne.backend.align.exits import TOGETHER
from lanterne.backend.align.frame import Ints
from lanterne.backend.align.matching import Calls

ENTRY, EXIT = 0, 1
Order = Literal["before", "after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Rank ``source`` sent at its own time ``sent_ns`` what ``target`` had at its own ``received_ns`` (Unix ns)."""

    source: int
    sent_ns: int
    target: int
    received_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """Events [E]: entries of the calls' rows [0, N), exits [N, 2 N), then sends and receipts of messages by turns.

    ``stamp`` is the Lamport clock (0 = the event never happened: a pending exit, or part of a contradiction),
    ``place`` the event's number on its rank, ``column`` its rank's column in ``clock`` [E', ranks], and ``row``
    its row there: how many events of each rank lie in its past, itself included.
    """

    rows: int
    ranks: tuple[int, ...]
    stamp: Ints
    place: Ints
    column: Ints
    row: Ints
    clock: Ints

    def event(self, row: int, side: int = ENTRY) -> int:
        """Number of the entry or exit of the calls' row ``row``."""
        return row + side * self.rows

    def order(self, a: int, b: int) -> Order | None:
        """Is event ``a`` ``before`` or ``after`` event ``b``; None = neither, or one of them never happened."""
        if a == b or not (self.stamp[a] and self.stamp[b]):
            return None
        if self._reached(a, b):
            return "before"
        return "after" if self._reached(b, a) else None

    def _reached(self, a: int, b: int) -> bool:
        if self.column[a] == self.column[b]:
            return bool(self.place[a] < self.place[b])
        return bool(self.clock[self.row[b], self.column[a]] > self.place[a])


def logical(calls: Calls, messages: Sequence[Message] = ()) -> Logical:
    """Lamport stamps and vector clocks of all calls and messages. Linear but for the sort by each rank's own time.

    Events in a contradiction (a cycle, which clocks that went back can make) and what follows keep stamp 0.
    """
    graph = _Graph(calls, messages)
    count, width = len(graph.rank), len(graph.ranks)
    stamp, row = np.zeros(count, np.int64), np.zeros(count, np.int64)
    clock: list[Ints] = [np.zeros(width, np.int64)]
    ready = deque(np.flatnonzero((graph.waits == 0) & graph.happened).tolist())
    last_stamp, last_row = np.zeros(width, np.int64), np.zeros(width, np.int64)
    gate_stamp = np.zeros(graph.gates, np.int64)
    gate_clock: dict[int, int] = {}
    while ready:
        event = int(ready.popleft())
        column, gate = int(graph.column[event]), int(graph.after[event])
        came = last_stamp[column]
        if gate >= 0:
            known = gate_clock[gate]
            came = max(came, gate_stamp[gate])
            merged = np.maximum(clock[last_row[column]], clock[known])
            last_row[column] = known if np.array_equal(merged, clock[known]) else _keep(clock, merged)
        stamp[event] = last_stamp[column] = came + 1
        row[event] = last_row[column]
        opened = int(graph.opens[event])
        if opened >= 0:
            mine = clock[last_row[column]]
            seen = gate_clock.get(opened)
            joined = mine.copy() if seen is None else np.maximum(clock[seen], mine)
            joined[column] = max(joined[column], graph.place[event] + 1)
            if seen is None:
                gate_clock[opened] = _keep(clock, joined)
            else:
                clock[seen] = joined
            gate_stamp[opened] = max(gate_stamp[opened], stamp[event])
            graph.missing[opened] -= 1
            if graph.missing[opened] == 0:
                ready.extend(graph.release(opened))
        after = int(graph.following[event])
        if after >= 0:
            graph.waits[after] -= 1
            if graph.waits[after] == 0:
                ready.append(after)
    return Logical(
        rows=len(calls), ranks=graph.ranks, stamp=stamp, place=graph.place, column=graph.column, row=row,
        clock=np.array(clock),
    )  # fmt: skip


def _keep(clock: list[Ints], row: Ints) -> int:
    clock.append(row)
    return len(clock) - 1


class _Graph:
    """Who must come first: each event's successor on its rank, the gate that it opens, the gate that it waits for."""

    def __init__(self, calls: Calls, messages: Sequence[Message]) -> None:
        n, m = len(calls), len(messages)
        sends = np.array([(x.source, x.sent_ns) for x in messages], np.int64).reshape(m, 2)
        gets = np.array([(x.target, x.received_ns) for x in messages], np.int64).reshape(m, 2)
        self.rank = np.concatenate([calls.rank, calls.rank, sends[:, 0], gets[:, 0]])
        when = np.concatenate([calls.entered_ns, calls.completed_ns, sends[:, 1], gets[:, 1]])
        mono = np.concatenate([calls.monotonic_ns, np.where(calls.completed_ns > 0, calls.monotonic_ns, 0)])
        length = np.where(calls.completed_ns > 0, calls.completed_ns - calls.entered_ns, 0)
        if n and np.all(calls.monotonic_ns > 0) and not m:  # a wall clock can go back, this one cannot
            when = mono + np.concatenate([np.zeros(n, np.int64), length])
        self.happened = np.concatenate([np.ones(n, bool), calls.completed_ns > 0, np.ones(2 * m, bool)])
        found, column = np.unique(self.rank, return_inverse=True)
        self.ranks = tuple(int(r) for r in found)
        self.column = column.reshape(-1).astype(np.int64)
        kind = np.repeat([0, 1, 0, 1], [n, n, m, m])
        order = np.lexsort((kind, when, self.column))
        order = order[self.happened[order]]
        same = self.column[order][1:] == self.column[order][:-1]
        self.following = np.full(len(when), -1, np.int64)
        self.following[order[:-1][same]] = order[1:][same]
        start = np.concatenate([[True], ~same]) if len(order) else np.zeros(0, bool)
        at = np.arange(len(order))
        self.place = np.zeros(len(when), np.int64)
        self.place[order] = at - np.maximum.accumulate(np.where(start, at, 0))
        self._gates(calls, n, m)
        self.waits = (self.after >= 0).astype(np.int64)
        self.waits[order[1:][same]] += 1

    def _gates(self, calls: Calls, n: int, m: int) -> None:
        """A slot is a gate that opens when all its members entered; it holds its exits where all leave together."""
        slots = len(calls.first)
        together = np.array([any(t in op.lower() for t in TOGETHER) for op in calls.ops] or [False], bool)[calls.op]
        whole = calls.sizes >= np.maximum(calls.expected(), 1)
        tied = together & whole[calls.slot]
        entry = np.where(tied, calls.slot, -1)
        messages = slots + np.arange(m)
        none = np.full(m, -1, np.int64)
        self.gates = slots + m
        self.opens = np.concatenate([entry, np.full(n, -1, np.int64), messages, none])
        self.after = np.concatenate([np.full(n, -1, np.int64), entry, none, messages])
        self.after[~self.happened] = -1
        self.missing = np.bincount(self.opens[self.opens >= 0], minlength=self.gates)
        held = np.flatnonzero(self.after >= 0)
        self._held = held[np.argsort(self.after[held], kind="stable")]
        self._start = np.searchsorted(self.after[self._held], np.arange(self.gates + 1))

    def release(self, gate: int) -> list[int]:
        """Events that the open gate lets go and that nothing else holds."""
        free = []
        for event in self._held[self._start[gate] : self._start[gate + 1]].tolist():
            self.waits[event] -= 1
            if self.waits[event] == 0:
                free.append(event)
        return free
