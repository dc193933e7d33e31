"""What came of a remedy: follow its orders, judge whether they helped, take them back or order what is left.

A trainer's action is judged by a series in the steps after it. A restart is judged by the next attempt: it helped
when every rank of it got past the step at which the trouble began, and it did not when the time for that is over
or the next attempt has the same trouble.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lanterne import orders
from lanterne.backend import dispatch
from lanterne.backend.policy.book import Book
from lanterne.backend.policy.model import Verify
from lanterne.backend.policy.view import since
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.records import BY_HAND, CommandRecord, rfc3339
from lanterne.causal.facts import Facts
from lanterne.errors import CommandRefused
from lanterne.nouns import Incident, IncidentStatus

SETTLED = frozenset({"applied", "refused", "expired", "cancelled", "undone"})
NOT_DONE = frozenset({"refused", "expired", "cancelled"})


def stamped(incident: Incident, status: IncidentStatus | None, **stamps: str) -> Incident:
    """The incident with a status (None: as it is) and more ledger stamps (empty ones are left out).

    One that a person closed in the meantime keeps the status that they gave it.
    """
    ledger = {**incident.ledger, **{k: v for k, v in stamps.items() if v}}
    closed = BY_HAND in incident.ledger
    return replace(incident, ledger=ledger, status=incident.status if status is None or closed else status)


def verify(control: ControlStore, store: Any, facts: Facts, now_ns: int) -> list[Incident]:
    """Follow the orders of this job and judge those that were applied; call it once a turn, before ``react``.

    Reads the ``command`` events in ``facts.events`` and, for a restart, the progress of the next attempt from
    ``store``. Moves command states, stamps ``acted`` (when the first rank or launcher carried it out) and
    ``verified``, sets the status to ``verifying``, ``resolved``, or back to ``diagnosed`` when the action was taken
    back or refused. Returns the incidents that changed, already saved: the runner must go on with these in place of
    its own copies. Raises StoreUnavailable.
    """
    dispatch.track(control, facts.job, facts.ranks_expected or len(facts.ranks), facts.events)
    book = Book.load(control, facts.job)
    if not book.open:
        return []
    control.commands(facts.job, state="pending", limit=1)  # those past their age are expired by being asked for
    changed: dict[str, Incident] = {}
    for entry in list(book.open):
        record = control.incident(entry["incident"])
        if record is None:
            book.close([entry], "refused")
            continue
        incident = _judge(control, store, facts, record.incident, entry, book, now_ns)
        if incident != record.incident:
            control.save_incident(record.job, record.attempt, incident)
            changed[incident.id] = incident
    book.save(control)
    return list(changed.values())


def _judge(
    control: ControlStore, store: Any, facts: Facts, incident: Incident, entry: dict[str, Any], book: Book, now_ns: int
) -> Incident:
    commands = [found for c in entry["commands"] if (found := control.command(c)) is not None]
    states = {c.state for c in commands}
    if entry.get("then") and commands and states <= SETTLED - {"cancelled"}:
        return _go_on(control, incident, entry, now_ns)
    deciding = [c for c in commands if dispatch.of_launcher(c)] or commands
    states = {c.state for c in deciding}
    if states & NOT_DONE or not commands:
        told = "; ".join(f"{c.action} {c.state}: {c.reason}" for c in commands if c.state not in {"applied", "pending"})
        _take_back(control, facts, commands, entry, f"not applied everywhere: {told}")
        return _closed(control, incident, entry, book, "refused", f"not carried out: {told}")
    if states - SETTLED:
        return incident
    if any(dispatch.of_launcher(c) for c in commands):
        return _judge_restart(control, store, incident, entry, deciding[-1], book, now_ns)
    return _judge_steps(control, facts, incident, entry, commands, book, now_ns)


def _go_on(control: ControlStore, incident: Incident, entry: dict[str, Any], now_ns: int) -> Incident:
    """Order what was to follow the first orders, whatever became of them: they prepare, the launcher's mends."""
    rest = entry.pop("then")
    for place, order in enumerate(rest, start=len(entry["commands"])):
        try:
            made = dispatch.issue(
                control, entry["job"], entry["attempt"], order["action"], order["parameters"], ranks=order["ranks"],
                propose=entry["propose"], reason=entry["why"], incident=incident.id, policy=entry["policy"],
                author=f"policy:{entry['policy']}", expires_s=entry["expires_s"], key=f"{entry['key']}/{place}",
            )  # fmt: skip
        except CommandRefused as error:
            control.add_note(incident.id, f"policy:{entry['policy']}", f"{order['action']} refused: {error}"[:2000])
            continue
        entry["commands"].append(made.id)
    entry["decided_ns"] = now_ns
    return incident


