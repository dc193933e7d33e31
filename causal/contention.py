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
QUEUE_RISE_MIN, QUEUE_ROWS_MIN, QUEUE_ROWS_NEAR = 8.0, 10, 5
"""Processes more, rows before, and rows between the two changes."""
ONE_LEADS = 0.3
"""Of the rise: a lead that grew by more is one rank's."""
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
    if not {"cpu_delay_percent", "host_runqueue"} & set(frame.facts.series) or len(rows) < 12:
        return []
    y = frame.step_ms[rows]
    found = stats.split(np.minimum(y, 20 * frame.base_step_ms)[:, None])
    at = int(found.at[0])
    before, after = stats.rows_median(y[:at]), stats.rows_median(y[at:])
    if not after > STEP_FACTOR_MIN * before:
        return []
    row, since = int(rows[at]), frame.step(int(rows[at]))
    if "cpu_delay_percent" not in frame.facts.series:
        loaded = _loaded(frame, row, after - before)
        return [] if loaded is None else [loaded]
    return [_finding(frame, c, row, since, after - before) for c in contended(frame, row, after - before)]


def _loaded(frame: Frame, row: int, rise_ms: float) -> Finding | None:
    """The only host of a job got a long run queue at the step at which all its ranks became slower together.

    Where ranks of other hosts stay well they tell it better, and where one rank leads it is that rank.
    """
    queue, rows = frame.facts.series["host_runqueue"], np.arange(len(frame.usable))
    now, past = frame.usable & (rows >= row), frame.usable & (rows < row)
    if len(frame.hosts) != 1 or not np.isfinite(queue[past]).any() or past.sum() < QUEUE_ROWS_MIN:
        return None
    level = stats.median(queue, 1)
    before, after = stats.rows_median(level[past]), stats.rows_median(level[now])
    lead = [stats.rows_median(stats.top2(frame.own[m])[1]) for m in (past, now)]
    near = abs(int(stats.split(level[frame.usable][:, None]).at[0]) - int(past.sum())) <= QUEUE_ROWS_NEAR
    if not after - before > max(QUEUE_RISE_MIN, 6 * stats.noise_of(level[past])) or not near:
        return None
    if np.isfinite(lead).all() and lead[1] - lead[0] > ONE_LEADS * rise_ms:
        return None
    host, since = frame.hosts[0] or None, frame.step(row)
    says = f"the run queue of {host or 'the host'} holds {after:.0f} processes since step {since}, before {before:.0f}"
    alike = f"all its ranks became slower together: a step takes {number(rise_ms, 'ms')} more"
    return make(
        CauseCategory.HOST_CONTENTION,
        "straggler",
        confidence=0.72,
        subject=Subject(host=host),
        since_step=since,
        cost=cost_of(frame, rise_ms, row),
        evidence=(
            Evidence(says=says, value=after, unit="processes", baseline=before, ref="host_runqueue"),
            Evidence(says=alike, value=rise_ms, unit="ms", baseline=0.0, ref="step_ms"),
        ),
        path=(Link(metric="host_runqueue", label="long run queue", weight=0.95, says=says, kind="pattern"),),
    )


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
