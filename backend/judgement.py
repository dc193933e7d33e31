"""From facts to a report: detect, join, diagnose, price. Pure: the same for live jobs and for a dead one's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lanterne import causal
from lanterne.backend import detect, incidents
from lanterne.backend.detect import anomaly, safety
from lanterne.backend.detect.base import Levels, step_ms
from lanterne.backend.detect.heartbeat import Beats
from lanterne.backend.detect.safety import Safety
from lanterne.backend.incidents import Case
from lanterne.causal.facts import Diagnosis, Facts, Waits
from lanterne.causal.remedies import remedy_for
from lanterne.causal.scoring import CLAIM
from lanterne.nouns import Anomaly, Cause, CauseCategory, Cost, Evidence, IncidentStatus, Report, to_json

log = logging.getLogger(__name__)

LIVE = frozenset({"live", "simulator", "spool"})
"""Sources whose healthy runs are full of series: there the detectors alone decide whether something is wrong."""

C = CauseCategory
FAMILY_OF_CAUSE: Mapping[CauseCategory, str] = {
    **dict.fromkeys(
        (
            C.RANK_CRASHED, C.RANK_HUNG, C.RANK_MISSING, C.COLLECTIVE_MISMATCH, C.COLLECTIVE_DIVERGENCE,
            C.EXTERNAL_TERMINATION, C.NETWORK_FAILURE, C.GIL_HELD,
        ),
        "liveness",
    ),
    **dict.fromkeys((C.OUT_OF_MEMORY, C.MEMORY_LEAK, C.FRAGMENTATION, C.SHARED_MEMORY_EXHAUSTED), "memory"),
    **dict.fromkeys((C.CHECKPOINT_STALL, C.CHECKPOINT_CORRUPT, C.CHECKPOINT_INCOMPLETE, C.STORAGE_SLOW), "storage"),
    **dict.fromkeys((C.REPLICA_DIVERGENCE, C.SEED_MISMATCH), "replicas"),
    **dict.fromkeys(
        (
            C.DATA_STALL, C.UNEVEN_INPUTS, C.SLOW_COMPUTE, C.THERMAL_THROTTLE, C.HOST_CONTENTION, C.GC_PAUSE,
            C.RECOMPILE, C.SLOW_LINK, C.TOPOLOGY_MISMATCH, C.SEQUENCE_IMBALANCE, C.PARTITION_IMBALANCE,
            C.EXCLUSIVE_WORK, C.DEVICE_FAULT,
        ),
        "timing",
    ),
}  # fmt: skip
"""Cause -> family of the incidents that it explains; the rest is numerics."""
SPOKEN: Mapping[str, CauseCategory] = {
    "scaler_misuse": C.SCALER_MISUSE, "heartbeat_lost": C.RANK_MISSING, "liveness": C.RANK_MISSING,
    "replica_divergence": C.REPLICA_DIVERGENCE, "optimizer_mismatch": C.REPLICA_DIVERGENCE,
    "grad_vanishing": C.GRADIENT_VANISHING,
}  # fmt: skip
"""Findings that are their own cause where the engine has none: a wrong call is one, and so is a rank that is gone."""
SPOKEN_CONFIDENCE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One evaluation: the report, the cases behind it (closed ones included), breakers and service rules."""

    report: Report
    cases: tuple[Case, ...]
    safety: Safety = field(default_factory=Safety)


def evaluate(
    facts: Facts, known: Sequence[Case] = (), *, now_ns: int = 0, levels: Levels | None = None,
    beats: Beats | None = None, before: Safety | None = None,
) -> Judgement:  # fmt: skip
    """Detect, join with what is known, diagnose each incident that is seen now, and write the report.

    ``now_ns`` (Unix) stamps the ledger of a live job; 0 offline. ``beats``: a live job's heartbeats; ``before``: its
    breakers and rules as the evaluation before left them.
    """
    anomalies = detect.run(facts, levels, beats)
    guarded = safety.look(facts, beats, before, levels)
    cases = incidents.join(facts, anomalies, known, now_ns=now_ns)
    seen = [case for case in cases if case.anomalies and not case.missed]
    offline = not LIVE & set(facts.sources)
    if seen or offline:
        diagnosis = _diagnose(facts, anomalies)
        diagnosis = replace(diagnosis, causes=tuple(priced(facts, cause) for cause in diagnosis.causes))
        if not seen and _claims(diagnosis):  # files without series: what happened is in their events alone
            seen = [incidents.from_diagnosis(facts, diagnosis)]
            cases = [*cases, *seen]
        cases = _told(facts, cases, seen, diagnosis, now_ns)
        cases = _folded(cases, {case.incident.id for case in known}, now_ns)
    return Judgement(report=report_of(facts, cases, guarded), cases=tuple(cases), safety=guarded)


