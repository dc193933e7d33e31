"""Simulated jobs that are no laboratory: rough noise, skewed clocks, silent ranks, spells that end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._causal_cases import Case, double, healthy, right, single
from lanterne.causal import diagnose, scoring
from lanterne.nouns import Cause


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
