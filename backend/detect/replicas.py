"""Replicas must agree: on their parameters, on synchronised gradients, and on what should be seeded alike."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from lanterne.backend.detect.base import events, finding, median
from lanterne.causal.facts import Facts
from lanterne.causal.replicas import apart
from lanterne.nouns import Anomaly, AttributeValue, EventName, Severity

CONFIRM = 2
ALONE_STEPS = 24
"""Steps after a check in which the next one would have come at the usual pace (16): it stands alone then."""
GRADIENTS_AGREE, GRADIENTS_DIFFER = 1e-5, 1e-3
"""Relative: norms of the same gradients differ by their summing order at most; what counts is a hundred times that."""
AGREED_ROWS = 5
OPTIMIZER_STATE = "optimizer_state"
OPTIMIZER_KEYS = ("betas", "eps", "weight_decay", "momentum", "step_count")


def detect(facts: Facts) -> list[Anomaly]:
    return [*(divergence(facts) or gradients(facts)), *seeds(facts), *optimizer(facts)]


def gradients(facts: Facts) -> list[Anomaly]:
    """Norms of the synchronised gradients that differ in few ranks from the rest, in a run in which all agreed before.

    Where they never agreed (sharded parameters, pipeline stages, local steps) nothing is said.
    """
    norm = facts.get("grad_norm")
    rows = np.flatnonzero(np.isfinite(norm).all(axis=1)) if norm.shape[1] > 2 else np.zeros(0, np.int64)
    if len(rows) < AGREED_ROWS + CONFIRM:
        return []
    x = norm[rows]
    usual = median(x, axis=1)[:, None]
    off = np.abs(x - usual) / np.maximum(np.abs(usual), 1e-12)
    odd = off > GRADIENTS_DIFFER
    wrong = np.flatnonzero(odd.any(axis=1))
    if len(wrong) < CONFIRM or wrong[0] < AGREED_ROWS or off[: wrong[0]].max() > GRADIENTS_AGREE:
        return []
    who = np.flatnonzero(odd.sum(axis=0) >= CONFIRM)
    if not len(who) or len(who) > max(1, x.shape[1] // 3):
        return []
    first, last, r = int(facts.steps[rows[wrong[0]]]), int(facts.steps[rows[wrong[-1]]]), int(who[0])
    rank = facts.ranks[r] if len(who) == 1 else None
    named = f"rank {rank}" if rank is not None else f"{len(who)} ranks"
    return [
        finding(
            facts, "replica_divergence",
            f"the synchronised gradients of {named} differ from the other replicas' since step {first}; their norms "
            f"were the same before",
            severity=Severity.P0, first=first, last=last, score=float(len(wrong)), rank=rank,
            value=float(x[wrong[0], r]), unit="1", baseline=float(usual[wrong[0], 0]),
        )
    ]  # fmt: skip


def optimizer(facts: Facts) -> list[Anomaly]:
    """Optimizer settings that replicas must share (betas, eps, weight decay, step count), as told in one step."""
    said: dict[tuple[int, str], dict[int, AttributeValue]] = defaultdict(dict)
    for event in events(facts, OPTIMIZER_STATE):
        for key in OPTIMIZER_KEYS:
            if key in event.attributes:
                said[event.step, key][event.rank] = event.attributes[key]
    for (step, key), values in sorted(said.items()):
        if len(values) < 3:
            continue
        common, count = Counter(values.values()).most_common(1)[0]
        odd = sorted(r for r, v in values.items() if v != common)
        if odd and len(odd) <= max(1, len(values) // 3) and count > len(values) / 2:
            return [
                finding(
                    facts, "optimizer_mismatch",
                    f"{key} of the optimizer of rank {', '.join(map(str, odd))} is {values[odd[0]]} at step {step}, "
                    f"the others have {common}",
                    severity=Severity.P1, first=step, last=max(s for s, _ in said), score=float(count),
                    rank=odd[0] if len(odd) == 1 else None, fired_by="event",
                )
            ]  # fmt: skip
    return []


def divergence(facts: Facts) -> list[Anomaly]:
    """Checksums of replicated parameters that differ from the majority's in two checks, or in the last one where no
    other came for a while: a collector to which they are dear looks seldom."""
    sums = facts.get("parameter_checksum")
    rows = np.flatnonzero(np.isfinite(sums).sum(axis=1) >= 2)
    if not len(rows):
        return []
    x = sums[rows]
    usual = median(x, axis=1)[:, None]
    if x.shape[1] == 2:
        usual = x[:, :1]
    odd = apart(x, np.broadcast_to(usual, x.shape))
    wrong = np.flatnonzero(odd.any(axis=1))
    since = int(facts.steps[-1] - facts.steps[rows[-1]])
    seldom = len(wrong) == 1 and wrong[0] == len(rows) - 1 and since >= ALONE_STEPS and odd[-1].sum() == 1
    if not len(wrong) or (len(wrong) < min(CONFIRM, len(rows)) and not seldom):
        return []
    often = odd.sum(axis=0)
    r = int(often.argmax())
    clear = x.shape[1] > 2 and (often > 0).sum() == 1
    first, last = int(facts.steps[rows[wrong[0]]]), int(facts.steps[rows[wrong[-1]]])
    rank = facts.ranks[r] if clear else None
    who = f"rank {rank}" if clear else f"{int((often > 0).sum())} ranks"
    gap = float(np.nanmax(np.abs(x[wrong[0]] - usual[wrong[0]])))
    return [
        finding(
            facts,
            "replica_divergence",
            f"the parameters of {who} differ from the other replicas' since the check at step {first}",
            severity=Severity.P0,
            first=first,
            last=last,
            score=float(len(wrong)),
            rank=rank,
            value=gap,
            unit="1",
            baseline=0.0,
        )
    ]


def seeds(facts: Facts) -> list[Anomaly]:
    """A seed that one rank has and the rest have not: neither all equal, nor all different by plan."""
    said: dict[str, dict[int, AttributeValue]] = defaultdict(dict)
    for event in events(facts, EventName.SEED):
        for key, value in event.attributes.items():
            if key not in ("host", "library") and isinstance(value, (int, float, str)):
                said[key][event.rank] = value
    for key, values in sorted(said.items()):
        if len(values) < 3:
            continue
        counts = Counter(values.values())
        common, n = counts.most_common(1)[0]
        odd = sorted(r for r, v in values.items() if v != common)
        if not odd or n < 2 or n <= len(values) / 2:
            odd, common = _off_pattern(values)
        if odd and len(odd) <= max(1, len(values) // 3):
            rank = odd[0] if len(odd) == 1 else None
            return [
                finding(
                    facts,
                    "seed_mismatch",
                    f"{key} of rank {', '.join(map(str, odd))} is {values[odd[0]]}, the others have {common}",
                    severity=Severity.P1,
                    first=int(facts.steps[0]) if len(facts.steps) else 0,
                    last=int(facts.steps[-1]) if len(facts.steps) else 0,
                    score=float(len(values) - len(odd)),
                    rank=rank,
                    fired_by="event",
                )
            ]
    return []


def _off_pattern(values: dict[int, AttributeValue]) -> tuple[list[int], str]:
    """Ranks that leave the pattern ``seed = base + rank``, where a clear majority keeps to it."""
    numbers = {r: v for r, v in values.items() if isinstance(v, int) and not isinstance(v, bool)}
    if len(numbers) < 4:
        return [], ""
    base, n = Counter(v - r for r, v in numbers.items()).most_common(1)[0]
    if n <= len(numbers) / 2:
        return [], ""
    return sorted(r for r, v in numbers.items() if v - r != base), f"{base} + rank"
