"""The cores were taken: ranks that stand ready and do not run make every step and every transfer longer.

Nobody is late then and no link is slow. What tells it apart is the scheduler's own account of the time that a rank's
main thread waited for a core (``cpu_delay_percent``), set against the time by which a step grew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.causal import stats
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame
from lanterne.causal.stats import Ints
from lanterne.causal.straggler import cost_of
from lanterne.nouns import CauseCategory, Evidence, Subject

RISE_PERCENT_MIN = 8.0
STEP_FACTOR_MIN = 1.15
EXPLAINS_MIN = 0.5
SAMPLES_MIN = 2
"""Readings on each side: the scheduler is asked twice a second, whatever a step takes."""


@dataclass(frozen=True, slots=True)
class Contended:
    """One host whose ranks waited for cores: shares in per cent before and after, and how much of the rise it is."""

    host: int
    before: float
    after: float
    explains: float


def contended(frame: Frame, row: int, rise_ms: float) -> list[Contended]:
    """Hosts whose ranks' time without a core rose at ``row`` by half of ``rise_ms`` a step or more; the worst first."""
    x = frame.facts.series.get("cpu_delay_percent")
    if x is None or not rise_ms > 0:
        return []
    rows = np.arange(len(frame.usable))
    now, past = frame.usable & (rows >= row), frame.usable & (rows < row)
    step = stats.rows_mean(frame.step_ms[now])
    found = []
    for host in np.unique(frame.host):
        mine = x[:, frame.host == host]
        if min(np.isfinite(mine[now]).sum(), np.isfinite(mine[past]).sum()) < SAMPLES_MIN:
            continue
        before, after = stats.rows_mean(mine[past]), stats.rows_mean(mine[now])
        explains = (after - before) / 100 * step / rise_ms
        if after - before >= RISE_PERCENT_MIN and explains >= EXPLAINS_MIN:
            found.append(Contended(int(host), before, after, min(explains, 1.0)))
    return sorted(found, key=lambda c: -c.explains)


def findings(frame: Frame) -> list[Finding]:
    """The hosts that explain a lasting rise of the step by time without a core."""
    rows: Ints = np.flatnonzero(frame.usable & np.isfinite(frame.step_ms))
    if "cpu_delay_percent" not in frame.facts.series or len(rows) < 12:
        return []
    y = frame.step_ms[rows]
    found = stats.split(np.minimum(y, 20 * frame.base_step_ms)[:, None])
    at = int(found.at[0])
    before, after = stats.rows_median(y[:at]), stats.rows_median(y[at:])
    if not after > STEP_FACTOR_MIN * before:
        return []
    row, since = int(rows[at]), frame.step(int(rows[at]))
    return [_finding(frame, c, row, since, after - before) for c in contended(frame, row, after - before)]


def _finding(frame: Frame, c: Contended, row: int, since: int, rise_ms: float) -> Finding:
    host = frame.hosts[c.host]
    says = (
        f"the ranks on {host or 'this host'} stood ready without a core for {number(c.after, '%')} of the time"
        f" since step {since}, before {number(c.before, '%')}"
    )
    share = f"that is {c.explains:.0%} of the {number(rise_ms, 'ms')} by which a step grew"
    return make(
        CauseCategory.HOST_CONTENTION,
        "straggler",
        confidence=0.55 + 0.4 * c.explains * (1 - np.exp(-(c.after - c.before) / 15)),
        subject=Subject(host=host or None),
        since_step=since,
        cost=cost_of(frame, rise_ms * c.explains, row),
        evidence=(
            Evidence(says=says, value=c.after, unit="%", baseline=c.before, ref="cpu_delay_percent"),
            Evidence(says=share, value=rise_ms * c.explains, unit="ms", baseline=0.0, ref="step_ms"),
        ),
        path=(Link(metric="cpu_delay_percent", label="time without a core", weight=0.96, says=says, kind="pattern"),),
    )
