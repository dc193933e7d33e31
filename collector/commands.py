"""The command thread of a rank: from the inbox to one agreed step boundary on all ranks.

The shipper of rank 0's node appends signed orders to ``commands/inbox.jsonl``. Rank 0's command thread
examines them (``lanterne.orders``) and opens a round of ``agreement.py``; every rank, rank 0 included,
examines the order again, logs its vote and casts it. The target step is chosen by rank 0 from its own step
rate, about a second ahead, and is part of the PREPARE, so all ranks agree on it. At the target step the
training thread runs the action (``actions.py``), and what it changed goes out as a ``command`` event.

With no orders a step costs one comparison in the training thread; the command thread sleeps between polls.
When the store dies in the one moment when a vote is cast and the decision is not known, the rank is in doubt.
It looks for the decision in the vote logs of this node; where none has it, the rank leaves with exit code 75,
because going on could mean training with other values than its peers (docs/actions.md, "in doubt").
"""

from __future__ import annotations

import atexit
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from lanterne import orders
from lanterne.clock import Clock, SystemClock
from lanterne.collector import actions, votelog
from lanterne.collector.agreement import COMMIT, Coordinator, Participant, Position, Round, Store
from lanterne.errors import CommandRefused
from lanterne.nouns import AttributeValue, EventName, Identity
from lanterne.settings import CollectorSettings

POLL_S, POLL_SOON_S = 0.2, 0.02
LEAD_S, LEAD_STEPS_MIN, LEAD_S_MAX = 0.5, 2, 30.0
ROUND_NS = 4_000_000_000
TRIES_MAX = 6
STORE_TIMEOUT_S = 10.0
IN_DOUBT_S = 15.0
IN_DOUBT_EXIT = 75
INBOX_LINES_MAX = 1_000


class Host(Protocol):
    """The part of a session that commands need (collector/session.py)."""

    identity: Identity
    settings: CollectorSettings
    folder: Path
    model: Any
    closed: bool

    @property
    def step_number(self) -> int: ...

    def on_step_boundary(self, call: Callable[[int], None], /) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def trace_kernels(self, steps: int = 1) -> bool: ...

    def put_event(
        self, name: EventName, /, body: str = "", attributes: Mapping[str, AttributeValue] | None = None
    ) -> None: ...


def own_connection(timeout_s: float = STORE_TIMEOUT_S) -> Any:
    """A second client of the job's default store, so that a waiting call never holds up the training thread.

    Returns None where there is no process group yet.
    """
    dist: Any = import_module("torch.distributed")
    if not dist.is_available() or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    if isinstance(store, dist.FileStore):
        return dist.FileStore(store.path, -1)
    return store


