"""The two hooks of the live runner: ``react`` to an incident, ``verify`` what was done about earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

from lanterne import orders
from lanterne.backend import dispatch
from lanterne.backend.policy.book import Book
from lanterne.backend.policy.decide import Decision, decide
from lanterne.backend.policy.model import Policy, Verify, parse, parse_text
from lanterne.backend.policy.view import since
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.records import CommandRecord, DecisionRecord, rfc3339
from lanterne.causal.facts import Diagnosis, Facts
from lanterne.clock import Clock
from lanterne.errors import CommandRefused, UsageError
from lanterne.nouns import Incident, IncidentStatus, Remedy, to_json
from lanterne.settings import ServerSettings

FINAL = (IncidentStatus.RESOLVED, IncidentStatus.DISMISSED)


@lru_cache(maxsize=1)
def defaults() -> tuple[Policy, ...]:
    """The policies that ship with Lanterne, one or more for every cause category."""
    text = resources.files("lanterne.backend.policy").joinpath("defaults.yaml").read_text(encoding="utf-8")
    return tuple(parse_text(text, "defaults.yaml"))


def policies(control: ControlStore) -> list[Policy]:
    """The policies in force: those of the catalog, then the defaults whose name is not in the catalog.

    A catalog entry that can no longer be read is left out and noted in the audit trail once a version.
    """
    stored = control.policies()
    found: list[Policy] = []
    for record in stored:
        body = dict(record.body) | {"name": record.name, "version": record.version, "enabled": record.enabled}
        try:
            found.append(parse(body))
        except UsageError as error:
            seen = control.policy_state("unreadable", record.name)
            if seen.get("version") != record.version:
                control.save_policy_state("unreadable", record.name, {"version": record.version})
                control.audit("policy", "policy.unreadable", record.name, {"detail": str(error)})
    names = {record.name for record in stored}
    return found + [p for p in defaults() if p.name not in names]


def _stamped(incident: Incident, status: IncidentStatus | None, **stamps: str) -> Incident:
    ledger = {**incident.ledger, **{k: v for k, v in stamps.items() if v}}
    return replace(incident, ledger=ledger, status=status or incident.status)


class Door:
    """The policy as the live runner calls it: ``door(incident, facts)`` for each open incident at each turn.

    It verifies what was done in the job, then reacts to the incident; None when nothing changed.
    """

    def __init__(self, control: ControlStore, store: Any, settings: ServerSettings, clock: Clock) -> None:
        self.control, self.store, self.settings, self.clock = control, store, settings, clock

    def __call__(self, incident: Incident, facts: Facts) -> Incident | None:
        now_ns = self.clock.unix_ns()
        changed = {i.id: i for i in verify(self.control, self.store, facts, now_ns)}
        current = changed.get(incident.id, incident)
        diagnosis = Diagnosis(kind=incident.kind, causes=current.causes)
        decided = react(
            self.control, self.store, facts.job, facts.attempt, current, diagnosis, facts, self.settings, now_ns
        )
        return None if decided == incident else decided


# --- react ---------------------------------------------------------------------------------------


def react(
    control: ControlStore, store: Any, job: str, attempt: int, incident: Incident, diagnosis: Diagnosis,
    facts: Facts, settings: ServerSettings, now_ns: int,
) -> Incident:  # fmt: skip
    """Decide about a diagnosed incident and act within the ceiling of ``settings.policy``.

    Call it for every open incident at every turn of the runner, after ``causal.diagnose`` put the causes into
    ``incident.causes``; it is idempotent: what was decided is decided again only when the first cause changed,
    when the last decision was to hold, or when an action was taken back. Returns the incident with
    ``ledger.decided`` set, the remedy of the first cause filled in from the policy, and status ``acting`` when
    an order was written. The caller saves the incident; decisions, commands and the audit trail are saved here.
    ``store`` is not read. ``now_ns`` is the server's Unix time. Raises StoreUnavailable.
    """
    del store, diagnosis
    if not incident.causes or incident.status in FINAL:
        return incident
    book = Book.load(control, job)
    last = control.decisions(incident.id)[-1:]
    if any(entry["incident"] == incident.id for entry in book.open):
        return incident
    chosen = decide(policies(control), job, attempt, incident, facts, book.history(), settings.policy, now_ns)
    if last and not _again(last[0], chosen, book.outcomes.get(incident.id, "")):
        return _with_remedy(incident, chosen)
    if chosen.chose in {"act", "propose"}:
        chosen = _issue(control, job, attempt, incident, chosen, book, now_ns)
    if not last or _differs(last[0], chosen):
        control.save_decision(
            DecisionRecord(
                incident=incident.id,
                job=job,
                policy=chosen.policy,
                chose=chosen.chose,
                says=chosen.why,
                at_ns=now_ns,
                body=to_json(chosen),
            )
        )
    status = IncidentStatus.ACTING if chosen.chose == "act" else None
    decided = "" if "decided" in incident.ledger else rfc3339(now_ns)
    return _stamped(_with_remedy(incident, chosen), status, decided=decided)


def _again(last: DecisionRecord, chosen: Decision, outcome: str) -> bool:
    """Is there something new to decide?"""
    if last.body.get("signature") != chosen.signature:
        return True
    return last.chose in {"hold", "none"} or (last.chose in {"act", "propose"} and outcome in {"undone", "refused"})


def _differs(last: DecisionRecord, chosen: Decision) -> bool:
    """Numbers that tick in a reason (seconds of a cool-down) do not make a new decision."""
    reason = last.says.split(":")[0] != chosen.why.split(":")[0]
    return last.chose != chosen.chose or reason or last.body.get("signature") != chosen.signature


def _with_remedy(incident: Incident, chosen: Decision) -> Incident:
    if not chosen.orders or not incident.causes:
        return incident
    first = chosen.orders[0]
    cause = incident.causes[0]
    says = cause.remedy.says or chosen.why
    remedy = Remedy(action=first.action, says=says, parameters=dict(first.parameters))
    return replace(incident, causes=(replace(cause, remedy=remedy), *incident.causes[1:]))


def _issue(
    control: ControlStore, job: str, attempt: int, incident: Incident, chosen: Decision, book: Book, now_ns: int
) -> Decision:
    policy = next(p for p in policies(control) if p.name == chosen.policy)
    number = book.tries.get(chosen.signature, 0)
    made: list[CommandRecord] = []
    try:
        for place, order in enumerate(chosen.orders):
            key = f"{incident.id}/{attempt}/{chosen.signature}/{number}/{place}"
            ranks = order.ranks if isinstance(order.ranks, str) else list(order.ranks)
            made.append(
                dispatch.issue(
                    control,
                    job,
                    attempt,
                    order.action,
                    order.parameters,
                    ranks=ranks,
                    propose=chosen.chose == "propose",
                    reason=chosen.why,
                    incident=incident.id,
                    policy=chosen.policy,
                    author=f"policy:{chosen.policy}",
                    expires_s=policy.expires_s,
                    key=key,
                )
            )
    except CommandRefused as error:
        return replace(chosen, chose="hold", why=str(error))
    book.acted(chosen.policy, chosen.signature, now_ns)
    book.outcomes[incident.id] = "open"
    book.open.append(
        {
            "signature": chosen.signature,
            "incident": incident.id,
            "attempt": attempt,
            "policy": chosen.policy,
            "commands": [c.id for c in made],
            "decided_ns": now_ns,
            "before": dict(chosen.before),
            "level": chosen.level,
            "verify": to_json(policy.verify) if policy.verify else None,
            "undo": policy.undo,
        }
    )
    book.save(control)
    return chosen


# --- verify --------------------------------------------------------------------------------------


def verify(control: ControlStore, store: Any, facts: Facts, now_ns: int) -> list[Incident]:
    """Follow the orders of this job and judge those that were applied; call it once a turn, before ``react``.

    Reads the ``command`` events in ``facts.events``. Moves command states, stamps ``acted`` (with the time of
    the first rank's applied event) and ``verified``, sets the status to ``verifying``, ``resolved``, or back to
    ``diagnosed`` when the action was taken back or refused. Returns the incidents that changed, already saved:
    the runner must go on with these in place of its own copies. ``store`` is not read. Raises StoreUnavailable.
    """
    del store
    dispatch.track(control, facts.job, facts.ranks_expected or len(facts.ranks), facts.events)
    book = Book.load(control, facts.job)
    changed: dict[str, Incident] = {}
    for entry in list(book.open):
        record = control.incident(entry["incident"])
        if record is None:
            book.close([entry], "refused")
            continue
        incident = _judge(control, facts, record.incident, entry, book, now_ns)
        if incident != record.incident:
            control.save_incident(record.job, record.attempt, incident)
            changed[incident.id] = incident
    book.save(control)
    return list(changed.values())


def _judge(
    control: ControlStore, facts: Facts, incident: Incident, entry: dict[str, Any], book: Book, now_ns: int
) -> Incident:
    commands = [found for c in entry["commands"] if (found := control.command(c)) is not None]
    states = {c.state for c in commands}
    if states & {"refused", "expired", "cancelled"} or not commands:
        told = "; ".join(f"{c.action} {c.state}: {c.reason}" for c in commands if c.state not in {"applied", "pending"})
        _take_back(control, facts, commands, entry, f"not applied everywhere: {told}")
        return _closed(control, incident, entry, book, "refused", f"not carried out: {told}")
    if states & {"proposed", "pending", "sent", "committed"}:
        return incident
    step = max((s for c in commands if (s := dispatch.applied_step(c)) is not None), default=None)
    if step is None:
        return incident
    acted = _applied_at(facts, entry, now_ns)
    incident = _stamped(incident, IncidentStatus.VERIFYING, acted=incident.ledger.get("acted", "") or acted)
    if facts.attempt != entry["attempt"]:
        return _closed(control, incident, entry, book, "refused", "the attempt ended before it could be judged")
    if entry["verify"] is None:
        return _closed(control, incident, entry, book, "done", "carried out; nothing to verify")
    rule = Verify(**entry["verify"])
    met, says = met_by(rule, facts, step, entry["before"], entry["level"])
    if met:
        incident = _stamped(incident, None, verified=rfc3339(now_ns))
        return _closed(control, incident, entry, book, "verified", says)
    done = int((facts.steps > step).sum())
    if facts.ended and done < rule.settle:
        return _closed(control, incident, entry, book, "unjudged", f"the run ended {done} steps after the action")
    if done >= rule.within_steps or facts.ended:
        _take_back(control, facts, commands, entry, says)
        return _closed(control, incident, entry, book, "undone", f"did not help in {done} steps: {says}")
    return incident


def _applied_at(facts: Facts, entry: Mapping[str, Any], now_ns: int) -> str:
    """When the last of the orders was applied by its first rank, on the job clock."""
    at = [
        e.job_ns
        for e in facts.events
        if e.attributes.get("id") in entry["commands"] and e.attributes.get("phase") == "applied" and e.job_ns
    ]
    return rfc3339(min(at, default=now_ns))


def _take_back(
    control: ControlStore, facts: Facts, commands: list[CommandRecord], entry: Mapping[str, Any], why: str
) -> None:
    """Order the undo of whatever some rank applied, last first."""
    for command in reversed(commands):
        applied = any(r.get("phase") == "applied" for r in command.results)
        if entry["undo"] and applied and orders.ACTIONS[command.action].undoable and facts.attempt == entry["attempt"]:
            dispatch.issue(
                control, facts.job, facts.attempt, "undo", {"of": command.id}, reason=why, incident=entry["incident"],
                policy=entry["policy"], author=f"policy:{entry['policy']}", key=f"undo/{command.id}",
            )  # fmt: skip


def _closed(
    control: ControlStore, incident: Incident, entry: dict[str, Any], book: Book, outcome: str, says: str
) -> Incident:
    book.close([entry], outcome)
    control.add_note(incident.id, f"policy:{entry['policy']}", f"{outcome}: {says}"[:2000])
    control.audit(f"policy:{entry['policy']}", f"remedy.{outcome}", incident.id, {"detail": says})
    status = IncidentStatus.RESOLVED if outcome == "verified" else IncidentStatus.DIAGNOSED
    return _stamped(incident, status)


def met_by(rule: Verify, facts: Facts, step: int, before: Mapping[str, float], level: float | None) -> tuple[bool, str]:
    """Did it help? ``step`` is where the action was applied. Returns the sentence with the numbers."""
    if int((facts.steps > step).sum()) < rule.settle:
        return False, f"fewer than {rule.settle} steps since step {step}"
    now = since(facts, rule.metric, step, rule.settle, rule.reduce, rule.missing)
    then = before.get(rule.metric, math.nan)
    goal = {
        "fall": (now <= rule.by * then, f"at most {rule.by:g} x {then:.4g}"),
        "rise": (now >= rule.by * then, f"at least {rule.by:g} x {then:.4g}"),
        "below": (now <= (level or 0.0), f"at most {level or 0.0:.4g}"),
        "above": (now >= (level or 0.0), f"at least {level or 0.0:.4g}"),
        "near": (abs(now - (level or 0.0)) <= rule.by * abs(level or 0.0), f"{level or 0.0:.4g} within {rule.by:.0%}"),
    }[rule.want]
    says = [f"{rule.metric} is {now:.4g}, wanted {goal[1]}"]
    good = goal[0]
    for name, factor in rule.no_worse.items():
        value, bound = since(facts, name, step, rule.settle), factor * before.get(name, math.nan)
        if not math.isnan(bound) and not value <= bound:
            good = False
            says.append(f"{name} is {value:.4g}, bound {bound:.4g}")
    return good, "; ".join(says)
