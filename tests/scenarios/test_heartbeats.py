"""Heartbeats through the whole backend: a rank that falls silent is missed, and told to people once."""

from __future__ import annotations

import pytest
from whole_backend import House

from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.nouns import Event, Identity, IncidentStatus, Kind

SHORT = Shape(dp=4, steps=40, forward_ms=20, backward_ms=40, data_ms=2, optimizer_ms=3, transfer_ms=5,
              checkpoint_every=0, jitter=0.03)  # fmt: skip
SECOND = 1_000_000_000


def beat(house: House, rank: int, n: int, step: int) -> None:
    who = Identity(job="j", rank=rank, local_rank=rank, world_size=4, host=f"node{rank // 8:03d}")
    now = house.clock.unix_ns()
    event = Event(
        kind=Kind.EVENT, name="heartbeat", sequence=1_000_000 + n, lamport=1_000_000 + n, unix_ns=now,
        monotonic_ns=n + 1, step=step, attributes={"phase": "forward"},
    )  # fmt: skip
    house.send(who, [event])


@pytest.mark.parametrize("silent_after", [5, 1_000])
def test_a_silent_rank_is_missed_and_a_speaking_one_is_not(house: House, silent_after: int) -> None:
    house.play(simulate(SHORT, (), seed=1, name="j"))
    for second in range(20):
        for rank in range(4):
            if rank != 2 or second < silent_after:
                beat(house, rank, second, 39)
        house.clock.advance(SECOND)
        house.runner.evaluate("j", 0)

    found = house.control.incidents("j")
    held = house.runner.safety("j", 0)
    assert held is not None
    lost = [(r.rule, r.rank) for r in held.broken]
    if silent_after > 20:
        assert (found, lost) == ([], [])
        return
    assert lost == [("heartbeat_lost", 2)]
    assert [(r.incident.kind, [c.category.value for c in r.incident.causes]) for r in found] == [
        ("heartbeat_lost", ["rank_missing"])
    ]
    assert found[0].incident.causes[0].subject.rank == 2
    assert [i.kind for i in house.report("j").incidents] == ["heartbeat_lost"]
    for second in range(20, 30):
        for rank in range(4):
            beat(house, rank, second, 39)
        house.clock.advance(SECOND)
        house.runner.evaluate("j", 0)
    assert [r.incident.status for r in house.control.incidents("j")] == [IncidentStatus.RESOLVED]
