"""The critical path, the waits and the what-if of one step, against timelines whose answer is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanterne import wire
from lanterne.backend.align import frame, replay, step_view
from lanterne.collector.sim.events import to_events
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.nouns import Event, Identity, Kind, group_name

MS = 1_000_000
START = 1_760_000_000_000_000_000


class Timeline:
    """Ranks that work and reduce; times in ms. Every rank is on one host, so that the clocks say nothing new."""

    def __init__(self, ranks: int, hosts: int = 1) -> None:
        self.now = dict.fromkeys(range(ranks), 0.0)
        self.events: dict[int, list[Event]] = {r: [] for r in range(ranks)}
        self.hosts = hosts
        self.count: dict[str, int] = {}

    def span(self, rank: int, kind: Kind, name: str, step: int, begin: float, end: float, **more: object) -> None:
        attributes = {getattr(wire, k.upper()): v for k, v in more.items()}
        at = int(begin * MS)
        self.events[rank].append(
            Event(
                kind=kind,
                name=name,
                sequence=len(self.events[rank]),
                lamport=0,
                unix_ns=START + at,
                monotonic_ns=10**12 + at,
                step=step,
                duration_ns=int(end * MS) - at,
                attributes=attributes,
            )
        )

    def work(self, rank: int, step: int, phase: str, ms: float) -> None:
        self.span(rank, Kind.PHASE, phase, step, self.now[rank], self.now[rank] + ms)
        self.now[rank] += ms

    def reduce(self, ranks: list[int], step: int, ms: float) -> None:
        group = group_name(ranks)
        sequence = self.count[group] = self.count.get(group, -1) + 1
        done = max(self.now[r] for r in ranks) + ms
        for r in ranks:
            self.span(
                r, Kind.COLLECTIVE, "allreduce", step, self.now[r], done, group=group, group_sequence=sequence, bytes=8
            )
            self.now[r] = done

    def step(self, step: int, began: dict[int, float]) -> None:
        for rank, at in began.items():
            self.span(rank, Kind.STEP, "step", step, at, self.now[rank])

    def view(self, step: int) -> step_view.StepView:
        pairs = [(Identity(job="j", rank=r, host=f"h{r % self.hosts}"), e) for r, e in self.events.items()]
        return step_view.of(frame.from_events(pairs), step)


def straggling(forward: dict[int, float], data: dict[int, float]) -> Timeline:
    """Four ranks in two tensor pairs, ten steps of 5 + 30 + 1 + 60 + 10 + 4 ms; step 5 is as told."""
    line = Timeline(4)
    for step in range(10):
        began = dict(line.now)
        for rank in range(4):
            line.work(rank, step, "data_wait", data.get(rank, 5) if step == 5 else 5)
            line.work(rank, step, "forward", forward.get(rank, 30) if step == 5 else 30)
        line.reduce([0, 1], step, 1)
        line.reduce([2, 3], step, 1)
        for rank in range(4):
            line.work(rank, step, "backward", 60)
        line.reduce([0, 1, 2, 3], step, 10)
        for rank in range(4):
            line.work(rank, step, "optimizer", 4)
        line.step(step, began)
    return line


def test_a_slow_rank_is_on_the_path_and_repairing_it_repairs_the_step() -> None:
    view = straggling({2: 80}, {}).view(5)
    path = view.path()
    assert [s.name for s in path] == ["forward", "allreduce", "backward", "allreduce", "optimizer"]
    assert path[0].rank == 2
    assert sum(s.end_ns - s.start_ns for s in path) == 160 * MS
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
    waits = {(w.rank, w.waited_for): w.wait_ns / MS for w in view.waits()}
    assert waits[3, 2] == pytest.approx(50)
    found = view.what_if(path, {})
    assert found is not None
    assert found.observed_ns == pytest.approx(160 * MS)
    assert found.ranks[2] == pytest.approx(110 * MS)
    assert found.all_normal_ns == pytest.approx(110 * MS)
    assert found.phases["forward"] == pytest.approx(110 * MS)
    assert found.phases["data_wait"] == pytest.approx(160 * MS)
    assert found.stages == {}


def test_a_second_slow_rank_limits_what_repairing_the_first_is_worth() -> None:
    view = straggling({2: 80}, {1: 35}).view(5)
    found = view.what_if(view.path(), {})
    assert found is not None
    assert found.observed_ns == pytest.approx(160 * MS)
    assert found.ranks[2] == pytest.approx(140 * MS)  # rank 1's 30 ms of data_wait then hold the step
    assert found.all_normal_ns == pytest.approx(110 * MS)


def test_a_healthy_step_has_nothing_to_win() -> None:
    view = straggling({}, {}).view(5)
    found = view.what_if(view.path(), {})
    assert found is not None
    assert found.all_normal_ns == pytest.approx(found.observed_ns)
    assert view.waits() == []


def test_a_heavy_stage_is_priced_as_a_stage() -> None:
    """Two stages of two ranks; stage 1 has twice the work of stage 0 and nobody in it is odd."""
    line = Timeline(4)
    for step in range(8):
        began = dict(line.now)
        for rank in range(4):
            line.work(rank, step, "forward", 60 if rank >= 2 else 30)
        line.reduce([0, 1, 2, 3], step, 2)
        line.step(step, began)
    view = line.view(4)
    found = view.what_if(view.path(), {0: 0, 1: 0, 2: 1, 3: 1})
    assert found is not None
    assert found.stages[1] == pytest.approx(32 * MS)
    assert found.stages[0] == pytest.approx(62 * MS)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(8, 1, 1), (2, 2, 2), (4, 2, 1)]), slow=st.booleans())
def test_the_replay_of_what_was_is_what_was(seed: int, shape: tuple[int, int, int], slow: bool) -> None:
    dp, pp, tp = shape
    faults = [("slow_compute", 1, 4)] if slow else []
    job = simulate(Shape(dp=dp, pp=pp, tp=tp, steps=12), faults, seed=seed)
    pairs: dict[int, tuple[Identity, list[Event]]] = {}
    for identity, _, events in to_events(job):
        pairs.setdefault(identity.rank, (identity, []))[1].extend(events)
    view = step_view.of(frame.from_events(pairs.values()), 6)
    path = view.path()
    found = view.what_if(path, {r: r // tp % pp for r in pairs})
    assert found is not None
    here = view.bounds.step == 6
    observed = view.bounds.end_ns[here].max() - view.bounds.begin_ns[here].min()
    blur = 2 * int(view.aligned.clocks.error_ns.max()) + 1000
    assert abs(found.observed_ns - observed) <= blur
    assert sum(s.end_ns - s.start_ns for s in path) == observed
    every = [*found.ranks.values(), *found.stages.values(), *found.phases.values(), found.all_normal_ns]
    assert all(0 <= value <= found.observed_ns + 1 for value in every)
    assert found.all_normal_ns <= min(found.ranks.values()) + 1


def test_normal_leaves_the_rank_itself_out() -> None:
    rank, kind = np.array([0, 1, 2, 0, 1, 2, 3]), np.array([0, 0, 0, 0, 0, 0, 1])
    values = np.array([10.0, 20.0, 90.0, 12.0, 22.0, 94.0, 7.0])
    assert replay.normal(values, kind, rank).tolist() == [20.0, 10.0, 10.0, 20.0, 10.0, 10.0, 7.0]
