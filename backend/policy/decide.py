"""The decision: pure, from policies, an incident, the facts and what was done before. "Hold" is a decision too.

A decision never raises and never acts. Reasons to hold, in the order in which they are looked at: stop
switch, another remedy still being verified, too little confidence, budget, cool-down, breaker (the same
signature failed, or was tried twice), an open breaker of a process group, blast radius, parameters that cannot be
computed or are out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from lanterne import orders
from lanterne.backend.policy.expression import Expression
from lanterne.backend.policy.model import MODES, RADII, Policy, Step
from lanterne.backend.policy.view import since, view
from lanterne.causal.facts import Facts
from lanterne.errors import CommandRefused, UsageError
from lanterne.nouns import BreakerState, CauseCategory, Incident

C = CauseCategory
TOLD_BY_CALLS = frozenset(
    {
        C.SLOW_COMPUTE, C.THERMAL_THROTTLE, C.HOST_CONTENTION, C.EXCLUSIVE_WORK, C.PARTITION_IMBALANCE,
        C.SEQUENCE_IMBALANCE, C.SLOW_LINK, C.TOPOLOGY_MISMATCH, C.NETWORK_FAILURE,
    }
)  # fmt: skip
"""Causes that are read off who was late in which call: not to be trusted where the calls themselves are slow."""
FAILURES = 3
"""Failures within five minutes that open a breaker (backend/detect/breaker.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ranks: str | tuple[int, ...] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``chose``: act | propose | suggest | observe | hold | none. ``orders`` are what would be, or is, ordered."""

    chose: str
    why: str
    policy: str = ""
    version: int = 0
    mode: str = ""
    signature: str = ""
    orders: Sequence[Order] = ()
    before: Mapping[str, float] = field(default_factory=dict)
    """The verified series at the decision."""
    level: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was done before, in this job. Times in Unix ns."""

    used: Mapping[str, Sequence[int]] = field(default_factory=dict)  # policy -> when it acted
    tries: Mapping[str, int] = field(default_factory=dict)  # signature -> times tried
    failed: Mapping[str, int] = field(default_factory=dict)  # signature -> times undone
    open: Sequence[str] = ()  # signatures not yet verified
    stopped: str = ""  # the stop switch and who pulled it
    breakers: Sequence[BreakerState] = ()  # of the process groups, as of the evaluation that decides


def signature(policy: Policy, incident: Incident) -> str:
    """What counts as "the same again": policy, category and subject."""
    cause = incident.causes[0]
    subject = cause.subject
    where = subject.rank if subject.rank is not None else subject.host or subject.group or "job"
    return f"{policy.name}/{cause.category}/{where}"


def matching(policies: Sequence[Policy], job: str, incident: Incident, seen: Mapping[str, Any]) -> list[Policy]:
    """Enabled policies whose causes, scope and condition fit, best first."""
    if not incident.causes:
        return []
    category = str(incident.causes[0].category)
    fits = [
        p
        for p in policies
        if p.enabled
        and (not p.causes or category in p.causes)
        and fnmatchcase(job, p.jobs)
        and Expression(p.when).true(seen)
    ]
    return sorted(fits, key=lambda p: (-p.priority, -len(p.when), p.name))


def decide(
    policies: Sequence[Policy], job: str, attempt: int, incident: Incident, facts: Facts,
    history: History, ceiling: str, now_ns: int,
) -> Decision:  # fmt: skip
    """Choose for the first cause of ``incident``. ``ceiling`` is the server's highest mode; ``now_ns`` Unix time."""
    seen = view(job, attempt, incident, facts, history.breakers)
    fits = matching(policies, job, incident, seen)
    if not fits:
        return Decision(chose="none", why="no policy speaks about this cause")
    policy = fits[0]
    mode = MODES[min(MODES.index(policy.mode), MODES.index(ceiling))]
    sign = signature(policy, incident)
    base = {"policy": policy.name, "version": policy.version, "mode": mode, "signature": sign}
    if not policy.steps:
        return Decision(chose="none", why=policy.says or "the policy orders nothing", **base)  # type: ignore[arg-type]
    try:
        found = tuple(_order(step, seen, incident) for step in policy.steps)
        level = _level(policy, seen)
    except (UsageError, CommandRefused) as error:
        return Decision(chose="hold", why=str(error), **base)  # type: ignore[arg-type]
    chose = {"observe": "observe", "suggest": "suggest", "approve": "propose", "auto": "act"}[mode]
    why = policy.says or f"policy {policy.name} fits"
    held = _hold(policy, incident, found, history, sign, now_ns) if chose in {"propose", "act"} else ""
    return Decision(
        chose="hold" if held else chose,
        why=held or why,
        orders=found,
        before=_before(policy, facts),
        level=level,
        **base,  # type: ignore[arg-type]
    )


def _order(step: Step, seen: Mapping[str, Any], incident: Incident) -> Order:
    known = orders.ACTIONS[step.action].parameters
    parameters: dict[str, Any] = {}
    for key, value in step.parameters.items():
        if isinstance(value, str) and value.startswith("="):
            value = Expression(value[1:])(seen)
            value = int(value) if known[key].kind is int else value
        parameters[key] = value
    orders.check_parameters(step.action, parameters)
    rank = incident.causes[0].subject.rank
    if step.ranks == "culprit" and rank is None:
        raise CommandRefused(f"{step.action}: the cause names no rank")
    return Order(action=step.action, parameters=parameters, ranks="all" if step.ranks == "all" else (int(rank or 0),))


def _level(policy: Policy, seen: Mapping[str, Any]) -> float | None:
    if policy.verify is None:
        return None
    level = policy.verify.level
    return float(Expression(level.removeprefix("="))(seen)) if isinstance(level, str) else float(level)


def _before(policy: Policy, facts: Facts) -> dict[str, float]:
    """The series that the verification reads, as they are now."""
    rule = policy.verify
    if rule is None:
        return {}
    wanted = dict.fromkeys(rule.no_worse, "median") | {rule.metric: rule.reduce}
    found = {name: since(facts, name, -1, rule.settle, how) for name, how in wanted.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _radius(found: Sequence[Order]) -> str:
    widest = "rank"
    for order in found:
        action = orders.ACTIONS[order.action]
        if order.action == "restart_without_node":
            reach = "host"
        elif action.subset and order.ranks != "all":
            reach = "rank"
        else:
            reach = "job"
        widest = RADII[max(RADII.index(widest), RADII.index(reach))]
    return widest


def _distrusted(category: CauseCategory, found: Sequence[Order], breakers: Sequence[BreakerState]) -> str:
    """Does the open breaker of a group speak against these orders?

    One that opened by failures holds whatever the trainers would have to carry out together; a restart, which builds
    the groups anew, and orders that wait for no step go on. One that opened because calls are slow holds only the
    remedies of causes that are read off calls. A half-open one lets its one trial through.
    """
    known = [orders.ACTIONS[order.action] for order in found]
    together = any(action.where == "trainer" and not action.immediate for action in known)
    for breaker in breakers:
        if breaker.state != "open" or not (together if breaker.failures >= FAILURES else category in TOLD_BY_CALLS):
            continue
        since = "" if breaker.since_step is None else f" since step {breaker.since_step}"
        return f"open breaker: group {breaker.group}{since}: {breaker.why}"
    return ""


def _hold(policy: Policy, incident: Incident, found: Sequence[Order], history: History, sign: str, now_ns: int) -> str:
    """Why not now; empty when nothing speaks against it."""
    cause = incident.causes[0]
    used = sorted(history.used.get(policy.name, ()))
    recent = [at for at in used if now_ns - at < policy.budget_s * 1e9]
    if history.stopped:
        return f"stop switch: {history.stopped}"
    if history.open:
        return f"another remedy is being verified: {history.open[0]}"
    if cause.confidence < policy.confidence:
        return f"confidence {cause.confidence:.2f} is below {policy.confidence:.2f}"
    if history.tries.get(sign, 0) >= policy.tries:
        failed = history.failed.get(sign, 0)
        return f"breaker: {sign} was tried {history.tries[sign]} times, {failed} without success"
    if len(recent) >= policy.budget:
        return f"budget: {len(recent)} of {policy.budget} actions used in {policy.budget_s:g} s"
    if used and now_ns - used[-1] < policy.cool_down_s * 1e9:
        return f"cool-down: {(now_ns - used[-1]) / 1e9:.0f} of {policy.cool_down_s:g} s since the last action"
    if told := _distrusted(cause.category, found, history.breakers):
        return told
    reach = _radius(found)
    if RADII.index(reach) > RADII.index(policy.blast_radius):
        return f"blast radius: it would touch the {reach}, the policy allows {policy.blast_radius}"
    return ""
