"""Loss and gradients: non-finite values, spikes, explosion and vanishing, with the levels of the contract.

A fixed level (grad_norm > 10, loss_spikeness > 0.35) says little about a run whose gradients are always
like that. So it fires only when the run's own baseline agrees, or when the user set it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lanterne.backend.detect.base import (
    WARM_UP_STEPS,
    Levels,
    common,
    events,
    finding,
    median,
    robust_scale,
    runs,
    step_at,
)
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Anomaly, EventName, Severity

HISTORY = 50
HISTORY_MIN = 12
SPIKE_Z = 8.0
LOG_Z = 5.0
"""Norms and losses of small batches are log-normal: a spike must stand out among the logarithms as well."""
SIGNED_HISTORY, SIGNED_RISE = 30, 4.0
"""Samples before, and times the largest deviation among them, for series that are not positive (policy losses)."""
LOSS_RISE = 3.0
"""Single-step rise by 200% (contract)."""
GRAD_SPIKE = 5.0
TAIL_STEPS, TAIL_SHARE, BEYOND_TAILS = 200, 0.6, 20.0
TAIL_OF_NORM, TAIL_OF_LOSS = (100, 1), (24, 2)
"""Norms of policy gradients and losses of noise levels jump by themselves now and then. A jump that is not beyond 20
times needs so many samples before it, of which fewer than so many stood out of their own past by six tenths of it (in
logarithms)."""
EXPLOSION = 1e4
VANISHING = 1e-6
VANISHING_STEPS, VANISHING_SAMPLES = 20, 3
FLAT_STEPS, FLAT_SHARE = 100, 0.01
"""The loss must have stood still for this long (contract): small gradients of a run that still learns are none."""
QUANTILE = 0.995
QUANTILE_STEPS = 3
QUANTILE_RISE = 1.5
VARIANCE_SIGMAS = 15.0
VARIANCE_WIDTH = 20
SCREEN = 5
VARIANCE_WINDOWS = 10
VARIANCE_TRIM = 2
"""Largest deviations of a window that do not count: a single bad batch is ``loss_spike``'s matter."""
VARIANCE_RISE = 4.0
"""Times the largest variance seen before: the history of a heavy-tailed loss has no use for sigmas alone."""


def detect(facts: Facts, levels: Levels | None = None) -> list[Anomaly]:
    levels = levels or Levels()
    bad = nonfinite(facts)
    return [*bad, *spikes(facts, levels), *gradient_level(facts, levels), *vanishing(facts), *variance(facts)]


def _amp_skipped(facts: Facts) -> set[int]:
    """Steps that a gradient scaler skipped: non-finite gradients there are the scaler's business."""
    return {e.step for e in events(facts, EventName.OVERFLOW)}


def nonfinite(facts: Facts) -> list[Anomaly]:
    """The first non-finite value: the rank that had it before the reduction, while all have it afterwards."""
    skipped = _amp_skipped(facts)
    seen: list[tuple[int, int, str, str]] = [
        (step_at(facts, e), e.rank, str(e.attributes.get("where", "gradient")), str(e.attributes.get("parameter", "")))
        for e in events(facts, EventName.NONFINITE)
        if e.step not in skipped
    ]
    counts = facts.get("grad_nonfinite")
    for t, r in np.argwhere(np.nan_to_num(counts, posinf=1.0) > 0):
        if int(facts.steps[t]) not in skipped:
            seen.append((int(facts.steps[t]), facts.ranks[r], "gradient", ""))
    for name in ("loss", "grad_norm", "grad_norm_local"):
        for t, r in np.argwhere(np.isinf(facts.get(name)))[:64]:
            if int(facts.steps[t]) not in skipped:
                seen.append((int(facts.steps[t]), facts.ranks[r], name, ""))
    if not seen:
        return []
    first = min(step for step, *_ in seen)
    last = max(step for step, *_ in seen)
    at_first = [s for s in seen if s[0] == first]
    gradient = [s for s in at_first if s[2] in ("gradient", "grad_norm_local", "parameter")] or at_first
    ranks = sorted({s[1] for s in gradient})
    rank = ranks[0] if (len(ranks) == 1 and len(facts.ranks) > 1) or len(facts.ranks) == 1 else None
    parameter = next((s[3] for s in gradient if s[3]), None)
    where = gradient[0][2]
    return [
        finding(
            facts,
            "nonfinite",
            f"non-finite {where.replace('_', ' ')} first at step {first}"
            + (f" on rank {rank}" if rank is not None else f" on {len(ranks)} ranks at once")
            + (f", parameter {parameter}" if parameter else ""),
            severity=Severity.P0,
            first=first,
            last=last,
            score=float(last - first + 1),
            rank=rank,
            parameter=parameter,
            fired_by="event",
        )
    ]


