"""Slow device or slow work: the fixed GEMM and copy that the action ``probe_device`` runs on all ranks at one step.

The same bytes everywhere: a rank whose figures are far from its peers' has a slow device, whatever it was given to do;
a straggler whose figures are its peers' has more work, or waits for something else.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import attribute, events, finding
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly, EventName, Severity

RATIO, RATIO_CPU = 1.3, 2.0
"""Times the median of the other ranks; nine rounds a measurement, of which the best counts. Ranks share cores, so a CPU
must stand out by more."""
RANKS_MIN = 3
PARTS = {"gemm_ms": "matrix product", "copy_ms": "copy"}


def detect(facts: Facts) -> list[Anomaly]:
    """Ranks that were slower than their peers in the last round of probes; [] with fewer than three measured."""
    told = [e for e in events(facts, EventName.DEVICE_PROBE) if not e.attributes.get("error")]
    if not told:
        return []
    last = max(e.step for e in told)
    of_rank = {e.rank: e for e in told if e.step == last}
    kinds = {str(e.attributes.get("device", "")).partition(":")[0] for e in of_rank.values()}
    if len(of_rank) < RANKS_MIN or len(kinds) > 1:
        return []
    found, ratio = [], RATIO_CPU if kinds == {"cpu"} else RATIO
    for key, what in PARTS.items():
        took = {rank: attribute(e, key) for rank, e in of_rank.items()}
        took = {rank: ms for rank, ms in took.items() if ms > 0}
        for rank, ms in took.items():
            usual = float(np.median([other for r, other in took.items() if r != rank])) if len(took) > 1 else ms
            if len(took) >= RANKS_MIN and ms > ratio * usual:
                found.append(
                    finding(
                        facts, "slow_device",
                        f"the device of rank {rank} takes {ms:.3g} ms for a fixed {what} that its peers do in "
                        f"{usual:.3g} ms: the device is slow, not its work",
                        severity=Severity.P1, first=last, last=last, score=ms / usual, rank=rank, value=ms, unit="ms",
                        baseline=usual, fired_by="event",
                    )
                )  # fmt: skip
    worst: dict[int | None, Anomaly] = {}
    for one in sorted(found, key=lambda a: -a.score):
        worst.setdefault(one.subject.rank, one)
    return list(worst.values())
