"""Checkpoints: one rank writes slowly, everybody does, or what was written cannot be read back."""

from __future__ import annotations

import numpy as np

from lanterne.causal import stats
from lanterne.causal.facts import FactEvent
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame
from lanterne.causal.patterns import prior
from lanterne.causal.stats import Floats
from lanterne.nouns import CauseCategory, Cost, EventName, Evidence, Subject, Symptom

STALL_FACTOR_MIN = 2.0  # of the usual checkpoint
STALL_MS_MIN = 500.0
BY_STEPS, WROTE = "three steps of this job, or a second, are", "finished its write"
INCOMPLETE_WORDS = ("missing", "incomplete", "not found", "no such file", "absent")


def findings(frame: Frame) -> list[Finding]:
    """Slow, corrupt and incomplete checkpoints."""
    x = frame.facts.series.get("checkpoint_ms")
    first = None if x is None else _slow(frame, x)
    if x is None or first is None:
        return _unreadable(frame)
    second = _slow(frame, _without(frame, x, first))
    return [first, *([] if second is None or second.key == first.key else [second]), *_unreadable(frame)]


def _without(frame: Frame, x: Floats, known: Finding) -> Floats:
    """Checkpoint times as they would be without a finding, so that another one shows beside it: the rank as its
    peers, or all ranks faster by as much as they slowed."""
    cause, evidence = known.cause, known.cause.evidence[0]
    rows = frame.facts.steps >= (cause.since_step or 0)
    out = x.copy()
    if cause.subject.rank is not None:
        out[rows, frame.ranks.index(cause.subject.rank)] = stats.median(x[rows], 1)
    elif evidence.value and evidence.baseline:
        out[rows] *= evidence.baseline / evidence.value
    return out


def _slow(frame: Frame, x: Floats) -> Finding | None:
    longest = np.where(np.isfinite(x), x, 0.0).max(1)
    rows = np.flatnonzero(longest > 1.0)
    if not len(rows):
        return None
    level = longest[rows]
    at = _jump(level)
    usual, reference = _usual(frame, level, x[rows[at]], at)
    if usual is None or level[at] < max(STALL_FACTOR_MIN * usual, usual + STALL_MS_MIN):
        return None
    row, excess = int(rows[at]), float(level[at] - usual)
    column, own, shown = _who(frame, x, row, excess)
    if reference == BY_STEPS and (column is None or shown == WROTE):
        return None  # one checkpoint only, and its peers' part of it took as long: no yardstick for a write
    since = frame.step(row)
    says = f"the checkpoint of step {since} took {number(float(level[at]), 'ms')}, {reference} {number(usual, 'ms')}"
    evidence = [Evidence(says=says, value=float(level[at]), unit="ms", baseline=usual, ref="checkpoint_ms")]
    several = int((level[at:] > usual + 0.4 * excess).sum())
    cost = _cost(frame, excess * several, row)
    sure = 0.9 + 0.05 * min(1.0, excess / (4 * STALL_MS_MIN))
    if len(level) < 2:
        sure *= 0.85
    link = Link(metric="checkpoint_ms", label="checkpoint", weight=prior("checkpoint_stall"), says=says, kind="pattern")
    if column is None:
        evidence.append(
            Evidence(says="every rank's write slowed together; none came last by much", value=own, unit="ms")
        )
        return make(
            CauseCategory.STORAGE_SLOW,
            "storage",
            confidence=sure * 0.95,
            since_step=since,
            evidence=evidence,
            cost=cost,
            symptom="checkpoint",
            path=(link,),
        )
    rank = int(frame.ranks[column])
    evidence.append(
        Evidence(says=f"rank {rank} {shown} {number(own, 'ms')} after its peers", value=own, unit="ms", baseline=0.0)
    )
    others = tuple(
        Symptom(kind="wait", says=f"rank {r} waits for rank {rank}'s checkpoint", subject=Subject(rank=int(r)))
        for r in frame.ranks
        if r != rank
    )
    return make(
        CauseCategory.CHECKPOINT_STALL,
        "storage",
        confidence=sure,
        since_step=since,
        evidence=evidence,
        cost=cost,
        subject=Subject(rank=rank, host=frame.hosts[int(frame.host[column])] or None),
        symptom="checkpoint",
        path=(link,),
        symptoms=others[:8],
    )


def _jump(level: Floats) -> int:
    """Position of the first checkpoint far above the median of those before it; else of the largest."""
    for i in range(1, len(level)):
        usual = float(np.median(level[:i]))
        if level[i] > max(STALL_FACTOR_MIN * usual, usual + STALL_MS_MIN):
            return i
    return 0


