"""What else moved: the series that left their own past, ranked, whatever they are. For incidents that nothing explains.

A series is split into a running median, what repeats with a period (a checkpoint or an evaluation every so many steps)
and the rest; the rest is measured in robust sigmas of the steps before. With an onset the question is narrower: by how
many sigmas did the ten steps after it leave the fifty before, on which rank more than on its peers? Not run with every
evaluation: :func:`candidates` is asked about an incident whose cause is not known, and by the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.backend.detect import learned
from lanterne.backend.detect.base import MAD_TO_SIGMA, median, runs
from lanterne.causal.facts import Facts, FloatArray
from lanterne.errors import UsageError

BEFORE, AFTER = 50, 10
SIGMAS = 6.0
PERIOD_MIN = 4
REPEATS = 3
ALIKE = 0.6
"""Correlation of a series with itself one period later from which the period is believed."""
SHARE_FLOOR = 0.02
SCORE_MAX = 1000.0
"""A series that never moved before has no scale of its own: beyond this a score says no more."""
TREND = 25
TRAIL = 9
NOT_JUDGED = frozenset({"lr", "lr_planned", "parameter_checksum", "loss_scale"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A series that moved. ``rank`` None: most ranks alike. ``score`` in robust sigmas, signed; ``step``: first one."""

    series: str
    rank: int | None
    step: int
    score: float
    before: float
    after: float
    period: int | None = None

    @property
    def says(self) -> str:
        who = "of most ranks" if self.rank is None else f"of rank {self.rank}"
        beyond = "beyond " if abs(self.score) >= SCORE_MAX else ""
        return (
            f"{self.series} {who} went from {self.before:.4g} to {self.after:.4g} at step {self.step} "
            f"({beyond}{self.score:+.0f} sigma)"
        )


