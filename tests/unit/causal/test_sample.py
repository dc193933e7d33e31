"""Late ranks of a short sample from waits alone: clocks that tell, clocks that do not, and windows of other parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lanterne.causal import sample
from lanterne.causal.facts import FactEvent, Facts, Waits
from lanterne.nouns import CauseCategory

STEPS, RANKS = 5, 4


def _facts(late: np.ndarray, length: np.ndarray, error_ms: float, op: str = "allreduce") -> Facts:
    """``late``, ``length`` [steps, ranks] ms of one call a step; all of a call's time is told as waiting."""
    steps, ranks = late.shape
    step, rank = (x.reshape(-1) for x in np.meshgrid(np.arange(steps), np.arange(ranks), indexing="ij"))
    waits = Waits(
        group=(f"0-{ranks - 1}",), group_index=np.zeros(len(step), np.int64), sequence=step, step=step, rank=rank,
        bytes=np.full(len(step), 1024), lateness_ms=late.reshape(-1).astype(float),
        wait_ms=length.reshape(-1).astype(float), transfer_ms=np.ones(len(step)),
        error_ms=np.full(len(step), error_ms), op=(op,), op_index=np.zeros(len(step), np.int64),
    )  # fmt: skip
    series = {"step_ms": np.full(late.shape, 500.0), "wait_ms": length.astype(float)}
    return Facts(
        job="j", ranks=tuple(range(ranks)), steps=np.arange(steps), series=series, waits=waits, sources=("kineto",)
    )


def _behind(rank: int | None, by: float = 40.0) -> tuple[np.ndarray, np.ndarray]:
    """(lateness, length) with small noise, one rank last by ``by`` ms and so with the shortest call."""
    late = np.random.default_rng(5).random((STEPS, RANKS))
    if rank is not None:
        late[:, rank] += by
    return late, late.max(axis=1, keepdims=True) - late


def _named(facts: Facts) -> list[int | None]:
    return [one.rank for one in sample.late(facts)]


def test_a_late_rank_is_named_where_clocks_tell() -> None:
    late, length = _behind(2)
    (one,) = sample.late(_facts(late, length, 0.01))
    assert (one.rank, one.first, one.last) == (2, 0, STEPS - 1)
    assert one.saving_ms == pytest.approx(40, abs=2)
    assert one.needs  # nothing says what it did in that time


def test_durations_name_it_where_clocks_do_not_tell() -> None:
    _, length = _behind(2)
    assert _named(_facts(np.zeros((STEPS, RANKS)), length, 200.0)) == [2]


def test_nobody_is_named_where_durations_and_blurred_clocks_disagree() -> None:
    late, _ = _behind(1)
    _, length = _behind(2)
    (one,) = sample.late(_facts(late, length, 200.0))
    assert (one.rank, one.category) == (None, CauseCategory.UNKNOWN)
    assert "clocks" in one.needs[0]


def test_blurred_clocks_alone_blame_nobody() -> None:
    late, _ = _behind(1)
    _, length = _behind(None)
    assert _named(_facts(late, length, 200.0)) == []


def test_a_lead_that_wanders_is_no_late_rank() -> None:
    late, _ = _behind(None)
    late[np.arange(STEPS), np.arange(STEPS) % RANKS] += 80
    length = late.max(axis=1, keepdims=True) - late
    assert _named(_facts(late, length, 0.01)) == []
    assert _named(_facts(late, length, 200.0)) == []


def test_a_rank_late_in_one_step_only_is_left_alone() -> None:
    late, _ = _behind(None)
    late[0, 3] += 300
    assert _named(_facts(late, late.max(axis=1, keepdims=True) - late, 0.01)) == []


def test_half_of_the_ranks_behind_the_others_is_the_shape_of_the_job() -> None:
    late, _ = _behind(None)
    late[:, 2:] += 60
    assert _named(_facts(late, late.max(axis=1, keepdims=True) - late, 0.01)) == []


def test_stages_that_send_to_each_other_are_not_compared() -> None:
    late, length = _behind(3)
    facts = _facts(late, length, 0.01)
    told = [FactEvent(name="trace", rank=0, attributes={"pairwise": "0-1 1-2 2-3"})]
    assert _named(replace(facts, events=told)) == []
    assert _named(_facts(late, length, 0.01, op="send")) == []
    replicas = [FactEvent(name="trace", rank=0, attributes={"pairwise": "0,8"})]
    assert _named(replace(facts, events=replicas)) == [3]


def test_live_jobs_and_long_windows_are_left_to_the_others() -> None:
    late, length = _behind(2)
    facts = _facts(late, length, 0.01)
    assert _named(replace(facts, sources=("live",))) == []
    assert _named(_facts(np.tile(late, (50, 1)), np.tile(length, (50, 1)), 0.01)) == []
