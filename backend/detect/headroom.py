"""Memory that runs out soon: the predictors of ``oom.py`` over the live series of each rank.

Device: what torch's allocator has handed out, against the device's memory. Host: what the process holds, against that
and what the host or its container still has to give at the time. A series is looked at ten times at an even interval,
as long as its own samples are apart (a second at least); the forecast reaches ten such intervals ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.backend.detect import oom
from lanterne.backend.detect.base import WARM_UP_STEPS, first_step
from lanterne.backend.detect.oom import SAMPLES, Advice, Sample
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Ruling

INTERVAL_NS = 1_000_000_000
MEMORIES = {
    "device": ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_limit_bytes"),
    "host": ("rss_bytes", "rss_bytes", "rss_limit_bytes"),
}
"""Which memory -> series of bytes in use, bytes held from the system, and the limit."""
FULL_SHARE, UNUSED_SHARE, FRAGMENTED_SAMPLES = 0.9, 0.25, 10
"""A device whose allocator holds nine tenths of it and cannot use a quarter of that, ten steps running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How one rank stands to one of its limits. ``level``: share of it in use; ``horizon_s``: how far it was looked."""

    rank: int
    memory: str
    level: float
    limit_bytes: float
    probability: float
    advice: Advice
    reserve_bytes: float
    horizon_s: float


def headroom(facts: Facts) -> list[Headroom]:
    """Each rank and memory with ten samples and a known limit; ``act`` first, then by probability."""
    found = []
    for memory, (used, held, limit) in MEMORIES.items():
        if used not in facts.series or limit not in facts.series or not len(facts.step_start_ns):
            continue
        for column, rank in enumerate(facts.ranks):
            x, most = facts.series[used][:, column], facts.series[limit][:, column]
            at = _samples(facts, x, most)
            if at is None:
                continue
            rows, interval_s = at
            top = float(most[rows[-1]])
            scaled = x[rows] / most[rows] * top  # of a limit that moves, the share counts
            keeps = np.where(np.isfinite(kept := facts.get(held)[rows, column]), kept, x[rows]) / most[rows] * top
            window = [Sample(allocated=a, reserved=max(a, k), resident=k, free=max(k - a, 0.0), largest_free=0.0)
                      for a, k in zip(scaled.tolist(), keeps.tolist(), strict=True)]  # fmt: skip
            said = oom.forecast(window, top)
            if said is not None:
                found.append(
                    Headroom(
                        rank=rank, memory=memory, level=float(scaled[-1]) / top, limit_bytes=top,
                        probability=said.probability, advice=said.advice, reserve_bytes=said.reserve_bytes,
                        horizon_s=oom.HORIZON * interval_s,
                    )
                )  # fmt: skip
    return sorted(found, key=lambda h: (-h.probability, h.rank, h.memory))


def _samples(facts: Facts, x: FloatArray, limit: FloatArray) -> tuple[list[int], float] | None:
    """(rows of the last ten samples, seconds between them); None where the window does not hold ten."""
    known = np.flatnonzero(np.isfinite(x) & (limit > 0) & (facts.steps - first_step(facts) >= WARM_UP_STEPS))
    if len(known) < SAMPLES:
        return None
    at = facts.step_start_ns[known]
    moved = np.flatnonzero(np.diff(x[known]) != 0) + 1
    apart = float(np.median(np.diff(at[moved]))) if len(moved) > 2 else 0.0
    interval = max(INTERVAL_NS, int(apart), int(np.median(np.diff(at))))
    wanted = int(at[-1]) - interval * np.arange(SAMPLES - 1, -1, -1)
    if wanted[0] < at[0] - interval // 2:
        return None
    rows = np.searchsorted(at, wanted + interval // 4, side="right") - 1
    return known[np.maximum(rows, 0)].tolist(), interval / 1e9


def rulings(found: list[Headroom]) -> list[Ruling]:
    """The highest chance of each memory as a rule: broken where the advice is to act."""
    first: dict[str, Headroom] = {}
    for one in found:
        first.setdefault(one.memory, one)
    return [
        Ruling(
            rule="memory_ahead", broken=one.advice is Advice.ACT, value=one.probability, threshold=oom.ACT_AT, unit="1",
            rank=one.rank,
            says=f"{one.memory} memory of rank {one.rank} is at {one.level:.0%} of {one.limit_bytes / 1e9:.1f} GB and "
            f"reaches it within {one.horizon_s:.0f} s with {one.probability:.0%}: {one.advice.value}",
        )
        for one in first.values()
    ]  # fmt: skip


def fragmented(facts: Facts) -> list[Ruling]:
    """Held by the device's allocator and not in use, over held: the rank with the most, where the device is full.

    The smallest share of the last steps counts: what is free between two steps and used within them is no waste.
    """
    used, held, limit = (facts.get(name)[-FRAGMENTED_SAMPLES:] for name in MEMORIES["device"])
    if len(held) < FRAGMENTED_SAMPLES or not np.isfinite(held).any():
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        unused = np.where(held > 0, (held - used) / held, np.nan).min(axis=0)  # NaN where a step is not known
        full = (held / limit).min(axis=0) >= FULL_SHARE
    found = np.where(full & np.isfinite(unused), unused, -np.inf)
    if not np.isfinite(found).any():
        return []
    r = int(found.argmax())
    return [
        Ruling(
            rule="fragmentation", broken=bool(found[r] >= UNUSED_SHARE), value=float(found[r]), threshold=UNUSED_SHARE,
            unit="1", rank=facts.ranks[r],
            says=f"the device of rank {facts.ranks[r]} is full, {found[r]:.0%} of what its allocator holds is not in "
            f"use: free blocks are too small for what is asked for (expandable_segments lets them grow)",
        )
    ]  # fmt: skip
