"""What the readers fill: one bag of evidence that becomes :class:`lanterne.causal.facts.Facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from lanterne.causal.facts import FactEvent, Facts, FloatArray, IntArray, Place
from lanterne.nouns import NO_RANK, NO_STEP, AttributeValue, Collective, Quality, group_name

CELLS_MAX = 8_000_000
EVENTS_MAX = 500_000
TRACE_CALLS_MAX = 2_000_000
SAMPLES_MAX = 4_000_000


@dataclass
class Gather:
    """Mutable on purpose: every reader adds to it, :meth:`facts` freezes it."""

    job: str = "offline"
    attempt: int = 0
    events: list[FactEvent] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    samples: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    expected: int = 0
    notes: list[str] = field(default_factory=list)
    dropped: int = 0
    used: int = 0  # files that gave at least one fact
    sampled: int = 0
    notes_seen: set[str] = field(default_factory=set)
    traces: list[Any] = field(default_factory=list)  # profiler traces to compare, see lanterne.backend.readers.fusion
    forms: dict[bytes, Any] = field(default_factory=dict)  # of text lines, see lanterne.backend.readers.forms

    def event(
        self,
        name: str,
        *,
        rank: int = NO_RANK,
        step: int = NO_STEP,
        at_ns: int = 0,
        host: str = "",
        body: str = "",
        ref: str = "",
        extra: Mapping[str, AttributeValue] | None = None,
        **attributes: AttributeValue,
    ) -> None:
        """Add one fact; a rank named here counts as seen. ``extra``: attributes whose names are not known here."""
        self.add(
            FactEvent(
                name=name,
                rank=rank,
                step=step,
                job_ns=at_ns,
                host=host,
                attributes={**(extra or {}), **attributes},
                body=body,
                ref=ref,
            )
        )

    def add(self, fact: FactEvent) -> None:
        """Add one fact; past ``EVENTS_MAX`` it is only counted."""
        if len(self.events) >= EVENTS_MAX:
            self.dropped += 1
            return
        if fact.rank != NO_RANK:
            self.ranks.add(fact.rank)
        self.events.append(fact)

    def sample(self, name: str, step: int, rank: int, value: float) -> None:
        """Add one point of a series of the closed vocabulary. ``rank`` -1: a job-wide value."""
        if self.sampled >= SAMPLES_MAX:
            self.dropped += 1
            return
        self.sampled += 1
        if rank != NO_RANK:
            self.ranks.add(rank)
        self.samples.setdefault(name, {})[(step, rank)] = value

    def merge(self, other: Gather) -> None:
        """Take over what another bag holds (of a file that was read apart)."""
        for fact in other.events:
            self.add(fact)
        room = max(0, SAMPLES_MAX - self.sampled)
        for name, points in other.samples.items():
            if len(points) > room:
                self.dropped += len(points) - room
                points = dict(islice(points.items(), room))
            self.samples.setdefault(name, {}).update(points)
            self.sampled += len(points)
            room -= len(points)
        self.job = self.job if other.job == "offline" else other.job
        self.attempt = max(self.attempt, other.attempt)
        self.collectives += other.collectives
        self.groups.update(other.groups)
        for rank, place in other.places.items():
            self.place(rank, host=place.host, device=place.device, mesh=place.mesh)
        self.sources |= other.sources
        self.ranks |= other.ranks
        self.expected = max(self.expected, other.expected)
        self.notes += other.notes
        for trace in other.traces:
            self.trace(trace)
        self.dropped += other.dropped
        self.used += other.used

    def group(self, ranks: tuple[int, ...]) -> str:
        """Register a process group by its rank set and return its name."""
        name = group_name(ranks)
        self.groups[name] = tuple(sorted(set(ranks)))
        self.expected = max(self.expected, max(ranks, default=-1) + 1)
        return name

    def place(self, rank: int, *, host: str = "", device: str = "", mesh: Mapping[str, int] | None = None) -> None:
        """Say where a rank lives; later, emptier words do not erase earlier ones."""
        old = self.places.get(rank, Place())
        self.places[rank] = Place(
            host=host or old.host, device=device or old.device, switch=old.switch, mesh=dict(mesh or old.mesh)
        )

    def gap(self, note: str) -> None:
        """A file or a part of one that could not be used: shown under the verdict."""
        self.notes.append(note)

    def trace(self, trace: Any) -> None:
        """Remember a profiler trace to be compared with the others (:mod:`lanterne.backend.readers.fusion`)."""
        held = sum(len(other.calls) for other in self.traces)
        if trace.rank < 0 or any(other.rank == trace.rank for other in self.traces):
            if trace.calls:
                self.gap(f"rank {trace.rank}: the calls of a trace are not compared: no rank, or a second trace of it")
        elif held + len(trace.calls) > TRACE_CALLS_MAX:
            self.gap(f"rank {trace.rank}: its calls are not compared: more than {TRACE_CALLS_MAX} in all traces")
        else:
            self.traces.append(trace)

    def _series(self, ranks: tuple[int, ...]) -> tuple[IntArray, dict[str, FloatArray]]:
        steps = sorted({step for points in self.samples.values() for step, _ in points})
        if steps and len(steps) * len(ranks) > CELLS_MAX:
            keep = -(-len(steps) * len(ranks) // CELLS_MAX)
            steps = steps[::keep]
            self.gap(f"series thinned to every {keep}th step: more than {CELLS_MAX} cells")
        row = {step: i for i, step in enumerate(steps)}
        column = {rank: i for i, rank in enumerate(ranks)}
        series = {}
        for name, points in self.samples.items():
            table = np.full((len(steps), len(ranks)), np.nan)
            for (step, rank), value in points.items():
                at = row.get(step)
                if at is not None:
                    table[at, column.get(rank, 0)] = value
            series[name] = table
        return np.asarray(steps, np.int64), series

    def facts(self) -> Facts:
        """Freeze: series become ``[steps, ranks]`` arrays; a job-wide value stands in the first column."""
        seen = set(self.ranks) | {c.rank for c in self.collectives}
        ranks = tuple(sorted(seen)) or ((0,) if self.samples else ())
        expected = max(self.expected, len(ranks), max(ranks, default=-1) + 1)
        steps, series = self._series(ranks)
        missing = tuple(r for r in range(expected) if r not in seen) if seen else ()
        last = max((e.job_ns for e in self.events), default=0)
        last = max([last, *(max(c.entered_ns, c.completed_ns) for c in self.collectives)])
        return Facts(
            job=self.job,
            attempt=self.attempt,
            ranks_expected=expected if ranks else 0,
            ranks=ranks,
            steps=steps,
            series=series,
            places=self.places,
            collectives=tuple(self.collectives),
            events=tuple(self.events),
            groups=self.groups,
            now_ns=last,
            ended=True,
            sources=tuple(sorted(self.sources)),
            quality=Quality(dropped_events=self.dropped, missing_ranks=missing[:1024], notes=tuple(self.notes)),
        )
