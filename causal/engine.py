"""The engine: facts in, a diagnosis out. Pure: no I/O, no clock, no randomness.

prepare one frame -> every stage hands back findings -> effects of other findings become symptoms -> the decay
walk over the explanation graph and the calibration make confidences -> causes are ranked by what stops the job,
then by saving times confidence. Below a lead the engine says what is missing instead of naming somebody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import networkx as nx

from lanterne.causal import (
    compiles,
    contention,
    episode,
    exits,
    field,
    graph,
    liveness,
    memory,
    network,
    numerics,
    replicas,
    sample,
    storage,
    straggler,
)
from lanterne.causal.facts import Diagnosis, Facts
from lanterne.causal.finding import Finding, Link, number
from lanterne.causal.frame import Frame, prepare
from lanterne.causal.nodes import joined
from lanterne.causal.remedies import place, remedy_for
from lanterne.causal.resolve import resolve
from lanterne.causal.scoring import CLAIM, LEAD, calibrated
from lanterne.causal.timing import spread_lead
from lanterne.nouns import Anomaly, Cause, CauseCategory, EventName, Subject, Symptom

CAUSES_MAX = 8
VICTIMS_MAX = 16
STAGES: tuple[Callable[[Frame], list[Finding]], ...] = (
    exits.findings,
    memory.findings,
    numerics.findings,
    replicas.findings,
    storage.findings,
    straggler.findings,
    compiles.findings,
    sample.findings,
    contention.findings,
    network.findings,
)

STOP_EVENTS = frozenset({EventName.STALL, EventName.EXITED, EventName.EXCEPTION})

C = CauseCategory
FAMILY: dict[CauseCategory, str] = {
    **dict.fromkeys((C.RANK_CRASHED, C.EXTERNAL_TERMINATION, C.DEVICE_FAULT), "crash"),
    **dict.fromkeys((C.RANK_HUNG, C.RANK_MISSING, C.COLLECTIVE_MISMATCH, C.COLLECTIVE_DIVERGENCE, C.GIL_HELD), "hang"),
    **dict.fromkeys((C.OUT_OF_MEMORY, C.MEMORY_LEAK, C.FRAGMENTATION, C.SHARED_MEMORY_EXHAUSTED), "memory"),
    **dict.fromkeys((C.CHECKPOINT_STALL, C.CHECKPOINT_CORRUPT, C.CHECKPOINT_INCOMPLETE, C.STORAGE_SLOW), "storage"),
    **dict.fromkeys((C.SLOW_LINK, C.TOPOLOGY_MISMATCH, C.NETWORK_FAILURE), "communication"),
    **dict.fromkeys(
        (
            C.ENV_MISMATCH,
            C.VERSION_MISMATCH,
            C.DEVICE_MISASSIGNED,
            C.PARALLEL_CONFIG_INVALID,
            C.INTERFACE_MISCONFIGURED,
            C.HOST_MISCONFIGURED,
            C.SEED_MISMATCH,
        ),
        "launch",
    ),
    **dict.fromkeys(
        (
            C.DATA_STALL,
            C.UNEVEN_INPUTS,
            C.SLOW_COMPUTE,
            C.THERMAL_THROTTLE,
            C.HOST_CONTENTION,
            C.GC_PAUSE,
            C.RECOMPILE,
            C.SEQUENCE_IMBALANCE,
            C.PARTITION_IMBALANCE,
            C.EXCLUSIVE_WORK,
        ),
        "straggler",
    ),
}
"""Category -> kind of diagnosis; the rest is numerics."""

STOPPING = frozenset(
    {
        C.RANK_CRASHED,
        C.RANK_HUNG,
        C.RANK_MISSING,
        C.COLLECTIVE_MISMATCH,
        C.COLLECTIVE_DIVERGENCE,
        C.EXTERNAL_TERMINATION,
        C.DEVICE_FAULT,
        C.OUT_OF_MEMORY,
        C.FRAGMENTATION,
        C.SHARED_MEMORY_EXHAUSTED,
        C.NETWORK_FAILURE,
        C.PARALLEL_CONFIG_INVALID,
        C.ENV_MISMATCH,
        C.VERSION_MISMATCH,
        C.DEVICE_MISASSIGNED,
        C.INTERFACE_MISCONFIGURED,
        C.HOST_MISCONFIGURED,
        C.GIL_HELD,
    }
)
RUINING = frozenset({C.NONFINITE_VALUES, C.LR_MISCONFIGURED, C.REPLICA_DIVERGENCE, C.FP16_OVERFLOW, C.BAD_BATCH})


def family_of(category: CauseCategory) -> str:
    """Kind of diagnosis that a category belongs to."""
    return FAMILY.get(category, "numerics")


def _outside(facts: Facts, anomalies: Sequence[Anomaly]) -> list[Finding]:
    """Causes that other modules derive from collectives and logs, as findings."""
    dead = facts.ended and not liveness.live(facts)
    found = [_wrap(c, facts, _of_dead_job(c, "hang") if dead else "") for c in liveness.candidates(facts, anomalies)]
    return found + [
        _wrap(c, facts, _of_dead_job(c, "crash") if dead else "") for c in field.candidates(facts, anomalies)
    ]


def _of_dead_job(cause: Cause, family: str) -> str:
    """Family of what the files of a dead job tell: who waits in vain hangs, and what no rule explains has ended."""
    if cause.category is C.UNKNOWN:
        return family if family == "hang" or cause.since_step is None else ""
    return family if family == "hang" and family_of(cause.category) not in {"hang", "crash"} else ""


def _stopped_at(cause: Cause, facts: Facts) -> int | None:
    """Step in which a job stopped: that of the rank's own stall or end, else the first that no rank finished."""
    rank = cause.subject.rank
    steps = [e.step for e in facts.events if e.rank == rank and e.step >= 0 and e.name in STOP_EVENTS]
    if steps:
        return max(steps)
    return int(facts.steps[-1]) + 1 if len(facts.steps) else None


