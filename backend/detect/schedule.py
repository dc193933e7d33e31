"""The learning rate against its plan, and its agreement over ranks.

``lr_drift = (lr - planned) / planned`` with the planned rate of that very step where a scheduler is known.
Without a plan only a jump above everything the run has used before is judged: decays and restarts are plans
that we merely do not see.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import Levels, common, events, finding
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Anomaly, Severity

CONFIRM_STEPS = 2
HEALTHY_STEPS = 5
AGREE_RELATIVE = 1e-3


def detect(facts: Facts, levels: Levels | None = None) -> list[Anomaly]:
    levels = levels or Levels()
    if not len(facts.ranks):
        return []
    return [*_drift(facts, levels), *_disagree(facts)]


def _ordered(facts: Facts) -> set[int]:
    """Steps at which a command of ours changed the rate: no anomaly."""
    return {
        e.step
        for e in events(facts, "command")
        if e.attributes.get("phase") in ("applied", "undone") and "lr" in str(e.attributes.get("action", ""))
    }


def drift_of(facts: Facts) -> FloatArray:
    """[T] drift of the median rank: as reported, else from lr and lr_planned; NaN where no plan is known."""
    lr, planned = common(facts, "lr"), common(facts, "lr_planned")
    with np.errstate(divide="ignore", invalid="ignore"):
        computed = np.where(planned > 0, lr / planned - 1, np.nan)
    reported = common(facts, "lr_drift")
    return np.where(np.isfinite(computed), computed, reported)


def _drift(facts: Facts, levels: Levels) -> list[Anomaly]:
    drift, lr = drift_of(facts), common(facts, "lr")
    if not np.isfinite(drift).any():
        return _without_plan(facts, lr)
    out = np.nan_to_num(drift) < levels.lr_drift_low
    out |= np.nan_to_num(drift) > levels.lr_drift_high
    streak = np.convolve(out, np.ones(CONFIRM_STEPS), "full")[: len(out)]
    hit = np.flatnonzero(streak >= CONFIRM_STEPS)
    if not len(hit):
        return []
    t = int(hit[0]) - CONFIRM_STEPS + 1
    before = drift[:t][np.isfinite(drift[:t])]
    # The baseline agrees when the run kept to its plan before; from the first step on only a chosen level fires.
    agreed = len(before) >= HEALTHY_STEPS and float(np.median(np.abs(before))) < 0.25
    if not agreed and not {"lr_drift_low", "lr_drift_high"} & levels.chosen:
        return []
    first, last = int(facts.steps[t]), int(facts.steps[int(np.flatnonzero(out)[-1])])
    if any(first - 1 <= s <= first + 1 for s in _ordered(facts)):
        return []
    value, rate = float(drift[int(hit[0])]), float(lr[int(hit[0])])
    plan = rate / (1 + value) if value > -1 else float("nan")
    return [
        finding(
            facts,
            "lr_drift",
            f"learning rate {rate:.3g} is {value:+.0%} off its plan ({plan:.3g}) since step {first}",
            severity=Severity.P1,
            first=first,
            last=last,
            score=abs(value),
            value=rate,
            unit="1",
            baseline=plan,
            fired_by="baseline" if agreed else "level",
        )
    ]


def _without_plan(facts: Facts, lr: FloatArray) -> list[Anomaly]:
    known = np.flatnonzero(np.isfinite(lr) & (lr > 0))
    if len(known) < 3 * HEALTHY_STEPS:
        return []
    x = lr[known]
    ratio = x[1:] / x[:-1]
    top = np.maximum.accumulate(x)[:-1]
    for i in np.flatnonzero((ratio > 1.95) & (x[1:] > 1.95 * top)):
        calm = ratio[max(0, i - HEALTHY_STEPS) : i]
        if len(calm) == HEALTHY_STEPS and float(np.abs(np.log(calm)).max()) < 0.2 and not _back_soon(x, int(i)):
            first = int(facts.steps[known[i + 1]])
            if any(first - 1 <= s <= first + 1 for s in _ordered(facts)):
                continue
            return [
                finding(
                    facts,
                    "lr_drift",
                    f"learning rate rose {ratio[i]:.1f} times in one step, from {x[i]:.3g} to {x[i + 1]:.3g}, "
                    f"above everything used before (no plan is known)",
                    severity=Severity.P1,
                    first=first,
                    last=int(facts.steps[known[-1]]),
                    score=float(ratio[i]),
                    value=float(x[i + 1]),
                    unit="1",
                    baseline=float(x[i]),
                )
            ]
    return []


def _back_soon(x: FloatArray, i: int) -> bool:
    """A single step is not enough: the next one must still be high, unless there is none yet."""
    return i + 2 < len(x) and x[i + 2] < 1.5 * x[i]


def _disagree(facts: Facts) -> list[Anomaly]:
    """Ranks that step with another rate than the rest (optimizer state must be equal on replicas)."""
    lr = facts.get("lr")
    if lr.shape[1] < 3 or not np.isfinite(lr).any():
        return []
    usual = common(facts, "lr")[:, None]
    odd = np.abs(lr - usual) > AGREE_RELATIVE * np.abs(usual) + 1e-12
    odd &= np.isfinite(lr)
    often = odd.sum(axis=0)
    if not (often >= CONFIRM_STEPS).any() or (often > 0).sum() > lr.shape[1] // 3:
        return []
    r = int(often.argmax())
    t = np.flatnonzero(odd[:, r])
    return [
        finding(
            facts,
            "lr_disagree",
            f"rank {facts.ranks[r]} uses learning rate {lr[t[0], r]:.3g} where the others use {usual[t[0], 0]:.3g}",
            severity=Severity.P1,
            first=int(facts.steps[t[0]]),
            last=int(facts.steps[t[-1]]),
            score=float(often[r]),
            rank=facts.ranks[r],
            value=float(lr[t[0], r]),
            unit="1",
            baseline=float(usual[t[0], 0]),
        )
    ]
