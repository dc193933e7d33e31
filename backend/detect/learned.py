"""A learned score: how far a sample is from what a small network expected after the sixteen before it.

The network (LSTM, 2 features, 12 units) gives mean and spread of the next sample of a standardised series; the score is
the distance in that spread. It was fitted on healthy simulated series by ``benchmarks/detect_learned.py``, which also
compares it with the robust z of ``anomaly.py`` on series that it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from lanterne.backend.detect.base import MAD_TO_SIGMA, median
from lanterne.backend.detect.network import lstm_outputs
from lanterne.causal.facts import FloatArray

WINDOW = 16
STANDARD = 34
"""Samples before the window that standardise it; with the window 50, as many as the robust z looks back."""
CLIP = 8.0
WEIGHTS = Path(__file__).with_name("learned_weights.npz")


@cache
def weights() -> Mapping[str, FloatArray]:
    with np.load(WEIGHTS, allow_pickle=False) as found:
        return {name: found[name].astype(np.float64) for name in found.files}


def standardised(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(windows [N, 16, 2], next samples [N]) of each place of ``x`` [T] with 50 samples before it, in robust sigmas."""
    whole = np.lib.stride_tricks.sliding_window_view(x, STANDARD + WINDOW + 1)
    usual = median(whole[:, : STANDARD + WINDOW], axis=1)[:, None]
    sigma = median(np.abs(whole[:, : STANDARD + WINDOW] - usual), axis=1)[:, None] * MAD_TO_SIGMA
    z = np.clip((whole[:, STANDARD:] - usual) / np.maximum(sigma, 1e-3 * np.abs(usual) + 1e-12), -CLIP, CLIP)
    change = np.diff(z, axis=1, prepend=z[:, :1])
    return np.stack([z[:, :-1], change[:, :-1]], axis=-1), z[:, -1]


def score(x: FloatArray, fitted: Mapping[str, FloatArray] | None = None) -> FloatArray:
    """[T] distance from the expected sample in expected spreads; NaN for the first 50. ``x`` must be finite."""
    found = np.full(len(x), np.nan)
    if len(x) <= STANDARD + WINDOW:
        return found
    windows, following = standardised(x)
    mean, spread = lstm_outputs(weights() if fitted is None else fitted, windows).T
    found[STANDARD + WINDOW :] = np.abs(following - mean) / np.exp(np.clip(spread, -3, 3))
    return found