def _wrap(cause: Cause, facts: Facts, family: str = "") -> Finding:
    family = family or family_of(cause.category)
    if cause.since_step is None and cause.category in STOPPING and family in {"hang", "crash"}:
        cause = replace(cause, since_step=_stopped_at(cause, facts))
    if not cause.remedy.says:
        cause = replace(cause, remedy=remedy_for(cause.category, cause.subject))
    says = cause.evidence[0].says if cause.evidence else cause.category.value
    symptom = {
        "hang": "job stands still",
        "crash": "job ended",
        "launch": "job did not start",
        "memory": "failed allocation",
    }
    link = Link(metric=f"{family}_evidence", label=says[:80], weight=0.97, says=says)
    waiting = _waiting(facts, cause.subject.rank) if family == "hang" else ()
    return Finding(
        cause=cause,
        family=family,
        symptom=symptom.get(family, "step time" if family == "straggler" else "loss"),
        path=(link,),
        symptoms=waiting,
        stops=cause.category in STOPPING or family == "hang",
    )


def _waiting(facts: Facts, culprit: int | None) -> tuple[Symptom, ...]:
    """Ranks that stand in a call which they entered and which nobody completed: victims."""
    found: dict[int, Symptom] = {}
    for call in facts.collectives:
        if call.completed_ns <= 0 and call.rank != culprit:
            says = f"rank {call.rank} waits in {call.op} number {call.sequence} of group {call.group.split('#')[0]}"
            found.setdefault(call.rank, Symptom(kind="wait", says=says, subject=Subject(rank=call.rank)))
    return tuple(found[rank] for rank in sorted(found))[:VICTIMS_MAX]


def diagnose(facts: Facts, anomalies: Sequence[Anomaly] = ()) -> Diagnosis:
    """Rank the causes of what is wrong in ``facts``; a healthy window gives none.

    ``anomalies`` (from detectors) are kept as symptoms and decide whether silence is an abstention: with an
    anomaly and no cause at or above a lead (0.3) the only cause is ``unknown`` with what would settle it.
    Raises ValueError when a series does not have the shape ``[steps, ranks]``.
    """
    frame = prepare(facts)
    found = [f for stage in STAGES for f in stage(frame)] + _outside(facts, anomalies)
    found = joined(found, frame)
    if not any(f.cause.confidence >= CLAIM for f in found):
        found += episode.findings(frame, found)
    causes, effects = resolve([f for f in found if f.cause.confidence > 0])
    drawn = graph.build(causes, effects)
    scored = [_score(f, drawn) for f in causes]
    kept = sorted((f for f in scored if f.cause.confidence >= LEAD), key=_order)[:CAUSES_MAX]
    kept = [f for f in kept if f.cause.category is not C.UNKNOWN] or kept  # an abstention yields to a cause
    symptoms = _symptoms(kept, anomalies)
    if not kept:
        return _nothing(frame, anomalies, [f for f in scored if f.cause.confidence > 0], symptoms)
    drawn = graph.build(kept, effects)
    nodes, edges = graph.export(drawn)
    return Diagnosis(
        kind=kept[0].family,
        causes=tuple(f.cause for f in kept),
        symptoms=symptoms,
        nodes=nodes,
        edges=tuple(edges),
        verdict=verdict(kept[0].cause),
        anomalies=tuple(anomalies),
    )


def _score(finding: Finding, drawn: nx.DiGraph) -> Finding:
    """Calibrated confidence; a cause that the walk does not reach with 0.7 stays a lead."""
    reached = graph.walk(drawn, finding.symptom).get(graph.cause_id(finding), 0.0)
    confidence = calibrated(finding.family, finding.cause.confidence)
    if reached < graph.REACHED:
        confidence = min(confidence, CLAIM - 0.01)
    return finding.with_confidence(round(min(confidence, 0.99), 4))


