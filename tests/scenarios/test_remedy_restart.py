"""A restart through the whole backend: ordered once, judged by the next attempt, tried twice, then left to people."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from whole_backend import House

from lanterne.backend.dispatch import Tracker
from lanterne.backend.pipeline import LiveRunner, report
from lanterne.collector.sim.events import to_events
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.nouns import NO_RANK, Event, EventName, Identity, Incident, IncidentStatus, Kind
from lanterne.settings import ServerSettings

SMALL = Shape(dp=4, steps=130, forward_ms=20, backward_ms=40, data_ms=2, optimizer_ms=3, transfer_ms=5,
              checkpoint_every=40, checkpoint_ms=90, jitter=0.05)  # fmt: skip


class Launches:
    """A house whose policies act, and the launcher's answers."""

    def __init__(self, house: House) -> None:
        self.house = house
        settings = ServerSettings(data=house.settings.data, policy="auto")
        house.runner = LiveRunner(house.store, house.control, settings, clock=house.clock)
        self.tracker = Tracker(house.store, house.control)

    def attempt(self, number: int, fault: str = "", steps: int = 130, size: float = 1.0) -> None:
        """Play an attempt, with a fault of rank 2 at step 60 or without."""
        faults = ((fault, 2, 60),) if fault else ()
        job = simulate(replace(SMALL, steps=steps), faults, seed=3 + number, size=size, name="j")
        pending: dict[int, tuple[Identity, list[Event]]] = {}
        for identity, _, events in to_events(job):
            pending.setdefault(identity.rank, (replace(identity, attempt=number), []))[1].extend(events)
        for identity, events in pending.values():
            last = max(e.unix_ns for e in events)
            self.house.clock.advance(max(0, last - self.house.clock.unix_ns()))
            self.house.send(identity, events)
        self.house.clock.advance(10**9)
        self.evaluate(number)

    def evaluate(self, number: int) -> None:
        self.house.runner.evaluate("j", number)

    def orders(self) -> list[Any]:
        return [c for c in self.house.control.commands("j") if c.action == "restart"]

    def launcher(self, command: Any, *phases: str, **more: Any) -> None:
        """What ``lanterne run`` says about an order."""
        who = Identity(job="j", attempt=command.attempt, rank=NO_RANK, host="node-1")
        for phase in phases:
            self.house.clock.advance(10**8)
            told = Event(
                kind=Kind.EVENT, name=EventName.COMMAND, sequence=-1, lamport=-1,
                unix_ns=self.house.clock.unix_ns(), monotonic_ns=self.house.clock.monotonic_ns(),
                attributes={"id": command.id, "action": command.action, "phase": phase, "rank": NO_RANK, **more},
            )  # fmt: skip
            self.house.send(who, [told])
        self.tracker.follow("j", command.attempt)

    def trainers(self, command: Any, phase: str) -> None:
        """What the four ranks say about an order."""
        for rank in range(4):
            self.house.clock.advance(10**7)
            told = Event(
                kind=Kind.EVENT, name=EventName.COMMAND, sequence=20_000 + rank, lamport=20_000 + rank, step=128,
                unix_ns=self.house.clock.unix_ns(), monotonic_ns=self.house.clock.monotonic_ns(),
                attributes={"id": command.id, "action": command.action, "phase": phase, "rank": rank, "step": 128},
            )  # fmt: skip
            self.house.send(Identity(job="j", attempt=command.attempt, rank=rank, world_size=4), [told])
        self.tracker.follow("j", command.attempt)

    def incident(self, attempt: int = 0) -> Incident:
        (found,) = self.house.control.incidents("j", attempt=attempt)
        return found.incident


@pytest.fixture
def launches(house: House) -> Launches:
    return Launches(house)


