"""The out-of-memory predictors: the network is torch's, the advice is the contract's, the default is the winner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lanterne.backend.detect import oom
from lanterne.backend.detect.network import lstm_outputs
from lanterne.backend.detect.oom import Advice, Sample
from lanterne.errors import UsageError

GB = 1e9


def window(start: float, step: float, count: int = 10) -> list[Sample]:
    levels = [start + i * step for i in range(count)]
    return [Sample(allocated=x, reserved=x * 1.05, resident=x * 1.1, free=x * 0.05, largest_free=1e6) for x in levels]


def stacked(*windows: list[Sample]) -> NDArray[np.float64]:
    return np.stack([oom.raw(w) for w in windows])


def test_the_shipped_network_is_what_torch_computes() -> None:
    lstm, out = torch.nn.LSTM(oom.FEATURES, oom.HIDDEN, batch_first=True), torch.nn.Linear(oom.HIDDEN, 1)
    shipped = {k: torch.from_numpy(v).float() for k, v in oom.weights().items() if "curve" not in k}
    lstm.load_state_dict({k.removeprefix("lstm."): v for k, v in shipped.items() if k.startswith("lstm.")})
    out.load_state_dict({k.removeprefix("out."): v for k, v in shipped.items() if k.startswith("out.")})
    windows, limit = stacked(window(5 * GB, 1e7), window(7 * GB, 3e8), window(9 * GB, -1e8)), np.full(3, 10 * GB)
    x = oom.features(windows, limit)
    assert x.shape == (3, oom.SAMPLES, oom.FEATURES)
    with torch.no_grad():
        _, (last, _) = lstm(torch.from_numpy(x).float())
        expected = out(last[-1])[:, 0].numpy()
    np.testing.assert_allclose(lstm_outputs(oom.weights(), x)[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize("predictor", oom.PREDICTORS)
def test_a_fuller_device_is_never_safer(predictor: str) -> None:
    low, high = window(3 * GB, 0), window(9.9 * GB, 0)
    chance = oom.probability(stacked(low, high), np.full(2, 10 * GB), predictor=predictor)
    assert chance[0] < 0.05
    assert chance[1] > chance[0]


def test_growth_counts_for_the_line() -> None:
    windows = stacked(window(9.0 * GB, 0), window(8.1 * GB, 1e8))  # both end at 9 GB of 10
    still, growing = oom.probability(windows, np.full(2, 10 * GB), predictor="linear")
    assert growing > still
    assert oom.linear_level(windows, np.full(2, 10 * GB))[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("start", "step", "answer"),
    [(9.9, 0.0, "hold"), (9.0, 0.03, "hold"), (9.0, 0.2, "act"), (2.0, 0.02, "hold"), (9.9, -0.2, "hold")],
)
def test_the_trend_asks_for_growth_towards_the_limit(start: float, step: float, answer: str) -> None:
    found = oom.forecast(window(start * GB, step * GB), 10 * GB)
    assert found is not None
    assert found.advice == answer


def test_the_trend_of_a_restless_series_is_not_sure() -> None:
    steady, restless = window(9.0 * GB, 0.06 * GB), window(9.0 * GB, 0.06 * GB)
    restless = [replace(s, allocated=s.allocated + (-1) ** i * 0.5 * GB) for i, s in enumerate(restless)]
    sure, unsure = oom.trend(stacked(steady, restless), np.full(2, 10 * GB))
    assert sure > 0.9
    assert 0.1 < unsure < 0.7


@pytest.mark.parametrize(
    ("chance", "answer"),
    [(0.0, "hold"), (0.299, "hold"), (0.3, "reserve"), (0.699, "reserve"), (0.7, "act"), (1.0, "act")],
)
def test_the_three_answers(chance: float, answer: str) -> None:
    assert oom.advice(chance) == Advice(answer)


def test_a_forecast_needs_ten_samples_and_a_limit() -> None:
    assert oom.forecast(window(GB, 0, 9), 10 * GB) is None
    found = oom.forecast(window(GB, 0), 10 * GB)
    assert found is not None
    assert (found.advice, found.reserve_bytes) == (Advice.HOLD, 0.0)
    with pytest.raises(UsageError, match="limit"):
        oom.forecast(window(GB, 0), 0)
    with pytest.raises(UsageError, match="last_value"):
        oom.forecast(window(GB, 0), GB, predictor="oracle")