def _order(finding: Finding) -> tuple[bool, float]:
    """Stopping causes first, then by impact x confidence; impact of a straggler is the share of time it costs."""
    cause = finding.cause
    stops = (finding.stops or cause.category in STOPPING) and cause.confidence >= 0.5
    if cause.category in RUINING:
        impact = 1.0
    elif cause.category is C.SEED_MISMATCH:
        impact = 0.0  # it makes runs differ; it slows and stops nothing
    elif cause.cost.slowdown:
        impact = 1 - 1 / cause.cost.slowdown
    else:
        impact = 0.6
    return not stops, -cause.confidence * (0.6 + 0.4 * impact)


def _symptoms(kept: Sequence[Finding], anomalies: Sequence[Anomaly]) -> tuple[Symptom, ...]:
    """Victims of the causes, then what the detectors saw on anybody who is not a cause; each once."""
    out: dict[tuple[str, int | None], Symptom] = {}
    for finding in kept:
        for symptom in finding.symptoms:
            out.setdefault((symptom.kind, symptom.subject.rank), symptom)
    culprits = {f.cause.subject.rank for f in kept}
    for anomaly in anomalies:
        if anomaly.subject.rank is None or anomaly.subject.rank not in culprits:
            out.setdefault(
                (anomaly.kind, anomaly.subject.rank),
                Symptom(kind=anomaly.kind, says=anomaly.says, subject=anomaly.subject),
            )
    return tuple(out.values())


def verdict(cause: Cause) -> str:
    """One sentence: who, what, since when, how sure, what it costs."""
    sure = "" if cause.confidence >= CLAIM else " (a lead, not a claim)"
    since = f" since step {cause.since_step}" if cause.since_step is not None and cause.since_step >= 0 else ""
    what = cause.category.value.replace("_", " ")
    text = f"{place(cause.subject)}: {what}{since}{sure}"
    if cause.evidence:
        text += f": {cause.evidence[0].says}"
    cost = cause.cost
    if cost.slowdown and cost.slowdown > 1.01:
        text += f"; the job is {cost.slowdown:.2f} times slower for it"
        if cost.saving_ms_per_step:
            text += f" ({number(cost.saving_ms_per_step, 'ms')} a step)"
    return text


def _nothing(
    frame: Frame, anomalies: Sequence[Anomaly], weak: Sequence[Finding], symptoms: tuple[Symptom, ...]
) -> Diagnosis:
    if not anomalies:
        return Diagnosis(kind="none", verdict="nothing stands out from its own past and its peers", symptoms=symptoms)
    needs = list(_missing(frame))
    needs += [
        f"{f.cause.category.value} of {place(f.cause.subject)} is too weak to say ({f.cause.confidence:.2f})"
        for f in weak[:3]
    ]
    since = min((a.first_step for a in anomalies if a.first_step >= 0), default=None)
    cause = Cause(
        category=C.UNKNOWN,
        subject=Subject(),
        since_step=since,
        confidence=0.0,
        needs=tuple(needs),
        remedy=remedy_for(C.UNKNOWN, Subject()),
    )
    first = anomalies[0]
    says = f"cannot tell the cause of: {first.says}" + (f"; {needs[0]}" if needs else "")
    return Diagnosis(kind="none", causes=(cause,), symptoms=symptoms, verdict=says, anomalies=tuple(anomalies))


def _missing(frame: Frame) -> list[str]:
    """What would settle it: absent evidence, in words."""
    out = []
    known = frame.facts.series
    if not frame.locator:
        out.append("no lateness, busy time or phases: collectives were not recorded")
    if len(frame.ranks) < 3:
        out.append(f"only {len(frame.ranks)} rank(s) seen: no peers to compare with")
    lead = spread_lead(frame)
    if lead is not None:
        out.append(
            f"a different rank is last each time, by {number(lead.after_ms, 'ms')} since step {frame.step(lead.row)},"
            f" before {number(lead.before_ms, 'ms')}: token counts or garbage collection times would tell why"
        )
    expected = frame.facts.ranks_expected
    if expected and len(frame.ranks) < expected:
        out.append(f"{expected - len(frame.ranks)} of {expected} ranks are silent: the cause may be one of them")
    if int(frame.usable.sum()) < 12:
        out.append(f"only {int(frame.usable.sum())} comparable steps; at least 12 are needed")
    out += [
        f"{what} not recorded"
        for name, what in (
            ("grad_norm_local", "gradient norms before the reduction"),
            ("transfer_ms", "transfer times"),
        )
        if name not in known
    ]
    return out
