"""Two-phase agreement of all ranks on one order and one target step, over the job's own store.

A round ``n`` has three kinds of key, each written once: ``prepare/n`` (by rank 0: the order and its target
step), ``vote/n/<rank>`` (by each rank, after the vote is on its disk) and ``decision/n``. The decision is
written with compare-and-set, so whoever is first, decides for all:

* rank 0 writes ``commit``, and only when every rank voted yes and all yes-votes name the same state;
* anybody writes ``abort`` when the round lasts longer than its time.

Why nothing is applied by some ranks only: a rank votes yes only while it is before the target step, and
after that vote it does not pass the target step until it knows the decision. A rank that did not vote yes
need not wait, because without its vote there is no commit. Hence the training thread pays one integer
comparison a step, and no plan is written when there is nothing to order.

The race between vote and step is settled without a lock: the vote thread arms the target and then reads the
step, the training thread writes the step and then reads the target. Whichever comes second sees the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lanterne.clock import Clock
from lanterne.collector.votelog import VoteLog
from lanterne.errors import CommandRefused

COMMIT, ABORT = "commit", "abort"
NEVER = 1 << 62


class Store(Protocol):
    """The part of a c10d store that is used. Every call may raise RuntimeError when the store is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(slots=True)
class Round:
    """One PREPARE as this rank sees it. ``decision`` is empty until it is known."""

    number: int
    order: Mapping[str, Any]
    target: int
    lasts_ns: int
    voted_ns: int = 0
    decision: str = ""
    done: bool = False


@dataclass(slots=True)
class Position:
    """Where the training thread is. ``paused_at`` is the step at which it holds, else -1."""

    step: int = 0
    paused_at: int = -1


Judge = Callable[[Mapping[str, Any]], str]
"""Examines an order; returns the state that all ranks must share to carry it out (often empty), or raises
CommandRefused."""


@dataclass
class Participant:
    """A rank's side. ``poll`` is called by the command thread; ``due`` and ``wait`` by the training thread."""

    store: Store
    rank: int
    log: VoteLog
    clock: Clock
    judge: Judge
    say: Callable[..., None]
    position: Position = field(default_factory=Position)
    next_target: int = NEVER
    """The training thread compares its step with this and with nothing else."""

    def __post_init__(self) -> None:
        self.next_round = self.log.last_round + 1
        self.armed: list[Round] = []
        self.decided = threading.Condition()
        self.lost = ""

    # --- command thread --------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do what there is to do; True while a decision is awaited (poll again soon)."""
        while self.store.check([f"prepare/{self.next_round}"]):
            self._prepare(self.next_round)
            self.next_round += 1
        open_rounds = [r for r in self.armed if not r.decision]
        for found in open_rounds:
            self._learn(found)
        return any(not r.decision for r in open_rounds)

    def _prepare(self, number: int) -> None:
        said = json.loads(self.store.get(f"prepare/{number}"))
        found = Round(number, said["order"], int(said["target"]), int(said["lasts_ns"]))
        order_id = str(found.order.get("id", ""))
        self.say(order_id, "prepared", action=str(found.order.get("action", "")), target=found.target)
        agree, why = "", ""
        try:
            agree = self.judge(found.order)
            self._arm(found)
        except CommandRefused as error:
            why = str(error)
        vote = "no" if why else "yes"
        counter = found.order.get("counter", -1)
        try:
            self.log.write(
                "vote", round=number, id=order_id, counter=counter, target=found.target, vote=vote, why=why,
                at_ns=self.clock.unix_ns(),
            )  # fmt: skip
        except OSError as error:  # a vote that is not on disk is not cast
            self._disarm(found)
            self.say(order_id, "refused", detail=f"the vote log cannot be written: {error}")
            return
        found.voted_ns = self.clock.monotonic_ns()
        self.store.set(f"vote/{number}/{self.rank}", json.dumps({"vote": vote, "agree": agree, "why": why}))
        self.say(order_id, "voted", detail=why or f"yes for step {found.target}")

    def _arm(self, found: Round) -> None:
        """Hold the training thread at the target step, or refuse because it is already there."""
        with self.decided:
            self.armed.append(found)
            self.next_target = min(r.target for r in self.armed)
        position = self.position
        if position.step < found.target or position.paused_at == found.target:
            return
        self._disarm(found)
        raise CommandRefused(f"late: this rank is already at step {position.step}, the target is {found.target}")

    def _disarm(self, found: Round) -> None:
        with self.decided:
            self.armed = [r for r in self.armed if r is not found]
            self.next_target = min((r.target for r in self.armed), default=NEVER)

    def _learn(self, found: Round) -> None:
        key = f"decision/{found.number}"
        if self.store.check([key]):
            self._decide(found, self.store.get(key).decode())
        elif self.clock.monotonic_ns() - found.voted_ns > found.lasts_ns:
            why = f"{ABORT}: rank {self.rank} waited {found.lasts_ns / 1e9:.1f} s for the decision"
            self._decide(found, self.store.compare_set(key, "", why).decode())

    def _decide(self, found: Round, decision: str) -> None:
        try:
            self.log.write("decision", round=found.number, decision=decision)
        except OSError as error:  # the decision stands, written or not
            self.say(str(found.order["id"]), "committed", detail=f"not in the vote log: {error}")
        with self.decided:
            found.decision = decision
            if decision == COMMIT:
                self.log.last_counter = max(self.log.last_counter, int(found.order["counter"]))
            else:
                self.armed = [r for r in self.armed if r is not found]
                self.next_target = min((r.target for r in self.armed), default=NEVER)
            self.decided.notify_all()
        phase = "committed" if decision == COMMIT else "aborted"
        self.say(str(found.order["id"]), phase, detail=decision, target=found.target)

    def lose(self, why: str) -> None:
        """The store is gone for good: wake whoever waits for a decision from it."""
        with self.decided:
            self.lost = why
            self.decided.notify_all()

    def follow(self, number: int, decision: str) -> None:
        """Take a decision that was learned from another rank's log instead of the store."""
        for found in list(self.armed):
            if found.number == number and not found.decision:
                self._decide(found, decision)

    # --- training thread -------------------------------------------------------------------------

    def due(self, step: int) -> list[Round]:
        """Armed rounds whose target is reached, oldest first."""
        with self.decided:
            return sorted((r for r in self.armed if r.target <= step), key=lambda r: r.number)

    def wait(self, found: Round, timeout_s: float) -> str:
        """Block until the decision of ``found`` is known; empty text after ``timeout_s``."""
        with self.decided:
            self.decided.wait_for(lambda: bool(found.decision or self.lost), timeout_s)
            return found.decision

    def finished(self, found: Round) -> None:
        self._disarm(found)


