"""Runs that must stay quiet: clean ones of many shapes, long checkpoints, resumes, rollbacks, empty windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect_runs import SHAPES, clean, event, facts, series

from lanterne.backend import detect
from lanterne.backend.detect import numerics
from lanterne.backend.detect.base import Levels
from lanterne.causal.facts import FactEvent, Facts
from lanterne.nouns import EventName

AT = 100


@pytest.mark.parametrize("shape", SHAPES)
def test_clean_runs_raise_nothing(shape: str) -> None:
    for seed in range(3):
        assert [(seed, a.kind, a.says) for a in detect.run(clean(shape, seed))] == []


def test_a_ten_minute_checkpoint_of_the_usual_length_is_quiet() -> None:
    found = series(300, step_ms=900.0)
    found["checkpoint_ms"] = np.zeros((300, 4))
    found["checkpoint_ms"][49::50] = 600_000.0
    found["step_ms"] += found["checkpoint_ms"]
    assert detect.run(facts(found)) == []


@pytest.mark.parametrize(
    ("rank", "others", "kinds"),
    [(2, 900.0, ["checkpoint_stall"]), (0, 900.0, []), (2, 0.0, []), (2, 9_000.0, [])],
)
def test_one_rank_that_saves_far_longer_than_all_others_is_told(rank: int, others: float, kinds: list[str]) -> None:
    found = series(300, step_ms=300.0)
    found["checkpoint_ms"] = np.zeros((300, 4))
    found["checkpoint_ms"][49::50] = others
    found["checkpoint_ms"][49::50, rank] = 12_900.0
    found["step_ms"][49::50] += 12_900.0
    assert [(a.kind, a.subject.rank) for a in detect.run(facts(found))] == [(kind, 2) for kind in kinds]


@pytest.mark.parametrize(("steps", "kinds"), [(30, []), (100, ["straggler"])])
def test_a_slowness_that_cost_less_than_half_a_second_is_a_hiccup(steps: int, kinds: list[str]) -> None:
    found = series(step_ms=3.0)
    found["lateness_ms"][AT : AT + steps, 2] += 8
    found["step_ms"][AT : AT + steps] += 8
    assert [a.kind for a in detect.run(facts(found))] == kinds


@pytest.mark.parametrize("told", [True, False])
def test_a_resumed_run_warms_up_as_well(told: bool) -> None:
    """Ten slow steps after a resume at step 5,000: compile and caches of rank 1, a scaler that settles."""
    found = series(60)
    found["lateness_ms"][:9, 1] += 900
    found["step_ms"][:9] += 900
    found["wait_ms"][:9] += 900
    said = [event("overflow", r, 5_000 + s, scale_after=2.0**s) for s in (1, 2, 4, 6) for r in range(4)]
    said += [event("attached", r, 5_000) for r in range(4)] if told else []
    run = replace(facts(found, said), steps=5_000 + np.arange(60))
    assert [(a.kind, a.says) for a in detect.run(run)] == []
    late = replace(
        run, events=[event("overflow", r, s, scale_after=1.0) for s in (5_020, 5_022, 5_024) for r in range(4)]
    )
    assert [a.kind for a in detect.run(late)] == ["overflow"]


def test_nothing_is_said_about_an_empty_window() -> None:
    assert detect.run(Facts(job="job")) == []
    assert detect.run(replace(facts(series(3)), ranks_expected=4)) == []


def test_the_loss_that_a_rollback_brings_back_is_no_spike_and_a_later_one_is() -> None:
    found = series(260)
    fall = 4.0 * np.exp(-np.arange(260) / 40)[:, None] + 0.3
    found["loss"] = fall + np.random.default_rng(1).normal(0, 0.01, (260, 1)) + np.zeros((1, 4))
    found["loss"][120:] = found["loss"][10:150]  # the parameters of step 10
    back = FactEvent(rank=0, step=120, name=EventName.COMMAND, attributes={"action": "rollback", "phase": "applied"})
    kinds = [a.kind for a in numerics.spikes(facts(found), Levels())]
    assert "loss_spike" in kinds  # nobody ordered it
    assert numerics.spikes(facts(found, [back]), Levels()) == []
    found["loss"][220] *= 12
    (spike,) = numerics.spikes(facts(found, [back]), Levels())
    assert (spike.kind, spike.first_step) == ("loss_spike", 220)
