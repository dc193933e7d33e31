"""What the host agent found on the job's own hosts: alone a lead or a claim, under a slow rank its explanation.

Events ``host_finding`` carry a category of the closed list, host, source and what it is about, and one sentence with
numbers (docs/agent.md). A finding that ended before the last step is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.finding import Finding, Link, make
from lanterne.causal.frame import Frame
from lanterne.nouns import CauseCategory, EventName, Evidence, Subject

C = CauseCategory
SURE = 0.72
"""The agent measures the host itself; that the job suffers from it is not shown by that."""
EXPLAINING = 0.9
FAMILY = {C.HOST_CONTENTION: "straggler", C.THERMAL_THROTTLE: "straggler", C.STORAGE_SLOW: "storage"}
EXPLAINS = {
    C.HOST_CONTENTION: frozenset({C.SLOW_COMPUTE, C.HOST_CONTENTION}),
    C.THERMAL_THROTTLE: frozenset({C.SLOW_COMPUTE}),
    C.STORAGE_SLOW: frozenset({C.CHECKPOINT_STALL, C.DATA_STALL, C.STORAGE_SLOW}),
}
"""Finding of the agent -> causes that it is the reason of, on a rank of that host."""


def present(facts: Facts) -> list[FactEvent]:
    """The last word on each (host, category, source, what) of the job's hosts, unless it says that it ended."""
    hosts = {p.host for p in facts.places.values() if p.host}
    last: dict[tuple[object, ...], FactEvent] = {}
    for e in facts.events:
        if e.name == EventName.HOST_FINDING and e.attributes.get("host") in hosts:
            key = tuple(e.attributes.get(k) for k in ("host", "category", "source", "what"))
            last[key] = e
    return [e for e in last.values() if e.attributes.get("state") != "ended" and _category(e) is not None]


def _category(event: FactEvent) -> CauseCategory | None:
    name = str(event.attributes.get("category", ""))
    return CauseCategory(name) if name in {c.value for c in FAMILY} else None


def joined(found: Sequence[Finding], frame: Frame) -> list[Finding]:
    """The stages' findings with the agent's: a cause that one of these explains takes its name, the rest follow."""
    out = list(found)
    for event in present(frame.facts):
        category = _category(event)
        assert category is not None
        host = str(event.attributes["host"])
        hit = [i for i, f in enumerate(out) if f.cause.category in EXPLAINS[category] and _on(f, host, frame.facts)]
        for i in hit:
            out[i] = _advised(_explained(out[i], event, category, host), event)
        if not hit:
            out.append(_advised(_alone(event, category, host), event))
    return out


def _on(finding: Finding, host: str, facts: Facts) -> bool:
    subject = finding.cause.subject
    if subject.rank is None:
        return subject.host == host
    place = facts.places.get(subject.rank)
    return place is not None and place.host == host


def _advised(finding: Finding, event: FactEvent) -> Finding:
    """With the agent's own words on what to do there, where it has some: it knows the path, group or process."""
    says = event.attributes.get("remedy")
    if not isinstance(says, str) or not says:
        return finding
    return replace(finding, cause=replace(finding.cause, remedy=replace(finding.cause.remedy, says=says)))


def _evidence(event: FactEvent) -> Evidence:
    value = event.attributes.get("value")
    says, ref = f"host agent on {event.attributes['host']}: {event.body}", f"host_finding {event.attributes['source']}"
    return Evidence(
        says=says, ref=ref,
        value=float(value) if isinstance(value, (int, float)) else None, unit=str(event.attributes.get("unit", "")),
    )  # fmt: skip


def _link(event: FactEvent, category: CauseCategory) -> Link:
    return Link(metric="host_finding", label=category.value.replace("_", " "), weight=0.95, says=event.body)


def _explained(finding: Finding, event: FactEvent, category: CauseCategory, host: str) -> Finding:
    cause = finding.cause
    return make(
        category, finding.family, confidence=max(cause.confidence, EXPLAINING),
        evidence=(_evidence(event), *cause.evidence), subject=replace(cause.subject, host=host),
        since_step=cause.since_step, cost=cause.cost, symptom=finding.symptom,
        path=(*finding.path, _link(event, category)), symptoms=finding.symptoms, refused=finding.refused,
    )  # fmt: skip


def _alone(event: FactEvent, category: CauseCategory, host: str) -> Finding:
    family = FAMILY[category]
    return make(
        category, family, confidence=SURE, evidence=(_evidence(event),), subject=Subject(host=host),
        since_step=event.step if event.step >= 0 else None,
        symptom="checkpoint" if family == "storage" else "step time", path=(_link(event, category),),
    )  # fmt: skip
