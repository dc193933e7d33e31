"""Checkpoints: stalled, corrupt, incomplete. A checkpoint may take minutes: it is judged against its own kind."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from lanterne.backend.detect.base import attribute, events, finding, median, step_at, step_ms
from lanterne.causal.facts import FactEvent, Facts
from lanterne.nouns import NO_STEP, Anomaly, EventName, Phase, Severity

STALL_FACTOR = 4.0
STALL_FLOOR_MS = 2000.0
FIRST_STEPS = 50.0
"""A first checkpoint has no kin; it stalls when it costs this many steps and one rank alone holds the rest up."""


def detect(facts: Facts) -> list[Anomaly]:
    return [*stalled(facts), *corrupt(facts), *incomplete(facts)]


def stalled(facts: Facts) -> list[Anomaly]:
    """A checkpoint far above the earlier ones, or one that the shipper reports as stalled right now."""
    found = [
        _open_stall(facts, e) for e in events(facts, EventName.STALL) if e.attributes.get("phase") == Phase.CHECKPOINT
    ]
    if found:
        return [min(found, key=lambda a: (a.first_step, a.subject.rank is None))]
    cost = facts.get("checkpoint_ms")
    rows = np.flatnonzero((np.nan_to_num(cost) > 0).any(axis=1))
    if not len(rows):
        return []
    longest = np.nanmax(np.nan_to_num(cost[rows]), axis=1)
    usual_step = float(median(step_ms(facts)))
    for i, t in enumerate(rows):
        before = longest[:i]
        if len(before):
            usual = float(np.median(before))
            slow = longest[i] > max(STALL_FACTOR * usual, usual + STALL_FLOOR_MS, usual + 5 * usual_step)
        else:
            others = longest[1:]
            usual = float(np.median(others)) if len(others) >= 2 else float("nan")
            slow = bool(len(others) >= 2 and longest[i] > max(STALL_FACTOR * usual, usual + STALL_FLOOR_MS))
            slow = slow and longest[i] > FIRST_STEPS * usual_step
        if slow:
            return [_stall(facts, int(t), float(longest[i]), usual)]
    return [alone for t in rows if (alone := _one_alone(facts, int(t))) is not None][:1]


def _one_alone(facts: Facts, t: int) -> Anomaly | None:
    """All ranks save and one takes far longer than the rest; the first rank may, it also writes what is common."""
    cost = np.nan_to_num(facts.get("checkpoint_ms")[t])
    slowest = int(cost.argmax())
    rest = np.delete(cost, slowest)
    if len(rest) < 2 or slowest == 0 or not rest.all():
        return None
    usual = float(np.median(rest))
    if cost[slowest] < max(STALL_FACTOR * float(rest.max()), usual + STALL_FLOOR_MS):
        return None
    step, rank = int(facts.steps[t]), facts.ranks[slowest]
    return finding(
        facts, "checkpoint_stall",
        f"rank {rank} took {cost[slowest] / 1e3:.1f} s for the checkpoint of step {step}, others {usual / 1e3:.2f} s",
        severity=Severity.P1, first=step, last=step, score=cost[slowest] / max(usual, 1.0), rank=rank,
        value=float(cost[slowest]), unit="ms", baseline=usual, fired_by="peers",
    )  # fmt: skip


def _holder(facts: Facts, t: int) -> int | None:
    """The rank that held the others up in step row t: the last to arrive, else the one with the longest phase."""
    late, cost = facts.get("lateness_ms")[t], facts.get("checkpoint_ms")[t]
    for row in (late, cost):
        known = np.where(np.isfinite(row), row, -np.inf)
        if len(known) >= 2 and np.isfinite(known).any():
            order = np.argsort(known)
            if known[order[-1]] > 0.5 * STALL_FLOOR_MS and known[order[-1]] > 2 * max(known[order[-2]], 1.0):
                return facts.ranks[int(order[-1])]
    return None


def _stall(facts: Facts, t: int, value: float, usual: float) -> Anomaly:
    step, rank = int(facts.steps[t]), _holder(facts, t)
    return finding(
        facts, "checkpoint_stall",
        f"the checkpoint of step {step} took {value / 1e3:.1f} s ({usual / 1e3:.2f} s usually)"
        + (f"; rank {rank} held it up" if rank is not None else ""),
        severity=Severity.P1, first=step, last=step, score=value / max(usual, 1.0), rank=rank, value=value, unit="ms",
        baseline=usual,
    )  # fmt: skip


def _open_stall(facts: Facts, event: FactEvent) -> Anomaly:
    step = step_at(facts, event)
    waiting = {c.rank for c in facts.collectives if c.completed_ns <= 0}
    seconds = attribute(event, "stalled_s", default=0.0)
    rows = np.flatnonzero(facts.steps == step)
    rank = _holder(facts, int(rows[0])) if len(rows) else None
    stalls = [e for e in events(facts, EventName.STALL) if e.step == event.step]
    alone = [e.rank for e in stalls if e.rank not in waiting and not e.attributes.get("waiting")]
    if rank is None and len(alone) == 1:
        rank = alone[0]
    return finding(
        facts, "checkpoint_stall",
        f"a checkpoint stands still for {seconds:.1f} s in step {step}"
        + (f" on rank {rank}" if rank is not None else ""),
        severity=Severity.P1, first=step, last=step, score=seconds, rank=rank, at_ns=event.job_ns, value=seconds,
        unit="s", baseline=attribute(event, "bound_s"), fired_by="event",
    )  # fmt: skip


def corrupt(facts: Facts) -> list[Anomaly]:
    """Checkpoints that do not read back as they were written."""
    found = []
    for event in events(facts, EventName.CHECKPOINT_VERIFIED):
        if event.attributes.get("ok") in (False, 0, "false", "False"):
            step = step_at(facts, event)
            path = str(event.attributes.get("path", ""))
            detail = str(event.attributes.get("detail", "") or event.body)
            found.append(
                finding(
                    facts,
                    "checkpoint_corrupt",
                    f"the checkpoint {path} of rank {event.rank} is damaged: {detail[:200]}",
                    severity=Severity.P1,
                    first=step,
                    last=step,
                    score=1.0,
                    rank=event.rank,
                    at_ns=event.job_ns,
                    fired_by="event",
                )
            )
    return found[:4]


def incomplete(facts: Facts) -> list[Anomaly]:
    """Steps of which only some of the ranks that save have saved, while training went on for long."""
    saved: dict[int, set[int]] = defaultdict(set)
    for event in events(facts, EventName.CHECKPOINT_SAVED):
        if event.step > NO_STEP:
            saved[event.step].add(event.rank)
    if len(saved) < 2 or not len(facts.steps):
        return []
    savers = max(saved.values(), key=len)
    last = int(facts.steps[-1])
    for step, ranks in sorted(saved.items()):
        missing = savers - ranks
        if missing and len(savers) > 1 and last - step >= 10:
            return [
                finding(
                    facts,
                    "checkpoint_incomplete",
                    f"the checkpoint of step {step} lacks the shard of rank {', '.join(map(str, sorted(missing)))}",
                    severity=Severity.P1,
                    first=step,
                    last=step,
                    score=float(len(missing)),
                    rank=next(iter(missing)) if len(missing) == 1 else None,
                    value=float(len(ranks)),
                    unit="{shard}",
                    baseline=float(len(savers)),
                    fired_by="event",
                )
            ]
    return []