def _running_median(x: FloatArray, width: int) -> FloatArray:
    padded = np.pad(x, (width // 2, width - 1 - width // 2), mode="edge")
    return median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)


def period_of(x: FloatArray) -> int | None:
    """The period in steps of what repeats in ``x`` [T] at least three times; None where nothing does."""
    known = np.where(np.isfinite(x), x, median(x))
    rest = known - _running_median(known, TREND)
    spread = float(median(np.abs(rest))) * MAD_TO_SIGMA
    peaks = np.clip(rest, -20 * spread, 20 * spread) if spread > 0 else rest
    peaks = np.where(np.abs(peaks) > SIGMAS / 2 * spread, peaks, 0.0)
    for first, last in runs(peaks != 0):
        if last - first >= PERIOD_MIN - 1:  # something that lasts, not a beat
            peaks[first : last + 1] = 0.0
    power = float(peaks @ peaks)
    best, found = ALIKE, None
    if power <= 0:
        return None
    for lag in range(PERIOD_MIN, len(peaks) // REPEATS + 1):
        a, b = peaks[lag:], peaks[:-lag]
        alike = float(a @ b) / max(float(np.sqrt((a @ a) * (b @ b))), 1e-30)
        if alike > best + 0.02:
            best, found = alike, lag
    return found


def seasonal(x: FloatArray, period: int) -> FloatArray:
    """[T] what repeats: for each place in the period the median of the rest there over all its turns."""
    rest = x - _running_median(x, TREND)
    usual = np.array([float(median(rest[place::period])) for place in range(period)])
    return np.asarray(np.tile(usual, len(x) // period + 1)[: len(x)], np.float64)


def deseasoned(x: FloatArray) -> tuple[FloatArray, int | None]:
    """``x`` without what repeats, and its period."""
    found = period_of(x)
    return (x, None) if found is None else (x - seasonal(np.where(np.isfinite(x), x, median(x)), found), found)


def robust_z(x: FloatArray) -> FloatArray:
    """[T] distance of each sample from the median of the ``BEFORE`` samples before it, in their robust sigmas."""
    z = np.full(len(x), np.nan)
    if len(x) <= BEFORE:
        return z
    past = np.lib.stride_tricks.sliding_window_view(x, BEFORE)[:-1]
    usual = median(past, axis=1)
    sigma = median(np.abs(past - usual[:, None]), axis=1) * MAD_TO_SIGMA
    z[BEFORE:] = (x[BEFORE:] - usual) / np.maximum(sigma, SHARE_FLOOR * np.abs(usual) + 1e-12)
    return z


def detrended_z(x: FloatArray) -> FloatArray:
    """[T] the robust z of each sample less the median of the nine before it: trends are no surprise."""
    if len(x) <= TRAIL:
        return np.full(len(x), np.nan)
    past = np.lib.stride_tricks.sliding_window_view(x, TRAIL)[:-1]
    rest = np.concatenate([np.zeros(TRAIL), x[TRAIL:] - median(past, axis=1)])
    return robust_z(rest)


SCORES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "robust_z": robust_z, "detrended_z": detrended_z, "learned": learned.score,
}  # fmt: skip
DEFAULT_SCORE = "detrended_z"
"""As good as the learned one on series kept apart (``benchmarks/detect_learned.py``), and simpler."""


def candidates(facts: Facts, step: int | None = None, *, top: int = 5, score: str = DEFAULT_SCORE) -> list[Candidate]:
    """The series that moved most at ``step`` (None: wherever each moved most), at least six sigmas, best first.

    ``score``: a name of ``SCORES``, for the question without a step. Raises :class:`UsageError` for another.
    """
    if score not in SCORES:
        raise UsageError(f"anomalies: the score {score!r} is not one of {', '.join(SCORES)}")
    found = []
    for name, values in facts.series.items():
        if name in NOT_JUDGED or not values.size or not np.isfinite(values).any():
            continue
        one = _moved(facts, name, values, SCORES[score]) if step is None else _moved_at(facts, name, values, step)
        if one is not None and abs(one.score) >= SIGMAS:
            found.append(one)
    return sorted(found, key=lambda c: -abs(c.score))[:top]


def _moved(
    facts: Facts, name: str, values: FloatArray, score_of: Callable[[FloatArray], FloatArray]
) -> Candidate | None:
    """Where the job's median left its past for three steps running."""
    x, period = deseasoned(median(values, axis=1))
    z = np.nan_to_num(score_of(np.where(np.isfinite(x), x, median(x))))
    if len(z) <= BEFORE:
        return None
    lasting = np.minimum(np.minimum(np.abs(z[:-2]), np.abs(z[1:-1])), np.abs(z[2:]))
    t = int(np.argmax(lasting))
    before, after = float(median(x[max(0, t - BEFORE) : t])), float(median(x[t : t + AFTER]))
    score = float(np.clip(np.sign(z[t]) * lasting[t], -SCORE_MAX, SCORE_MAX))
    return Candidate(
        series=name, rank=None, step=int(facts.steps[t]), score=score, before=before, after=after, period=period
    )


def _moved_at(facts: Facts, name: str, values: FloatArray, step: int) -> Candidate | None:
    """The rank that moved most beyond its peers at a step, or the job as a whole."""
    t = int(np.searchsorted(facts.steps, step))
    past, now = values[max(0, t - BEFORE) : t], values[t : t + AFTER]
    if len(past) < AFTER or len(now) < 3:
        return None
    usual, level = median(past, axis=0), median(now, axis=0)
    sigma = median(np.abs(past - usual), axis=0) * MAD_TO_SIGMA
    sigma = np.maximum(sigma, SHARE_FLOOR * np.abs(usual) + 1e-12)
    z = (level - usual) / sigma
    if not np.isfinite(z).any():
        return None
    common = float(median(z))
    beyond = np.nan_to_num(z - common)
    r = int(np.argmax(np.abs(beyond)))
    alone = values.shape[1] > 1 and abs(beyond[r]) > abs(common)
    return Candidate(
        series=name, rank=facts.ranks[r] if alone else None, step=int(facts.steps[t]),
        score=float(np.clip(z[r] if alone else common, -SCORE_MAX, SCORE_MAX)),
        before=float(usual[r] if alone else median(usual)),
        after=float(level[r] if alone else median(level)),
    )  # fmt: skip
