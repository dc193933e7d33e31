"""Bandwidth of each group against the best that the same group has shown (contract: below 70% is flagged).

Only the largest calls count: small ones measure latency. Best and present are medians over 50 calls, so that neither
one lucky call nor one bad one decides. Algorithm bandwidth (payload over time): the bus factor of a group is constant
and cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.causal.facts import FloatArray, IntArray
from lanterne.nouns import Ruling

SHARE = 0.7
CALLS = 50
FLOOR_MS = 15.0
"""A shorter transfer is no matter of bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """``recent``: GB/s of the last calls of the largest kind; ``best``: highest median of 50; ``took_ms``: now."""

    kind: int
    recent: tuple[float, ...] = ()
    best: float = 0.0
    count: int = 0
    took_ms: float = 0.0

    @property
    def now(self) -> float:
        return float(np.median(self.recent)) if self.recent else float("nan")


def follow(before: Speed | None, kind: IntArray, size: IntArray, took_ms: FloatArray) -> Speed | None:
    """The speed after more calls of a group (parallel arrays in order); a larger kind that comes often begins anew."""
    usable = (size > 0) & (took_ms > 0)
    kinds, counts = np.unique(kind[usable], return_counts=True)
    often = kinds[counts >= CALLS]
    largest = int(often.max()) if len(often) else -1
    if before is None or largest > before.kind:
        if largest < 0:
            return before
        before = Speed(kind=largest)
    mine = np.flatnonzero(usable & (kind == before.kind))
    if not len(mine):
        return before
    speed = np.array([*before.recent, *(size[mine] / took_ms[mine] / 1e6).tolist()])
    blocks = speed[: len(speed) // CALLS * CALLS].reshape(-1, CALLS)
    best = max([before.best, *np.median(blocks, axis=1).tolist()])
    return Speed(
        kind=before.kind, recent=tuple(speed[-CALLS:].tolist()), best=best, count=before.count + len(mine),
        took_ms=float(np.median(took_ms[mine][-CALLS:])),
    )  # fmt: skip


def rulings(speeds: Mapping[str, Speed]) -> list[Ruling]:
    """One rule a group with enough calls: its present share of the best."""
    return [
        Ruling(
            rule="bandwidth", broken=s.now < SHARE * s.best and s.took_ms >= FLOOR_MS, value=s.now / s.best,
            threshold=SHARE, unit="1",
            says=f"group {group} moves {s.now:.3g} GB/s in its largest calls, {s.best:.3g} at its best",
        )
        for group, s in sorted(speeds.items())
        if s.count >= 2 * CALLS and s.best > 0
    ]  # fmt: skip
