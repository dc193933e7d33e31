"""From facts to a report: detect, join, diagnose, price. Pure: the same for live jobs and for a dead one's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lanterne import causal
from lanterne.backend import detect, incidents
from lanterne.backend.detect.base import Levels, step_ms
from lanterne.backend.incidents import Case
from lanterne.causal.facts import Diagnosis, Facts
from lanterne.nouns import Cause, CauseCategory, Cost, Incident, IncidentStatus, Report, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One evaluation: the report, and the cases behind it (closed ones included)."""

    report: Report
    cases: tuple[Case, ...]


def evaluate(facts: Facts, known: Sequence[Case] = (), *, now_ns: int = 0, levels: Levels | None = None) -> Judgement:
    """Detect, join with what is known, diagnose each incident that is seen now, and write the report.

    ``now_ns`` (Unix) stamps the ledger of a live job; 0 offline.
    """
    anomalies = detect.run(facts, levels)
    cases = [_diagnosed(facts, case, now_ns) for case in incidents.join(facts, anomalies, known, now_ns=now_ns)]
    return Judgement(report=report_of(facts, cases), cases=tuple(cases))


def judge(facts: Facts, *, levels: Levels | None = None) -> Report:
    """The report of a window, offline: the one door for readers, simulator and benchmarks."""
    return evaluate(facts, levels=levels).report


def _diagnosed(facts: Facts, case: Case, now_ns: int) -> Case:
    if not case.anomalies or case.missed or not case.open:
        return case
    diagnosis = causal.diagnose(facts, case.anomalies)
    causes = tuple(priced(facts, cause) for cause in diagnosis.causes)
    return incidents.diagnosed(case, replace(diagnosis, causes=causes), now_ns)


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
    """Seconds from the end of the last finished step to the end of the window."""
    if not len(facts.steps):
        return 0.0
    end = incidents.time_of(facts, int(facts.steps[-1]) + 1)
    return max(0.0, (facts.now_ns - end) / 1e9) if end else 0.0


def shown(case: Case) -> bool:
    """Whether a report names the case: everything but what was dismissed."""
    return case.incident.status is not IncidentStatus.DISMISSED


def report_of(facts: Facts, cases: Sequence[Case]) -> Report:
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
    )


def _verdict(facts: Facts, told: Sequence[Case]) -> str:
    if told:
        first = told[0]
        says = first.diagnosis.verdict if first.diagnosis is not None and first.diagnosis.verdict else sentence(first)
        more = len(told) - 1
        return says if not more else f"{says} ({more} more incident{'s' if more > 1 else ''})"
    if not facts.ranks:
        return "Nothing has been reported yet."
    typical = step_ms(facts)
    time = f", {float(np.nanmedian(typical)):.0f} ms a step" if np.isfinite(typical).any() else ""
    return f"Healthy: {len(facts.steps)} steps on {len(facts.ranks)} ranks{time}; nothing stands out."


def sentence(case: Case) -> str:
    """One sentence for a case that has no worded diagnosis."""
    incident = case.incident
    if case.anomalies:
        top = incidents.head(case.anomalies)
        return f"{top.says[:1].upper()}{top.says[1:]}; the cause is not known."
    cause = incident.causes[0] if incident.causes else None
    return f"{incident.kind.replace('_', ' ')}: {cause.category.value if cause else 'cause not known'}"


def graph_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """The explanation graph as the API answers it (docs/seams.md section 6)."""
    nodes: list[Mapping[str, Any]] = [{"id": name, **attributes} for name, attributes in diagnosis.nodes.items()]
    return {"nodes": nodes, "edges": [to_json(edge) for edge in diagnosis.edges]}


def categories(incident: Incident) -> list[str]:
    """Categories of an incident's causes, best first."""
    return [str(cause.category) for cause in incident.causes]
