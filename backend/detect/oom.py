"""Will an allocation fail soon? Four predictors over the last ten samples of an allocator, one advice.

A window is ten samples of ``Sample`` at an even interval; the answer is the probability that allocated memory reaches
the limit within the next ten intervals (200 ms at the 20 ms of the seed contract). Below 0.3: hold; from 0.3: reserve
15% more; from 0.7: act. ``last_value`` and ``linear`` are logistic curves over one number, ``lstm`` a network of one
layer over twelve features; these are fitted by ``benchmarks/detect_oom.py`` on traces of real allocations taken every
20 ms. ``trend`` has no fitted number and knows no interval: the chance by the prediction error of the least-squares
line. It is the default, because the network must win on traces kept apart and does not (docs/detectors.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from lanterne.backend.detect.network import logistic, lstm_outputs
from lanterne.causal.facts import FloatArray
from lanterne.errors import UsageError

SAMPLES = 10
FEATURES = 12
HIDDEN = 16
HORIZON = 10
RESERVE_AT = 0.3
ACT_AT = 0.7
RESERVE_SHARE = 0.15
PREDICTORS = ("last_value", "linear", "lstm", "trend")
DEFAULT = "trend"
TREND_FLOOR = 0.002
"""Least standard error of a sample, as a share of the limit: a level that did not move is not known exactly."""
WEIGHTS = Path(__file__).with_name("oom_weights.npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at an allocator, bytes: in use, held from the system, of the process, held but free, largest free."""

    allocated: float
    reserved: float
    resident: float
    free: float
    largest_free: float


class Advice(StrEnum):
    HOLD = "hold"
    RESERVE = "reserve"  # 15% more than asked for
    ACT = "act"  # empty caches, shrink the micro-batch, save a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """``reserve_bytes``: what to hold back for the next allocations; 0 where nothing needs to be done."""

    probability: float
    advice: Advice
    reserve_bytes: float


def raw(samples: Sequence[Sample]) -> FloatArray:
    """Samples as [N, 5]: allocated, reserved, resident, free, largest free."""
    return np.array([[s.allocated, s.reserved, s.resident, s.free, s.largest_free] for s in samples], np.float64)


def features(windows: FloatArray, limit: FloatArray) -> FloatArray:
    """[B, 10, 5] bytes and [B] limits -> [B, 10, 12], all of order one: levels, their changes, spread and headroom."""
    x = windows / limit[:, None, None]
    change = np.diff(x[:, :, :3], axis=1, prepend=x[:, :1, :3])
    top = np.maximum.accumulate(x[:, :, 0], axis=1)
    low = np.minimum.accumulate(x[:, :, 0], axis=1)
    held = np.maximum(x[:, :, 1], 1e-9)
    return np.stack(
        [
            x[:, :, 0], x[:, :, 1], x[:, :, 2], x[:, :, 3] / held, x[:, :, 4], 10 * change[:, :, 0],
            10 * change[:, :, 1], 10 * change[:, :, 2], top, low, 1 - np.maximum(x[:, :, 0], x[:, :, 1]), top - low,
        ],
        axis=-1,
    )  # fmt: skip


def last_level(windows: FloatArray, limit: FloatArray) -> FloatArray:
    """[B] last allocated over limit."""
    return np.asarray(windows[:, -1, 0] / limit, np.float64)


def linear_level(windows: FloatArray, limit: FloatArray) -> FloatArray:
    """[B] where the least-squares line of allocated stands at the end of the horizon, over limit; the last at least."""
    y = windows[:, :, 0] / limit[:, None]
    t = np.arange(SAMPLES) - (SAMPLES - 1) / 2
    slope = (y @ t) / (t @ t)
    return np.asarray(np.maximum(y.mean(axis=1) + slope * (HORIZON + (SAMPLES - 1) / 2), y[:, -1]), np.float64)


def trend(windows: FloatArray, limit: FloatArray) -> FloatArray:
    """[B] chance that the line of allocated stands at the limit at the end of the horizon.

    Normal prediction error of a least-squares line: ``s^2 (1 + 1/n + t*^2 / sum t^2)``, ``t*`` counted from its middle.
    """
    y = windows[:, :, 0] / limit[:, None]
    t = np.arange(SAMPLES) - (SAMPLES - 1) / 2
    ahead = HORIZON + (SAMPLES - 1) / 2
    slope = (y @ t) / (t @ t)
    rest = y - y.mean(axis=1, keepdims=True) - slope[:, None] * t
    variance = np.maximum((rest**2).sum(axis=1) / (SAMPLES - 2), TREND_FLOOR**2)
    error = np.sqrt(variance * (1 + 1 / SAMPLES + ahead**2 / (t @ t)))
    return np.asarray(ndtr((y.mean(axis=1) + slope * ahead - 1) / error), np.float64)


@cache
def weights() -> Mapping[str, FloatArray]:
    """The fitted numbers of the predictors that have some, as the training script wrote them."""
    with np.load(WEIGHTS, allow_pickle=False) as found:
        return {name: found[name].astype(np.float64) for name in found.files}


def probability(
    windows: FloatArray, limit: FloatArray, *, predictor: str = DEFAULT, fitted: Mapping[str, FloatArray] | None = None
) -> FloatArray:
    """[B] probabilities of reaching the limit within the horizon, for [B, 10, 5] bytes and [B] limits.

    ``fitted``: numbers other than the shipped ones. Raises :class:`UsageError` for a predictor not in ``PREDICTORS``.
    """
    fitted = weights() if fitted is None else fitted
    if predictor == "lstm":
        return logistic(lstm_outputs(fitted, features(windows, limit))[:, 0])
    if predictor not in PREDICTORS:
        raise UsageError(f"oom: {predictor!r} is not one of {', '.join(PREDICTORS)}")
    if predictor == "trend":
        return trend(windows, limit)
    level = (last_level if predictor == "last_value" else linear_level)(windows, limit)
    slope, offset = fitted[f"{predictor}.curve"]
    return logistic(slope * level + offset)


def advice(chance: float) -> Advice:
    """The contract's three answers."""
    if chance >= ACT_AT:
        return Advice.ACT
    return Advice.RESERVE if chance >= RESERVE_AT else Advice.HOLD


def forecast(samples: Sequence[Sample], limit_bytes: float, *, predictor: str = DEFAULT) -> Forecast | None:
    """Advice from the last ten samples; None with fewer. Raises :class:`UsageError` for a limit not above 0."""
    if not limit_bytes > 0:
        raise UsageError(f"oom: a limit of {limit_bytes} bytes; give the bytes that the allocator may use")
    if len(samples) < SAMPLES:
        return None
    window = raw(samples[-SAMPLES:])[None]
    chance = float(probability(window, np.array([limit_bytes]), predictor=predictor)[0])
    chosen = advice(chance)
    reserve = RESERVE_SHARE * samples[-1].allocated if chosen is not Advice.HOLD else 0.0
    return Forecast(probability=chance, advice=chosen, reserve_bytes=reserve)