def _before(x: FloatArray, t: int) -> FloatArray:
    """Up to HISTORY finite samples before row t."""
    past = x[max(0, t - 2 * HISTORY) : t]
    return past[np.isfinite(past)][-HISTORY:]


def _jumps(x: FloatArray, ratio: float, tail: tuple[int, int]) -> list[tuple[int, float, float, float]]:
    """(row, value, median before, z) of samples that leave the band of the HISTORY before them and are no ``tail``."""
    found = []
    finite = np.isfinite(x)
    if finite.sum() <= HISTORY_MIN:
        return []
    ceiling = float(np.median(np.abs(x[finite])))
    for t in np.flatnonzero(finite & (x > max(ceiling, 0) * min(ratio, 1.5))):
        past = _before(x, int(t))
        if len(past) < HISTORY_MIN:
            continue
        usual, scale = float(np.median(past)), robust_scale(past)
        scale = max(scale, 0.05 * abs(usual))
        z = (float(x[t]) - usual) / scale
        clear = _log_z(past, x[t]) > LOG_Z if past.min() > 0 else _beyond_all(x[:t], usual, float(x[t]))
        if z > SPIKE_Z and x[t] > ratio * abs(usual) and x[t] > 1.3 * past.max() and clear:
            if usual > 0 and x[t] < BEYOND_TAILS * usual and _is_tail(x[:t], float(x[t]) / usual, *tail):
                continue
            found.append((int(t), float(x[t]), usual, z))
    return found


def _is_tail(past: FloatArray, ratio: float, least: int, count: int) -> bool:
    """Whether ``count`` jumps like that of ``ratio`` times were seen, or fewer than ``least`` samples to know it from.

    Of series that are positive; what changes its sign is judged by :func:`_beyond_all`.
    """
    known = past[np.isfinite(past)][-TAIL_STEPS - HISTORY_MIN :]
    if (known <= 0).any():
        return False
    if len(known) < least:
        return True
    before = median(np.lib.stride_tricks.sliding_window_view(known[:-1], HISTORY_MIN), axis=1)
    return bool((np.log(known[HISTORY_MIN:] / before) >= TAIL_SHARE * np.log(ratio)).sum() >= count)


def _beyond_all(past: FloatArray, usual: float, value: float) -> bool:
    """A loss that changes its sign has no logarithms and heavy tails: far beyond everything that was ever seen."""
    known = past[np.isfinite(past)]
    return len(known) >= SIGNED_HISTORY and value - usual > SIGNED_RISE * float(np.abs(known - usual).max())


def _log_z(past: FloatArray, value: float) -> float:
    """Distance of a value in the logarithms' own scale; all must be positive."""
    logs = np.log(past)
    return float((np.log(value) - np.median(logs)) / max(robust_scale(logs), float(logs.std()), 0.05))


