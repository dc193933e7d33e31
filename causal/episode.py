"""A slow spell that is over: where in the window the job's steps rose and came back.

The stages look for one change that lasts to the end of the window. Where the steps are fast again, the window is cut
at the end of the spell and judged as it was then. The spell is the best two-level box fit to the step times, by
prefix sums over all pairs of ends, O(rows^2) with at most ``BLOCKS_MAX`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lanterne.causal import network, stats, straggler
from lanterne.causal.finding import Finding, number
from lanterne.causal.frame import Frame, prepare
from lanterne.causal.stats import Floats
from lanterne.nouns import Evidence

BLOCKS_MAX = 512
ROWS_MIN, ROWS_AFTER_MIN = 8, 5
RISE_SHARE_MIN = 0.02
RISE_SIGMAS_MIN = 4.0
WINSOR_SIGMAS = 12.0
OVER = 0.95
"""Confidence of a cause that was seen only until its end."""


def spell(frame: Frame) -> tuple[int, int] | None:
    """(first row, row after the last) of a slow spell that is over; None where there is none."""
    rows = np.flatnonzero(frame.usable & np.isfinite(frame.step_ms))
    if len(rows) < 3 * ROWS_MIN:
        return None
    y = frame.step_ms[rows].astype(np.float64)
    noise = max(stats.noise_of(np.diff(y)) / np.sqrt(2), 1e-9)
    middle = float(np.median(y))
    y = np.clip(y, middle - WINSOR_SIGMAS * noise, middle + max(WINSOR_SIGMAS * noise, middle))
    width = -(-len(y) // BLOCKS_MAX)
    begin, end, rise = _box(np.array([b.mean() for b in np.split(y, range(width, len(y), width))]))
    begin, end = begin * width, min(end * width, len(y))
    least = max(RISE_SHARE_MIN * frame.base_step_ms, RISE_SIGMAS_MIN * noise / np.sqrt(max(end - begin, 1)))
    if end - begin < ROWS_MIN or len(y) - end < ROWS_AFTER_MIN or rise < least:
        return None
    return int(rows[begin]), int(rows[end - 1]) + 1


def _box(y: Floats) -> tuple[int, int, float]:
    """The (begin, end) whose mean lies above the rest's with the largest between-group sum of squares, and by how
    much."""
    n = len(y)
    total = np.concatenate([[0.0], np.cumsum(y)])
    inside = total[None, :] - total[:, None]  # [begin, end]
    size = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
    valid = (size > 0) & (size < n)
    size = np.where(valid, size, 1)
    rise = inside / size - (total[-1] - inside) / (n - np.where(valid, size, 0))
    gain = np.where(valid & (rise > 0), size * (n - size) / n * rise**2, 0.0)
    begin, end = np.unravel_index(int(gain.argmax()), gain.shape)
    return int(begin), int(end), float(rise[begin, end])


def findings(frame: Frame, known: Sequence[Finding]) -> list[Finding]:
    """Stragglers and slow links of a spell that is over, beyond those that are ``known``."""
    found = spell(frame)
    if found is None:
        return []
    _, end = found
    facts = frame.facts
    then = prepare(
        replace(
            facts,
            steps=facts.steps[:end],
            step_start_ns=facts.step_start_ns[:end],
            series={name: x[:end] for name, x in facts.series.items()},
        )
    )
    keys = {f.key for f in known}
    fresh = [f for stage in (straggler.findings, network.findings) for f in stage(then) if f.key not in keys]
    return [_over(frame, f, end) for f in fresh]


def _over(frame: Frame, finding: Finding, end: int) -> Finding:
    after = stats.rows_median(frame.step_ms[end:][frame.usable[end:]])
    during = finding.cause.evidence[0].value if finding.cause.evidence else None
    says = f"it is over: since step {frame.step(end)} steps take {number(after, 'ms')} again"
    evidence = (*finding.cause.evidence, Evidence(says=says, value=after, unit="ms", baseline=during, ref="step_ms"))
    return replace(finding, cause=replace(finding.cause, evidence=evidence, confidence=OVER * finding.cause.confidence))
