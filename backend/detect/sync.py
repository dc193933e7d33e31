"""Gradient synchronisation against the contract's fixed levels: > 800 ms, and > 3 times the median of the ranks.

The sync time of a rank in a step is what it waited in collectives and the transfers themselves. It says *that* the job
loses time in synchronisation, never who is late: the one who waits longest is a victim (``straggler`` names the last).
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import Levels, Mask, finding, median, rows_of, settled, step_ms
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Anomaly, Severity

RUNNING = 3
"""Steps in a row (contract)."""
RATIO = 3.0
BASELINE_STEPS = 20
SHARE = 0.5
FLOOR_MS = 100.0
"""Beyond the median by this and by half a step: three times next to nothing is nothing."""


def sync_ms(facts: Facts) -> FloatArray:
    """[T, R] waiting plus transfer of each rank and step; NaN where no collective was seen."""
    wait = facts.series.get("wait_ms")
    if wait is None:
        return np.full((len(facts.steps), len(facts.ranks)), np.nan)
    return wait + np.nan_to_num(facts.get("transfer_ms"))


def detect(facts: Facts, levels: Levels | None = None) -> list[Anomaly]:
    if "wait_ms" not in facts.series or not len(facts.ranks):
        return []
    sync, keep = sync_ms(facts), settled(facts)
    rows = rows_of(keep & np.isfinite(sync).any(axis=1))
    if len(rows) < BASELINE_STEPS + RUNNING:
        return []
    return [*_delay(facts, sync, rows, levels or Levels()), *_skew(facts, sync, rows)]


def _streak(hit: Mask) -> Mask:
    """True from the third row in a row on, along axis 0."""
    out = hit.copy()
    for back in range(1, RUNNING):
        out[back:] &= hit[:-back]
        out[:back] = False
    return out


def _delay(facts: Facts, sync: FloatArray, rows: np.ndarray, levels: Levels) -> list[Anomaly]:
    """The job's sync delay (its longest rank's) above 800 ms three steps running, where it usually is a third.

    The three must exceed 99% of all steps before them as well.
    """
    longest = np.where(np.isfinite(sync[rows]), sync[rows], -np.inf).max(axis=1)
    usual = float(np.median(longest[:BASELINE_STEPS]))
    level = levels.sync_ms
    bound = level if "sync_ms" in levels.chosen else max(level, RATIO * usual)
    hit = np.flatnonzero(_streak(longest > bound))
    if len(hit) and "sync_ms" not in levels.chosen:  # a host that stutters by itself shows such delays one by one
        start = int(hit[0]) - RUNNING + 1
        worst = float(np.quantile(longest[:start], 0.99)) if start else 0.0
        hit = hit if longest[start : start + RUNNING].min() > worst else hit[:0]
    if not len(hit):
        return []
    first, last = int(facts.steps[rows[hit[0] - RUNNING + 1]]), int(facts.steps[rows[hit[-1]]])
    value = float(longest[hit[0]])
    return [
        finding(
            facts, "sync_delay",
            f"synchronising gradients took more than {bound:.0f} ms in {RUNNING} steps running from step {first} "
            f"({value:.0f} ms, {usual:.0f} ms usually)",
            severity=Severity.P0, first=first, last=last, score=value / bound, value=value, unit="ms", baseline=usual,
            fired_by="level" if "sync_ms" in levels.chosen else "baseline",
        )
    ]  # fmt: skip


def _skew(facts: Facts, sync: FloatArray, rows: np.ndarray) -> list[Anomaly]:
    """A rank whose sync time exceeds three times the ranks' median three steps running, and did not before."""
    if sync.shape[1] < 3:
        return []
    x, whole = sync[rows], step_ms(facts)[rows]
    usual = median(x, axis=1)[:, None]
    floor = max(SHARE * float(median(whole)), FLOOR_MS)
    over = np.nan_to_num(x) > np.maximum(RATIO * usual, usual + floor)
    over &= median(x[:BASELINE_STEPS], axis=0)[None, :] <= RATIO * median(x[:BASELINE_STEPS])
    hit = np.argwhere(_streak(over))
    if not len(hit):
        return []
    t, r = (int(i) for i in hit[0])
    first, last = int(facts.steps[rows[t - RUNNING + 1]]), int(facts.steps[rows[int(hit[-1][0])]])
    rank, value, base = facts.ranks[r], float(x[t, r]), float(usual[t, 0])
    return [
        finding(
            facts, "sync_skew",
            f"rank {rank} spends {value:.0f} ms a step in synchronisation from step {first} where the median rank "
            f"spends {base:.0f} ms: those that it shares a group with are waited for",
            severity=Severity.P0, first=first, last=last, score=value / max(base, 1.0), rank=rank, value=value,
            unit="ms", baseline=base,
        )
    ]  # fmt: skip
