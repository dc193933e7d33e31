"""Build the Facts of a window of one attempt: align the clocks, match the collectives, pivot the series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lanterne import wire
from lanterne.backend.align import clocks as clock
from lanterne.backend.align import frame as rows
from lanterne.backend.align import matching, series, stream, waits
from lanterne.backend.align.frame import Frame, Log, Store
from lanterne.backend.align.pending import attribute, number, pending_calls
from lanterne.backend.align.stream import Aligned
from lanterne.causal.facts import FactEvent, Facts, IntArray, Place
from lanterne.nouns import MESH_AXES, NO_RANK, NO_STEP, Event, EventName, Identity, Quality

LAST_STEPS = 400
_QUIET = frozenset({EventName.CLOCK_SNAPSHOT, EventName.HEARTBEAT, EventName.CHECKSUM, EventName.COLLECTIVE_PENDING})
EVENTS_MAX = 20_000


def build_facts(
    store: Store, job: str, attempt: int, last_steps: int = LAST_STEPS, *, now_ns: int = 0, ended: bool = False,
    first_step: int | None = None, ranks_expected: int = 0, dropped: int = 0,
) -> Facts:  # fmt: skip
    """Facts of the last ``last_steps`` steps (or of ``first_step`` and later) of a job's attempt in the store.

    ``now_ns`` is the reader's Unix time (0: the latest time seen). ``ended`` says that silence is final.
    Raises :class:`lanterne.errors.StoreUnavailable` when the store cannot answer.
    """
    frame = read_window(store, job, attempt, last_steps, first_step=first_step)
    return assemble(
        frame, now_ns=now_ns, ended=ended, ranks_expected=ranks_expected, dropped=dropped, sources=("live",)
    )[0]


def read_window(
    store: Store, job: str, attempt: int, last_steps: int = LAST_STEPS, *, first_step: int | None = None,
    calls: bool = True,
) -> Frame:  # fmt: skip
    """The rows of the last ``last_steps`` steps of an attempt, or of ``first_step`` and later.

    ``calls`` False leaves out collectives and clock exchanges, for who follows them as they come in.
    """
    last = rows.last_step(store, job, attempt)
    first = max(0, last - last_steps + 1) if first_step is None else first_step
    return rows.read(store, job, attempt, first, max(last, first), calls=calls)


def facts_from_events(
    sources: Iterable[tuple[Identity, Iterable[Event]]], *, ended: bool = True, source: str = "spool"
) -> Facts:
    """Facts of plain events, one (identity, events) pair a rank: the offline way to the same answer."""
    pairs = [(identity, list(events)) for identity, events in sources]
    expected = max((identity.world_size for identity, _ in pairs), default=0)
    facts, _ = assemble(rows.from_events(pairs), ended=ended, ranks_expected=expected, sources=(source,))
    places = {i.rank: Place(host=i.host, device=i.device, mesh=dict(i.mesh)) for i, _ in pairs}
    return replace(facts, places={**facts.places, **places})


def assemble(
    frame: Frame, *, now_ns: int = 0, ended: bool = False, ranks_expected: int = 0, dropped: int = 0,
    sources: Sequence[str] = (), aligned: Aligned | None = None,
) -> tuple[Facts, clock.Clocks]:  # fmt: skip
    """Facts of a frame and the clocks under them. Everything after this is pure: neither store nor files.

    ``aligned``: the calls, from who follows them as they come in; else the frame's own are aligned here.
    """
    if aligned is None:
        found_calls = matching.from_frame(frame, pending_calls(frame.logs))
        seen = _ranks(frame, found_calls)
        aligned = stream.whole(found_calls, clock.snapshots_of(frame), frame.hosts, seen)
    calls, attribution, clocks = aligned.calls, aligned.attribution, aligned.clocks
    ranks = _ranks(frame, calls)
    axes = series.grid(frame, ranks)
    found = series.timings(frame, axes)
    found |= series.metrics(frame, axes)
    for name, values in series.events_as_series(frame, axes).items():
        found[name] = values if name == "gc_ms" or name not in found else np.fmax(found[name], values)
    found |= series.waiting(calls, attribution, axes, found["step_ms"])
    expected = max(ranks_expected, _world_size(frame.logs))
    latest = max(int(axes.end_ns.max(initial=0)), max((log.time_ns for log in frame.logs), default=0))
    facts = Facts(
        job=frame.job,
        attempt=frame.attempt,
        ranks_expected=expected or len(ranks),
        ranks=tuple(ranks),
        steps=axes.steps,
        step_start_ns=_step_starts(axes, clocks),
        series=found,
        places=_places(frame),
        waits=waits.as_facts(calls, attribution),
        collectives=matching.last_calls(calls),
        events=_events(frame, clocks) + _disagreements(calls, attribution),
        groups={g: matching.members_of(g) for g in calls.groups if matching.members_of(g)},
        now_ns=now_ns or latest,
        ended=ended or _all_ended(frame.logs, ranks),
        sources=tuple(sources),
        quality=Quality(
            dropped_events=dropped,
            missing_ranks=tuple(sorted(set(range(expected)) - set(ranks))),
            clock_error_ns=clocks.median_error_ns() if ranks else None,
        ),
    )
    return facts, clocks


def _ranks(frame: Frame, calls: matching.Calls) -> list[int]:
    found = {*np.unique(frame.spans.rank).tolist(), *np.unique(frame.points.rank).tolist()}
    found |= {log.rank for log in frame.logs} | set(np.unique(calls.rank).tolist())
    return sorted(int(r) for r in found if r > NO_RANK)


def _world_size(logs: Sequence[Log]) -> int:
    sizes = [number(attribute(log, "world_size", wire.WORLD_SIZE), 0) for log in logs if log.name == "attached"]
    return max(sizes, default=0)


def _all_ended(logs: Sequence[Log], ranks: Sequence[int]) -> bool:
    over = {log.rank for log in logs if log.name in (EventName.EXITED, EventName.CLOSED)}
    return bool(ranks) and over.issuperset(ranks)


def _places(frame: Frame) -> dict[int, Place]:
    places = {rank: Place(host=host) for rank, host in frame.hosts.items() if rank > NO_RANK}
    for log in frame.logs:
        if log.name == EventName.ATTACHED and log.rank > NO_RANK:
            mesh = {
                axis: number(value, 0)
                for axis in MESH_AXES
                if (value := attribute(log, wire.MESH + axis, f"mesh.{axis}", axis)) is not None
            }
            places[log.rank] = Place(
                host=log.host or frame.hosts.get(log.rank, ""),
                device=str(attribute(log, wire.DEVICE, "device") or ""),
                switch=str(attribute(log, "switch") or ""),
                mesh=mesh,
            )
    return places


def placed(facts: Facts, ranks: Mapping[int, Identity]) -> Facts:
    """Facts with host, device and mesh as the resource of a rank's data says them, where its own events do not."""
    places = dict(facts.places)
    for rank in facts.ranks:
        who, place = ranks.get(rank), places.get(rank, Place())
        if who is not None:
            places[rank] = replace(
                place, host=place.host or who.host, device=place.device or who.device, mesh=place.mesh or dict(who.mesh)
            )
    return replace(facts, places=places)


