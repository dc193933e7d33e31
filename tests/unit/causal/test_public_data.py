"""Public data: service incidents (PetShop, CC-BY-4.0) and production traces (StragglerAnalysis, Apache-2.0)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import _public
from lanterne.causal import Operations, rank_metrics, what_if
from lanterne.causal.counterfactual import cause_of, schedule_1f1b
from lanterne.nouns import CauseCategory

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("case", _public.petshop_cases(DATA / "petshop"), ids=lambda c: c.name)
def test_the_service_that_was_broken_ranks_first(case):
    ranked = rank_metrics(case.table, case.onset, case.edges, symptom=case.symptom)
    assert ranked[0].entity == case.truth
    assert ranked[0].path[-1] == "PetSite"


def test_the_call_graph_matters():
    case = _public.petshop_cases(DATA / "petshop")[0]
    backwards = [(b, a) for a, b in case.edges]
    assert rank_metrics(case.table, case.onset, backwards, symptom=case.symptom)[0].entity != case.truth


def test_a_heavy_last_stage_is_not_a_slow_worker():
    result = what_if(_public.straggler_operations(DATA / "straggler" / "trace-ST.parquet"))
    assert result.slowdown == pytest.approx(1.179, abs=0.01)  # published: 1.1787
    assert result.stage_share[3] == pytest.approx(1.219, abs=0.02)
    assert result.worker_share.max() == pytest.approx(0.031, abs=0.01)
    assert (result.worker, result.stage) == (None, 3)
    named = cause_of(result, {})
    assert named is not None
    assert named[0] is CauseCategory.PARTITION_IMBALANCE


def test_a_slow_worker_is_named_and_its_repair_wins_the_loss_back():
    rng = np.random.default_rng(0)
    forward, backward = (ms * np.exp(rng.normal(0, 0.02, (5, 4, 4, 8))) for ms in (10.0, 20.0))
    forward[:, 2, 1] *= 2
    backward[:, 2, 1] *= 2
    zero = np.zeros(5)
    operations = Operations(forward=forward, backward=backward, head=zero, sync=np.zeros((5, 4)), tail=zero)
    result = what_if(operations)
    assert result.worker == (2, 1)
    named = cause_of(result, {(2, 1): 9})
    assert named is not None
    assert named[1].rank == 9


def test_a_1f1b_step_without_jitter_has_its_textbook_length():
    stages, micro = 4, 8
    even = np.ones((1, 1, stages, micro))
    zero = np.zeros(1)
    operations = Operations(forward=even, backward=2 * even, head=zero, sync=np.zeros((1, stages)), tail=zero)
    assert what_if(operations).observed == pytest.approx((micro + stages - 1) * 3)
    assert len(schedule_1f1b(stages, micro)) == 2 * stages * micro


def test_broken_input_says_what_is_wrong():
    with pytest.raises(ValueError, match="one shape"):
        Operations(
            forward=np.ones((1, 1, 2, 2)),
            backward=np.ones((1, 1, 2, 3)),
            head=np.zeros(1),
            sync=np.zeros((1, 2)),
            tail=np.zeros(1),
        )
    with pytest.raises(ValueError, match="one length"):
        rank_metrics({"a": np.zeros(3), "b": np.zeros(4)}, 2)
    with pytest.raises(ValueError, match="onset 1 of 9"):
        rank_metrics({"a": np.zeros(9)}, 1)


def test_without_a_graph_and_onset_the_column_that_moved_first_is_found():
    rng = np.random.default_rng(1)
    table = {f"service{i}|latency": 10 + rng.normal(0, 0.2, 120) for i in range(12)}
    table["service7|latency"][80:] += 8
    assert rank_metrics(table)[0].entity == "service7"


def test_a_falling_hit_ratio_counts_and_a_rising_one_does_not():
    rng = np.random.default_rng(2)
    table = {f"s{i}|latency": 10 + rng.normal(0, 0.2, 60) for i in range(10)}
    table["cache|hit_ratio"] = 0.9 + rng.normal(0, 0.01, 60)
    table["cache|hit_ratio"][40:] -= 0.5
    best = rank_metrics(table, 40)[0]
    assert best.entity == "cache"
    assert "cache_miss_storm" in best.patterns
    table["cache|hit_ratio"][40:] += 0.6
    assert rank_metrics(table, 40)[0].entity != "cache"