def spikes(facts: Facts, levels: Levels) -> list[Anomaly]:
    """Jumps of loss and gradient norm, and three steps in a row above the window's 99.5% quantile."""
    found: list[Anomaly] = []
    for name, ratio, kind in (
        ("loss", LOSS_RISE, "loss_spike"),
        ("grad_norm", GRAD_SPIKE, "grad_spike"),
        ("grad_norm_local", GRAD_SPIKE, "grad_spike"),
    ):
        values = facts.series.get(name)
        if values is None or not len(facts.ranks):
            continue
        whole = common(facts, name)
        for own_rows in _stretches(facts):
            found += _spikes_of(facts, name, kind, ratio, values=_only(values, own_rows), whole=_only(whole, own_rows))
    spikeness = facts.get("loss_spikeness")
    if "loss_spikeness" in levels.chosen and np.nanmax(spikeness, initial=-np.inf) > levels.loss_spikeness:
        found.append(_level(facts, "loss_spikeness", spikeness, levels.loss_spikeness))
    return found


def _stretches(facts: Facts) -> list[slice]:
    """The rows between our own rollbacks: the loss of older parameters is no spike of the newer ones."""
    back = {
        e.step
        for e in events(facts, EventName.COMMAND)
        if e.attributes.get("action") == "rollback" and e.attributes.get("phase") == "applied" and e.step >= 0
    }
    cuts = [0, *sorted(int(np.searchsorted(facts.steps, step)) for step in back), len(facts.steps)]
    return [slice(a, b) for a, b in pairwise(cuts) if b > a]


def _only(values: FloatArray, rows: slice) -> FloatArray:
    """``values`` with NaN outside ``rows``."""
    if rows == slice(0, len(values)):
        return values
    out = np.full_like(values, np.nan)
    out[rows] = values[rows]
    return out


def _spikes_of(
    facts: Facts, name: str, kind: str, ratio: float, *, values: FloatArray, whole: FloatArray
) -> list[Anomaly]:
    """The first spike of a series ``values [steps, ranks]`` and of what its ranks have in common (``whole``)."""
    tail = TAIL_OF_LOSS if name == "loss" else TAIL_OF_NORM
    best = _jumps(whole, ratio, tail)
    rank: int | None = None
    for r in _suspects(values, ratio):
        own = _jumps(values[:, r], ratio, tail)
        if own and (not best or own[0][0] < best[0][0] or (own[0][0] == best[0][0] and own[0][1] > 2 * best[0][1])):
            best, rank = own, facts.ranks[r]
    if best:
        return [_spike(facts, name, kind, best, rank, values)]
    return _quantile(facts, whole) if name == "loss" else []


def _suspects(values: FloatArray, ratio: float) -> list[int]:
    """Columns whose largest value stands far above their own median, screened by a fifth of the rows."""
    top = np.nanmax(np.where(np.isnan(values) | np.isinf(values), -np.inf, values), axis=0, initial=-np.inf)
    rough = np.abs(median(values[::SCREEN], axis=0)) if len(values) > 20 * SCREEN else np.zeros(values.shape[1])
    near = np.flatnonzero(top > 0.5 * ratio * np.nan_to_num(rough, posinf=0.0))
    finite = np.where(np.isfinite(values[:, near]), values[:, near], np.nan)
    return [int(r) for r in near[top[near] > ratio * np.abs(median(finite, axis=0))][:32]]


Jump = tuple[int, float, float, float]


def _spike(
    facts: Facts, name: str, kind: str, jumps: list[Jump], rank: int | None, values: FloatArray
) -> Anomaly:  # fmt: skip
    t, value, usual, z = jumps[0]
    first, last = int(facts.steps[t]), int(facts.steps[jumps[-1][0]])
    if rank is None and len(facts.ranks) > 1:
        row = values[t]
        order = np.argsort(np.where(np.isfinite(row), row, -np.inf))
        if row[order[-1]] > 3 * max(float(row[order[-2]]), 1e-30):
            rank = facts.ranks[int(order[-1])]
    whose = f" of rank {rank}" if rank is not None else ""
    return finding(
        facts, kind,
        f"{name.replace('_', ' ')}{whose} rose to {value:.4g} at step {first} "
        f"({usual:.4g} before, {z:.0f} sigma of the run's own noise)",
        severity=Severity.P1, first=first, last=last, score=min(z, 1e6), rank=rank, value=value, unit="1",
        baseline=usual,
    )  # fmt: skip


