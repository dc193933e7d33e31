"""Late ranks of a short sample (profiler traces, dumps), by comparison with their peers: lanterne.causal.sample."""

from __future__ import annotations

from lanterne.backend.detect.base import finding, step_ms
from lanterne.backend.detect.base import median as middle
from lanterne.causal import sample
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly, Severity

COSTLY = 0.1
"""Share of a step from which a late rank is P1."""


def detect(facts: Facts) -> list[Anomaly]:
    """One anomaly for each late rank, or one without a rank where it cannot be told who is waited for."""
    whole = float(middle(step_ms(facts)))
    return [
        finding(
            facts, "straggler", one.evidence[0].says,
            severity=Severity.P1 if one.level_ms > COSTLY * whole else Severity.P2,
            first=one.first, last=one.last, score=one.level_ms / max(one.spread_ms, 1e-3), rank=one.rank,
            group=one.group if one.rank is None else None, value=one.level_ms, unit="ms", baseline=one.spread_ms,
            fired_by="peers",
        )
        for one in sample.late(facts)
    ]  # fmt: skip
