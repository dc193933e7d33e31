"""Who is slow and why: the right rank, phase, onset and cost, and silence where nothing stands out."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.causal import diagnose
from lanterne.nouns import Anomaly, CauseCategory, Severity, Subject


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", [0.02, 0.25])
def test_a_healthy_job_has_no_cause(small, named, seed, noise):
    diagnosis = diagnose(small(seed=seed, noise=noise).facts())
    assert named(diagnosis.causes) == []
    assert diagnosis.kind == "none"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_slow_rank_is_named_in_either_phase(small, phase):
    job = small(seed=1)
    job.work[phase][40:, 2] += 60
    diagnosis = diagnose(job.facts())
    cause = diagnosis.causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.SLOW_COMPUTE, 2, 40)
    assert cause.confidence >= 0.9
    # a step was about 72 ms and is 60 ms longer: (72 + 60) / 72
    assert cause.cost.slowdown == pytest.approx(1.83, abs=0.12)
    assert cause.cost.saving_ms_per_step == pytest.approx(60, abs=4)
    assert {s.subject.rank for s in diagnosis.symptoms} == {0, 1, 3}


@pytest.mark.parametrize(("busy", "says"), [(90.0, "its device worked 90 ms"), (21.0, "lost on the host")])
def test_traced_kernels_tell_device_from_host(small, busy, says):
    job = small(ranks=4)
    job.work["forward"][40:, 2] += 60
    for step in (20, 60, 80):
        for rank in range(4):
            ms = busy if rank == 2 and step >= 40 else 20.0
            job.event("kernels", rank, step, device_ms=ms, longest="gemm", longest_ms=ms / 2)
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category.value, cause.subject.rank) == ("slow_compute", 2)
    told = [e for e in cause.evidence if e.ref == "cuda.kernel step 80"]
    assert [(e.value, e.baseline) for e in told] == [(busy, 20.0)]
    assert says in told[0].says
    assert "gemm" in told[0].says


def test_equal_backward_times_do_not_hide_a_slow_backward(small):
    job = small(seed=2, noise=0.01)
    job.work["backward"][50:, 1] += 40
    facts = job.facts()
    seen = facts.series["backward_ms"][50:].mean(0)
    assert np.ptp(seen) < 0.03 * seen.mean(), "the host sees the same backward time on every rank"
    assert diagnose(facts).causes[0].subject.rank == 1


def test_waiting_for_data_is_a_data_stall(small, named):
    job = small(seed=3)
    job.work["data"][30:, 3] += 50
    assert named(diagnose(job.facts()).causes) == [("data_stall", 3)]


def test_most_ranks_waiting_for_data_is_nobodys_fault(small, named):
    job = small(seed=3)
    job.work["data"][30:] += 50
    assert named(diagnose(job.facts()).causes) == [("data_stall", None)]


def test_garbage_collection_explains_the_pauses(small):
    job = small(seed=4)
    pause = np.zeros((100, 4))
    pause[30::5, 0] = 90
    job.work["forward"] += pause
    job.series["gc_ms"] = pause
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.GC_PAUSE, 0, 30)
    assert any("garbage collection" in e.says and e.unit == "ms" for e in cause.evidence)


def test_pauses_without_an_explanation_stay_a_lead(small):
    job = small(seed=4)
    job.work["forward"][30::5, 0] += 90
    causes = diagnose(job.facts()).causes
    assert all(c.confidence < 0.7 for c in causes)


def test_a_hot_device_is_throttled_and_a_cool_one_is_only_slow(small):
    found = {}
    for hottest in (91.0, 70.0):
        job = small(seed=5, ranks=8)
        rng = np.random.default_rng(1)
        heat = 60 + rng.normal(0, 0.5, (100, 8))
        clock = 1700 + rng.normal(0, 3, (100, 8))
        heat[40:, 5] = hottest + rng.normal(0, 0.5, 60)
        clock[40:, 5] *= 0.7
        for phase in ("forward", "backward"):
            job.work[phase][40:, 5] /= 0.7
        job.series |= {"gpu_temperature_c": heat, "gpu_clock_mhz": clock}
        found[hottest] = diagnose(job.facts()).causes[0]
    assert found[91.0].category is CauseCategory.THERMAL_THROTTLE
    assert found[70.0].category is CauseCategory.SLOW_COMPUTE
    assert any("clock" in e.says for e in found[70.0].evidence)
    assert {c.subject.rank for c in found.values()} == {5}


def test_a_busy_host_is_named_not_one_of_its_ranks(small):
    job = small(seed=6, ranks=16, hosts=4)
    extra = np.abs(np.random.default_rng(2).normal(25, 5, (60, 4)))
    job.work["forward"][40:, 4:8] += extra
    cpu = 40 + np.random.default_rng(3).normal(0, 2, (100, 16))
    cpu[40:, 4:8] += 50
    job.series["host_cpu_percent"] = cpu
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.subject.host) == (CauseCategory.HOST_CONTENTION, None, "node1")


def test_a_straggler_behind_a_bigger_one_is_found_too(small, named):
    job = small(seed=7, ranks=8)
    job.work["forward"][40:, 1] += 60
    job.work["data"][40:, 6] += 30
    found = diagnose(job.facts()).causes
    assert named(found) == [("slow_compute", 1), ("data_stall", 6)]
    assert any("hidden behind" in e.says for e in found[1].evidence)


def test_a_slow_link_is_not_a_slow_rank(small, named):
    job = small(seed=8)
    job.transfer[40:] += 50
    queue = np.random.default_rng(4).integers(0, 2000, (100, 4)).astype(float)
    queue[40:, 1] += 400_000
    job.series["send_queue_bytes"] = queue
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.SLOW_LINK, 1, 40)
    del job.series["send_queue_bytes"]
    blind = diagnose(job.facts()).causes[0]
    assert (blind.category, blind.subject.rank, blind.subject.group) == (CauseCategory.SLOW_LINK, None, "0-3")
    assert blind.needs
    assert blind.confidence < cause.confidence


def test_a_busy_machine_is_not_a_slow_link(small, named):
    job = small(seed=9)
    job.transfer[40:] *= 2.2
    for phase in ("data", "forward", "backward"):
        job.work[phase][40:] *= 2
    assert named(diagnose(job.facts()).causes) == []


def test_uneven_tokens_blame_nobody(small, named):
    job = small(seed=10, ranks=8)
    scale = np.exp(np.random.default_rng(5).normal(0, 0.3, (60, 8)))
    for phase in ("forward", "backward"):
        job.work[phase][40:] *= scale
    tokens = np.full((100, 8), 4096.0)
    tokens[40:] *= scale
    job.series["tokens"] = tokens
    assert named(diagnose(job.facts()).causes) == [("sequence_imbalance", None)]


def test_a_heavy_pipeline_stage_is_partition_imbalance(small, named):
    job = small(seed=11, ranks=8, mesh=lambda r: {"dp_replicate": r // 4, "pp": r % 4})
    for phase in ("forward", "backward"):
        job.work[phase][:, 3::4] *= 1.5
    assert named(diagnose(job.facts()).causes)[0] == ("partition_imbalance", None)


def test_checkpoints_are_compared_with_checkpoints(small, named):
    job = small(seed=12)
    saving = np.zeros((100, 4))
    saving[9::10] = 400
    job.series["checkpoint_ms"] = saving
    facts = job.facts()
    facts.series["step_ms"][9::10] += 400  # type: ignore[index]
    assert named(diagnose(facts).causes) == []


def test_missing_ranks_and_missing_steps_do_not_break_the_answer(small):
    job = small(seed=13, ranks=8)
    job.work["forward"][40:, 2] += 60
    facts = job.facts()
    for name in ("lateness_ms", "busy_ms", "forward_ms", "wait_ms"):
        facts.series[name][::7, 4] = np.nan
        facts.series[name][60:70] = np.nan
    cause = diagnose(facts).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.SLOW_COMPUTE, 2, 40)


def test_two_ranks_are_enough_to_tell_with_less_confidence(small):
    job = small(seed=14, ranks=2)
    job.work["forward"][40:, 1] += 60
    pair = diagnose(job.facts()).causes[0]
    assert pair.subject.rank == 1
    assert pair.confidence < 0.9


def test_an_alarm_without_a_cause_is_an_abstention(small):
    alarm = Anomaly(
        kind="straggler",
        subject=Subject(rank=1),
        severity=Severity.P2,
        first_step=5,
        last_step=9,
        score=3.0,
        says="rank 1 is late",
    )
    facts = small(steps=8).facts()
    diagnosis = diagnose(facts, [alarm])
    (cause,) = diagnosis.causes
    assert cause.category is CauseCategory.UNKNOWN
    assert cause.confidence == 0.0
    assert any("comparable steps" in n for n in cause.needs)
    assert "cannot tell" in diagnosis.verdict


def test_facts_of_the_wrong_shape_are_refused_by_name(small):
    facts = small().facts()
    facts.series["loss"] = np.zeros((3, 4))  # type: ignore[index]
    with pytest.raises(ValueError, match="'loss' has shape"):
        diagnose(facts)


def test_nothing_known_is_no_cause():
    from lanterne.causal import Facts

    assert diagnose(Facts(job="empty")).causes == ()


def test_the_graph_leads_from_the_cause_to_the_symptom(small):
    import networkx as nx

    job = small(seed=1)
    job.work["data"][40:, 2] += 60
    job.series["loader_ms"] = job.work["data"] * 3
    diagnosis = diagnose(job.facts())
    graph = nx.DiGraph([(e.source, e.target) for e in diagnosis.edges if not e.refused])
    assert nx.shortest_path(graph, "data_stall@rank 2", "step time") == [
        "data_stall@rank 2", "loader_ms@rank 2", "data_wait_ms@rank 2", "own_ms@rank 2", "step time",
    ]  # fmt: skip
    assert diagnosis.nodes["data_stall@rank 2"]["role"] == "cause"
    assert all(e.says for e in diagnosis.edges)


def test_the_same_facts_give_the_same_diagnosis(small):
    job = small(seed=3)
    job.work["data"][30:, 3] += 50
    assert diagnose(job.facts()) == diagnose(job.facts())
