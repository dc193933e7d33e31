"""Orders on their way: written signed into the control store, followed by the ``command`` events of the ranks.

A command is ``applied`` when every rank that it concerns said so; one rank that failed makes it ``refused``
(and the policy has it taken back on the others). A launcher's command is applied when one launcher said so; its
events carry rank -1. States move only forward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lanterne import orders
from lanterne.backend.store.batch import Batch
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import CommandRecord
from lanterne.causal.facts import FactEvent
from lanterne.errors import LanterneError
from lanterne.nouns import NO_RANK, EventName

log = logging.getLogger(__name__)
TAKEN_UP = ("pending", "sent", "committed", "applied")
"""States in which a launcher's command still concerns the launchers of other nodes."""
MOVING = ("proposed", "pending", "sent", "committed")
_TOLD = ("received", "prepared", "voted", "committed", "aborted", "applied", "failed", "refused", "undone")


def issue(
    control: ControlStore, job: str, attempt: int, action: str, parameters: Mapping[str, Any], *,
    ranks: str | Sequence[int] = "all", propose: bool = False, reason: str = "", incident: str = "",
    policy: str = "", author: str = "policy", expires_s: float = 60.0, key: str | None = None,
) -> CommandRecord:  # fmt: skip
    """Write one signed command and its line of the audit trail; ``propose`` leaves it to a person to approve.

    Raises CommandRefused when the action is not in the list or out of bounds.
    """
    orders.check_parameters(action, parameters)
    made = control.create_command(
        job, attempt, action, parameters, ranks=ranks, state="proposed" if propose else "pending", reason=reason,
        incident=incident, policy=policy, author=author, expires_s=expires_s, idempotency_key=key,
    )  # fmt: skip
    detail = {"action": action, "parameters": dict(parameters), "incident": incident, "policy": policy}
    control.audit(author or "policy", "command.proposed" if propose else "command.issued", made.id, detail)
    return made


def _by_command(events: Iterable[FactEvent]) -> dict[str, list[FactEvent]]:
    found: dict[str, list[FactEvent]] = {}
    for event in events:
        if event.name == EventName.COMMAND and event.attributes.get("id"):
            found.setdefault(str(event.attributes["id"]), []).append(event)
    return found


def _result(event: FactEvent) -> dict[str, Any]:
    keep = ("phase", "before", "after", "detail")
    plain = {k: event.attributes[k] for k in keep if k in event.attributes}
    at = {"at_ns": event.job_ns} if event.job_ns else {}
    return {"rank": event.rank, "step": event.attributes.get("step", event.step), **at, **plain}


def concerned(command: CommandRecord, world: int) -> set[int]:
    """The ranks that must say that they applied it."""
    return set(range(max(world, 1))) if command.ranks == "all" else set(command.ranks)


def of_launcher(command: CommandRecord) -> bool:
    """Is it carried out by ``lanterne run`` around the trainer?"""
    return orders.ACTIONS[command.action].where == "launcher"


def told_ns(command: CommandRecord, phase: str) -> int:
    """When a phase of the command was first said, on the sender's clock (Unix ns); 0 before."""
    return min((int(r["at_ns"]) for r in command.results if r.get("phase") == phase and r.get("at_ns")), default=0)


def ended_ns(control: ControlStore, job: str, attempt: int) -> int:
    """When a launcher began to end this attempt by order (Unix ns); 0 when none did.

    What its ranks did afterwards is the order's doing and says nothing about the trouble.
    """
    found = [told_ns(c, "committed") for c in control.commands(job, attempt=attempt) if of_launcher(c)]
    return min((at for at in found if at), default=0)


def applied_step(command: CommandRecord) -> int | None:
    """The step at which the ranks applied it; None before they did."""
    steps = [int(r["step"]) for r in command.results if r.get("phase") == "applied" and r.get("step") is not None]
    return max(steps, default=None)


def track(control: ControlStore, job: str, world: int, events: Iterable[FactEvent]) -> list[str]:
    """Move the states of the commands of ``job`` by what its ``world`` ranks said; returns the ids that changed.

    ``events`` may hold anything; ``command`` events are picked out. Telling it the same again changes nothing.
    Refusals of orders that this store never wrote (forged ones) go into the audit trail.
    """
    changed = []
    for command_id, said in _by_command(events).items():
        command = control.command(command_id)
        if command is None or command.job != job:
            _audit_foreign(control, job, command_id, said)
            continue
        if command.state not in (*MOVING, "applied") and not any(e.attributes.get("phase") == "undone" for e in said):
            continue
        known = {(r.get("rank"), r.get("phase")) for r in command.results}
        fresh = [r for e in said if (r := _result(e)).get("phase") in _TOLD and (r["rank"], r["phase"]) not in known]
        if fresh:
            control.add_command_results(command_id, fresh)
        if fresh and _move(control, command, world, said):
            changed.append(command_id)
    return changed