def _events(frame: Frame, clocks: clock.Clocks) -> list[FactEvent]:
    logs = [log for log in frame.logs if log.name not in _QUIET][-EVENTS_MAX:]
    if not logs:
        return []
    times = clocks.job_ns(np.array([log.rank for log in logs]), np.array([log.time_ns for log in logs]))
    found = [
        FactEvent(
            name=log.name,
            rank=log.rank,
            step=log.step,
            job_ns=int(at),
            host=log.host,
            attributes=log.attributes,
            body=log.body,
            ref=f"logs:{log.rank}/{log.sequence}",
        )
        for log, at in zip(logs, times, strict=True)
    ]
    return sorted(found, key=lambda e: e.job_ns)


def _disagreements(calls: matching.Calls, a: waits.Attribution) -> list[FactEvent]:
    """Slots whose members call different things, as events: the odd rank, or no rank where it is a tie."""
    found = []
    for miss in matching.mismatches(calls):
        row = int(np.flatnonzero((calls.sequence == miss.sequence) & (calls.step == miss.step))[0])
        found.append(
            FactEvent(
                name="collective_mismatch",
                rank=miss.odd[0] if len(miss.odd) == 1 else NO_RANK,
                step=miss.step,
                job_ns=int(a.last_ns[row]),
                attributes={
                    "group": miss.group,
                    "group_sequence": miss.sequence,
                    "what": miss.what,
                    "odd": ",".join(map(str, miss.odd)),
                },
                body=miss.says,
                ref=f"collectives:{miss.group}/{miss.sequence}",
            )
        )
    return found


def _step_starts(axes: series.Grid, clocks: clock.Clocks) -> IntArray:
    """Job time at which the first rank began each step, [T]."""
    ranks = np.broadcast_to(axes.ranks, axes.shape).reshape(-1)
    own = axes.start_ns.reshape(-1)
    known = own > 0
    late = np.iinfo(np.int64).max
    at = np.full(len(own), late, np.int64)
    if known.any():
        at[known] = clocks.job_ns(ranks[known], own[known])
    first = at.reshape(axes.shape).min(axis=1, initial=late)
    return np.where(first < late, first, 0)


def step_of(facts: Facts, rank: int) -> int:
    """Last step that ``rank`` finished; -1 where it finished none."""
    step_ms = facts.get("step_ms")
    if rank not in facts.ranks:
        return NO_STEP
    done = np.flatnonzero(np.isfinite(step_ms[:, facts.ranks.index(rank)]))
    return int(facts.steps[done[-1]]) if len(done) else NO_STEP


def hosts_of(facts: Facts) -> Mapping[int, str]:
    """Rank -> host name."""
    return {rank: place.host for rank, place in facts.places.items()}
