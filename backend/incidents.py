"""Anomalies joined in time and subject into incidents with a life; evaluated again and again without duplicates.

Two anomalies belong together when one can follow from the other and they meet in time: within a family
(timing, numerics, ...) windows that touch; across families a consequence that begins while its cause lasts.
A group of anomalies is *the same incident* as an earlier one when they share a family and meet in time.

Life: open -> diagnosed -> (acting -> verifying, by the policy) -> resolved; an incident that later data do
not confirm is dismissed. Nothing here reads a clock: ``now_ns`` is passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from lanterne.backend.store.records import BY_HAND
from lanterne.causal.facts import Diagnosis, Facts
from lanterne.nouns import Anomaly, Incident, IncidentStatus, Severity, Subject

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "liveness": ("collective_mismatch", "hang", "crash", "silent_rank", "liveness", "heartbeat_lost", "version_gap"),
    "memory": ("out_of_memory", "memory_leak"),
    "numerics": (
        "nonfinite", "overflow", "loss_scale_collapse", "lr_drift", "lr_disagree", "grad_explosion", "grad_spike",
        "loss_spike", "grad_norm", "loss_spikeness", "grad_vanishing", "loss_variance", "scaler_misuse",
    ),
    "replicas": ("replica_divergence", "seed_mismatch", "optimizer_mismatch"),
    "storage": ("checkpoint_stall", "checkpoint_corrupt", "checkpoint_incomplete", "storage_slow"),
    "timing": (
        "straggler", "gc_pause", "data_stall", "slow_transfer", "thermal_throttle", "device_error",
        "slow_device", "intermittent_straggler", "step_time", "sync_skew", "sync_delay", "host_contention",
    ),
}  # fmt: skip
"""Kinds by family, the telling ones first: the first one present names the incident."""

FOLLOWS: Mapping[str, frozenset[str]] = {
    "liveness": frozenset({"memory", "numerics", "storage", "timing", "replicas"}),
    "timing": frozenset({"memory", "storage"}),
    "memory": frozenset({"liveness"}),
    "storage": frozenset({"liveness"}),
    "numerics": frozenset({"replicas"}),
}
"""Family -> families that it can be a consequence of."""

_FAMILY_OF = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}
_ORDER = {kind: i for i, kind in enumerate(k for kinds in FAMILIES.values() for k in kinds)}
GAP_STEPS = 10
FOLLOW_STEPS = 3
QUIET_STEPS: Mapping[str, int] = {"timing": 60, "numerics": 200, "memory": 200, "storage": 200, "replicas": 200}
"""Steps without a sign after which an incident counts as over; liveness ends when the job moves on."""
STOPPED = frozenset({"crash", "out_of_memory"})
CONFIRM = 3
"""Evaluations in a row that must miss an incident before it is dismissed as not confirmed."""
LEVELS = frozenset({"sync_delay", "sync_skew", "loss_variance"})
"""P0 by the contract's fixed levels: they make an incident grave, but name it only where nothing tells more."""
RETURNS = frozenset({"heartbeat_lost", "version_gap", "liveness"})
"""Kinds that are true while they last: a rank that speaks again was away, it was no mistake."""
FOLDED = "folded"
"""Ledger stamp of an incident that turned out to be a part of another one."""
CLOSED = frozenset({IncidentStatus.RESOLVED, IncidentStatus.DISMISSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An incident with what lies under it. ``missed`` counts evaluations in a row that did not see it."""

    incident: Incident
    fingerprint: str
    anomalies: tuple[Anomaly, ...] = ()
    diagnosis: Diagnosis | None = None
    first_step: int = 0
    last_step: int = 0
    missed: int = 0
    families: frozenset[str] = field(default_factory=frozenset)

    @property
    def open(self) -> bool:
        return self.incident.status not in CLOSED


def family(kind: str) -> str:
    """Family of an anomaly kind; a kind that is not in the table is its own family."""
    return _FAMILY_OF.get(kind, kind)


def rfc3339(unix_ns: int) -> str:
    """Unix ns as RFC 3339 in UTC, microseconds; empty for 0."""
    if unix_ns <= 0:
        return ""
    stamp = datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S") + f".{unix_ns % 1_000_000_000 // 1000:06d}Z"


def time_of(facts: Facts, step: int) -> int:
    """Job time (Unix ns) at which a step began; the end of the window for later steps; 0 where not known."""
    if not len(facts.step_start_ns):
        return 0
    row = int(np.searchsorted(facts.steps, step))
    if row >= len(facts.steps):
        return facts.now_ns if step > int(facts.steps[-1]) + 1 else _last_end(facts)
    return int(facts.step_start_ns[row])


def _last_end(facts: Facts) -> int:
    length = facts.get("step_ms")[-1]
    longest = float(np.nanmax(length)) if np.isfinite(length).any() else 0.0
    return int(facts.step_start_ns[-1]) + int(longest * 1e6)


def group(anomalies: Sequence[Anomaly]) -> list[list[Anomaly]]:
    """Split anomalies into groups that belong together (transitively)."""
    parent = list(range(len(anomalies)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, a in enumerate(anomalies):
        for j in range(i):
            if _together(a, anomalies[j]):
                parent[root(i)] = root(j)
    groups: dict[int, list[Anomaly]] = {}
    for i, a in enumerate(anomalies):
        groups.setdefault(root(i), []).append(a)
    return list(groups.values())


def _repeats(a: Anomaly, b: Anomaly) -> bool:
    """The same finding about the same subject again, before the incident could have counted as over."""
    quiet = QUIET_STEPS.get(family(a.kind), GAP_STEPS)
    near = a.first_step <= b.last_step + quiet and b.first_step <= a.last_step + quiet
    return a.kind == b.kind and near and _who(a.subject) == _who(b.subject)


def _together(a: Anomaly, b: Anomaly) -> bool:
    if _repeats(a, b):
        return True
    fa, fb = family(a.kind), family(b.kind)
    if fa == fb:
        return a.first_step <= b.last_step + GAP_STEPS and b.first_step <= a.last_step + GAP_STEPS
    return _caused(a, fa, b, fb) or _caused(b, fb, a, fa)


def _caused(effect: Anomaly, of: str, cause: Anomaly, by: str) -> bool:
    if by not in FOLLOWS.get(of, frozenset()):
        return False
    return cause.first_step - FOLLOW_STEPS <= effect.first_step <= cause.last_step + FOLLOW_STEPS


def head(anomalies: Sequence[Anomaly]) -> Anomaly:
    """The anomaly that names the incident: the most severe, then the most telling kind, then the earliest."""
    return min(anomalies, key=lambda a: (_weight(a), _ORDER.get(a.kind, 99), a.first_step))


def _weight(anomaly: Anomaly) -> Severity:
    """Severity as far as the name goes: a fixed level that was crossed tells less than what made it be crossed."""
    return max(anomaly.severity, Severity.P1) if anomaly.kind in LEVELS else anomaly.severity


def worst(anomalies: Sequence[Anomaly]) -> Severity:
    """The highest severity among the signs of an incident."""
    return Severity(min(a.severity for a in anomalies))


def fingerprint(job: str, anomalies: Sequence[Anomaly]) -> str:
    """The same trouble of the same job has the same fingerprint in every attempt (for silencing and grouping)."""
    top = head(anomalies)
    who = _who(top.subject)
    return hashlib.blake2b(f"{job}/{top.kind}/{who}".encode(), digest_size=8).hexdigest()


def _who(subject: Subject) -> str:
    for name in ("rank", "host", "group", "parameter"):
        value = getattr(subject, name)
        if value is not None:
            return f"{name}={value}"
    return "job"


def join(facts: Facts, anomalies: Sequence[Anomaly], known: Sequence[Case] = (), *, now_ns: int = 0) -> list[Case]:
    """All cases after this evaluation: known ones brought up to date, new ones opened, ended ones closed.

    ``now_ns`` (Unix) stamps ``detected`` of new incidents; with 0 (offline) they have no such stamp.
    """
    left = sorted((c for c in known if FOLDED not in c.incident.ledger), key=lambda c: not c.open)
    cases: list[Case] = []
    again: dict[str, list[Anomaly]] = {}
    for members in sorted(group(anomalies), key=lambda g: min(a.first_step for a in g)):
        match = next((c for c in left if _same(c, members)), None)
        later = [] if match is None else _after_end(facts, match, members)
        if match is None or later:
            cases.append(_opened(facts, later or members, now_ns))
        if match is not None:
            again.setdefault(match.incident.id, []).extend(a for a in members if a not in later)
    for case in left:
        seen = again.get(case.incident.id)
        cases.append(_renewed(facts, case, seen, now_ns) if seen else _unseen(facts, case, now_ns))
    return cases


def _ended_step(facts: Facts, case: Case) -> int | None:
    """The step at which a person resolved this case, or a remedy of it was verified; None for any other case."""
    ledger = case.incident.ledger
    ended = ledger.get(BY_HAND) or (ledger.get("acted") and ledger.get("verified"))
    if case.incident.status is not IncidentStatus.RESOLVED or not (ended or ledger.get("acted")):
        return None
    if not len(facts.steps):
        return None
    at = datetime.fromisoformat(ended).timestamp() * 1e9 if ended else facts.now_ns
    return int(facts.steps[max(int(np.searchsorted(facts.step_start_ns, at)) - 1, 0)])


def _after_end(facts: Facts, case: Case, members: Sequence[Anomaly]) -> list[Anomaly]:
    """Signs that began after the case was mended or closed by a person: the trouble is back, another incident."""
    step = _ended_step(facts, case)
    return [] if step is None else [a for a in members if a.first_step > step + GAP_STEPS]


def fold(case: Case, into: Case) -> Case:
    """``into`` with what ``case`` saw: both were signs of one trouble."""
    return replace(
        into,
        anomalies=(*into.anomalies, *(a for a in case.anomalies if a not in into.anomalies)),
        first_step=min(into.first_step, case.first_step),
        last_step=max(into.last_step, case.last_step),
        families=into.families | case.families,
    )


def folded(case: Case, now_ns: int) -> Case:
    """The case closed because it is a part of another one."""
    ledger = {**case.incident.ledger, FOLDED: rfc3339(now_ns)}
    return replace(case, incident=replace(case.incident, status=IncidentStatus.DISMISSED, ledger=ledger))


def _same(case: Case, members: Sequence[Anomaly]) -> bool:
    if case.open and any(_repeats(a, b) for a in members for b in case.anomalies):
        return True
    if not case.families & {family(a.kind) for a in members}:
        return False
    first, last = min(a.first_step for a in members), max(a.last_step for a in members)
    return first <= case.last_step + GAP_STEPS and case.first_step <= last + GAP_STEPS


def _opened(facts: Facts, members: Sequence[Anomaly], now_ns: int) -> Case:
    top = head(members)
    first = min(a.first_step for a in members)
    onset = min((a.at_unix_ns for a in members if a.at_unix_ns > 0), default=0) or time_of(facts, first)
    identity = hashlib.blake2b(
        f"{facts.job}/{facts.attempt}/{family(top.kind)}/{first}".encode(), digest_size=6
    ).hexdigest()
    ledger = {"onset": rfc3339(onset)} | ({"detected": rfc3339(now_ns)} if now_ns else {})
    incident = Incident(
        id=f"inc-{identity}",
        kind=top.kind,
        severity=worst(members),
        status=IncidentStatus.OPEN,
        opened_step=max(first, 0),
        opened_at=rfc3339(onset or now_ns),
        ledger={k: v for k, v in ledger.items() if v},
    )
    return _aged(
        facts,
        Case(
            incident=incident,
            fingerprint=fingerprint(facts.job, members),
            anomalies=tuple(members),
            first_step=first,
            last_step=max(a.last_step for a in members),
            families=frozenset(family(a.kind) for a in members),
        ),
        now_ns,
    )


def from_diagnosis(facts: Facts, diagnosis: Diagnosis) -> Case:
    """A case that rests on a diagnosis alone (files of a dead job that hold no series for the detectors)."""
    cause = diagnosis.causes[0]
    first = max(cause.since_step or 0, 0)
    top = Anomaly(
        kind=diagnosis.kind,
        subject=cause.subject,
        severity=Severity.P0 if diagnosis.kind in ("hang", "crash", "launch") else Severity.P1,
        first_step=first,
        last_step=first,
        score=cause.confidence,
        says=cause.evidence[0].says if cause.evidence else cause.category.value,
        fired_by="event",
    )
    return _opened(facts, [top], 0)


def _renewed(facts: Facts, case: Case, members: Sequence[Anomaly], now_ns: int) -> Case:
    top = head(members)
    was = case.incident
    worse = min(was.severity, worst(members))
    status = was.status
    unconfirmed = status is IncidentStatus.DISMISSED and case.missed >= CONFIRM  # not by a person: seen again after all
    lasting = _ended_step(facts, case) is None and not _over(facts, members)
    if unconfirmed or (status is IncidentStatus.RESOLVED and lasting):
        status = IncidentStatus.DIAGNOSED if was.causes else IncidentStatus.OPEN
    return _aged(
        facts,
        replace(
            case,
            incident=replace(was, kind=top.kind, severity=Severity(worse), status=status),
            anomalies=tuple(members),
            first_step=min(a.first_step for a in members),
            last_step=max(a.last_step for a in members),
            missed=0,
            families=case.families | {family(a.kind) for a in members},
        ),
        now_ns,
    )


def _over(facts: Facts, members: Sequence[Anomaly]) -> bool:
    """Every sign lies far enough back, and nothing of it stops the job."""
    if not len(facts.steps) or any(a.kind in STOPPED for a in members):
        return False
    now = int(facts.steps[-1])
    return all(now - a.last_step >= QUIET_STEPS.get(family(a.kind), GAP_STEPS) for a in members)


def _aged(facts: Facts, case: Case, now_ns: int) -> Case:
    """Resolve a case whose signs are all in the past; a finished job resolves nothing by itself."""
    settled = (IncidentStatus.OPEN, IncidentStatus.DIAGNOSED)
    if case.incident.status in settled and not facts.ended and _over(facts, case.anomalies):
        return replace(case, incident=_with(case.incident, IncidentStatus.RESOLVED, "verified", now_ns))
    return case


def _unseen(facts: Facts, case: Case, now_ns: int) -> Case:
    """A known case that this evaluation does not show."""
    if not case.open or case.incident.status in (IncidentStatus.ACTING, IncidentStatus.VERIFYING):
        return case
    moved = len(facts.steps) > 0 and int(facts.steps[-1]) > case.last_step + 1
    if "liveness" in case.families and case.incident.kind == "hang":
        # The job moves again (or ended well): the stall is over.
        if moved:
            return replace(case, incident=_with(case.incident, IncidentStatus.RESOLVED, "verified", now_ns))
        return case
    if len(facts.steps) and case.first_step < int(facts.steps[0]):
        return replace(case, incident=_with(case.incident, IncidentStatus.RESOLVED, "verified", now_ns))
    missed = case.missed + 1
    if missed < CONFIRM:
        return replace(case, missed=missed)
    if case.incident.kind in RETURNS:
        return replace(case, incident=_with(case.incident, IncidentStatus.RESOLVED, "verified", now_ns))
    return replace(case, missed=missed, incident=replace(case.incident, status=IncidentStatus.DISMISSED))


def _with(incident: Incident, status: IncidentStatus, stamp: str, now_ns: int) -> Incident:
    ledger = dict(incident.ledger)
    if now_ns:
        ledger.setdefault(stamp, rfc3339(now_ns))
    return replace(incident, status=status, ledger=ledger)


def diagnosed(case: Case, diagnosis: Diagnosis, now_ns: int = 0) -> Case:
    """The case with its causes, victims and effects; the stamp ``diagnosed`` is set once, by the first cause."""
    was = case.incident
    ledger = dict(was.ledger)
    if now_ns and diagnosis.causes:
        ledger.setdefault("diagnosed", rfc3339(now_ns))
    status = was.status
    if status is IncidentStatus.OPEN and diagnosis.causes:
        status = IncidentStatus.DIAGNOSED
    incident = replace(
        was, status=status, ledger=ledger, causes=tuple(diagnosis.causes), symptoms=tuple(diagnosis.symptoms)
    )
    return replace(case, incident=incident, diagnosis=diagnosis)
