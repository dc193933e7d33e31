"""Seasonal decomposition and the ranked list of what moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detect_runs import SHAPES, clean, facts, series

from lanterne.backend.detect import anomaly, learned
from lanterne.backend.detect.network import lstm_outputs
from lanterne.errors import UsageError


def periodic(every: int, height: float, *, steps: int = 400, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = 100 + rng.normal(0, 1, steps)
    x[every - 1 :: every] += height
    return x


@pytest.mark.parametrize("every", [10, 25, 50, 100])
def test_the_period_of_checkpoints_is_found(every: int) -> None:
    assert anomaly.period_of(periodic(every, 60.0)) == every


@pytest.mark.parametrize("seed", range(8))
def test_noise_has_no_period(seed: int) -> None:
    assert anomaly.period_of(periodic(1, 0.0, seed=seed)) is None


def test_what_repeats_is_taken_out_and_what_does_not_stays() -> None:
    x = periodic(50, 60.0)
    x[330:340] += 60.0  # not in turn
    rest, period = anomaly.deseasoned(x)
    assert period == 50
    assert np.abs(rest[49::50] - 100).max() < 12
    assert np.nanmax(anomaly.robust_z(rest)[330:340]) > 10
    assert np.nanmax(np.abs(anomaly.robust_z(rest)[100:330])) < 10


def test_the_series_that_moved_comes_first_with_its_rank_and_step() -> None:
    found = series(300)
    rng = np.random.default_rng(1)
    found["host_cpu_percent"] = 30 + rng.normal(0, 1, (300, 4))
    found["net_retries"] = 5 + rng.normal(0, 1, (300, 4))
    found["host_cpu_percent"][200:, 2] += 40
    found["net_retries"][200:] += 4
    best, *_ = anomaly.candidates(facts(found), 200)
    assert (best.series, best.rank, best.step) == ("host_cpu_percent", 2, 200)
    assert best.score > 20
    assert "of rank 2" in best.says


def test_a_job_that_moves_together_is_nobody_s() -> None:
    found = series(300)
    found["step_ms"][150:] *= 2
    found["backward_ms"][150:] *= 2
    moved = {c.series: c for c in anomaly.candidates(facts(found))}
    assert moved["step_ms"].rank is None
    assert abs(moved["step_ms"].step - 150) <= 2


@pytest.mark.parametrize("shape", ["periodic", "accumulation", "cosine"])
def test_step_times_of_healthy_shapes_do_not_move(shape: str) -> None:
    assert shape in SHAPES
    assert not {c.series for c in anomaly.candidates(clean(shape, 1))} & {"step_ms", "data_wait_ms", "lateness_ms"}


def test_the_learned_score_is_what_torch_computes() -> None:
    lstm, out = torch.nn.LSTM(2, 12, batch_first=True), torch.nn.Linear(12, 2)
    shipped = {k: torch.from_numpy(v).float() for k, v in learned.weights().items()}
    lstm.load_state_dict({k.removeprefix("lstm."): v for k, v in shipped.items() if k.startswith("lstm.")})
    out.load_state_dict({k.removeprefix("out."): v for k, v in shipped.items() if k.startswith("out.")})
    windows, following = learned.standardised(periodic(30, 40.0, steps=120))
    assert (windows.shape, following.shape) == ((70, learned.WINDOW, 2), (70,))
    with torch.no_grad():
        _, (last, _) = lstm(torch.from_numpy(windows).float())
        expected = out(last[-1]).numpy()
    np.testing.assert_allclose(lstm_outputs(learned.weights(), windows), expected, atol=1e-4)


@pytest.mark.parametrize("name", anomaly.SCORES)
def test_every_score_sees_a_shift_and_has_nothing_to_say_about_the_first_steps(name: str) -> None:
    score, x = anomaly.SCORES[name], np.random.default_rng(2).normal(100, 1, 200)
    quiet = np.abs(score(x))
    assert np.isnan(quiet[: anomaly.BEFORE]).all()
    x[150:] += 12
    assert np.abs(score(x))[150:153].max() > 2 * np.nanmax(quiet)
    assert np.isnan(score(x[:30])).all()


def test_a_trend_is_no_surprise_to_the_default() -> None:
    x = 0.3 * np.arange(200) + np.random.default_rng(3).normal(0, 1, 200)
    assert np.nanmax(np.abs(anomaly.SCORES[anomaly.DEFAULT_SCORE](x))) < anomaly.SIGMAS


def test_other_scores_are_refused() -> None:
    with pytest.raises(UsageError, match="detrended_z"):
        anomaly.candidates(facts(series()), score="oracle")