def _quantile(facts: Facts, loss: FloatArray) -> list[Anomaly]:
    """Loss above its window's 99.5% quantile, and half again above its median, three steps running."""
    above = np.zeros(len(loss), bool)
    usual_all = float(median(loss))
    for row in np.flatnonzero(np.isfinite(loss) & (loss > abs(usual_all) * 1.1)).tolist():
        past = _before(loss, max(HISTORY_MIN, row - 2)) if row >= HISTORY_MIN else loss[:0]
        if len(past) >= HISTORY_MIN:
            usual = float(np.median(past))
            above[row] = loss[row] > max(
                float(np.quantile(past, QUANTILE)),
                QUANTILE_RISE * abs(usual),
                usual + SPIKE_Z * max(robust_scale(past), 0.02 * abs(usual)),
            )
    streak = np.convolve(above, np.ones(QUANTILE_STEPS), "full")[: len(above)]
    hit = np.flatnonzero(streak >= QUANTILE_STEPS)
    if not len(hit):
        return []
    t = int(hit[0]) - QUANTILE_STEPS + 1
    usual = float(np.median(_before(loss, t)))
    return [
        finding(
            facts,
            "loss_spike",
            f"loss stayed above the 99.5% quantile of its window for {QUANTILE_STEPS} steps from step "
            f"{int(facts.steps[t])} ({usual:.4g} -> {float(loss[int(hit[0])]):.4g})",
            severity=Severity.P1,
            first=int(facts.steps[t]),
            last=int(facts.steps[int(hit[-1])]),
            score=3.0,
            value=float(loss[int(hit[0])]),
            unit="1",
            baseline=usual,
        )
    ]


def _level(facts: Facts, name: str, values: FloatArray, level: float) -> Anomaly:
    t, r = (int(i[0]) for i in np.nonzero(values > level))
    return finding(
        facts, name, f"{name.replace('_', ' ')} {float(values[t, r]):.3g} is above the level {level:g} that you set",
        severity=Severity.P1, first=int(facts.steps[t]), last=int(facts.steps[-1]), score=float(values[t, r]) / level,
        value=float(values[t, r]), unit="1", baseline=level, fired_by="level",
    )  # fmt: skip


def gradient_level(facts: Facts, levels: Levels) -> list[Anomaly]:
    """Explosion: above 1e4, or above the level and far above the run's own past for several steps."""
    norm = common(facts, "grad_norm")
    if not np.isfinite(norm).any():
        return []
    found: list[Anomaly] = []
    usual = float(np.nanmedian(norm))
    over = np.nan_to_num(norm) > levels.grad_norm
    if "grad_norm" in levels.chosen and over.any():
        found.append(_level(facts, "grad_norm", norm[:, None], levels.grad_norm))
    huge = np.flatnonzero(np.nan_to_num(norm) > EXPLOSION)
    for t in huge[:1]:
        past = _before(norm, int(t))
        if (len(past) >= HISTORY_MIN and float(np.median(past)) < EXPLOSION / 10) or usual < EXPLOSION / 10:
            found.append(
                finding(
                    facts,
                    "grad_explosion",
                    f"gradient norm {float(norm[t]):.3g} at step {int(facts.steps[t])} is beyond {EXPLOSION:g}",
                    severity=Severity.P0,
                    first=int(facts.steps[t]),
                    last=int(facts.steps[huge[-1]]),
                    score=float(norm[t]) / EXPLOSION,
                    value=float(norm[t]),
                    unit="1",
                    baseline=usual,
                    fired_by="level",
                )
            )
    return found


