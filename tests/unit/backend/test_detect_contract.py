"""The contract's service rules: at the threshold, beyond it, and where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import event, facts, series

from lanterne.backend.detect import contract, precision
from lanterne.backend.detect.contract import Absence, absence
from lanterne.causal.facts import Facts

RNG = np.random.default_rng(5)


def test_liveness_over_sixty_samples() -> None:
    low = np.full(70, 0.998)
    assert contract.liveness(low[:59]) is None
    assert contract.liveness(np.append(low, np.nan)) is None
    back = np.append(low, 1.0)
    hole = np.where(np.arange(70) == 40, np.nan, low)
    found = [contract.liveness(x) for x in (low, back, hole, np.ones(60))]
    assert [r is not None and r.broken for r in found] == [True, False, False, False]


def test_checkpoint_success_of_the_last_five_minutes() -> None:
    saved = [event("checkpoint_saved", r, 190) for r in range(4)]
    damaged = event("checkpoint_verified", 1, 195, ok=False)
    sound, spoiled = (
        contract.checkpoint_success(facts(series(), saved)),
        contract.checkpoint_success(facts(series(), [*saved, damaged])),
    )
    assert sound is not None
    assert spoiled is not None
    assert (sound.broken, spoiled.broken, spoiled.value) == (False, True, 0.75)
    assert contract.checkpoint_success(facts(series())) is None
    old = facts(series(400, step_ms=3000.0), [*saved, damaged])  # the events lie twenty minutes back
    assert contract.checkpoint_success(old) is None


@pytest.mark.parametrize(
    ("silent_s", "step", "state"),
    [(0.5, 100, Absence.PRESENT), (2.9, 96, Absence.PRESENT), (3.0, 100, Absence.SILENT), (0.5, 95, Absence.BEHIND)],
)
def test_the_two_ways_to_be_away(silent_s: float, step: int, state: Absence) -> None:
    assert absence(silent_s, step, 100) is state


def test_leak_drift_against_the_healthy_windows() -> None:
    level = 2e9 + RNG.normal(0, 2e6, 241)
    steady = contract.leak_drift(level)
    leaking = contract.leak_drift(level + np.where(np.arange(241) > 220, (np.arange(241) - 220) * 1e7, 0.0))
    assert steady is not None
    assert leaking is not None
    assert (steady.broken, leaking.broken) == (False, True)
    assert contract.leak_drift(level[:200]) is None
    always = contract.leak_drift(
        2e9 + np.arange(241, dtype=np.float64) * np.float64(3e6)
    )  # grows as it always did: the fit detector's matter
    assert always is not None
    assert not always.broken


def test_downgrade_needs_underflow_and_a_falling_spread() -> None:
    falling, level = np.linspace(1.0, 0.4, 40), np.ones(40)
    for share, std, broken in ((0.08, falling, True), (0.08, level, False), (0.03, falling, False)):
        found = contract.downgrade(np.full(40, share), std)
        assert found is not None
        assert found.broken is broken
    assert contract.downgrade(np.full(5, 0.1), falling[:5]) is None


def test_return_levels_by_format() -> None:
    for name, low, high in (("fp16", 5e-5, 2e-4), ("e4m3", 4e-3, 6e-3)):
        below, above = contract.may_return(name, np.full(8, low)), contract.may_return(name, np.full(8, high))
        assert below is not None
        assert above is not None
        assert (below.broken, above.broken) == (False, True)
        assert contract.may_return(name, np.full(5, 0.0)) is None


def precise(*, scaler: bool, underflow: float, falls: bool) -> Facts:
    found = series(400)
    rows = np.arange(400) % 32 == 0
    spread = np.linspace(1.0, 0.4 if falls else 1.0, 400)[:, None] * np.ones((1, 4))
    values = {"fp16_underflow": underflow, "fp16_overflow": 0.0, "e4m3_underflow": 0.2, "e4m3_overflow": 0.0}
    found |= {name: np.where(rows[:, None], v, np.nan) * np.ones((1, 4)) for name, v in values.items()}
    found["grad_std"] = np.where(rows[:, None], spread, np.nan)
    if not scaler:
        del found["loss_scale"]
    return facts(found)


@pytest.mark.parametrize(
    ("run", "rules"),
    [
        (precise(scaler=True, underflow=0.08, falls=True), [("precision_downgrade", True)]),
        (precise(scaler=True, underflow=0.08, falls=False), [("precision_downgrade", False)]),
        (precise(scaler=True, underflow=0.01, falls=True), [("precision_downgrade", False)]),
        (precise(scaler=False, underflow=0.08, falls=True), []),
        (precise(scaler=False, underflow=0.0, falls=True), [("fp16_return", False)]),
        (facts(series()), []),
    ],
)
def test_formats_are_ruled_from_samples_of_the_gradients(run: Facts, rules: list[tuple[str, bool]]) -> None:
    assert [(r.rule, r.broken) for r in precision.rulings(run)] == rules


@pytest.mark.parametrize(
    ("calls", "count"),
    [
        (["scale", "backward", "unscale", "clip", "step", "update"], 0),
        (["scale", "backward", "step", "update"], 0),
        (["backward", "optimizer_step"], 0),
        (["backward", "clip", "optimizer_step"], 0),
        (["scale", "backward_in_autocast", "step", "update"], 1),
        (["backward", "step", "update"], 1),
        (["scale", "backward", "clip", "step", "update"], 1),
        (["scale", "backward", "clip", "unscale", "step", "update"], 1),
        (["scale", "backward", "step"], 1),
        (["scale", "backward", "optimizer_step"], 1),
    ],
)
def test_scaler_misuse(calls: list[str], count: int) -> None:
    assert len(contract.scaler_misuse(calls)) == count