def test_a_crash_is_restarted_and_verified_by_the_next_attempt(launches: Launches) -> None:
    launches.attempt(0, "crash")
    (order,) = launches.orders()
    assert (order.state, launches.incident().status) == ("pending", IncidentStatus.ACTING)
    launches.evaluate(0)
    assert len(launches.orders()) == 1

    launches.launcher(order, "received", "committed", "applied")
    launches.evaluate(0)
    assert launches.incident().status is IncidentStatus.VERIFYING
    assert set(launches.incident().ledger) >= {"decided", "acted"}

    launches.attempt(1, steps=50)  # not yet where the crash was
    launches.evaluate(0)
    assert launches.incident().status is IncidentStatus.VERIFYING
    launches.attempt(1, steps=90)
    launches.evaluate(0)

    done = launches.incident()
    assert (done.status, done.causes[0].category.value) == (IncidentStatus.RESOLVED, "rank_crashed")
    assert done.ledger["onset"] < done.ledger["acted"] < done.ledger["verified"]
    told = report(launches.house.store, launches.house.control, "j", clock=launches.house.clock)
    assert [(i.id, i.status) for i in told.incidents] == [(done.id, IncidentStatus.RESOLVED)]
    assert told.incidents[0].causes[0].remedy.action == "restart"
    for _ in range(3):
        launches.evaluate(0)
        assert launches.incident() == done


def test_a_leak_is_saved_before_it_is_restarted(launches: Launches) -> None:
    launches.attempt(0, "memory_leak", size=20.0)
    (save,) = launches.house.control.commands("j")
    assert save.action == "save_checkpoint"
    launches.evaluate(0)
    assert not launches.orders()
    launches.trainers(save, "applied")
    launches.evaluate(0)
    (order,) = launches.orders()
    launches.launcher(order, "received", "committed", "applied")
    launches.attempt(1, steps=90)
    launches.evaluate(0)
    done = launches.incident()
    assert (done.status, done.causes[0].category.value) == (IncidentStatus.RESOLVED, "memory_leak")
    assert done.causes[0].subject.rank == 2


def test_what_the_restart_does_to_the_old_ranks_changes_no_verdict(launches: Launches) -> None:
    launches.house.play(simulate(SMALL, (("hang", 2, 60),), seed=3, name="j"))
    assert launches.incident().causes[0].category.value == "rank_hung"
    assert not launches.orders()  # a stall of some seconds may yet pass
    launches.house.clock.advance(20 * 10**9)
    launches.evaluate(0)
    (order,) = launches.orders()
    before = launches.incident().causes[0]
    launches.launcher(order, "received", "committed")
    for rank in range(4):
        ended = Event(
            kind=Kind.EVENT, name=EventName.EXITED, sequence=10_000, lamport=10_000,
            unix_ns=launches.house.clock.unix_ns() + 10**9, monotonic_ns=10**12, attributes={"signal": 15},
        )  # fmt: skip
        launches.house.send(Identity(job="j", rank=rank, world_size=4), [ended])
    launches.house.clock.advance(3 * 10**9)
    launches.evaluate(0)
    found = launches.incident()
    assert (found.kind, found.causes[0].category, found.causes[0].subject.rank) == (
        "hang", before.category, before.subject.rank,
    )  # fmt: skip


def test_a_restart_that_does_not_help_is_tried_twice_and_told(launches: Launches) -> None:
    for attempt in range(2):
        launches.attempt(attempt, "crash")
        order = next(o for o in launches.orders() if o.attempt == attempt)
        launches.house.clock.advance(60 * 10**9)
        launches.launcher(order, "received", "committed", "applied")
        launches.evaluate(attempt)
    launches.attempt(2, "crash")

    assert sorted(o.attempt for o in launches.orders()) == [0, 1]
    last = launches.incident(2)
    assert launches.house.control.decisions(last.id)[-1].chose == "hold"
    assert "was tried 2 times, 2 without success; left to a person" in last.causes[0].remedy.says
    notes = [n.says for i in range(2) for n in launches.house.control.notes(launches.incident(i).id)]
    assert notes == [f"failed: did not help: attempt {i + 1} has the same trouble" for i in range(2)]
    assert launches.incident(0).status is IncidentStatus.DIAGNOSED


