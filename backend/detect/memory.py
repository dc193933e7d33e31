"""Memory: out of memory, and leaks. Warm caches grow too, so a leak must go on, be steep, and set the rank apart."""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import WARM_UP_STEPS, attribute, events, finding, first_step, median, ranges, step_at
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Anomaly, EventName, Severity

SERIES = ("rss_bytes", "gpu_allocated_bytes", "shm_bytes")
STEPS_MIN = 24
PARTS = 8
GROWTH_BYTES = 192e6
GROWTH_SHARE = 0.10
STRAIGHT = 0.9


def detect(facts: Facts) -> list[Anomaly]:
    return [*out_of_memory(facts), *leaks(facts)]


def out_of_memory(facts: Facts) -> list[Anomaly]:
    found = []
    for event in events(facts, EventName.OUT_OF_MEMORY)[:4]:
        step = step_at(facts, event)
        allocated = attribute(event, "allocated_bytes")
        size = f" with {allocated / 1e9:.1f} GB allocated" if np.isfinite(allocated) else ""
        found.append(
            finding(
                facts,
                "out_of_memory",
                f"rank {event.rank} ran out of memory at step {step}{size}",
                severity=Severity.P0,
                first=step,
                last=step,
                score=1.0,
                rank=event.rank,
                at_ns=event.job_ns,
                value=allocated if np.isfinite(allocated) else None,
                unit="By",
                fired_by="event",
            )
        )
    return found


def leaks(facts: Facts) -> list[Anomaly]:
    """Growth that does not stop: the last stretch of the window, in parts, each higher than the one before."""
    found, begun = [], first_step(facts)
    for name in SERIES:
        values = facts.series.get(name)
        if values is None:
            continue
        rows = np.flatnonzero(np.isfinite(values).any(axis=1) & (facts.steps - begun >= WARM_UP_STEPS))
        if len(rows) < STEPS_MIN:
            continue
        wide = np.flatnonzero(ranges(values[rows]) >= GROWTH_BYTES).tolist()
        grown = {r: leak for r in wide if (leak := _leak(values[rows, r])) is not None}
        if not grown:
            continue
        # Everybody grows alike: data cached by all ranks, or a leak in common code. One rank alone is a leak.
        peers = median(np.array([[_growth(values[rows, r])] for r in range(values.shape[1])]))
        for r, (start, growth, level) in grown.items():
            if len(facts.ranks) > 2 and growth < 3 * max(float(peers), 0.0):
                continue
            first, last = int(facts.steps[rows[start]]), int(facts.steps[rows[-1]])
            rate = growth / max(last - first, 1)
            found.append(
                finding(
                    facts,
                    "memory_leak",
                    f"{name.removesuffix('_bytes').replace('_', ' ')} of rank {facts.ranks[r]} grew by "
                    f"{growth / 1e6:.0f} MB since step {first} ({rate / 1e6:.1f} MB a step) and goes on",
                    severity=Severity.P1,
                    first=first,
                    last=last,
                    score=growth / GROWTH_BYTES,
                    rank=facts.ranks[r],
                    value=rate,
                    unit="By/{step}",
                    baseline=level,
                )
            )
    return found


def _growth(x: FloatArray) -> float:
    known = x[np.isfinite(x)]
    return float(np.median(known[-5:]) - np.median(known[:5])) if len(known) >= 10 else 0.0


def _leak(x: FloatArray) -> tuple[int, float, float] | None:
    """(first row, growth, level before) of growth that is straight, lasting and large; None otherwise."""
    known = np.flatnonzero(np.isfinite(x))
    if len(known) < STEPS_MIN:
        return None
    y = x[known]
    start = _foot(y)
    tail = y[start:]
    if len(tail) < STEPS_MIN // 2:
        return None
    level, growth = float(np.median(y[: max(start, 5)])), float(np.median(tail[-3:]) - np.median(tail[:3]))
    if growth < max(GROWTH_BYTES, GROWTH_SHARE * level):
        return None
    parts = np.array([np.median(p) for p in np.array_split(tail, PARTS)])
    rising = np.diff(parts) > 0.2 * growth / PARTS
    t = np.arange(len(tail), dtype=np.float64)
    correlation = float(np.corrcoef(t, tail)[0, 1])
    if rising.mean() < 0.85 or correlation < STRAIGHT or not rising[-1]:
        return None
    return int(known[start]), growth, level


def _foot(y: FloatArray) -> int:
    """Row where the final growth begins: the point farthest below the chord from the first to the last sample."""
    n = len(y)
    chord = y[0] + (y[-1] - y[0]) * np.arange(n) / max(n - 1, 1)
    return int(np.argmax(chord - y)) if n > 2 else 0
