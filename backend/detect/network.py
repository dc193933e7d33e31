"""The small recurrent networks of the predictors, evaluated with numpy as torch computes them: no torch at run time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lanterne.causal.facts import FloatArray


def logistic(z: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-np.clip(z, -60, 60))), np.float64)


def lstm_outputs(weights: Mapping[str, FloatArray], x: FloatArray) -> FloatArray:
    """[B, T, F] -> [B, O]: ``torch.nn.LSTM`` of one layer (``lstm.*``; gates input, forget, cell, output) and a linear
    layer (``out.*``) over its last state."""
    w_in, w_state = weights["lstm.weight_ih_l0"], weights["lstm.weight_hh_l0"]
    bias = weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"]
    hidden = w_state.shape[1]
    state, cell = np.zeros((len(x), hidden)), np.zeros((len(x), hidden))
    for t in range(x.shape[1]):
        gates = x[:, t] @ w_in.T + state @ w_state.T + bias
        take, keep, new, give = (gates[:, i * hidden : (i + 1) * hidden] for i in range(4))
        cell = logistic(keep) * cell + logistic(take) * np.tanh(new)
        state = logistic(give) * np.tanh(cell)
    return np.asarray(state @ weights["out.weight"].T + weights["out.bias"], np.float64)