def judge(facts: Facts, *, levels: Levels | None = None) -> Report:
    """The report of a window, offline: the one door for readers, simulator and benchmarks."""
    return evaluate(facts, levels=levels).report


def _diagnose(facts: Facts, anomalies: Sequence[Anomaly]) -> Diagnosis:
    """The engine's answer. An error in it must not hide what the detectors saw: the incident then has no cause."""
    try:
        return causal.diagnose(facts, anomalies)
    except Exception:
        log.exception("diagnosis of job %s failed", facts.job)
        return Diagnosis(kind="none", anomalies=tuple(anomalies))


def _claims(diagnosis: Diagnosis) -> bool:
    return bool(diagnosis.causes)


def _told(
    facts: Facts, cases: Sequence[Case], seen: Sequence[Case], diagnosis: Diagnosis, now_ns: int
) -> list[Case]:  # fmt: skip
    """Give each cause to the incident that it fits best; an incident left without one says that it is not known."""
    share: dict[str, list[Cause]] = {case.incident.id: [] for case in seen}
    for cause in diagnosis.causes:
        if cause.category is CauseCategory.UNKNOWN:
            continue
        possible = [case for case in seen if _can_explain(cause, case)]
        if not possible:
            continue
        best = max(possible, key=lambda case: (fit(case, cause), -case.first_step))
        if len(seen) == 1 or fit(best, cause) > 0:
            share[best.incident.id].append(cause)
    told = []
    for case in cases:
        if case.incident.id in share and (share[case.incident.id] or not _known_cause(case)):
            answer = _about(facts, case, share[case.incident.id], diagnosis)
            case = incidents.diagnosed(case, answer, now_ns)
        told.append(case)
    return told


def _can_explain(cause: Cause, case: Case) -> bool:
    """Odd numbers make no step longer: time, memory and storage are not explained by numerics or replicas."""
    odd = FAMILY_OF_CAUSE.get(cause.category, "numerics") in {"numerics", "replicas"}
    return not (odd and case.families <= {"timing", "memory", "storage"})


def _known_cause(case: Case) -> Cause | None:
    """The cause that the incident was given with confidence, now or in an earlier evaluation."""
    causes = case.incident.causes
    sure = causes and causes[0].category is not CauseCategory.UNKNOWN and causes[0].confidence >= CLAIM
    return causes[0] if sure else None


