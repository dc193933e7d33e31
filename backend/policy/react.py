"""``react`` to an incident: decide, and act within the server's ceiling. ``Door`` is how the live runner calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

from lanterne import orders
from lanterne.backend import dispatch
from lanterne.backend.policy.book import Book
from lanterne.backend.policy.decide import Decision, Order, decide
from lanterne.backend.policy.model import Policy, parse, parse_text
from lanterne.backend.policy.outcome import failed_again, stamped, verify
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.records import DecisionRecord, rfc3339
from lanterne.causal.facts import Diagnosis, Facts
from lanterne.clock import Clock
from lanterne.errors import CommandRefused, UsageError
from lanterne.nouns import BreakerState, Incident, IncidentStatus, Remedy, to_json
from lanterne.settings import ServerSettings

Breakers = Callable[[str, int], Sequence[BreakerState]]
"""(job, attempt) -> the breakers of its process groups that moved, as of the last evaluation."""
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


class Door:
    """The policy as the live runner calls it: ``door(incident, facts)`` for each open incident at each turn.

    It verifies what was done in the job, then reacts to the incident; None when nothing changed.
    """

    def __init__(
        self, control: ControlStore, store: Any, settings: ServerSettings, clock: Clock,
        breakers: Breakers = lambda _job, _attempt: (),
    ) -> None:  # fmt: skip
        self.control, self.store, self.settings, self.clock = control, store, settings, clock
        self.breakers = breakers

    def __call__(self, incident: Incident, facts: Facts) -> Incident | None:
        now_ns = self.clock.unix_ns()
        changed = {i.id: i for i in verify(self.control, self.store, facts, now_ns)}
        current = changed.get(incident.id, incident)
        diagnosis = Diagnosis(kind=incident.kind, causes=current.causes)
        decided = react(
            self.control, self.store, facts.job, facts.attempt, current, diagnosis, facts, self.settings, now_ns,
            self.breakers(facts.job, facts.attempt),
        )  # fmt: skip
        return None if decided == incident else decided


# --- react ---------------------------------------------------------------------------------------


def react(
    control: ControlStore, store: Any, job: str, attempt: int, incident: Incident, diagnosis: Diagnosis,
    facts: Facts, settings: ServerSettings, now_ns: int, breakers: Sequence[BreakerState] = (),
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
    if not incident.causes or incident.status in FINAL or _left(control, job, attempt):
        return incident
    book = Book.load(control, job)
    failed_again(control, incident, attempt, book)
    last = control.decisions(incident.id)[-1:]
    if any(entry["incident"] == incident.id for entry in book.open):
        return incident  # it keeps the remedy that was decided
    history = replace(book.history(), breakers=breakers)
    chosen = decide(policies(control), job, attempt, incident, facts, history, settings.policy, now_ns)
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
    return stamped(_with_remedy(incident, chosen), status, decided=decided)


def _left(control: ControlStore, job: str, attempt: int) -> bool:
    """Is there a newer attempt? What is over is not mended."""
    found = control.job(job)
    return found is not None and found.attempt is not None and found.attempt.attempt > attempt


def _again(last: DecisionRecord, chosen: Decision, outcome: str) -> bool:
    """Is there something new to decide?"""
    if last.body.get("signature") != chosen.signature:
        return True
    return last.chose in {"hold", "none"} or (
        last.chose in {"act", "propose"} and outcome in {"undone", "failed", "refused"}
    )


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
    if chosen.chose == "hold" and chosen.why.startswith("breaker") and chosen.why not in says:
        says = f"{says} {chosen.why[0].upper()}{chosen.why[1:]}; left to a person."
    remedy = Remedy(action=first.action, says=says, parameters=dict(first.parameters))
    return replace(incident, causes=(replace(cause, remedy=remedy), *incident.causes[1:]))


def _issue(
    control: ControlStore, job: str, attempt: int, incident: Incident, chosen: Decision, book: Book, now_ns: int
) -> Decision:
    policy = next(p for p in policies(control) if p.name == chosen.policy)
    key = f"{incident.id}/{attempt}/{chosen.signature}/{book.tries.get(chosen.signature, 0)}"
    first, then = _in_turn(chosen.orders)
    made: list[str] = []
    try:
        for place, order in enumerate(first):
            command = dispatch.issue(
                control, job, attempt, order.action, order.parameters, ranks=_ranks(order),
                propose=chosen.chose == "propose", reason=chosen.why, incident=incident.id, policy=chosen.policy,
                author=f"policy:{chosen.policy}", expires_s=policy.expires_s, key=f"{key}/{place}",
            )  # fmt: skip
            made.append(command.id)
    except CommandRefused as error:
        return replace(chosen, chose="hold", why=str(error))
    book.acted(chosen.policy, chosen.signature, now_ns)
    book.outcomes[incident.id] = "open"
    book.open.append(
        {
            "signature": chosen.signature,
            "category": str(incident.causes[0].category),
            "incident": incident.id,
            "job": job,
            "attempt": attempt,
            "policy": chosen.policy,
            "commands": made,
            "then": [{"action": o.action, "parameters": dict(o.parameters), "ranks": _ranks(o)} for o in then],
            "key": key,
            "why": chosen.why,
            "propose": chosen.chose == "propose",
            "expires_s": policy.expires_s,
            "decided_ns": now_ns,
            "before": dict(chosen.before),
            "level": chosen.level,
            "verify": to_json(policy.verify) if policy.verify else None,
            "undo": policy.undo,
        }
    )
    book.save(control)
    return chosen


def _in_turn(found: Sequence[Order]) -> tuple[Sequence[Order], Sequence[Order]]:
    """What is ordered at once, and what follows when that is settled: a restart must not outrun its snapshot."""
    at = next((i for i, order in enumerate(found) if orders.ACTIONS[order.action].where == "launcher"), len(found))
    return found[: at or 1], found[at or 1 :]


def _ranks(order: Order) -> str | list[int]:
    return order.ranks if isinstance(order.ranks, str) else list(order.ranks)
