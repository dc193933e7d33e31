"""Hang, crash and silence. A stall is judged where it happens (the shipper knows the phases); here for the whole job.

A rank that waits in a collective is a victim. Phases that may last long (checkpoint, eval, compile) have
their own learned bounds in the shipper; a stall there is a checkpoint's matter, not a hang.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import attribute, events, finding, step_at, step_ms
from lanterne.causal.facts import FactEvent, Facts
from lanterne.nouns import LONG_PHASES, NO_STEP, Anomaly, EventName, Severity

SILENT_FLOOR_S = 10.0
SILENT_FACTOR = 8.0
POLITE_SIGNALS = frozenset({2, 15})
"""SIGINT and SIGTERM come from outside or from the launcher that ends the rest of a broken job."""
MEMORY_WORDS = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "memoryerror",
    "bad_alloc",
    "defaultcpuallocator",
)


def detect(facts: Facts) -> list[Anomaly]:
    return [*hang(facts), *crash(facts), *silent(facts)]


def open_stalls(facts: Facts) -> dict[int, FactEvent]:
    """Rank -> its latest stall that neither ended nor was followed by finished steps."""
    open_: dict[int, FactEvent] = {}
    for event in events(facts, EventName.STALL, EventName.STALL_ENDED):
        if event.name == EventName.STALL:
            open_[event.rank] = event
        else:
            open_.pop(event.rank, None)
    last = int(facts.steps[-1]) if len(facts.steps) else NO_STEP
    return {r: e for r, e in open_.items() if e.step == NO_STEP or e.step >= last - 1}


def hang(facts: Facts) -> list[Anomaly]:
    """Open stalls, and calls that some members entered and others never did."""
    stalls = {
        rank: event
        for rank, event in open_stalls(facts).items()
        if str(event.attributes.get("phase", "")) not in LONG_PHASES
    }
    waiting = {c.rank for c in facts.collectives if c.completed_ns <= 0}
    waiting |= {rank for rank, event in stalls.items() if event.attributes.get("waiting") is True}
    if not stalls:
        return []
    first = min(step_at(facts, e) for e in stalls.values())
    at = min(e.job_ns - int(attribute(e, "stalled_s", default=0.0) * 1e9) for e in stalls.values() if e.job_ns)
    seconds = max(attribute(e, "stalled_s", default=0.0) for e in stalls.values())
    bound = max(attribute(e, "bound_s", default=5.0) for e in stalls.values())
    outside = [r for r in stalls if r not in waiting]
    absent = _absent(facts)
    suspects = sorted(set(outside) & absent) or (sorted(absent) if len(absent) < len(facts.ranks) else [])
    suspects = suspects or (outside if len(outside) < len(stalls) else [])
    rank = suspects[0] if len(suspects) == 1 else None
    phase = str(stalls[rank].attributes.get("phase", "")) if rank in stalls and rank is not None else ""
    victims = sorted(waiting - set(suspects))
    says = f"no progress for {seconds:.1f} s (bound {bound:.1f} s): " + (
        f"rank {rank} is in {phase or 'its own code'} and has not entered the collective"
        f" that ranks {_list(victims)} wait in"
        if rank is not None and victims
        else f"ranks {_list(sorted(stalls))} stand still"
    )
    return [
        finding(
            facts,
            "hang",
            says,
            severity=Severity.P0,
            first=first,
            last=first,
            score=seconds / max(bound, 1e-9),
            rank=rank,
            group=_group(facts, victims),
            at_ns=at,
            value=seconds,
            unit="s",
            baseline=bound,
            fired_by="event",
        )
    ]


def _list(ranks: list[int]) -> str:
    from lanterne.nouns import group_name

    return group_name(ranks) or "none"


def _group(facts: Facts, victims: list[int]) -> str | None:
    for call in facts.collectives:
        if call.completed_ns <= 0 and call.rank in victims:
            return call.group
    return None


def _absent(facts: Facts) -> set[int]:
    """Members of pending calls that have not entered them."""
    absent: set[int] = set()
    pending = {(c.group, c.sequence) for c in facts.collectives if c.completed_ns <= 0}
    for group, sequence in pending:
        there = {c.rank for c in facts.collectives if c.group == group and c.sequence >= sequence}
        absent |= set(facts.groups.get(group, ())) - there
    return absent


def crash(facts: Facts) -> list[Anomaly]:
    """The first rank that went down on its own; those that its launcher ended afterwards follow from it."""
    down: list[FactEvent] = []
    for event in events(facts, EventName.EXITED):
        code, signal = attribute(event, "exit_code", default=0), attribute(event, "signal", default=0)
        if (code != 0 or signal != 0) and int(signal) not in POLITE_SIGNALS and int(code) not in (-2, -15, 130, 143):
            down.append(event)
    raised = [e for e in events(facts, EventName.EXCEPTION) if not e.attributes.get("handled")]
    found = []
    for event in sorted([*down, *raised], key=lambda e: (e.job_ns, e.name == EventName.EXITED))[:8]:
        text = f"{event.attributes.get('type', '')} {event.attributes.get('message', '')} {event.body}".lower()
        kind = "out_of_memory" if any(w in text for w in MEMORY_WORDS) else "crash"
        step = step_at(facts, event)
        found.append(
            finding(
                facts,
                kind,
                _crash_says(event),
                severity=Severity.P0,
                first=step,
                last=step,
                score=1.0,
                rank=event.rank if event.rank >= 0 else None,
                at_ns=event.job_ns,
                fired_by="event",
            )
        )
    return found


def _crash_says(event: FactEvent) -> str:
    if event.name == EventName.EXCEPTION:
        text = str(event.attributes.get("message", "") or event.body).strip().splitlines()
        kind = event.attributes.get("type", "exception")
        return f"rank {event.rank} raised {kind}: {(text[-1] if text else '')[:200]}"
    signal = attribute(event, "signal", default=0)
    if signal:
        return f"rank {event.rank} was killed by signal {int(abs(signal))}"
    return f"rank {event.rank} exited with code {int(attribute(event, 'exit_code', default=0))}"


def _took_part(facts: Facts) -> dict[str, int]:
    """Group -> last step in which a member came out of its call: all members live, only their data are not here."""
    last: dict[str, int] = {}
    for call in facts.collectives:
        if call.completed_ns > 0 and call.step > last.get(call.group, NO_STEP):
            last[call.group] = call.step
    return last


def silent(facts: Facts) -> list[Anomaly]:
    """Ranks that stopped reporting while others went on, and ranks that never reported."""
    found: list[Anomaly] = []
    done = np.isfinite(facts.get("step_ms"))
    if not len(facts.steps) or not done.any():
        return found
    last = np.where(done.any(axis=0), len(facts.steps) - 1 - done[::-1].argmax(axis=0), -1)
    behind = last.max() - last
    usual_s = max(float(np.nanmedian(step_ms(facts))), 1.0) / 1e3
    bound = max(SILENT_FLOOR_S, SILENT_FACTOR * usual_s)
    late = np.flatnonzero(behind * usual_s > bound)
    if not len(late):
        return found
    over = {e.rank for e in events(facts, EventName.EXITED, EventName.CLOSED, EventName.STALL, EventName.EXCEPTION)}
    took_part = _took_part(facts)
    newest = int(facts.steps[last.max()]) - 1
    heard = {rank for group, step in took_part.items() if step >= newest for rank in facts.groups.get(group, ())}
    for r in late:
        rank = facts.ranks[int(r)]
        if rank not in over and rank not in heard:
            step = int(facts.steps[max(int(last[r]), 0)])
            found.append(
                finding(
                    facts,
                    "silent_rank",
                    f"rank {rank} has reported nothing since step {step}; the others went on",
                    severity=Severity.P1,
                    first=step,
                    last=int(facts.steps[-1]),
                    score=float(behind[r]),
                    rank=rank,
                    value=float(behind[r] * usual_s),
                    unit="s",
                    baseline=bound,
                )
            )
    return found
