"""Mixed precision: repeated overflow, and a loss scale that collapses. A few skipped steps are how scalers work.

Whether a narrow format loses too much of the gradients, or could be taken up, are service rules (:func:`rulings`).
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import attribute, common, events, finding, first_step
from lanterne.backend.detect.contract import RETURN_SHARE, downgrade, may_return, scaler_misuse
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly, EventName, Ruling, Severity

OVERFLOWS = 3
WITHIN_STEPS = 20
SETTLING_STEPS = 10
"""A scaler that starts too high halves itself for the first steps."""
SCALE_FLOOR = 1.0
COLLAPSE = 64.0
AMP_CALLS = "amp_calls"
"""Event of the collector that tells a step's order of calls; see :func:`contract.scaler_misuse` for the names."""


def detect(facts: Facts) -> list[Anomaly]:
    skipped: dict[int, set[int]] = {}
    for event in events(facts, EventName.OVERFLOW):
        skipped.setdefault(event.step, set()).add(event.rank)
    begun = first_step(facts)
    steps = np.array(sorted(s for s in skipped if s - begun >= SETTLING_STEPS), np.int64)
    return [*_repeated(facts, skipped, steps), *_collapse(facts, steps), *misuse(facts)]


def misuse(facts: Facts) -> list[Anomaly]:
    """A step whose calls around the gradient scaler stand in a wrong order (``amp_calls``: ``calls`` = names, commas).

    The first step is left out where others are told: compilation and warm-up loops call what they like.
    """
    told = [e for e in events(facts, AMP_CALLS) if e.attributes.get("calls")]
    later = [e for e in told if e.step > 0] or told
    for event in later:
        wrong = scaler_misuse([c.strip() for c in str(event.attributes["calls"]).split(",")])
        if wrong:
            alike = {e.rank for e in later if e.attributes["calls"] == event.attributes["calls"]}
            return [
                finding(
                    facts, "scaler_misuse", f"mixed precision is used wrongly: {'; '.join(wrong)}",
                    severity=Severity.P1, first=event.step, last=max(e.step for e in later), score=float(len(wrong)),
                    rank=event.rank if len(alike) == 1 < len(facts.ranks) else None, at_ns=event.job_ns,
                    fired_by="event",
                )
            ]  # fmt: skip
    return []


def _repeated(facts: Facts, skipped: dict[int, set[int]], steps: np.ndarray) -> list[Anomaly]:
    if len(steps) < OVERFLOWS:
        return []
    dense = np.flatnonzero(steps[OVERFLOWS - 1 :] - steps[: len(steps) - OVERFLOWS + 1] <= WITHIN_STEPS)
    if not len(dense):
        return []
    first, last = int(steps[dense[0]]), int(steps[-1])
    rank = _culprit(facts, skipped, [int(s) for s in steps if s >= first])
    scale = [attribute(e, "scale_after") for e in events(facts, EventName.OVERFLOW) if e.step >= first]
    count = int((steps >= first).sum())
    return [
        finding(
            facts,
            "overflow",
            f"{count} steps skipped for overflow since step {first}"
            + (f", loss scale down to {scale[-1]:g}" if scale and np.isfinite(scale[-1]) else "")
            + (f"; rank {rank} had the non-finite gradients before the reduction" if rank is not None else ""),
            severity=Severity.P1,
            first=first,
            last=last,
            score=float(count),
            rank=rank,
            value=float(count),
            unit="{step}",
            baseline=0.0,
            fired_by="event",
        )
    ]


def _culprit(facts: Facts, skipped: dict[int, set[int]], steps: list[int]) -> int | None:
    """The one rank with non-finite local gradients in these steps; else the one rank that skipped."""
    rows = np.flatnonzero(np.isin(facts.steps, steps))
    local = np.nan_to_num(facts.get("grad_nonfinite")[rows], posinf=1.0) > 0
    if local.any():
        ranks = np.flatnonzero(local.any(axis=0))
        return facts.ranks[int(ranks[0])] if len(ranks) == 1 else None
    who = set().union(*(skipped[s] for s in steps)) if steps else set()
    return next(iter(who)) if len(who) == 1 and len(facts.ranks) > 1 else None


def _collapse(facts: Facts, skipped: np.ndarray) -> list[Anomaly]:
    """The scale fell under 1, or by more than 64 times since its highest, and did not come back."""
    scale = common(facts, "loss_scale")
    known = np.flatnonzero(np.isfinite(scale) & (facts.steps - first_step(facts) >= SETTLING_STEPS))
    if len(known) < 2 or not len(skipped):
        return []
    top, now = float(scale[known].max()), float(scale[known[-1]])
    if now > 0 and (now < SCALE_FLOOR <= top or top / now > COLLAPSE):
        low = known[scale[known] <= top / COLLAPSE] if top / now > COLLAPSE else known[scale[known] < SCALE_FLOOR]
        first = int(facts.steps[low[0]])
        return [
            finding(
                facts,
                "loss_scale_collapse",
                f"the loss scale fell from {top:g} to {now:g}",
                severity=Severity.P1,
                first=first,
                last=int(facts.steps[known[-1]]),
                score=top / now,
                value=now,
                unit="1",
                baseline=top,
            )
        ]
    return []


def rulings(facts: Facts) -> list[Ruling]:
    """The downgrade rule where a gradient scaler is in use (so FP16 is), and each format's return rule elsewhere.

    All from samples of the gradients, median over the ranks.
    """
    scaled = np.isfinite(common(facts, "loss_scale")).any()
    if scaled and "fp16_underflow" in facts.series:
        said = downgrade(common(facts, "fp16_underflow"), common(facts, "grad_std"))
        return [said] if said is not None else []
    outside = {f: common(facts, f"{f}_underflow") + common(facts, f"{f}_overflow") for f in RETURN_SHARE}
    return [
        rule for name, share in outside.items() if (rule := may_return(name, share)) is not None and not rule.broken
    ]
