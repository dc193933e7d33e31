"""Traces that lie together, with what was recorded of the same calls: lateness and waits on one job clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.backend.align import fuse, matching, series, stream, waits
from lanterne.backend.readers.gather import Gather
from lanterne.causal.facts import Facts


def fused(facts: Facts, gather: Gather) -> Facts:
    """The facts with the traces' calls aligned; unchanged where there is nothing to compare."""
    traces = [trace for trace in gather.traces if trace.calls]
    if not traces:
        return _recorded(facts)
    if len(traces) == 1 and not facts.collectives:
        return facts
    hosts = {rank: place.host for rank, place in facts.places.items() if place.host}
    found = fuse.fuse(traces, facts.collectives, hosts)
    calls, a = found.aligned.calls, found.aligned.attribution
    none = np.zeros((0, 0), np.int64)
    axes = series.Grid(steps=facts.steps, ranks=np.array(facts.ranks, np.int64), start_ns=none, end_ns=none)
    told = {name: v for name, v in series.waiting(calls, a, axes, facts.get("step_ms")).items() if np.isfinite(v).any()}
    notes = [*facts.quality.notes, *found.notes]
    if found.replayed:
        notes.append(f"{found.replayed} calls of the traces are replays of CUDA graphs")
    if found.both:
        notes.append(f"{found.both} calls stand both in a trace and in a record; their times are the trace's")
    error = found.aligned.clocks.median_error_ns() if len(traces) > 1 else facts.quality.clock_error_ns
    return replace(
        facts,
        series={**facts.series, **told},
        waits=waits.as_facts(calls, a),
        collectives=tuple(found.records),
        quality=replace(facts.quality, notes=tuple(notes), clock_error_ns=error),
    )


def _recorded(facts: Facts) -> Facts:
    """Waits of recorded calls alone, of a job whose calls all completed: who entered late. When a call completed is
    discovered by polling, so no transfer is told; a record that was cut off or a standstill is judged elsewhere."""
    calls = facts.collectives
    if not calls or any(c.entered_ns <= 1 or c.completed_ns <= c.entered_ns + 1 for c in calls):
        return facts
    hosts = {rank: place.host for rank, place in facts.places.items() if place.host}
    aligned = stream.whole(matching.from_collectives(calls), (), hosts)
    told = waits.as_facts(aligned.calls, aligned.attribution)
    return replace(facts, waits=replace(told, transfer_ms=np.full(len(told.rank), np.nan)))
