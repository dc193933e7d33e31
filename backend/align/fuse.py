"""Three sources, one event set: profiler traces, replays of CUDA graphs in them, and recorded calls of the same ranks.

The Flight Recorder and NCCL's log know a call's place in its group, its shape, where in the code it was made, and
whether it completed, but not when the device ran it; a trace knows that, but neither counts calls from the
start nor names what it replays. Both see the same calls of a rank in the same order. So per rank and group one
shift of the order is sought at which operations and sizes agree; where both carry times, their difference
must be one constant (two clocks), and its spread is the error. A shift that does not explain twice as many calls
as the next one is not guessed: the sources then stay apart, and a note says so.

Fused calls have the record's number and the trace's device times. Device calls without a host side are, where
the trace launches graphs, replays: they are numbered within their step and form a group of their own
(``0-7#graph``); elsewhere they are parts of other calls (``0-7#device``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lanterne.backend.align import matching, stream
from lanterne.backend.align.clock_table import Clocks
from lanterne.backend.align.stream import Aligned
from lanterne.backend.align.traces import PER_STEP, Trace, TraceCall, by_group, family, from_device
from lanterne.nouns import Collective

OVERLAP_MIN = 3
CLOSE_NS = 5_000_000
"""Clocks that read one wall agree to this; of several shifts that fit, the one within it is taken."""
SPREAD_NS = 2_000_000
"""Handing a call over takes the host less than this between the recorder's reading and the profiler's."""
GRAPH, PARTS = "#graph", "#device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """``rank``'s record times are ``offset_ns`` ahead of its trace's clock, give or take ``error_ns``."""

    rank: int
    offset_ns: int
    error_ns: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """``aligned``: all calls that a trace timed, on the job clock. ``records``: what was recorded, times on the job
    clock where ``shifts`` has the rank. ``replayed``: calls from graph replays; ``both``: calls of two sources."""

    aligned: Aligned
    records: Sequence[Collective]
    shifts: Mapping[int, Shift]
    replayed: int
    both: int
    notes: Sequence[str]


def fuse(traces: Sequence[Trace], records: Sequence[Collective], hosts: Mapping[int, str]) -> Fused:
    """One event set of the traces and records of one job. Linear but for the search of each group's shift."""
    recorded: dict[tuple[int, str], list[Collective]] = {}
    for record in records:
        recorded.setdefault((record.rank, record.group), []).append(record)
    rows: list[Collective] = []
    notes: list[str] = []
    found: dict[int, list[Shift]] = {}
    counted: set[tuple[str, int]] = set()  # (group, rank) numbered as recorded
    replayed = both = 0
    for trace in traces:
        for group, (host, device) in by_group(trace).items():
            pairs, alone = _pairs(host, device)
            replayed += len(alone) if trace.graph_launches else 0
            apart = group + (GRAPH if trace.graph_launches else PARTS) if host else group
            known = sorted(recorded.get((trace.rank, group), ()), key=lambda r: r.sequence)
            lag = _lag([h for h, _ in pairs], known, trace.rank) if known and pairs else None
            if known and pairs and lag is None:
                notes.append(
                    f"rank {trace.rank}: recorded calls of {group} fit its trace nowhere, or in several places"
                )
            timed = from_device(trace, group, pairs)
            if lag is not None:
                first, shift = lag
                found.setdefault(trace.rank, []).append(shift)
                counted.add((group, trace.rank))
                at = {i + first: i for i in range(len(pairs)) if 0 <= i + first < len(known)}
                both += len(at)
                for place, i in at.items():
                    timed[i] = _told(timed[i], known[place])
                base = known[0].sequence + first  # calls before and after the records go on counting
                timed = [t if i in at.values() else replace(t, sequence=base + i) for i, t in enumerate(timed)]
            rows += timed
            rows += from_device(trace, apart, [(d, d) for d in alone])
    aligned = stream.whole(matching.from_collectives(_numbered(rows, counted)), (), hosts)
    shifts = {rank: min(of, key=lambda s: s.error_ns) for rank, of in found.items() if of}
    on_job = [_on_job_clock(r, shifts.get(r.rank), aligned.clocks) for r in records]
    return Fused(aligned=aligned, records=on_job, shifts=shifts, replayed=replayed, both=both, notes=notes)