def _judge_steps(
    control: ControlStore, facts: Facts, incident: Incident, entry: dict[str, Any], commands: list[CommandRecord],
    book: Book, now_ns: int,
) -> Incident:  # fmt: skip
    """A trainer's action, by the steps after it."""
    step = max((s for c in commands if (s := dispatch.applied_step(c)) is not None), default=None)
    if step is None:
        return incident
    acted = rfc3339(min((at for c in commands if (at := dispatch.told_ns(c, "applied"))), default=now_ns))
    incident = stamped(incident, IncidentStatus.VERIFYING, acted=incident.ledger.get("acted", "") or acted)
    if facts.attempt != entry["attempt"]:
        return _closed(control, incident, entry, book, "refused", "the attempt ended before it could be judged")
    if entry["verify"] is None:
        return _closed(control, incident, entry, book, "done", "carried out; nothing to verify")
    rule = Verify(**entry["verify"])
    met, says = met_by(rule, facts, step, entry["before"], entry["level"])
    if met:
        incident = stamped(incident, None, verified=rfc3339(now_ns))
        return _closed(control, incident, entry, book, "verified", says)
    done = int((facts.steps > step).sum())
    if facts.ended and done < rule.settle:
        return _closed(control, incident, entry, book, "unjudged", f"the run ended {done} steps after the action")
    if done >= rule.within_steps or facts.ended:
        _take_back(control, facts, commands, entry, says)
        return _closed(control, incident, entry, book, "undone", f"did not help in {done} steps: {says}")
    return incident


def _judge_restart(
    control: ControlStore, store: Any, incident: Incident, entry: dict[str, Any], command: CommandRecord, book: Book,
    now_ns: int,
) -> Incident:  # fmt: skip
    """A launcher's action, by the attempt that it started."""
    began = dispatch.told_ns(command, "committed") or dispatch.told_ns(command, "applied") or now_ns
    acted = incident.ledger.get("acted", "") or rfc3339(began)
    incident = stamped(incident, IncidentStatus.VERIFYING, acted=acted)
    if command.action == "give_up" or entry["verify"] is None:
        return _closed(control, incident, entry, book, "done", "carried out; nothing to verify")
    rule, level = Verify(**entry["verify"]), entry["level"] or 0.0
    attempt, step = _progress(control, store, entry["job"])
    if attempt > entry["attempt"] and step > level:
        incident = stamped(incident, None, verified=rfc3339(now_ns))
        says = f"attempt {attempt} is at step {step} on every rank, beyond step {level:g}"
        return _closed(control, incident, entry, book, "verified", says)
    if now_ns - began > rule.within_s * 1e9:
        says = f"did not help: {rule.within_s:g} s later no attempt was beyond step {level:g}"
        return _closed(control, incident, entry, book, "failed", says)
    return incident


def _progress(control: ControlStore, store: Any, job: str) -> tuple[int, int]:
    """The newest attempt and the last step that all its ranks have closed, -1 before the first."""
    found = control.job(job)
    newest = None if found is None else found.attempt
    if newest is None or store is None:
        return -1, -1
    rows = store.rows("SELECT rank, step FROM rank_progress WHERE job = ? AND attempt = ?", [job, newest.attempt])
    steps = [int(r["step"]) for r in rows]
    return newest.attempt, min(steps, default=-1) if len(steps) >= max(newest.world_size, 1) else -1


def failed_again(control: ControlStore, incident: Incident, attempt: int, book: Book) -> None:
    """Close restarts of earlier attempts that are open for the same cause: this attempt has it again."""
    category = str(incident.causes[0].category)
    for entry in list(book.open):
        if entry["attempt"] < attempt and entry.get("category") == category:
            record = control.incident(entry["incident"])
            says = f"did not help: attempt {attempt} has the same trouble"
            if record is not None:
                after = _closed(control, record.incident, entry, book, "failed", says)
                control.save_incident(record.job, record.attempt, after)
            else:
                book.close([entry], "failed")
            book.save(control)


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
    return stamped(incident, status)


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
