"""The network's share: transfers (last arrival to completion) that last, per group, and mismatched calls.

Lateness is no network matter: a transfer begins when the last member has entered. Bandwidth against the best that a
group has shown is a service rule (``bandwidth.py``); the API fits ``alpha + beta x bytes``.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import (
    LOST_MS,
    common,
    events,
    finding,
    lasting_rise,
    lost_ms,
    median,
    rows_of,
    settled,
    step_ms,
)
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly, Severity

WIDTH = 10
RATIO = 2.5
SHARE = 0.2
FLOOR_MS = 15.0
SIGMAS = 4.0


def detect(facts: Facts) -> list[Anomaly]:
    return [*slow_transfer(facts), *mismatch(facts)]


def slow_transfer(facts: Facts) -> list[Anomaly]:
    """A lasting rise of the job's transfer time by 2.5 times and a fifth of the step."""
    transfer = facts.series.get("transfer_ms")
    if transfer is None:
        return []
    per_step, whole = common(facts, "transfer_ms"), step_ms(facts)
    rows = rows_of(settled(facts) & np.isfinite(per_step) & np.isfinite(whole))
    if len(rows) < 2 * WIDTH:
        return []
    x, step = per_step[rows], whole[rows]
    usual = float(np.percentile(step, 25))
    shift = lasting_rise(x, WIDTH, max(SHARE * usual, FLOOR_MS))
    if shift is None or shift.level < RATIO * max(shift.baseline, 1.0) or shift.z < SIGMAS:
        return []
    during = slice(shift.first, shift.last + 1)
    outside = np.ones(len(rows), bool)
    outside[during] = False
    normal = float(np.median(step[outside])) if outside.any() else usual
    if float(np.median(step[during])) - normal < max(0.3 * shift.rise, 0.1 * normal):
        return []
    if lost_ms(step[during], normal) < LOST_MS or _lateness_explains(facts, rows[during], shift.rise):
        return []
    first, last = int(facts.steps[rows[shift.first]]), int(facts.steps[rows[shift.last]])
    group, rank = _where(facts, first)
    return [
        finding(
            facts,
            "slow_transfer",
            f"transfers take {shift.level:.0f} ms a step since step {first} ({shift.baseline:.1f} ms before), "
            f"counted from the last arrival: the network is slow, nobody is late",
            severity=Severity.P1,
            first=first,
            last=last,
            score=min(shift.z, 1e6),
            rank=rank,
            group=group,
            value=shift.level,
            unit="ms",
            baseline=shift.baseline,
        )
    ]


def _lateness_explains(facts: Facts, rows: np.ndarray, rise: float) -> bool:
    """Somebody is late by as much as the transfer rose: then the straggler is the story."""
    late = facts.get("lateness_ms")[rows]
    typical = median(late, axis=0)
    return bool(np.isfinite(typical).any() and float(np.nanmax(typical)) > rise)


def _where(facts: Facts, first: int) -> tuple[str | None, int | None]:
    """Group with the largest rise of its transfers; a rank only where its own transfers rose by twice the others'."""
    w = facts.waits
    if not len(w.step):
        return None, None
    rises: dict[int, float] = {}
    for g in np.unique(w.group_index):
        mine = w.group_index == g
        before, after = w.transfer_ms[mine & (w.step < first)], w.transfer_ms[mine & (w.step >= first)]
        if len(before) >= 4 and len(after) >= 4:
            rises[int(g)] = float(np.median(after) - np.median(before))
    group = w.group[max(rises, key=lambda g: rises[g])] if rises else None
    own = facts.get("transfer_ms")
    late = facts.steps >= first
    gain = median(own[late], axis=0) - median(own[~late], axis=0) if (~late).any() else np.zeros(own.shape[1])
    order = np.argsort(np.nan_to_num(gain, nan=-np.inf))
    if len(order) > 2 and gain[order[-1]] > 2 * max(float(gain[order[-2]]), 1.0):
        return group, facts.ranks[int(order[-1])]
    return group, None


def mismatch(facts: Facts) -> list[Anomaly]:
    """Members of one slot that call different things."""
    told = events(facts, "collective_mismatch")
    if not told:
        return []
    event = told[0]
    return [
        finding(
            facts,
            "collective_mismatch",
            event.body,
            severity=Severity.P0,
            first=event.step,
            last=event.step,
            score=1.0,
            rank=event.rank if event.rank >= 0 else None,
            group=str(event.attributes.get("group", "")) or None,
            at_ns=event.job_ns,
            fired_by="event",
        )
    ]