class CommandAgent:
    """One per session. ``boundary`` runs in the training thread, everything else in the command thread."""

    def __init__(self, host: Host, *, clock: Clock, connect: Callable[[], Any]) -> None:
        self.host, self.clock, self.connect = host, clock, connect
        self.identity = host.identity
        self.folder = Path(host.folder) / "commands"
        self.log = votelog.VoteLog(self.folder / f"rank-{self.identity.rank}.wal")
        self.position = Position(step=host.step_number)
        self.actions = actions.Actions(host, self)
        self.participant: Participant | None = None
        self.coordinator: Coordinator | None = None
        self.key = host.settings.command_key
        self.waiting: deque[dict[str, Any]] = deque(maxlen=INBOX_LINES_MAX)
        self.read_to = 0
        self.tries: tuple[int, float] = (0, LEAD_S)
        self.retry: dict[str, Any] | None = None
        self.rate = _StepRate(clock)
        self._closing = threading.Event()
        self._immediate: list[Round] = []
        self.thread = threading.Thread(target=self._run, name="lanterne-commands", daemon=True)

    # --- training thread -------------------------------------------------------------------------

    def boundary(self, step: int) -> None:
        """At the end of each optimizer step, on every rank with the same numbers."""
        self.position.step = step
        participant = self.participant
        if participant is not None and step >= participant.next_target:
            self.carry_out(participant, step)

    def carry_out(self, participant: Participant, step: int) -> None:
        for found in participant.due(step):
            decision = participant.wait(found, found.lasts_ns / 1e9 + STORE_TIMEOUT_S)
            if not decision:
                decision = self._resolve(participant, found)
            if decision == COMMIT and not found.done:
                found.done = True
                self._apply(found, step)
            participant.finished(found)

    def _resolve(self, participant: Participant, found: Round) -> str:
        """In doubt: the store is gone between our vote and the decision."""
        give_up = self.clock.monotonic_ns() + int(IN_DOUBT_S * 1e9)
        while self.clock.monotonic_ns() < give_up:
            decision = found.decision or votelog.decision_of(self.folder, found.number) or ""
            if decision:
                participant.follow(found.number, decision)
                return decision
            self._closing.wait(0.2)
        why = f"in doubt about round {found.number}: {participant.lost or 'no decision'}; leaving with {IN_DOUBT_EXIT}"
        self.say(str(found.order["id"]), "refused", detail=why)
        raise SystemExit(IN_DOUBT_EXIT)

    def _apply(self, found: Round, step: int) -> None:
        order = found.order
        ranks = order["ranks"]
        if ranks != "all" and self.identity.rank not in ranks:
            return
        try:
            effect = self.actions.run(order, step)
        except Exception as error:
            self._write_applied(found, step, failed=repr(error))
            detail = f"failed: {type(error).__name__}: {error}"
            self.say(str(order["id"]), "failed", action=str(order["action"]), step=step, detail=detail[:1000])
            return
        self._write_applied(found, step, before=effect.before, after=effect.after)
        phase = "undone" if order["action"] == "undo" else "applied"
        subject = str(order["parameters"]["of"]) if phase == "undone" else str(order["id"])
        told = {"before": _text(effect.before), "after": _text(effect.after), "detail": effect.says}
        self.say(subject, phase, action=str(order["action"]), step=step, **told)
        if phase == "undone":
            self.say(str(order["id"]), "applied", action="undo", step=step, **told)
        if effect.then is not None:
            effect.then()

    def _write_applied(self, found: Round, step: int, **fields: Any) -> None:
        try:
            self.log.write("applied", round=found.number, id=found.order["id"], step=step, **fields)
        except OSError as error:
            self.say(str(found.order["id"]), "applied", step=step, detail=f"not in the vote log: {error}")

    # --- command thread --------------------------------------------------------------------------

    def _run(self) -> None:
        wait = POLL_S
        while not self._closing.wait(wait) and not self.host.closed:
            try:
                wait = self._tick()
            except Exception as error:  # the store is gone: no order can be agreed any more
                self._closing.wait(POLL_S)
                if self._closing.is_set() or self.host.closed:
                    return
                why = f"{type(error).__name__}: {error}"[:300]
                self.say("", "refused", detail=f"commands are switched off: {why}")
                if self.participant is not None:
                    self.participant.lose(why)
                return

    def _tick(self) -> float:
        self.rate.see(self.position.step)
        if self.participant is None and not self._connect():
            return POLL_S
        assert self.participant is not None
        if self.identity.rank == 0:
            self._coordinate()
        soon = self.participant.poll()
        self._run_immediate()
        return POLL_SOON_S if soon or (self.coordinator is not None and self.coordinator.open) else POLL_S

    def _connect(self) -> bool:
        world = self.identity.world_size
        store: Any = self.connect() if world > 1 else _LocalStore()
        if store is None:
            return False
        if world > 1:
            prefix = f"lanterne/{self.identity.job}/{self.identity.attempt}"
            store = import_module("torch.distributed").PrefixStore(prefix, store)
        self.join(store)
        return True

    def join(self, store: Store) -> None:
        """Take part in the agreement of all ranks over ``store``."""
        self.participant = Participant(
            store, self.identity.rank, self.log, self.clock, self._judge, self.say, self.position
        )
        if self.identity.rank == 0:
            self.coordinator = Coordinator(store, self.identity.world_size, self.clock)

    def _judge(self, order: Mapping[str, Any]) -> str:
        self._examine(order)
        return self.actions.check(order)

    def _examine(self, order: Mapping[str, Any]) -> None:
        orders.examine(
            order,
            public=self._public_key(),
            job=self.identity.job,
            attempt=self.identity.attempt,
            now_ns=self.clock.unix_ns(),
            last_counter=self.log.last_counter,
        )
        if orders.ACTIONS[str(order["action"])].where != "trainer":
            raise CommandRefused(f"{order['action']}: is carried out by the launcher, not by the trainer")

    def _public_key(self) -> str:
        """The key given by settings, else the one pinned at first contact: once taken it is never changed."""
        if self.key:
            return self.key
        assert self.participant is not None
        store = self.participant.store
        if self.identity.rank == 0:
            try:
                told = json.loads((self.folder / "key.json").read_text(encoding="utf-8"))
                self.key = str(told.get("public_key") or told["key"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise CommandRefused(f"no public key for job {self.identity.job} in {self.folder}/key.json") from None
            store.compare_set("key", "", self.key)
        elif store.check(["key"]):
            self.key = store.get("key").decode()
        else:
            raise CommandRefused("no public key is known yet; rank 0 has not pinned one")
        return self.key

    def _run_immediate(self) -> None:
        """Orders that wait for no step (stacks of a rank that may be hung) run in this thread."""
        assert self.participant is not None
        for found in list(self.participant.armed):
            if found.decision == COMMIT and not found.done and orders.ACTIONS[str(found.order["action"])].immediate:
                found.done = True
                self._apply(found, self.position.step)
                self.participant.finished(found)

    # --- rank 0 ----------------------------------------------------------------------------------

    def _coordinate(self) -> None:
        assert self.coordinator is not None
        self._read_inbox()
        if self.coordinator.open is not None:
            self._conclude(self.coordinator.poll())
        elif self.retry is not None or self.waiting:
            order = self.retry or self.waiting.popleft()
            if self.retry is None:
                self.tries = (0, LEAD_S)
            self.retry = None
            self._begin(order)

    def _begin(self, order: dict[str, Any]) -> None:
        assert self.coordinator is not None
        try:
            self._examine(order)
        except CommandRefused as error:
            self.say(str(order.get("id", "")), "refused", detail=str(error))
            return
        self.coordinator.begin(order, self._target(order), ROUND_NS)

    def _target(self, order: Mapping[str, Any]) -> int:
        """A step about ``lead`` seconds ahead; the step itself while the job is paused."""
        if self.position.paused_at >= 0:
            return self.position.paused_at
        if orders.ACTIONS[str(order["action"])].immediate:
            return 1 << 61  # never reached by the training thread
        return self.position.step + max(LEAD_STEPS_MIN, self.rate.steps_in(self.tries[1]))

    def _conclude(self, concluded: tuple[Round, list[str]] | None) -> None:
        if concluded is None:
            return
        found, against = concluded
        if not against:
            return
        count, lead = self.tries
        passing = all(": late:" in why or why.startswith("no vote") for why in against)
        if passing and count + 1 < TRIES_MAX:
            self.tries, self.retry = (count + 1, min(lead * 2, LEAD_S_MAX)), dict(found.order)
        else:
            self.say(str(found.order["id"]), "refused", detail="; ".join(against)[:1000])

    def _read_inbox(self) -> None:
        try:
            with (self.folder / "inbox.jsonl").open("rb") as file:
                file.seek(self.read_to)
                data = file.read(1 << 20)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self.read_to += end
        for line in data[:end].splitlines():
            try:
                order = json.loads(line)
            except ValueError:
                self.say("", "refused", detail=f"a line of the inbox is not JSON: {line[:80]!r}")
                continue
            if isinstance(order, dict) and not _of_launcher(order):
                self.say(str(order.get("id", "")), "received", action=str(order.get("action", "")))
                signed = (*orders.FIELDS, "signature")  # what else the backend tells about it is not signed
                self.waiting.append({key: order[key] for key in signed if key in order})

    # --- both ------------------------------------------------------------------------------------

    def say(self, order_id: str, phase: str, **fields: AttributeValue) -> None:
        """One ``command`` event; the audit trail is made of these."""
        attributes: dict[str, AttributeValue] = {"id": order_id, "phase": phase, "rank": self.identity.rank, **fields}
        attributes.setdefault("step", self.position.step)
        try:
            self.host.put_event(EventName.COMMAND, attributes=attributes)
        except Exception:
            return

    def close(self) -> None:
        """Stop taking orders. Never raises, never waits long. Safe to call twice."""
        atexit.unregister(self.close)
        self._closing.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(2.0)
        if self.participant is not None:
            for found in self.participant.armed:
                self.say(str(found.order["id"]), "aborted", detail="the loop ended before the target step")
        self.actions.close()
        self.log.close()


class _StepRate:
    """Steps a second, from what the command thread sees at its polls."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: deque[tuple[int, int]] = deque(maxlen=32)

    def see(self, step: int) -> None:
        self.seen.append((self.clock.monotonic_ns(), step))

    def steps_in(self, seconds: float) -> int:
        if len(self.seen) < 2:
            return LEAD_STEPS_MIN
        (first_ns, first), (last_ns, last) = self.seen[0], self.seen[-1]
        return int((last - first) / max((last_ns - first_ns) / 1e9, 1e-3) * seconds) + 1


class _LocalStore:
    """The store of a job with one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._lock:
            if self._values.get(key, b"") == expected.encode():
                self._values[key] = desired.encode()
            return self._values[key]


def _of_launcher(order: Mapping[str, Any]) -> bool:
    """Orders of the same queue that ``lanterne run`` takes; they say nothing here."""
    known = orders.ACTIONS.get(str(order.get("action")))
    return known is not None and known.where == "launcher"


def _text(value: Any) -> str:
    return json.dumps(value, default=str)[:1000]


def start(session: Host, *, clock: Clock | None = None, connect: Callable[[], Any] = own_connection) -> CommandAgent:
    """Called by ``attach``: start the command thread and hook it to the step boundary.

    ``connect`` gives a store of its own, or None while the process group is not there yet.
    Raises OSError when the session folder cannot be written.
    """
    agent = CommandAgent(session, clock=clock or SystemClock(), connect=connect)
    session.on_step_boundary(agent.boundary)
    if session.settings.snapshot_every > 0:
        session.on_step_boundary(agent.actions.snapshot)
    agent.thread.start()
    atexit.register(agent.close)
    return agent