def _usual(frame: Frame, level: Floats, own: Floats, at: int) -> tuple[float | None, str]:
    """What a checkpoint usually takes: those before, else its peers' part of it (``own`` [R]), else the later ones,
    else (one only, which tells of a rank that comes late to it but not of a slow write) three steps of this job."""
    if at > 0:
        return float(np.median(level[:at])), "before"
    peers = stats.rows_median(own)
    if peers > 1.0 and level[0] > max(STALL_FACTOR_MIN * peers, peers + STALL_MS_MIN):
        return peers, "its peers'"
    later = level[1:]
    if len(later):
        return float(np.median(later)), "later ones"
    if np.isfinite(frame.base_step_ms):
        return max(3 * frame.base_step_ms, 1000.0), BY_STEPS
    return None, ""


def _who(frame: Frame, x: Floats, row: int, excess: float) -> tuple[int | None, float, str]:
    """The rank that holds the checkpoint up: by its own duration, else by its late entry (a barrier inside the phase
    gives everybody the same duration)."""
    for name, shown in (
        ("checkpoint_ms", WROTE),
        ("lateness_ms", "entered the barrier"),
        ("busy_ms", "worked"),
    ):
        values = frame.facts.series.get(name)
        if values is None or not np.isfinite(values[row]).any():
            continue
        beyond = values[row] - stats.rows_median(values[row])
        order = np.argsort(-np.nan_to_num(beyond, nan=-np.inf))
        first = float(beyond[order[0]])
        second = float(beyond[order[1]]) if len(order) > 1 else 0.0
        if first > 0.4 * excess and max(second, 0.0) < 0.5 * first:
            return int(order[0]), first, shown
    return _by_waits(frame, row, excess)


def _by_waits(frame: Frame, row: int, excess: float) -> tuple[int | None, float, str]:
    """The last to arrive at the collectives of that step or the next one (where the barrier may be counted)."""
    w = frame.facts.waits
    near = np.isin(w.step, [frame.step(row), frame.step(row) + 1])
    if near.any():
        late, who = w.lateness_ms[near], w.rank[near]
        k = int(np.nanargmax(late)) if np.isfinite(late).any() else -1
        if k >= 0 and late[k] > 0.4 * excess and int(who[k]) in frame.ranks:
            return frame.ranks.index(int(who[k])), float(late[k]), "entered the barrier"
    return None, 0.0, ""


def _cost(frame: Frame, lost_ms: float, row: int) -> Cost:
    total = float(np.nansum(frame.step_ms[row:]))
    ranks = frame.facts.ranks_expected or len(frame.ranks)
    slowdown = total / max(total - lost_ms, 0.05 * total) if total > 0 else None
    steps = max(1, len(frame.step_ms) - row)
    return Cost(slowdown=slowdown, gpu_hours=lost_ms * ranks / 3.6e6, saving_ms_per_step=lost_ms / steps)


def _unreadable(frame: Frame) -> list[Finding]:
    bad = [e for e in frame.facts.events if e.name == EventName.CHECKPOINT_VERIFIED and not _ok(e)]
    by_rank: dict[int, FactEvent] = {}
    for event in sorted(bad, key=lambda e: (e.step, e.job_ns)):
        by_rank.setdefault(event.rank, event)
    out = []
    for event in list(by_rank.values())[:4]:
        text = f"{event.attributes.get('detail', '')} {event.body}".strip()
        incomplete = any(word in text.lower() for word in INCOMPLETE_WORDS)
        category = CauseCategory.CHECKPOINT_INCOMPLETE if incomplete else CauseCategory.CHECKPOINT_CORRUPT
        rank = event.rank if event.rank >= 0 else None
        path = str(event.attributes.get("path", ""))
        says = f"the checkpoint {path} of rank {rank} at step {event.step} does not read back: {text[:200]}".rstrip(
            ": "
        )
        times = sum(e.rank == event.rank for e in bad)
        out.append(
            make(
                category,
                "storage",
                confidence=0.97,
                subject=Subject(rank=rank, host=event.host or None),
                since_step=event.step if event.step >= 0 else None,
                symptom="checkpoint",
                evidence=(Evidence(says=says, value=float(times), unit="checkpoints", baseline=0.0, ref=event.ref),),
                path=(Link(metric="checkpoint", label="checkpoint does not verify", weight=0.99, says=says),),
            )
        )
    return out


def _ok(event: FactEvent) -> bool:
    value = event.attributes.get("ok", True)
    return value not in {False, "false", "False", "0"}
