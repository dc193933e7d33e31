"""The guards: what they learn, what they cut, what they leave alone."""

from __future__ import annotations

import math

import pytest
import torch

from lanterne.collector.guards import loss_scale
from lanterne.collector.guards.clipping import CurvatureClip, EmaClip, LayerClip, QuantileClip
from lanterne.errors import UsageError


def parameter(size: int = 4) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(size))


def give(found: torch.nn.Parameter, norm: float) -> None:
    """A gradient of that L2 norm."""
    found.grad = torch.full_like(found, norm / math.sqrt(found.numel()))


def norm(found: torch.nn.Parameter) -> float:
    assert found.grad is not None
    return float(found.grad.norm())


GUARDS = {"layer": LayerClip, "ema": EmaClip, "quantile": QuantileClip}


@pytest.mark.parametrize("name", GUARDS)
def test_a_spike_is_cut_to_the_learned_bound_and_steady_gradients_pass(name: str) -> None:
    found = parameter()
    guard = GUARDS[name]([found])
    for step in range(40):
        give(found, 1.0 + 0.01 * (step % 5))
        assert not guard.clip().clipped
    give(found, 100.0)
    cut = guard.clip()
    assert cut.clipped
    assert cut.norm == pytest.approx(100.0)
    assert norm(found) == pytest.approx(cut.bound, rel=1e-4)
    assert cut.bound < 3.0


@pytest.mark.parametrize("name", GUARDS)
def test_a_gradient_that_is_not_finite_is_dropped_and_not_learned(name: str) -> None:
    found = parameter()
    guard = GUARDS[name]([found])
    for _ in range(20):
        give(found, 1.0)
        guard.clip()
    give(found, math.nan)
    assert guard.clip().clipped
    assert norm(found) == 0.0
    give(found, 50.0)
    assert guard.clip().bound < 3.0


def test_each_layer_has_its_own_bound() -> None:
    small, large = parameter(), parameter()
    guard = LayerClip([small, large])
    for _ in range(20):
        give(small, 0.01)
        give(large, 10.0)
        guard.clip()
    give(small, 1.0)
    give(large, 10.0)
    guard.clip()
    assert norm(small) < 0.02
    assert norm(large) == pytest.approx(10.0)


def test_what_the_quantile_guard_cut_is_given_back_within_the_bound() -> None:
    found = parameter()
    guard = QuantileClip([found], delay=2)
    for _ in range(40):
        give(found, 1.0)
        guard.clip()
    give(found, 1.8)
    bound = guard.clip().bound
    seen = []
    for _ in range(3):
        give(found, 1.0)
        guard.clip()
        seen.append(norm(found))
    owed = 1.8 - bound
    assert seen == pytest.approx([1.0 + owed / 2, 1.0 + owed / 2, 1.0], rel=1e-4)


def test_the_curvature_of_a_quadratic_is_found_and_bounds_the_step() -> None:
    found = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    curvatures = torch.tensor([1.0, 5.0, 40.0])
    guard = CurvatureClip([found], lambda: 0.1, iterations=30)
    assert guard.measure(lambda: 0.5 * (curvatures * found**2).sum()) == pytest.approx(40.0, rel=1e-3)
    found.grad = curvatures * found.detach()
    before = norm(found)
    assert guard.clip().clipped
    assert norm(found) == pytest.approx(before * 1.8 / 4.0, rel=1e-3)


def test_without_a_measured_curvature_nothing_is_cut() -> None:
    found = parameter()
    give(found, 1e6)
    assert not CurvatureClip([found], lambda: 1.0).clip().clipped


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="gamma"):
        EmaClip([parameter()], gamma=1.5)
    with pytest.raises(UsageError, match="quantile"):
        QuantileClip([parameter()], quantile=0.2)
    with pytest.raises(UsageError, match="warm_up"):
        LayerClip([parameter()], window=5, warm_up=10)


# --- loss scale ----------------------------------------------------------------------------------


def scaler(scale: float) -> torch.amp.GradScaler:
    found = torch.amp.GradScaler("cpu", init_scale=scale)
    found.scale(torch.ones(1))
    return found


def drive(forecast: loss_scale.ForecastScaler, gradient: float) -> float:
    """One step whose largest unscaled gradient is ``gradient``; returns the largest scaled one."""
    found = parameter()
    found.grad = torch.full_like(found, gradient * forecast.scaler.get_scale())
    seen = forecast.before_step([found])
    forecast.update()
    return seen


def test_rising_gradients_lower_the_scale_before_they_overflow() -> None:
    forecast = loss_scale.ForecastScaler(scaler(2.0**12))
    seen = [drive(forecast, 1.0 * 1.3**step) for step in range(40)]
    assert max(seen) < forecast.limit
    assert forecast.scaler.get_scale() < 2.0**12
    assert forecast.clip_factor < 1.0


def test_steady_gradients_leave_the_scale_and_let_it_grow_when_there_is_room() -> None:
    forecast = loss_scale.ForecastScaler(scaler(16.0), growth_interval=10)
    for _ in range(25):
        drive(forecast, 0.5)
    assert forecast.scaler.get_scale() == 64.0


def test_an_overflow_halves_the_scale() -> None:
    forecast = loss_scale.ForecastScaler(scaler(1024.0))
    drive(forecast, math.inf)
    assert forecast.scaler.get_scale() == 512.0


def test_theil_sen_is_not_moved_by_one_outlier() -> None:
    line = [0.5 * i for i in range(9)]
    assert loss_scale.slope([*line[:4], 100.0, *line[5:]]) == pytest.approx(0.5)
