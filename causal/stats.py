"""Robust statistics of the engine: NaN-aware medians, floored scales, onset splits, top-2 maxima.

Arrays are ``[steps, ranks]`` unless said otherwise; NaN = not known. Everything is vectorised numpy over
whole columns, because a window of 1,024 ranks x 500 steps is judged on one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation of a normal variable."""


def median(x: Floats, axis: int = 0) -> Floats:
    """NaN-aware median along ``axis``; all-NaN slices give NaN.

    One partition where nothing is missing, one sort otherwise (``np.nanmedian`` falls back to a Python
    loop over slices for narrow arrays).
    """
    if x.shape[axis] == 0:
        return np.full(np.delete(x.shape, axis), np.nan)
    if axis == 0 and x.ndim == 2:  # along memory: a strided partition is several times slower
        x, axis = np.ascontiguousarray(x.T), 1
    known = np.isfinite(x)
    if known.all():
        half = x.shape[axis] // 2
        if x.shape[axis] % 2:
            return np.asarray(np.partition(x, half, axis).take(half, axis))
        both = np.partition(x, (half - 1, half), axis).take((half - 1, half), axis)
        return np.asarray(both.mean(axis))
    count = known.sum(axis, keepdims=True)
    ordered = np.sort(np.where(known, x, np.inf), axis)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, x.shape[axis] - 1), axis)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.squeeze(np.where(count > 0, 0.5 * (low + high), np.nan), axis))


def spread(x: Floats, axis: int = 0) -> Floats:
    """Robust standard deviation: 1.4826 x the median absolute deviation."""
    middle = np.expand_dims(median(x, axis), axis)
    return MAD_TO_SIGMA * median(np.abs(x - middle), axis)


def floored_scale(base: Floats, axis: int = 0) -> Floats:
    """Scale of a baseline that quantised or constant metrics cannot shrink to zero.

    ``max(IQR / 1.349, 0.25 std, 0.001 |median|)`` (research/causal.md section 2: the floor is the whole
    difference to BARO, whose IQR of quantised metrics is tiny or zero).
    """
    with np.errstate(invalid="ignore"):
        q1, q3 = np.nanquantile(base, [0.25, 0.75], axis=axis)
        parts = (q3 - q1) / 1.349, 0.25 * np.nanstd(base, axis=axis), 1e-3 * np.abs(np.nanmedian(base, axis=axis))
    return np.asarray(np.maximum(np.maximum(*parts[:2]), parts[2]))


@dataclass(frozen=True, slots=True)
class Split:
    """One change point per column. ``at`` [R] first index after it, ``shift`` [R] mean after - mean before."""

    at: Ints
    shift: Floats
    before: Floats
    after: Floats


def split(x: Floats, *, left: int = 5, right: int = 3) -> Split:
    """Least-squares single change point of each column by prefix sums, O(T R); upward changes only.

    ``left``/``right``: fewest known samples on each side. A column with no upward change has shift 0.
    """
    known = np.isfinite(x)
    if known.all():
        value, total_n = x.astype(np.float64, copy=False), np.full(x.shape[1], len(x))
        n1 = np.broadcast_to(np.arange(1, len(x))[:, None], (max(len(x) - 1, 0), x.shape[1]))
    else:
        value, total_n = np.where(known, x, 0.0), known.sum(0)
        n1 = np.cumsum(known, 0)[:-1]
    total = value.sum(0)
    s1 = np.cumsum(value, 0)[:-1]
    n2, s2 = total_n - n1, total - s1
    valid = (n1 >= left) & (n2 >= right)
    a, b = s1 / np.maximum(n1, 1), s2 / np.maximum(n2, 1)
    gain = np.where(valid & (b > a), n1 * n2 / np.maximum(total_n, 1) * (b - a) ** 2, 0.0)
    if not len(gain):
        zero = np.zeros(x.shape[1])
        return Split(np.zeros(x.shape[1], np.int64), zero, zero, zero)
    at = gain.argmax(0)
    column = np.arange(x.shape[1])
    some = gain[at, column] > 0
    before, after = np.where(some, a[at, column], 0.0), np.where(some, b[at, column], 0.0)
    return Split((at + 1).astype(np.int64), after - before, before, after)


def hinge(t: Floats, y: Floats, knee: float) -> tuple[float, float, float]:
    """Least squares of ``base + slope max(0, t - knee)``: (sum of squared residues, slope, base)."""
    z = np.maximum(t - knee, 0.0)
    zc, yc = z - z.mean(), y - y.mean()
    slope = float((zc @ yc) / max(zc @ zc, 1e-9))
    return float(((yc - slope * zc) ** 2).sum()), slope, float(y.mean() - slope * z.mean())


def top2(x: Floats) -> tuple[Ints, Floats, Floats]:
    """Per row: position of the largest, the largest, the second largest. NaN counts as -inf."""
    y = np.where(np.isfinite(x), x, -np.inf)
    where = y.argmax(1)
    row = np.arange(len(y))
    first = y[row, where]
    if y.shape[1] < 2:
        return where.astype(np.int64), first, np.full(len(y), -np.inf)
    y[row, where] = -np.inf
    return where.astype(np.int64), first, y.max(1)


def group_max(x: Floats, label: Ints, groups: int) -> Floats:
    """Row-wise maximum within each label: ``[T, R] -> [T, groups]``; a label with no column gives -inf."""
    out = np.full((x.shape[0], groups), -np.inf)
    order = np.argsort(label, kind="stable")
    first = np.searchsorted(label[order], np.arange(groups))
    has = np.bincount(label, minlength=groups) > 0
    y = np.where(np.isfinite(x), x, -np.inf)[:, order]
    out[:, has] = np.maximum.reduceat(y, first[has], axis=1)
    return out


def rows_mean(x: Floats) -> float:
    """Mean of the known values; NaN when there is none."""
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else float("nan")


def rows_median(x: Floats) -> float:
    """Median of the known values; NaN when there is none."""
    known = x[np.isfinite(x)]
    return float(np.median(known)) if known.size else float("nan")


def noise_of(x: Floats) -> float:
    """Robust standard deviation of one series; 0 when fewer than 3 values are known."""
    known = x[np.isfinite(x)]
    if known.size < 3:
        return 0.0
    return float(MAD_TO_SIGMA * np.median(np.abs(known - np.median(known))))
