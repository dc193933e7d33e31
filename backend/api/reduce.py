"""Fewer points with the same extremes: min-max buckets and LTTB. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def minmax(value: Floats, points: int) -> Ints:
    """Indices of at most ``points`` rows: the first, the last, and smallest and largest of each bucket in order.

    NaN is never an extreme; a bucket of NaN alone keeps its first row, so that a gap stays a gap.
    """
    n = len(value)
    if n <= points or points < 4:
        return np.arange(n, dtype=np.int64) if n <= points else np.linspace(0, n - 1, max(points, 1)).astype(np.int64)
    width = -(-n // ((points - 2) // 2))
    rows = -(-n // width)
    padded = np.full(rows * width, np.nan)
    padded[:n] = value
    buckets = padded.reshape(rows, width)
    gaps = np.isnan(buckets)
    least = np.where(gaps, np.inf, buckets).argmin(axis=1)
    most = np.where(gaps, -np.inf, buckets).argmax(axis=1)
    empty = gaps.all(axis=1)
    least[empty] = most[empty] = 0
    first = np.arange(rows, dtype=np.int64) * width
    return np.unique(np.concatenate([[0, n - 1], first + least, first + most]))


def lttb(x: Floats, y: Floats, points: int) -> Ints:
    """Indices by largest-triangle-three-buckets (Steinarsson 2013): the shape of the line, not every spike."""
    n = len(x)
    if n <= points or points < 3:
        return minmax(y, points)
    y = np.where(np.isnan(y), 0.0, y)
    edges = np.linspace(1, n - 1, points - 1).astype(np.int64)
    chosen = [0]
    for i in range(points - 2):
        low, high = edges[i], max(edges[i + 1], edges[i] + 1)
        after = slice(high, edges[i + 2]) if i + 2 < len(edges) and edges[i + 2] > high else slice(n - 1, n)
        ax, ay = x[chosen[-1]], y[chosen[-1]]
        area = np.abs((ax - x[after].mean()) * (y[low:high] - ay) - (ax - x[low:high]) * (y[after].mean() - ay))
        chosen.append(int(low + np.argmax(area)))
    return np.array([*chosen, n - 1], dtype=np.int64)


def smooth(value: Floats, weight: float) -> Floats:
    """Debiased exponential mean of the full data: ``weight`` 0 = as it is, towards 1 = smoother. NaN is passed over."""
    if not 0.0 < weight < 1.0:
        return value
    found = np.empty_like(value)
    mean, debias = 0.0, 0.0
    for at, v in enumerate(value):
        if np.isfinite(v):
            mean = weight * mean + (1 - weight) * v
            debias = weight * debias + (1 - weight)
        found[at] = mean / debias if debias else np.nan
    return found
