"""The step of the whole job became slower. Says nothing about who: the causal engine does.

Machines are shared, so the bar is high: a quarter longer, for thirty steps, ten times the run's noise. Steps that carry
more tokens or samples than before (a curriculum, a larger batch) may take longer by as much.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import Shift, common, finding, lasting_rise, rows_of, settled, step_ms
from lanterne.causal.facts import Facts, IntArray
from lanterne.nouns import Anomaly, Severity

WIDTH = 30
RATIO = 1.25
SIGMAS = 10.0
SECONDS = 20.0


def detect(facts: Facts) -> list[Anomaly]:
    whole = step_ms(facts)
    rows = rows_of(settled(facts) & np.isfinite(whole))
    if len(rows) < 2 * WIDTH:
        return []
    x = whole[rows]
    usual = float(np.percentile(x, 25))
    shift = lasting_rise(x, WIDTH, (RATIO - 1) * usual)
    if shift is None or shift.level < RATIO * shift.baseline or shift.z < SIGMAS:
        return []
    if shift.level < RATIO * shift.baseline * _more_work(facts, rows, shift):
        return []
    if float(np.sum(x[shift.first : shift.last + 1])) / 1e3 < SECONDS:
        return []
    first, last = int(facts.steps[rows[shift.first]]), int(facts.steps[rows[shift.last]])
    return [
        finding(
            facts,
            "step_time",
            f"a step takes {shift.level:.0f} ms since step {first} ({shift.baseline:.0f} ms before)",
            severity=Severity.P1,
            first=first,
            last=last,
            score=shift.level / shift.baseline,
            value=shift.level,
            unit="ms",
            baseline=shift.baseline,
        )
    ]


def _more_work(facts: Facts, rows: IntArray, shift: Shift) -> float:
    """Work of the risen steps over that of the others, where tokens or samples are told; 1 at least."""
    ratios = [1.0]
    for name in ("tokens", "samples"):
        work = common(facts, name)[rows]
        during, others = work[shift.first : shift.last + 1], np.delete(work, np.s_[shift.first : shift.last + 1])
        if np.isfinite(during).any() and np.isfinite(others).any():
            before = float(np.nanmedian(others))
            ratios.append(float(np.nanmedian(during)) / before if before > 0 else 1.0)
    return max(ratios)
