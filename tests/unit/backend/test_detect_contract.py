"""The contract's service rules: at the threshold, beyond it, and where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detect_runs import event, facts, series

from lanterne.backend.detect import contract
from lanterne.backend.detect.contract import Absence, absence

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
    assert contract.may_return("float16", np.full(8, 5e-5))
    assert not contract.may_return("float16", np.full(8, 2e-4))
    assert contract.may_return("float8_e4m3", np.full(8, 4e-3))
    assert not contract.may_return("float8_e4m3", np.full(7, 0.0))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float8_e4m3", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
    ],
)  # fmt: skip
def test_shares_are_what_torch_s_cast_does(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    top, normal, least = contract.FORMAT_LIMITS[name]
    assert top == pytest.approx(info.max)
    assert normal == pytest.approx(info.tiny)
    x = np.array([least * 0.5, least * 0.51, least, 1.0, 0.0])
    kept = torch.tensor(x, dtype=torch.float64).to(dtype).to(torch.float64).numpy()
    assert contract.shares(x, name)[1] == pytest.approx(((kept == 0) & (x > 0)).mean())
    assert contract.shares(np.array([1.0, top, top * 1.5, np.inf]), name)[0] == 0.5


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