def test_an_order_that_no_launcher_takes_expires_and_is_told(launches: Launches) -> None:
    launches.attempt(0, "crash")
    launches.house.clock.advance(61 * 10**9)
    launches.evaluate(0)
    found = launches.incident()
    assert found.status in {IncidentStatus.DIAGNOSED, IncidentStatus.ACTING}
    assert "restart expired" in launches.house.control.notes(found.id)[0].says
    trail = [a.action for a in launches.house.control.audit_log() if a.subject == launches.orders()[-1].id]
    assert trail[0] == "command.expired"


def test_a_verified_incident_stays_resolved_and_new_trouble_is_a_new_one(launches: Launches) -> None:
    house = launches.house
    launches.attempt(0, "lr_jump", steps=100)
    (command,) = house.control.commands("j")
    found = launches.incident()
    mended = replace(
        found, status=IncidentStatus.RESOLVED,
        ledger={**found.ledger, "acted": found.ledger["decided"], "verified": found.ledger["decided"]},
    )  # fmt: skip
    house.control.set_command_state(command.id, "applied")
    house.control.save_policy_state("ledger", "j", {})
    house.control.save_incident("j", 0, mended)
    again = LiveRunner(house.store, house.control, house.settings, clock=house.clock)
    for _ in range(4):
        again.evaluate("j", 0)
        assert launches.incident().status is IncidentStatus.RESOLVED
        assert launches.incident().ledger["verified"] == mended.ledger["verified"]


def test_what_a_person_closed_stays_closed_while_its_old_signs_last(house: House) -> None:
    house.play(simulate(SMALL, (("lr_jump", 2, 60),), seed=3, name="j"), evaluate_every=15)
    (found,) = house.control.incidents("j")
    closed = house.control.set_incident_status(found.incident.id, IncidentStatus.RESOLVED)
    assert closed is not None
    for runner in (house.runner, LiveRunner(house.store, house.control, house.settings, clock=house.clock)):
        for _ in range(4):
            house.clock.advance(10**9)
            runner.evaluate("j", 0)
            (now,) = house.control.incidents("j")
            assert now.incident.status is IncidentStatus.RESOLVED
            assert now.incident.ledger["closed"] == closed.incident.ledger["closed"]
    assert [i.status for i in house.report("j").incidents] == [IncidentStatus.RESOLVED]


def test_a_remedy_that_ends_does_not_open_what_a_person_closed(launches: Launches) -> None:
    launches.attempt(0, "crash")
    (order,) = launches.orders()
    launches.house.control.set_incident_status(launches.incident().id, IncidentStatus.DISMISSED)
    launches.launcher(order, "received", "committed", "applied")
    launches.evaluate(0)
    launches.attempt(1, steps=90)
    launches.evaluate(1)
    launches.evaluate(0)
    assert launches.incident().status is IncidentStatus.DISMISSED


@pytest.mark.parametrize(
    ("fault", "action"),
    [("lr_jump", "set_lr"), ("crash", "restart"), ("nonfinite", "rollback"), ("bad_batch", "rollback")],
)
def test_with_observe_nothing_is_ordered_and_the_report_says_what_would_be(
    house: House, fault: str, action: str
) -> None:
    house.play(simulate(SMALL, ((fault, 2, 60),), seed=3, name="j"), evaluate_every=15)
    assert house.control.commands("j") == []
    (found,) = house.report("j").incidents
    assert found.causes[0].remedy.action == action
    assert "decided" in found.ledger
    assert "acted" not in found.ledger
    decision = house.control.decisions(found.id)[-1]
    assert (decision.chose, decision.body["orders"][0]["action"]) == ("observe", action)