def vanishing(facts: Facts) -> list[Anomaly]:
    """Gradient norm below 1e-6 for a span of steps, in a run that once had larger ones, while the loss stands still.

    Norms may be sampled: the span counts from the first small one to the last with none between that is not.
    """
    norm, loss = common(facts, "grad_norm"), common(facts, "loss")
    known = np.flatnonzero(np.isfinite(norm))
    if not len(known) or norm[known].max() < 100 * VANISHING:
        return []
    for low, high in runs(norm[known] < VANISHING):
        a, b = int(known[low]), int(known[high])
        if high - low + 1 < VANISHING_SAMPLES or facts.steps[b] - facts.steps[a] + 1 < VANISHING_STEPS:
            continue
        if not _flat(loss[a : b + 1]):
            continue
        first = int(facts.steps[a])
        return [
            finding(
                facts, "grad_vanishing",
                f"gradient norm below {VANISHING:g} since step {first} ({float(norm[a]):.2g}), and the loss has not "
                f"moved in the last {FLAT_STEPS} steps",
                severity=Severity.P1, first=first, last=int(facts.steps[b]),
                score=VANISHING / max(float(norm[a]), 1e-30), value=float(norm[a]), unit="1",
                baseline=float(np.median(norm[known])), fired_by="level",
            )
        ]  # fmt: skip
    return []


def _flat(loss: FloatArray) -> bool:
    """Whether the last 100 known losses neither fall nor rise: by more than 1%, or than their own noise explains."""
    x = loss[np.isfinite(loss)][-FLAT_STEPS:]
    if len(x) < FLAT_STEPS:
        return False
    half = FLAT_STEPS // 2
    noise = 2 * float(np.std(np.diff(x))) / np.sqrt(half)
    return bool(abs(np.median(x[half:]) - np.median(x[:half])) <= max(FLAT_SHARE * abs(float(np.median(x))), noise))


def _variances(windows: FloatArray) -> FloatArray:
    """Variance of each row of [N, W] about its own straight line, without its few largest deviations."""
    t = np.arange(windows.shape[1]) - (windows.shape[1] - 1) / 2
    centred = windows - windows.mean(axis=1, keepdims=True)
    squares = np.sort((centred - (centred @ t / (t @ t))[:, None] * t) ** 2, axis=1)
    return np.asarray(squares[:, :-VARIANCE_TRIM].mean(axis=1), np.float64)


def variance(facts: Facts) -> list[Anomaly]:
    """Loss variance of two windows running beyond mean + 15 sigma of those before, and four times their largest."""
    loss = common(facts, "loss")
    rows = np.flatnonzero(np.isfinite(loss))[WARM_UP_STEPS:]
    count = len(rows) // VARIANCE_WIDTH
    if count <= VARIANCE_WINDOWS:
        return []
    rows = rows[-count * VARIANCE_WIDTH :].reshape(count, VARIANCE_WIDTH)
    spread = _variances(loss[rows])
    for k in range(VARIANCE_WINDOWS, count - 1):
        before = spread[:k]
        bound = max(before.mean() + VARIANCE_SIGMAS * before.std(), VARIANCE_RISE * before.max())
        if spread[k : k + 2].min() > bound > 0:
            first, value = int(facts.steps[rows[k, 0]]), float(np.sqrt(spread[k]))
            return [
                finding(
                    facts, "loss_variance",
                    f"the loss scatters by {value:.3g} in the {VARIANCE_WIDTH} steps from step {first} "
                    f"({float(np.sqrt(before.mean())):.3g} before)",
                    severity=Severity.P0, first=first, last=int(facts.steps[rows[-1, -1]]),
                    score=float(spread[k] / bound), value=value, unit="1", baseline=float(np.sqrt(before.mean())),
                )
            ]  # fmt: skip
    return []
