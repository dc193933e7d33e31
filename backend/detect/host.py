"""What happens on one host or inside one process: garbage collection, data stalls, throttling, device errors."""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import finding, lasting_rise, median, ranges, risen, rows_of, settled, step_ms
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly, Severity

GC_SHARE = 0.10
GC_COUNT = 4
GC_FLOOR_MS = 20.0
DATA_SHARE = 0.35
DATA_FLOOR_MS = 10.0
WIDTH = 10
HARMFUL_THROTTLE = 0x08 | 0x20 | 0x40 | 0x80
"""NVML clock event reasons: hardware slowdown, software thermal, hardware thermal, hardware power brake."""


def detect(facts: Facts) -> list[Anomaly]:
    return [*garbage(facts), *data_stall(facts), *throttled(facts), *device_errors(facts)]


def garbage(facts: Facts) -> list[Anomaly]:
    """A rank that spends a tenth of its time in garbage collection, well above its peers."""
    pauses, whole = np.nan_to_num(facts.get("gc_ms")), step_ms(facts)
    rows = rows_of(settled(facts) & np.isfinite(whole))
    if len(rows) < WIDTH or not pauses.any():
        return []
    spent = pauses[rows]
    hard = spent > np.maximum(GC_FLOOR_MS, 0.1 * float(np.median(whole[rows])))
    found = []
    for r in np.flatnonzero(hard.sum(axis=0) >= GC_COUNT):
        hit = np.flatnonzero(hard[:, r])
        window = slice(int(hit[0]), int(hit[-1]) + 1)
        total = float(whole[rows][window].sum())
        share = float(spent[window, r].sum()) / total if total > 0 else 0.0
        peers = np.delete(spent[window], r, axis=1).sum(axis=0)
        apart = not len(peers) or float(np.median(peers)) < 0.5 * float(spent[window, r].sum())
        if share >= GC_SHARE and apart:
            first, last = int(facts.steps[rows[hit[0]]]), int(facts.steps[rows[hit[-1]]])
            typical = float(np.median(spent[hit, r]))
            found.append(
                finding(
                    facts,
                    "gc_pause",
                    f"garbage collection takes {share:.0%} of rank {facts.ranks[r]}'s time since step {first} "
                    f"({len(hit)} pauses of {typical:.0f} ms)",
                    severity=Severity.P1 if share > 0.1 else Severity.P2,
                    first=first,
                    last=last,
                    score=share / GC_SHARE,
                    rank=facts.ranks[r],
                    value=typical,
                    unit="ms",
                    baseline=0.0,
                )
            )
    return found


def data_stall(facts: Facts) -> list[Anomaly]:
    """Waiting for data that lasts and grew: on all ranks, or on one (then the straggler detector sees it as well)."""
    wait, whole = facts.get("data_wait_ms"), step_ms(facts)
    rows = rows_of(settled(facts) & np.isfinite(whole))
    if len(rows) < 2 * WIDTH:
        return []
    usual = float(np.percentile(whole[rows], 25))
    floor = max(DATA_SHARE * usual, DATA_FLOOR_MS)
    found = []
    for r in risen(wait[rows], WIDTH, floor):
        x = wait[rows, r]
        if not np.isfinite(x).all():
            continue
        shift = lasting_rise(x, WIDTH, floor)
        if shift is None or shift.rise < 4 * shift.noise or shift.level < 3 * max(shift.baseline, 0.5):
            continue
        during = slice(shift.first, shift.last + 1)
        if float(np.median(whole[rows][during])) < usual + 0.5 * shift.rise:
            continue
        first, last = int(facts.steps[rows[shift.first]]), int(facts.steps[rows[shift.last]])
        found.append(
            finding(
                facts,
                "data_stall",
                f"rank {facts.ranks[r]} waits {shift.level:.0f} ms a step for data since step {first} "
                f"({shift.baseline:.1f} ms before)",
                severity=Severity.P1,
                first=first,
                last=last,
                score=min(shift.z, 1e6),
                rank=facts.ranks[r],
                value=shift.level,
                unit="ms",
                baseline=shift.baseline,
            )
        )
    return found[:8]


def throttled(facts: Facts) -> list[Anomaly]:
    """Harmful clock reasons in most of ten steps together with a clock below the peers'."""
    bits, clock = facts.get("gpu_throttle"), facts.get("gpu_clock_mhz")
    if not np.isfinite(bits).any():
        return []
    bad = (np.nan_to_num(bits).astype(np.int64) & HARMFUL_THROTTLE) > 0
    found = []
    for r in np.flatnonzero(bad.sum(axis=0) >= WIDTH):
        hit = np.flatnonzero(bad[:, r])
        peers = np.delete(clock[hit], r, axis=1)
        own, usual = float(median(clock[hit, r])), float(median(peers)) if peers.size else float("nan")
        if np.isfinite(usual) and own < 0.93 * usual:
            found.append(
                finding(
                    facts,
                    "thermal_throttle",
                    f"rank {facts.ranks[r]}'s device is throttled: {own:.0f} MHz where its peers run {usual:.0f} MHz",
                    severity=Severity.P1,
                    first=int(facts.steps[hit[0]]),
                    last=int(facts.steps[hit[-1]]),
                    score=usual / max(own, 1.0),
                    rank=facts.ranks[r],
                    value=own,
                    unit="MHz",
                    baseline=usual,
                )
            )
    return found


def device_errors(facts: Facts) -> list[Anomaly]:
    """Uncorrectable memory errors that rose during the run."""
    errors = facts.get("gpu_ecc_errors")
    found = []
    for r in np.flatnonzero(ranges(errors) > 0):
        known = np.flatnonzero(np.isfinite(errors[:, r]))
        if len(known) and errors[known[-1], r] > errors[known[0], r]:
            rose = int(known[np.flatnonzero(np.diff(errors[known, r]) > 0)[0] + 1])
            found.append(
                finding(
                    facts,
                    "device_error",
                    f"the device of rank {facts.ranks[r]} counted {errors[known[-1], r] - errors[known[0], r]:.0f} "
                    f"memory errors since step {int(facts.steps[rose])}",
                    severity=Severity.P1,
                    first=int(facts.steps[rose]),
                    last=int(facts.steps[known[-1]]),
                    score=float(errors[known[-1], r] - errors[known[0], r]),
                    rank=facts.ranks[r],
                    value=float(errors[known[-1], r]),
                    unit="{error}",
                    baseline=float(errors[known[0], r]),
                )
            )
    return found