def _ranks_that(said: Iterable[FactEvent], phase: str) -> set[int]:
    return {e.rank for e in said if e.attributes.get("phase") == phase}


def _move(control: ControlStore, command: CommandRecord, world: int, said: Sequence[FactEvent]) -> bool:
    everybody = {NO_RANK} if of_launcher(command) else concerned(command, world)
    speaker = NO_RANK if of_launcher(command) else 0
    final = [e for e in said if e.rank == speaker and e.attributes.get("phase") == "refused"]
    if everybody <= _ranks_that(said, "undone"):
        return _set(control, command, "undone", ("applied", "refused"), "")
    if failed := _ranks_that(said, "failed"):
        why = next(str(e.attributes.get("detail", "")) for e in said if e.attributes.get("phase") == "failed")
        return _set(control, command, "refused", MOVING, f"failed on rank {', '.join(map(str, sorted(failed)))}: {why}")
    if everybody <= _ranks_that(said, "applied"):
        return _set(control, command, "applied", MOVING, "")
    if final:
        return _set(control, command, "refused", MOVING, str(final[-1].attributes.get("detail", "")))
    if _ranks_that(said, "committed"):
        return _set(control, command, "committed", ("pending", "sent"), "")
    return _set(control, command, "sent", ("pending",), "")


def _set(control: ControlStore, command: CommandRecord, state: str, expected: Sequence[str], why: str) -> bool:
    if not control.set_command_state(command.id, state, expected=expected, reason=why or None):
        return False
    control.audit("trainer", f"command.{state}", command.id, {"action": command.action, "detail": why})
    return True


def _audit_foreign(control: ControlStore, job: str, command_id: str, said: Sequence[FactEvent]) -> None:
    refusals = [e for e in said if e.attributes.get("phase") == "refused"]
    if not refusals:
        return
    mark = control.policy_state("audit-foreign", job)
    if command_id in mark.get("ids", []):
        return
    control.save_policy_state("audit-foreign", job, {"ids": [*mark.get("ids", []), command_id][-1000:]})
    detail = {"job": job, "detail": str(refusals[0].attributes.get("detail", ""))}
    control.audit("trainer", "command.refused", command_id, detail)


class Tracker:
    """Follows the orders of all jobs on a thread of its own, woken by commits that hold ``command`` events."""

    def __init__(self, store: EventStore, control: ControlStore) -> None:
        self.store, self.control = store, control
        self._dirty: set[tuple[str, int]] = set()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._unsubscribe = self.store.subscribe(self._committed)
        self._thread = threading.Thread(target=self._run, name="lanterne-dispatch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._stop.set()
        self._wake.set()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def _committed(self, batches: Sequence[Batch]) -> None:
        spoke = [b for b in batches if b.signal == "logs" and EventName.COMMAND in b.table.column("name").to_pylist()]
        if spoke:
            with self._lock:
                self._dirty |= {(run.job, run.attempt) for batch in spoke for run in batch.runs}
            self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                keys, self._dirty = self._dirty, set()
            for job, attempt in sorted(keys):
                try:
                    self.follow(job, attempt)
                except LanterneError as error:
                    log.warning("dispatch: job %s attempt %d: %s", job, attempt, error)

    def follow(self, job: str, attempt: int) -> None:
        """Move the states of an attempt's commands by all that was said about them so far."""
        track(self.control, job, self._world(job, attempt), self.events(job, attempt))

    def _world(self, job: str, attempt: int) -> int:
        found = self.control.job(job)
        sizes = [a.world_size for a in found.attempts if a.attempt == attempt] if found is not None else []
        return max(sizes, default=1)

    def events(self, job: str, attempt: int) -> list[FactEvent]:
        """The ``command`` events of an attempt, in the order of arrival."""
        rows = self.store.rows(
            "SELECT rank, step, time_ns, attributes FROM logs"
            " WHERE job = ? AND attempt = ? AND name = ? ORDER BY time_ns",
            [job, attempt, str(EventName.COMMAND)],
        )
        return [
            FactEvent(
                name=EventName.COMMAND,
                rank=r["rank"],
                step=r["step"],
                job_ns=r["time_ns"],
                attributes=dict(r["attributes"] or ()),
            )
            for r in rows
        ]
