"""Recompilation: a graph that is built again and again after warm-up.

Steps that compile are left out of every other comparison, so what they cost is counted here.
"""

from __future__ import annotations

import numpy as np

from lanterne.causal import stats
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import LONG_PHASE_MS, Frame, warm_up_rows
from lanterne.causal.straggler import cost_of
from lanterne.nouns import CauseCategory, Evidence, Subject, Symptom

TIMES_MIN, SPAN_MIN = 4, 10
"""So many compilations, over so many steps: fewer are the last batch of an epoch or the first evaluation."""
SHARE_MIN = 0.02
ONE_RANK = 0.8


def findings(frame: Frame) -> list[Finding]:
    """At most one finding: the rank that compiles in most of those steps, or all of them."""
    x = frame.facts.series.get("compile_ms")
    if x is None or not len(x):
        return []
    spent = np.where(np.isfinite(x), x, 0.0)
    longest = spent.max(1)
    longest[: warm_up_rows(frame.facts)] = 0.0
    rows = np.flatnonzero(longest > LONG_PHASE_MS)
    if len(rows) < TIMES_MIN or rows[-1] - rows[0] < SPAN_MIN:
        return []
    lost = float(longest[rows].sum()) / (len(longest) - int(rows[0]))
    if not np.isfinite(frame.base_step_ms) or lost < SHARE_MIN * frame.base_step_ms:
        return []
    others = stats.top2(spent[rows])[2]
    alone = others < 0.5 * longest[rows]
    who = np.bincount(spent[rows].argmax(1)[alone], minlength=x.shape[1])
    column = int(who.argmax()) if who.max() >= ONE_RANK * len(rows) else None
    since = frame.step(int(rows[0]))
    rank = None if column is None else int(frame.ranks[column])
    subject = Subject() if column is None else Subject(rank=rank, host=frame.hosts[int(frame.host[column])] or None)
    name = "the job compiles" if rank is None else f"rank {rank} compiles"
    mean = float(longest[rows].mean())
    says = f"{name} again in {len(rows)} steps since step {since}, {number(mean, 'ms')} each time"
    waits = tuple(
        Symptom(kind="wait", says=f"rank {r} waits while rank {rank} compiles", subject=Subject(rank=int(r)))
        for r in frame.ranks[:9]
        if rank is not None and r != rank
    )
    return [
        make(
            CauseCategory.RECOMPILE,
            "straggler",
            confidence=0.9,
            subject=subject,
            since_step=since,
            cost=cost_of(frame, lost, int(rows[0])),
            evidence=(Evidence(says=says, value=mean, unit="ms", baseline=0.0, ref="compile_ms"),),
            path=(Link(metric="compile_ms", label="compilation", weight=0.97, says=says),),
            symptoms=waits[:8],
        )
    ]
