"""Simulated jobs that are no laboratory: rough noise, skewed clocks, silent ranks, spells that end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._causal_cases import Case, double, healthy, right, single
from lanterne.causal import diagnose, scoring
from lanterne.nouns import Anomaly, Cause, Severity, Subject


def causes_of(case: Case) -> list[Cause]:
    return list(diagnose(case.facts(case.job())).causes)


def case(kind: str, rank: int = 21, onset: int = 120, layout: str = "dp", **rest: object) -> Case:
    return Case(ranks=64, layout=layout, faults=((kind, rank, onset),), seed=7, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("found", list(healthy(range(40, 43))), ids=lambda c: f"{c.layout}-{c.seed}")
def test_a_rough_but_healthy_job_is_left_in_peace(found):
    assert causes_of(found) == []


@pytest.mark.parametrize("found", list(double(range(50, 52))), ids=lambda c: "+".join(f[0] for f in c.faults))
def test_two_faults_at_once_are_both_named(found):
    job = found.job()
    causes = diagnose(found.facts(job)).causes
    assert all(any(right(c, t) for c in causes[:3]) for t in job.truths)


def test_a_repair_saves_what_the_fault_really_cost():
    faulty = case("slow_compute", size=0.25)
    job, well = faulty.job(), replace(faulty, faults=()).job()
    rows = np.arange(120, 300)
    rows = rows[(job.series["eval_ms"][rows].max(1) == 0) & (job.series["checkpoint_ms"][rows].max(1) == 0)]
    lost = float((np.median(job.series["step_ms"][rows], 1) - np.median(well.series["step_ms"][rows], 1)).mean())
    cause = diagnose(faulty.facts(job)).causes[0]
    assert right(cause, job.truths[0])
    assert cause.cost.saving_ms_per_step == pytest.approx(lost, rel=0.5)


def test_a_silent_member_does_not_hide_a_slow_backward():
    found = case("slow_backward", missing=0.1)
    assert right(causes_of(found)[0], found.job().truths[0])


@pytest.mark.parametrize("layout", ["dp", "dp_pp"])
def test_no_innocent_is_claimed_where_the_culprit_is_silent(layout):
    found = case("slow_compute", layout=layout)
    job = found.job()
    job.silent = (21,)
    causes = diagnose(found.facts(job)).causes
    assert all(c.confidence < scoring.CLAIM for c in causes)
    assert all("silent" in c.needs[0] for c in causes)


def test_a_spell_that_is_over_is_named_with_its_end():
    found = case("slow_link", heal_after=50)
    cause = causes_of(found)[0]
    assert right(cause, found.job().truths[0])
    assert cause.since_step == pytest.approx(120, abs=3)
    assert "it is over: since step 1" in cause.evidence[-1].says


def test_a_checkpoint_that_stalls_from_the_first_one_on_is_judged_by_its_peers():
    found = case("checkpoint_stall", onset=45)
    cause = causes_of(found)[0]
    assert right(cause, found.job().truths[0])
    assert "its peers'" in cause.evidence[0].says


def test_memory_that_fills_a_cache_and_levels_off_is_no_leak(small):
    job = small(steps=60)
    job.series["rss_bytes"] += 1.5e9 * (1 - np.exp(-np.arange(60) / 15))[:, None]
    assert diagnose(job.facts()).causes == ()
    job.series["rss_bytes"][:, 1] += 6e7 * np.arange(60)
    assert diagnose(job.facts()).causes[0].subject.rank == 1


def test_a_container_that_fills_while_the_ranks_stay_small_is_not_the_jobs_leak(small):
    job = small(steps=120)
    job.series["cgroup_bytes"] = np.repeat(1.5e9 + 3e6 * np.arange(120.0)[:, None], 4, 1)
    assert diagnose(job.facts()).causes == ()
    job.series["rss_bytes"] += 0.75e6 * np.arange(120.0)[:, None]
    assert diagnose(job.facts()).causes[0].category.value == "memory_leak"


def test_ranks_that_told_a_finite_gradient_clear_the_silent_ones():
    found = next(iter(single(range(501, 502), kinds=("nonfinite",))))
    assert found.missing > 0
    assert right(causes_of(found)[0], found.job().truths[0])


def test_a_fault_that_heals_leaves_the_rows_after_it_as_they_were():
    healing, well = case("slow_data", heal_after=20).job(), replace(case("slow_data"), faults=()).job()
    assert healing.truths[0].until == 140
    assert (healing.work["data"][120:140, 21] > 2 * well.work["data"][120:140, 21]).all()
    assert healing.work["data"][140:, 21].mean() < 2 * well.work["data"][140:, 21].mean()


def two(first: tuple[str, int, int], second: tuple[str, int, int], layout: str = "dp") -> Case:
    return Case(ranks=64, layout=layout, faults=(first, second), seed=7)


@pytest.mark.parametrize(
    "found",
    [
        two(("overflow", 26, 65), ("bad_batch", 57, 129)),
        two(("partition_imbalance", 0, 66), ("slow_data", 24, 116), "dp_tp_pp"),
    ],
    ids=["bad batch of another rank than overflows", "slow rank outside of the heavy stage"],
)
def test_a_fault_elsewhere_is_no_effect_of_the_first(found):
    job = found.job()
    causes = diagnose(found.facts(job)).causes
    assert [any(right(c, t) for c in causes) for t in job.truths] == [True, True]


def test_scattered_token_counts_are_no_heavy_stage_and_no_single_ranks_fault():
    causes = causes_of(replace(case("sequence_imbalance", layout="dp_pp", onset=217), seed=7033))
    assert [(c.category, c.subject.rank) for c in causes] == [("sequence_imbalance", None)]


def test_a_rank_that_gets_slower_bit_by_bit_began_at_the_knee(small):
    job = small(ranks=8, steps=200)
    job.work["forward"][:, 3] *= 1 + np.clip((np.arange(200) - 80) / 60, 0, 2)
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank) == ("slow_compute", 3)
    assert cause.since_step == pytest.approx(80, abs=15)


def test_checkpoints_that_always_take_seconds_are_no_slow_storage(small):
    for steps in (range(19, 100, 20), [50]):
        job = small(ranks=4, steps=100)
        job.series["checkpoint_ms"] = np.zeros((100, 4))
        job.series["checkpoint_ms"][list(steps)] = 4000 * np.exp(
            np.random.default_rng(3).normal(0, 0.2, (len(steps), 4))
        )
        assert diagnose(job.facts()).causes == ()


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_rate_without_a_plan_is_only_blamed_where_it_rose(small, factor):
    job = small(ranks=4, steps=120)
    job.series.pop("lr_planned")
    job.series["lr"][60:] *= factor
    job.series["loss"][60:] += 2.0
    assert any(c.category == "lr_misconfigured" for c in diagnose(job.facts()).causes) == (factor > 1)


def test_a_graph_that_is_built_again_and_again_is_named(small):
    job = small(ranks=4, steps=120)
    job.series["compile_ms"] = np.zeros((120, 4))
    job.series["compile_ms"][:2] = 5000.0
    assert diagnose(job.facts()).causes == ()
    job.series["compile_ms"][40::9, 2] = 600.0
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == ("recompile", 2, 40)


def test_a_lead_that_wanders_for_no_recorded_reason_is_told_with_an_abstention(small):
    job = small(ranks=8, steps=200)
    job.work["forward"][80:] *= np.exp(np.random.default_rng(5).normal(0, 0.5, (120, 8)))
    seen = Anomaly(
        kind="step_time",
        subject=Subject(),
        first_step=80,
        last_step=199,
        score=9.0,
        severity=Severity.P2,
        says="steps are slow",
    )
    cause = diagnose(job.facts(), [seen]).causes[0]
    assert cause.category == "unknown"
    assert any("a different rank is last each time" in need for need in cause.needs)


def test_a_rank_that_tells_its_own_stall_clears_the_silent_ones():
    found = case("hang", rank=40, layout="dp_pp", missing=0.1)
    assert [(c.category, c.subject.rank) for c in causes_of(found)] == [("rank_hung", 40)]


def test_one_rank_that_stalls_a_checkpoint_is_named_beside_slow_storage():
    found = two(("storage_slow", 0, 110), ("checkpoint_stall", 44, 170))
    job = found.job()
    causes = diagnose(found.facts(job)).causes
    assert [any(right(c, t) for c in causes) for t in job.truths] == [True, True]


def test_of_two_replicas_that_differ_none_is_named():
    found = case("replica_divergence", rank=11, layout="dp_tp_pp")  # its replicas: ranks 27, 43 and 59
    job = found.job()
    assert right(diagnose(found.facts(job)).causes[0], job.truths[0])
    job.silent = (43, 59)
    cause = diagnose(found.facts(job)).causes[0]
    assert (cause.category, cause.subject.rank) == ("replica_divergence", None)
    assert cause.confidence < scoring.CLAIM


def test_an_overflow_of_one_rank_long_after_the_learning_rate_is_a_cause_of_its_own():
    found = two(("lr_jump", 0, 71), ("overflow", 1, 218))
    job = found.job()
    causes = diagnose(found.facts(job)).causes
    assert [any(right(c, t) for c in causes) for t in job.truths] == [True, True]


def test_checksums_of_bits_are_compared_to_the_bit(small):
    job = small(ranks=4, steps=100)
    sums = np.full((100, 4), np.nan)
    sums[::16] = float((1 << 52) - 12345)
    job.series["parameter_checksum"] = sums
    assert diagnose(job.facts()).causes == ()
    sums[64::16, 3] -= 1
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == ("replica_divergence", 3, 64)


def test_a_rank_that_is_slow_every_second_step_is_found_and_more_noise_is_not(small):
    job = small(ranks=8, steps=200)
    job.work["forward"][80::2, 5] += 40.0
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == ("slow_compute", 5, 80)
    noisy = small(ranks=8, steps=200)
    noisy.work["forward"][80:] *= np.exp(np.random.default_rng(1).normal(0, 0.25, (120, 8)))
    assert diagnose(noisy.facts()).causes == ()


def test_a_learning_rate_of_one_rank_alone_names_it(small):
    job = small(ranks=4, steps=100)
    job.series["lr"][60:, 2] *= 10
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == ("lr_misconfigured", 2, 60)


def test_a_late_rank_is_only_a_lead_where_the_wait_for_data_was_not_recorded():
    found = case("slow_data")
    facts = found.facts(found.job())
    poor = replace(facts, series={k: facts.series[k] for k in ("step_ms", "lateness_ms", "busy_ms", "wait_ms")})
    cause = diagnose(poor).causes[0]
    assert (cause.subject.rank, cause.confidence < scoring.CLAIM) == (21, True)
    assert "data_wait_ms" in cause.needs[0]


def test_nobody_is_claimed_where_all_are_last_by_turns_and_no_tokens_were_recorded():
    found = replace(case("sequence_imbalance"), seed=8101)
    facts = found.facts(found.job())
    poor = replace(facts, series={k: v for k, v in facts.series.items() if k != "tokens"})
    assert all(c.confidence < scoring.CLAIM for c in diagnose(poor).causes)


def test_steps_whose_longest_phase_was_not_told_are_left_out(small):
    job = small(ranks=8, steps=200)
    job.work["forward"][80:, 3] *= 2.5
    series = dict(job.facts().series)
    gone = np.random.default_rng(2).random((200, 8)) < 0.15
    kept = {"step_ms": series["step_ms"], "data_wait_ms": series["data_wait_ms"]}
    kept["forward_ms"] = np.where(gone, np.nan, series["forward_ms"])
    causes = diagnose(job.facts(series=kept)).causes
    assert [(c.category, c.subject.rank) for c in causes] == [("slow_compute", 3)]


def test_a_loaded_host_slows_all_ranks_of_a_job_on_one_host():
    found = Case(ranks=8, layout="dp", faults=(("host_contention", 3, 150),), seed=9005)
    job = found.job()
    causes = diagnose(found.facts(job)).causes
    assert right(causes[0], job.truths[0])
    assert [c.category for c in causes] == ["host_contention"]


@pytest.mark.parametrize(("kind", "rank", "seed"), [("thermal", 7, 9001), ("gc_pause", 4, 9003)])
def test_a_fault_soon_after_the_start_of_a_long_window_keeps_its_upstream_cause(kind, rank, seed):
    found = Case(ranks=8, layout="dp", faults=((kind, rank, 45),), seed=seed)
    job = found.job()
    assert right(diagnose(found.facts(job)).causes[0], job.truths[0])


def test_ranks_that_slow_together_are_leads_where_their_hosts_are_unknown(small):
    job = small(ranks=12, steps=200)
    job.work["forward"][80:, 3:6] *= 2.2
    causes = diagnose(job.facts(places={})).causes
    assert causes
    assert {c.subject.rank for c in causes} <= {3, 4, 5}
    assert all(c.confidence < scoring.CLAIM and "became slower at the same step" in c.needs[0] for c in causes)
