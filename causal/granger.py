"""Learned edges: Granger causality and mutual information, fast enough for all pairs of 1,000 series.

* :func:`granger_all`: "do the past values of j help to predict i beyond i's own past?" for every pair, from one
  Gram matrix and small Schur complements (Frisch-Waugh-Lovell) instead of one regression a pair.
* :func:`granger_edge`: the same test for one edge whose direction is known, with a lag-0 term: inside a step
  cause and effect share one time index, which plain Granger cannot see.
* :func:`mutual_information`: Gaussian-copula MI (ranks -> normal scores -> correlation), nats.
* :func:`benjamini_hochberg`: which of many tests stand at a false discovery rate.

Arrays are ``[samples, series]``. The F-test is Granger (1969); the correction Benjamini and Hochberg (1995).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as scipy_stats
from scipy.special import ndtri

Floats = NDArray[np.float64]

RIDGE = 1e-8
MI_CORRELATION_MAX = 0.999999


@dataclass(frozen=True, slots=True)
class Tested:
    """``p_value[i, j]`` and ``partial_r2[i, j]`` of "j Granger-causes i"; the diagonal is 1 and 0."""

    p_value: Floats
    partial_r2: Floats
    samples: int


def _standard(x: Floats) -> Floats:
    x = np.asarray(x, np.float64)
    if not np.isfinite(x).all():
        raise ValueError("granger: series hold missing values; drop or fill those samples first")
    return np.asarray((x - x.mean(0)) / (x.std(0) + 1e-12))


def granger_all(x: Floats, lags: int = 3) -> Tested:
    """F-test of every ordered pair of ``x [samples, series]`` with ``lags`` past values each.

    Raises ValueError on missing values or when the samples do not suffice for the regression.
    """
    samples, n = x.shape
    free = samples - lags - 2 * lags - 1
    if free < 3:
        raise ValueError(f"granger: {samples} samples are too few for {lags} lags; at least {3 * lags + 4} are needed")
    x = _standard(x)
    y = x[lags:]
    z = np.stack([x[lags - lag : samples - lag] for lag in range(1, lags + 1)], 2)
    z, y = z - z.mean(0), y - y.mean(0)
    flat = z.reshape(len(y), n * lags)
    gram = (flat.T @ flat).reshape(n, lags, n, lags)
    cross = (flat.T @ y).reshape(n, lags, n)
    ridge = np.eye(lags) * RIDGE * len(y)
    own_gram = gram[np.arange(n), :, np.arange(n), :] + ridge
    own_inverse = np.linalg.inv(own_gram)
    own = cross[np.arange(n), :, np.arange(n)]
    rss0 = (y**2).sum(0) - np.einsum("il,ilm,im->i", own, own_inverse, own)
    p_value, r2 = np.ones((n, n)), np.zeros((n, n))
    for i in range(n):
        between = gram[i].transpose(1, 0, 2)
        weight = np.einsum("lm,jmk->jlk", own_inverse[i], between)
        schur = own_gram - np.einsum("jlk,jlm->jkm", between, weight) + ridge
        left = cross[:, :, i] - np.einsum("jlk,l->jk", weight, own[i])
        beta = np.linalg.solve(schur, left[:, :, None])[:, :, 0]
        gained = np.clip((beta * left).sum(1), 0, rss0[i] * (1 - 1e-9))
        f = (gained / lags) / np.maximum((rss0[i] - gained) / free, 1e-300)
        p_value[i], r2[i] = scipy_stats.f.sf(f, lags, free), gained / max(rss0[i], 1e-12)
        p_value[i, i], r2[i, i] = 1.0, 0.0
    return Tested(p_value, r2, len(y))


def granger_edge(cause: Floats, effect: Floats, lags: int = 2) -> tuple[float, float, int]:
    """(p, partial R2, samples) of ``cause[t .. t-lags]`` for ``effect[t]`` given the effect's own past.

    Only for an edge whose direction the structure fixes: the lag-0 term is symmetric by itself.
    """
    known = np.isfinite(cause) & np.isfinite(effect)
    cause, effect = cause[known], effect[known]
    n = len(effect) - lags
    if n < 4 * lags + 8 or cause.std() < 1e-12 or effect.std() < 1e-12:
        return 1.0, 0.0, max(n, 0)
    y = effect[lags:]
    z = np.column_stack([np.ones(n)] + [effect[lags - k : len(effect) - k] for k in range(1, lags + 1)])
    x = np.column_stack([cause[lags - k : len(cause) - k] for k in range(lags + 1)])
    q, _ = np.linalg.qr(z)
    y_rest, x_rest = y - q @ (q.T @ y), x - q @ (q.T @ x)
    beta, *_ = np.linalg.lstsq(x_rest, y_rest, rcond=None)
    rss0, rss1 = float((y_rest**2).sum()), float(((y_rest - x_rest @ beta) ** 2).sum())
    free = n - 2 * lags - 2
    f = ((rss0 - rss1) / (lags + 1)) / max(rss1 / free, 1e-300)
    return float(scipy_stats.f.sf(f, lags + 1, free)), max(0.0, 1 - rss1 / max(rss0, 1e-300)), n


def _scores(x: Floats) -> Floats:
    order = np.argsort(np.argsort(x, 0), 0)
    return np.asarray(ndtri((order + 0.5) / len(x)))


def mutual_information(x: Floats) -> Floats:
    """Gaussian-copula mutual information (nats) of all pairs of ``x [samples, series]``; 0 on the diagonal."""
    u = _scores(np.asarray(x, np.float64))
    c = np.clip(u.T @ u / (u**2).sum(0).mean(), -MI_CORRELATION_MAX, MI_CORRELATION_MAX)
    mi = -0.5 * np.log1p(-(c**2))
    np.fill_diagonal(mi, 0.0)
    return np.asarray(mi)


def mutual_information_pair(x: Floats, y: Floats) -> float:
    """Gaussian-copula mutual information of two series, nats; samples missing in either are dropped."""
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 8 or np.ptp(x[known]) == 0 or np.ptp(y[known]) == 0:
        return 0.0
    return float(mutual_information(np.column_stack([x[known], y[known]]))[0, 1])


def benjamini_hochberg(p_value: Floats, rate: float = 0.05) -> NDArray[np.bool_]:
    """Which tests stand at false discovery rate ``rate``; same shape as ``p_value``."""
    flat = np.asarray(p_value, np.float64).reshape(-1)
    if not flat.size:
        return np.zeros(p_value.shape, bool)
    order = np.argsort(flat)
    passed = flat[order] <= rate * np.arange(1, len(flat) + 1) / len(flat)
    keep = np.zeros(len(flat), bool)
    if passed.any():
        keep[order[: int(np.flatnonzero(passed)[-1]) + 1]] = True
    return keep.reshape(p_value.shape)


def strength(p_value: float, partial_r2: float, mi: float) -> float:
    """Granger and mutual information as one evidence in [0, 1]: ``1 - (1-g)(1-m)``.

    ``g = sqrt(partial R2)`` where the F-test stands at 1%, ``m = sqrt(1 - exp(-2 MI))`` (the correlation that a
    Gaussian of that MI has), research/causal.md 6.6.
    """
    g = partial_r2**0.5 if p_value < 0.01 else 0.0
    return float(1 - (1 - g) * (1 - (1 - np.exp(-2 * max(mi, 0.0))) ** 0.5))