def _pairs(
    host: Sequence[TraceCall], device: Sequence[TraceCall]
) -> tuple[list[tuple[TraceCall, TraceCall]], list[TraceCall]]:
    """Each host call with its kernel (the next one of its kind that starts no earlier), and the kernels left over."""
    waiting: dict[str, list[TraceCall]] = {}
    for call in device:
        waiting.setdefault(family(call.name), []).append(call)
    used: set[int] = set()
    pairs = []
    ahead: dict[str, int] = dict.fromkeys(waiting, 0)
    for call in host:
        kind = family(call.name)
        queue = waiting.get(kind, [])
        at = ahead.get(kind, 0)
        while at < len(queue) and not _fits(call, queue[at]):
            at += 1
        if at < len(queue):
            pairs.append((call, queue[at]))
            used.add(id(queue[at]))
            ahead[kind] = at + 1
    return pairs, [c for c in device if id(c) not in used]


def _fits(host: TraceCall, device: TraceCall) -> bool:
    sizes = host.elements, device.elements
    return device.ts_us >= host.ts_us and (not all(sizes) or sizes[0] == sizes[1])


def _lag(host: Sequence[TraceCall], known: Sequence[Collective], rank: int) -> tuple[int, Shift] | None:
    """(index in ``known`` of the first host call, the clocks' shift); None where none fits, or more than one does."""
    ops = np.array([family(c.name) for c in host]), np.array([family(r.op) for r in known])
    when = np.array([round(c.ts_us * 1e3) for c in host]), np.array([r.entered_ns for r in known])
    timed = bool(np.all(when[1] > 1))
    least = min(OVERLAP_MIN, len(host), len(known))
    fits: list[tuple[int, Shift]] = []
    for first in range(least - len(host), len(known) - least + 1):
        mine = slice(max(0, -first), min(len(host), len(known) - first))
        theirs = slice(mine.start + first, mine.stop + first)
        if not np.array_equal(ops[0][mine], ops[1][theirs]):
            continue
        apart = when[1][theirs] - when[0][mine]
        middle = int(np.median(apart)) if timed else 0
        error = int(np.abs(apart - middle).max()) if timed else 0
        if error <= SPREAD_NS:
            fits.append((first, Shift(rank=rank, offset_ns=middle, error_ns=error, calls=mine.stop - mine.start)))
    close = [f for f in fits if abs(f[1].offset_ns) <= CLOSE_NS] if timed else []
    best = sorted(close or fits, key=lambda f: -f[1].calls)
    # A few calls at an edge agree by chance; what explains twice as many is no chance.
    clear = bool(best) and (len(best) == 1 or best[0][1].calls >= 2 * best[1][1].calls)
    return best[0] if clear else None


def _told(timed: Collective, record: Collective) -> Collective:
    """The trace's times with what the record knows."""
    return replace(
        record, step=timed.step, bytes=record.bytes or timed.bytes,
        entered_ns=timed.entered_ns, completed_ns=timed.completed_ns,
    )  # fmt: skip


def _numbered(rows: Sequence[Collective], counted: set[tuple[str, int]]) -> list[Collective]:
    """A group in which only some ranks are numbered as recorded goes by steps on all: numbers must mean one thing."""
    groups = {group for group, _ in counted}
    mixed = {row.group for row in rows if row.group in groups and (row.group, row.rank) not in counted}
    count: dict[tuple[str, int, int], int] = {}
    out = []
    for row in sorted(rows, key=lambda r: r.entered_ns):
        number = row.sequence
        if row.group in mixed:
            key = (row.group, row.rank, row.step)
            count[key] = count.get(key, -1) + 1
            number = (row.step + 1) * PER_STEP + count[key]
        out.append(replace(row, sequence=number))
    return out


def _on_job_clock(record: Collective, shift: Shift | None, clocks: Clocks) -> Collective:
    if shift is None:
        return record

    def moved(at_ns: int) -> int:
        own = at_ns - shift.offset_ns
        return int(clocks.job_ns(np.array([record.rank]), np.array([own]))[0]) if at_ns > 0 else at_ns

    return replace(record, entered_ns=moved(record.entered_ns), completed_ns=moved(record.completed_ns))