def _about(facts: Facts, case: Case, causes: Sequence[Cause], diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis as far as it is about one incident; of a trouble that is over, as it stood at its end."""
    if not causes and len(facts.steps) and case.last_step + incidents.GAP_STEPS < int(facts.steps[-1]):
        then = _diagnose(until(facts, case.last_step), case.anomalies)
        fitting = tuple(priced(facts, c) for c in then.causes if c.category is not C.UNKNOWN and fit(case, c) >= 4)
        if fitting:
            verdict = then.verdict if fitting[0].category is then.causes[0].category else ""
            return replace(then, causes=fitting, verdict=verdict)
    first = bool(causes) and bool(diagnosis.causes) and causes[0] is diagnosis.causes[0]
    verdict = diagnosis.verdict if first else ""  # the engine's sentence is about its first cause
    if not causes and len(diagnosis.causes) == 1 and incidents.head(case.anomalies).kind not in SPOKEN:
        causes = [c for c in diagnosis.causes if c.category is CauseCategory.UNKNOWN]  # it says what would settle it
    return replace(diagnosis, causes=tuple(causes) or (_unknown(facts, case),), verdict=verdict)


def until(facts: Facts, step: int) -> Facts:
    """The facts up to a step (inclusive), as a reader at that time had them."""
    rows = int(np.searchsorted(facts.steps, step, side="right"))
    keep = facts.waits.step <= step
    columns: dict[str, Any] = {f.name: getattr(facts.waits, f.name) for f in fields(facts.waits)}
    cut: dict[str, Any] = {n: v[keep] if isinstance(v, np.ndarray) and len(v) else v for n, v in columns.items()}
    waits = Waits(**cut)
    return replace(
        facts,
        steps=facts.steps[:rows],
        step_start_ns=facts.step_start_ns[:rows],
        series={name: values[:rows] for name, values in facts.series.items()},
        waits=waits,
        events=[e for e in facts.events if e.step <= step],
        collectives=[c for c in facts.collectives if c.step <= step],
    )


def _folded(cases: Sequence[Case], known: set[str], now_ns: int) -> list[Case]:
    """Fold what has no cause of its own, or a stall that passed, into the incident whose cause explains it."""
    out = list(cases)
    for case in cases:
        owner = next((o for o in out if o.incident.id != case.incident.id and _explains(o, case)), None)
        if owner is None:
            continue
        out[out.index(owner)] = incidents.fold(case, owner)
        at = next(i for i, c in enumerate(out) if c.incident.id == case.incident.id)
        if case.incident.id in known:
            out[at] = incidents.folded(case, now_ns)
        else:
            del out[at]
    return out


def _explains(owner: Case, case: Case) -> bool:
    cause, own = _known_cause(owner), _known_cause(case)
    passed = case.incident.kind == "hang" and case.incident.status is IncidentStatus.RESOLVED
    if cause is None or owner.incident.status is IncidentStatus.DISMISSED or (own is not None and not passed):
        return False
    if case.incident.status in (IncidentStatus.DISMISSED, IncidentStatus.ACTING, IncidentStatus.VERIFYING):
        return False
    gap = incidents.GAP_STEPS
    if case.first_step > owner.last_step + gap or owner.first_step > case.last_step + gap:
        return False
    ranks = {a.subject.rank for a in case.anomalies} | ({own.subject.rank} if own is not None else set())
    ranks -= {None}
    costs_time = FAMILY_OF_CAUSE.get(cause.category, "numerics") in {"timing", "memory", "storage", "liveness"}
    return cause.subject.rank in ranks or (not ranks and costs_time)


def fit(case: Case, cause: Cause) -> int:
    """How well a cause fits an incident: family 4, rank 2, time 1."""
    score = 4 if FAMILY_OF_CAUSE.get(cause.category, "numerics") in case.families else 0
    ranks = {a.subject.rank for a in case.anomalies if a.subject.rank is not None}
    score += 2 if cause.subject.rank is not None and cause.subject.rank in ranks else 0
    since = cause.since_step
    near = since is not None and case.first_step - incidents.GAP_STEPS <= since <= case.last_step + incidents.GAP_STEPS
    return score + (1 if near else 0)


def _unknown(facts: Facts, case: Case) -> Cause:
    """The engine knows no cause: the finding itself where it is one, else what was seen and what else moved."""
    top = incidents.head(case.anomalies)
    spoken = SPOKEN.get(top.kind)
    if spoken is not None:
        return Cause(
            category=spoken, subject=top.subject, since_step=max(top.first_step, 0), confidence=SPOKEN_CONFIDENCE,
            evidence=(Evidence(says=top.says, value=top.value, unit=top.unit, baseline=top.baseline),),
            remedy=remedy_for(spoken, top.subject),
        )  # fmt: skip
    moved = anomaly.candidates(facts, case.first_step, top=3)
    return Cause(
        category=CauseCategory.UNKNOWN,
        subject=top.subject,
        since_step=top.first_step if top.first_step >= 0 else None,
        evidence=(
            Evidence(says=top.says, value=top.value, unit=top.unit, baseline=top.baseline),
            *(Evidence(says=c.says, value=c.after, baseline=c.before, ref=c.series) for c in moved),
        ),
        needs=("evidence that tells the possible causes of this apart",),
    )


def priced(facts: Facts, cause: Cause) -> Cause:
    """Fill in the GPU-hours lost so far where the engine gave a saving per step, or where the job stands still."""
    if cause.cost.gpu_hours is not None:
        return cause
    ranks = max(len(facts.ranks), facts.ranks_expected)
    saving = cause.cost.saving_ms_per_step
    if saving is not None and cause.since_step is not None:
        steps = int((facts.steps >= cause.since_step).sum())
        hours = saving * steps * ranks / 3.6e6
    elif cause.category in (CauseCategory.RANK_HUNG, CauseCategory.RANK_CRASHED, CauseCategory.COLLECTIVE_MISMATCH):
        hours = idle_s(facts) * ranks / 3600
    else:
        return cause
    cost = Cost(
        slowdown=cause.cost.slowdown, gpu_hours=float(f"{hours:.3g}"), saving_ms_per_step=cause.cost.saving_ms_per_step
    )
    return replace(cause, cost=cost)


def idle_s(facts: Facts) -> float:
    """Seconds from the end of the last finished step to the end of the window, or of the last rank that is gone."""
    if not len(facts.steps):
        return 0.0
    end, until_ns = incidents.time_of(facts, int(facts.steps[-1]) + 1), facts.now_ns
    if facts.ended:  # a job that is over holds no devices any more
        until_ns = min(until_ns, max((e.job_ns for e in facts.events if e.job_ns), default=until_ns))
    return max(0.0, (until_ns - end) / 1e9) if end else 0.0


def shown(case: Case) -> bool:
    """Whether a report names the case: everything but what was dismissed."""
    return case.incident.status is not IncidentStatus.DISMISSED


def report_of(facts: Facts, cases: Sequence[Case], guarded: Safety | None = None) -> Report:
    """The report of DESIGN 4. Incidents: the worst first, then the earliest."""
    told = sorted((c for c in cases if shown(c)), key=lambda c: (c.incident.severity, c.first_step))
    return Report(
        job=facts.job,
        healthy=not told,
        verdict=_verdict(facts, told),
        incidents=tuple(c.incident for c in told),
        ranks_seen=len(facts.ranks),
        ranks_expected=facts.ranks_expected,
        quality=facts.quality,
        breakers=guarded.moved if guarded else (),
        rules=guarded.broken if guarded else (),
    )


def _verdict(facts: Facts, told: Sequence[Case]) -> str:
    if told:
        first = told[0]
        says = sentence(first)
        more = len(told) - 1
        return says if not more else f"{says} ({more} more incident{'s' if more > 1 else ''})"
    if not facts.ranks:
        return "Nothing has been reported yet."
    typical = step_ms(facts)
    time = f", {float(np.nanmedian(typical)):.0f} ms a step" if np.isfinite(typical).any() else ""
    return f"Healthy: {len(facts.steps)} steps on {len(facts.ranks)} ranks{time}; nothing stands out."


def sentence(case: Case) -> str:
    """One sentence: the engine's own where its first cause is this incident's, else made of what is known."""
    incident, diagnosis = case.incident, case.diagnosis
    cause = incident.causes[0] if incident.causes else None
    if cause is not None and cause.category is not CauseCategory.UNKNOWN:
        if diagnosis is not None and diagnosis.verdict:
            return diagnosis.verdict
        who = "" if cause.subject.rank is None else f"rank {cause.subject.rank}: "
        since = "" if cause.since_step is None else f" since step {cause.since_step}"
        why = f": {cause.evidence[0].says}" if cause.evidence else ""
        return f"{who}{cause.category.value.replace('_', ' ')}{since}{why}"
    if case.anomalies:
        return f"{incidents.head(case.anomalies).says}; the cause is not known"
    return f"{incident.kind.replace('_', ' ')}; the cause is not known"


def graph_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """The explanation graph as the API answers it (docs/seams.md section 6)."""
    nodes: list[Mapping[str, Any]] = [{"id": name, **attributes} for name, attributes in diagnosis.nodes.items()]
    return {"nodes": nodes, "edges": [to_json(edge) for edge in diagnosis.edges]}
