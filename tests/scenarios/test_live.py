"""One fault, one verdict: the live pipeline over simulated jobs, and its silence over healthy ones."""

from __future__ import annotations

import pytest
from whole_backend import House

from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.nouns import IncidentStatus

SMALL = Shape(dp=4, steps=130, forward_ms=20, backward_ms=40, data_ms=2, optimizer_ms=3, transfer_ms=5,
              checkpoint_every=40, checkpoint_ms=90, jitter=0.05)  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "category", "rank"),
    [
        ("slow_compute", "slow_compute", 2),
        ("slow_backward", "slow_compute", 2),
        ("thermal", "thermal_throttle", 2),
        ("slow_data", "data_stall", 2),
        ("bad_batch", "bad_batch", 2),
        ("lr_jump", "lr_misconfigured", None),
        ("nonfinite", "nonfinite_values", 2),
        ("overflow", "fp16_overflow", 2),
        ("out_of_memory", "out_of_memory", 2),
        ("memory_leak", "memory_leak", 2),
        ("checkpoint_stall", "checkpoint_stall", 2),
        ("replica_divergence", "replica_divergence", 2),
        ("hang", "rank_hung", 2),
        ("crash", "rank_crashed", 2),
    ],
)
def test_the_fault_is_named(house: House, fault: str, category: str, rank: int | None) -> None:
    house.play(simulate(SMALL, ((fault, 2, 60),), seed=3, name="j"), evaluate_every=15)

    report = house.report("j")

    assert not report.healthy
    cause = report.incidents[0].causes[0]
    assert (cause.category.value, cause.subject.rank) == (category, rank), report.verdict
    assert cause.since_step is not None
    assert abs(cause.since_step - 60) <= 40
    assert cause.evidence
    assert cause.remedy.says


PARALLEL = Shape(dp=4, pp=2, tp=2, steps=130, forward_ms=40, backward_ms=60, jitter=0.05)
SHARDED = Shape(dp=4, tp=4, steps=130, forward_ms=40, backward_ms=60, jitter=0.05)


@pytest.mark.parametrize(
    ("shape", "fault", "category", "rank"),
    [
        (PARALLEL, "slow_compute", "slow_compute", 5),
        (PARALLEL, "slow_data", "data_stall", 5),
        (PARALLEL, "thermal", "thermal_throttle", 5),
        (PARALLEL, "gc_pause", "gc_pause", 5),
        (PARALLEL, "sequence_imbalance", "sequence_imbalance", None),
        (PARALLEL, "hang", "rank_hung", 5),
        (SHARDED, "slow_compute", "slow_compute", 5),
        (SHARDED, "slow_backward", "slow_compute", 5),
        (SHARDED, "hang", "rank_hung", 5),
    ],
)
def test_the_fault_is_named_among_ranks_that_share_a_model(
    house: House, shape: Shape, fault: str, category: str, rank: int | None
) -> None:
    house.play(simulate(shape, ((fault, 5, 60),), seed=3, name="j"), evaluate_every=30)
    report = house.report("j")
    assert report.incidents, "nothing was seen"
    cause = report.incidents[0].causes[0]
    assert (cause.category.value, cause.subject.rank) == (category, rank), report.verdict
    assert abs((cause.since_step or 0) - 60) <= 40


def test_of_pipeline_stages_that_nothing_tells_apart_the_copy_is_named_as_a_lead(house: House) -> None:
    house.play(simulate(PARALLEL, (("slow_backward", 5, 60),), seed=3, size=1.6, name="j"), evaluate_every=30)
    cause = house.report("j").incidents[0].causes[0]
    assert (cause.category.value, cause.subject.rank) == ("slow_compute", None)
    assert "5" in str(cause.subject.group)
    assert cause.confidence < 0.75
    assert "who enters them last" in " ".join(cause.needs)


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_job_of_shared_models_raises_nothing(house: House, seed: int) -> None:
    house.play(simulate(PARALLEL, (), seed=seed, distract=True, name="j"), evaluate_every=30)
    assert house.control.incidents("j") == []


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_job_raises_nothing(house: House, seed: int) -> None:
    house.play(simulate(SMALL, (), seed=seed, distract=True, name="j"), evaluate_every=10)

    assert house.control.incidents("j") == []
    report = house.report("j")
    assert report.healthy
    assert report.incidents == ()
    assert report.ranks_seen == report.ranks_expected == 4


def test_one_fault_is_one_incident_however_often_it_is_evaluated(house: House) -> None:
    house.play(simulate(SMALL, (("slow_compute", 1, 50),), seed=5, name="j"), evaluate_every=4)
    for _ in range(3):
        house.runner.evaluate("j", 0)

    saved = house.control.incidents("j")
    assert len(saved) == 1
    incident = saved[0].incident
    assert incident.status is IncidentStatus.DIAGNOSED
    assert incident.ledger["onset"] < incident.ledger["detected"] <= incident.ledger["diagnosed"]
    assert [i.id for i in house.report("j").incidents] == [incident.id]


def test_a_restarted_server_goes_on_with_the_incident_it_knew(house: House) -> None:
    from lanterne.backend.pipeline import LiveRunner

    house.play(simulate(SMALL, (("slow_data", 3, 50),), seed=6, name="j"), evaluate_every=20)
    before = house.control.incidents("j")
    again = LiveRunner(house.store, house.control, house.settings, clock=house.clock)
    again.evaluate("j", 0)

    assert [r.incident.id for r in house.control.incidents("j")] == [r.incident.id for r in before]
    waits = house.store.rows("SELECT count(*) AS n, count(DISTINCT (group_name, group_sequence, rank)) AS d FROM waits")
    assert waits[0]["n"] == waits[0]["d"] > 0


def test_a_dismissed_incident_stays_dismissed(house: House) -> None:
    house.play(simulate(SMALL, (("slow_compute", 1, 50),), seed=5, name="j"), evaluate_every=30)
    incident = house.control.incidents("j")[0].incident
    house.control.set_incident_status(incident.id, IncidentStatus.DISMISSED)
    house.runner.evaluate("j", 0)

    assert house.control.incidents("j")[0].incident.status is IncidentStatus.DISMISSED
    assert house.report("j").healthy


def test_the_graph_of_an_incident_names_its_cause(house: House) -> None:
    house.play(simulate(SMALL, (("slow_compute", 1, 50),), seed=5, name="j"), evaluate_every=0)
    incident = house.control.incidents("j")[0].incident

    graph = house.control.graph(incident.id)

    assert graph is not None
    assert any(node["role"] == "cause" and node["rank"] == 1 for node in graph["nodes"])
    assert graph["edges"]
