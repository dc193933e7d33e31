"""What reaches the server late, twice or from the dead must not mislead it; the signs of one fault are one incident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from whole_backend import House

from lanterne.collector.sim.events import to_events
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Job, Shape
from lanterne.nouns import Event, Identity, IncidentStatus, Kind

SLOW = Shape(dp=4, steps=110, forward_ms=200, backward_ms=400, data_ms=2, optimizer_ms=3, transfer_ms=5,
             checkpoint_every=50, checkpoint_ms=90, jitter=0.05)  # fmt: skip


def by_rank(job: Job) -> dict[int, tuple[Identity, list[Event]]]:
    found: dict[int, tuple[Identity, list[Event]]] = {}
    for identity, _, events in to_events(job):
        found.setdefault(identity.rank, (identity, []))[1].extend(events)
    return found


def feed(house: House, job: Job) -> list[str]:
    """Send one rank after another, each in two parts, the last rank first; the verdict after each part."""
    ranks = by_rank(job)
    latest = max(e.unix_ns + e.duration_ns for _, events in ranks.values() for e in events)
    house.clock.advance(latest - house.clock.unix_ns() + 1_000_000_000)
    verdicts = []
    for _, (identity, events) in sorted(ranks.items(), reverse=True):
        middle = 2 * len(events) // 3
        for part in (events[:middle], events[middle:]):
            house.send(identity, part)
            house.runner.evaluate(job.name, 0)
            verdicts.append(house.report(job.name).verdict)
    return verdicts


def test_data_that_have_not_arrived_are_no_fault(house: House) -> None:
    verdicts = feed(house, simulate(SLOW, (), seed=1, name="j"))

    assert [v for v in verdicts if not v.startswith("Healthy")] == []
    assert house.control.incidents("j") == []


def test_no_rank_is_blamed_before_the_culprit_was_heard(house: House) -> None:
    job = simulate(SLOW, (("nonfinite", 1, 60),), seed=1, name="j")

    verdicts = feed(house, job)

    assert not any(v.startswith(("rank 0:", "rank 2:", "rank 3:")) for v in verdicts), verdicts
    cause = house.report("j").incidents[0].causes[0]
    assert (cause.category.value, cause.subject.rank, cause.since_step) == ("nonfinite_values", 1, 60)
    assert len([r for r in house.control.incidents("j") if r.incident.status is not IncidentStatus.DISMISSED]) == 1


def told(like: Event, sequence: int, step: int, name: str, **attributes: object) -> Event:
    return replace(
        like, kind=Kind.EVENT, name=name, step=step, sequence=sequence, lamport=sequence, duration_ns=0, value=None,
        body="", attributes=attributes,
    )  # fmt: skip


def test_a_checkpoint_damaged_again_and_again_is_one_incident(house: House) -> None:
    ranks = by_rank(simulate(SLOW, (), seed=2, name="j"))
    for identity, events in ranks.values():
        house.send(identity, events)
    identity, events = ranks[2]
    at = events[-1].sequence
    for i, step in enumerate((20, 60, 100)):
        event = told(events[-1], at + 1 + i, step, "checkpoint_verified", ok=False, path=f"step-{step}.pt",
                     detail="Bad CRC-32")  # fmt: skip
        house.send(identity, [event])
        house.clock.advance(2_000_000_000)
        house.runner.evaluate("j", 0)

    assert len(house.control.incidents("j")) == 1
    (incident,) = house.report("j").incidents
    assert [(c.category.value, c.subject.rank) for c in incident.causes] == [("checkpoint_corrupt", 2)]


@pytest.mark.parametrize("complete", [True, False])
def test_a_mismatch_outranks_the_crash_that_follows_it(house: House, complete: bool) -> None:
    """Rank 1 is aborted by the library, rank 2 brought the odd size; open calls are told at the ranks' end."""
    ranks = by_rank(simulate(SLOW, (), seed=3, name="j"))
    for rank, (identity, events) in ranks.items():
        house.send(identity, events)
        last, at = events[-1], events[-1].sequence
        size = 80 if rank == 2 else 16
        call = {"op": "allreduce", "group": "0-3", "group_sequence": 9_000, "dtype": "float32",
                "bytes": 4 * size, "shape": size, "entered_ns": last.unix_ns}  # fmt: skip
        end = told(last, at + 2, 110, "exited", signal=6 if rank == 1 else 15)
        if complete or rank in (0, 2):
            house.send(identity, [told(last, at + 1, 110, "collective_pending", **call), end])
        else:
            house.send(identity, [end])
    house.clock.advance(5_000_000_000)
    house.runner.evaluate("j", 0)

    report = house.report("j")
    cause = report.incidents[0].causes[0]
    assert cause.category.value == "collective_mismatch", report.verdict
    assert cause.subject.rank == (2 if complete else None)  # one against one: which is wrong cannot be told
    assert "80 x float32" in cause.evidence[0].says
    assert "16 x float32" in cause.evidence[0].says
    assert len(report.incidents) == 1


def test_a_job_ended_from_outside_did_not_hang(house: House) -> None:
    """At any moment some rank is inside a call: that is told at its end, and is no hang."""
    ranks = by_rank(simulate(SLOW, (), seed=4, name="j"))
    for rank, (identity, events) in ranks.items():
        house.send(identity, events)
        last, at = events[-1], events[-1].sequence
        call = {"op": "allreduce", "group": "0-3", "group_sequence": 9_000, "dtype": "float32", "bytes": 64,
                "shape": 16, "entered_ns": last.unix_ns}  # fmt: skip
        pending = [told(last, at + 1, 110, "collective_pending", **call)] if rank != 2 else []
        house.send(identity, [*pending, told(last, at + 2, 110, "exited", signal=15)])
    house.clock.advance(3_600_000_000_000)
    house.runner.evaluate("j", 0)

    causes = [c.category.value for i in house.report("j").incidents for c in i.causes]
    assert "rank_hung" not in causes