@dataclass
class Coordinator:
    """Rank 0's side: one round at a time. ``begin`` and ``poll`` are called by its command thread."""

    store: Store
    world: int
    clock: Clock
    number: int = 0
    """The next round; every earlier one is decided."""
    open: Round | None = None

    def __post_init__(self) -> None:
        while self.store.check([f"prepare/{self.number}"]):
            self.number += 1

    def begin(self, order: Mapping[str, Any], target: int, lasts_ns: int) -> None:
        """PREPARE: ask every rank to vote for ``order`` at ``target``."""
        if self.open is not None:
            raise RuntimeError("a round is open")
        said = json.dumps({"order": dict(order), "target": target, "lasts_ns": lasts_ns})
        self.open = Round(self.number, order, target, lasts_ns, voted_ns=self.clock.monotonic_ns())
        self.number += 1
        self.store.set(f"prepare/{self.open.number}", said)

    def poll(self) -> tuple[Round, list[str]] | None:
        """The round and the reasons against it, once it is decided; None while votes are missing."""
        found = self.open
        if found is None:
            return None
        keys = [f"vote/{found.number}/{rank}" for rank in range(self.world)]
        late = self.clock.monotonic_ns() - found.voted_ns > found.lasts_ns
        if not self.store.check(keys) and not late:
            return None
        votes = {r: json.loads(self.store.get(k)) for r, k in enumerate(keys) if self.store.check([k])}
        against = [f"rank {rank}: {vote['why']}" for rank, vote in votes.items() if vote["vote"] != "yes"]
        silent = sorted(set(range(self.world)) - set(votes))
        if silent:
            against.append(f"no vote from rank {', '.join(map(str, silent))} within {found.lasts_ns / 1e9:.1f} s")
        states = {vote["agree"] for vote in votes.values() if vote["vote"] == "yes"}
        if len(states) > 1:
            against.append(f"ranks are in different states: {', '.join(sorted(states))}")
        wanted = f"{ABORT}: {'; '.join(against)[:400]}" if against else COMMIT
        found.decision = self.store.compare_set(f"decision/{found.number}", "", wanted).decode()
        if found.decision != COMMIT and not against:
            against = [found.decision]
        self.open = None
        return found, against
