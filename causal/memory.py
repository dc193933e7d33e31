"""Memory: a leak is a trend that lasts, running out is an event, fragmentation is reserved far above allocated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.causal import stats
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame
from lanterne.causal.patterns import prior
from lanterne.causal.stats import Floats, Ints
from lanterne.nouns import CauseCategory, EventName, Evidence, Subject, Symptom

SERIES = {
    "rss_bytes": "host memory",
    "gpu_allocated_bytes": "device memory",
    "cgroup_bytes": "container memory",
    "shm_bytes": "shared memory",
}
SHARED = frozenset({"cgroup_bytes", "shm_bytes"})
"""Read per rank, but the same number for all ranks of a container."""
BLOCKS = 8
RISE_SHARE_MIN = 0.08  # of the level before
RISE_BYTES_MIN = 64 << 20
LEVELS_OFF = 0.5
CONTAINER_SHARE_MIN = 0.5
FRAGMENTED_SHARE = 0.25  # of the reserved bytes not allocated when an allocation failed
OOM_WORDS = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "bad_alloc",
)
SHM_WORDS = ("bus error", "shared memory", "shm_open", "/dev/shm")


@dataclass(slots=True)
class Trend:
    """A rank's memory grows: first row, bytes a step, level before and at the end, share of explained variance."""

    column: int
    name: str
    row: int
    per_step: float
    before: float
    last: float
    fit: float


def findings(frame: Frame) -> list[Finding]:
    """Leaks and failed allocations."""
    leaks = _leaks(frame)
    return [*leaks, *_out_of_memory(frame, leaks)]


def _trends(frame: Frame, name: str) -> list[Trend]:
    x = frame.facts.series.get(name)
    if x is None:
        return []
    rows = np.flatnonzero(np.isfinite(x).any(1) & (np.arange(len(x)) >= min(5, len(x) // 4)))
    if len(rows) < 3 * BLOCKS:
        return []
    y = x[rows]
    quarter = max(4, len(rows) // 6)
    gain = stats.median(y[-quarter:], 0) - stats.median(y[:quarter], 0)
    level = stats.median(y[:quarter], 0)
    worth = np.flatnonzero(gain > np.maximum(RISE_BYTES_MIN, RISE_SHARE_MIN * level))
    out = [_trend(name, rows, y[:, r], int(r)) for r in worth[:256]]
    return [t for t in out if t is not None]


def _trend(name: str, rows: Ints, y: Floats, column: int) -> Trend | None:
    """Hinge fit ``a + b max(0, t - k)``: level before, then steady growth. A single jump does not fit it."""
    known = np.isfinite(y)
    t, y = rows[known].astype(float), y[known]
    if len(y) < 3 * BLOCKS:
        return None
    best: tuple[float, int, float, float] | None = None
    for k in np.unique(np.linspace(0, int(0.7 * len(t)), 40).astype(int)):
        residue, slope, base = stats.hinge(t, y, float(t[k]))
        if best is None or residue < best[0]:
            best = residue, int(k), slope, base
    assert best is not None
    near = range(max(0, best[1] - len(t) // 40 - 1), min(len(t) - 1, best[1] + len(t) // 40 + 2))
    residue, k, slope, base = min((fit[0], k, *fit[1:]) for k in near for fit in (stats.hinge(t, y, float(t[k])),))
    total = float(((y - y.mean()) ** 2).sum())
    fit = 1 - residue / max(total, 1e-9)
    after = y[k:]
    blocks = np.array([b.mean() for b in np.array_split(after, BLOCKS)]) if len(after) >= 2 * BLOCKS else after
    rising = float(np.mean(np.diff(blocks) > 0)) if len(blocks) > 2 else 0.0
    largest = float(np.diff(blocks).max() / max(blocks[-1] - blocks[0], 1e-9)) if len(blocks) > 2 else 1.0
    if slope <= 0 or fit < 0.8 or rising < 0.8 or largest > 0.6 or _levels_off(t[k:], after):
        return None
    return Trend(column, name, int(rows[known][k]) + 1, slope, base, float(np.median(y[-3:])), fit)


def _levels_off(t: Floats, y: Floats) -> bool:
    """Growth that slows down to less than half in its last third: caches and pools that fill, no leak."""
    third = len(y) // 3
    if third < BLOCKS:
        return False
    first, last = (np.polyfit(t[part], y[part], 1)[0] for part in (slice(0, third), slice(-third, None)))
    return bool(last < LEVELS_OFF * first)


def _leaks(frame: Frame) -> list[Finding]:
    per_rank: dict[int, list[Trend]] = {}
    for name in SERIES:
        if name in SHARED and per_rank:
            continue  # the ranks of a host share it: it says nothing that the rank's own memory does not say better
        found = _trends(frame, name)
        if name == "cgroup_bytes" and found and not _from_ranks(frame, found):
            continue
        if len(found) > 0.5 * len(frame.ranks) and len(frame.ranks) > 2:
            return [_leak_finding(frame, found, None)]
        for trend in found:
            per_rank.setdefault(trend.column, []).append(trend)
    return [_leak_finding(frame, trends, column) for column, trends in list(per_rank.items())[:4]]


def _from_ranks(frame: Frame, found: list[Trend]) -> bool:
    """Do the ranks' own processes account for half of the container's growth? Page cache and neighbours count there
    too, so where the ranks' memory is known and stayed, nothing of this job leaks."""
    rss = frame.facts.series.get("rss_bytes")
    if rss is None or not np.isfinite(rss).any():
        return True
    worst = max(found, key=lambda t: t.last - t.before)
    mine = rss[:, frame.host == frame.host[worst.column]]
    rise = np.nan_to_num(stats.median(mine[-5:], 0) - stats.median(mine[worst.row : worst.row + 5], 0))
    return bool(rise.sum() > CONTAINER_SHARE_MIN * (worst.last - worst.before))


def _leak_finding(frame: Frame, trends: list[Trend], column: int | None) -> Finding:
    worst = max(trends, key=lambda t: t.last - t.before)
    since = frame.step(worst.row if column is not None else int(np.median([t.row for t in trends])))
    subject, who = Subject(), f"{len(trends)} of {len(frame.ranks)} ranks"
    if column is not None:
        rank = int(frame.ranks[column])
        subject, who = Subject(rank=rank, host=frame.hosts[int(frame.host[column])] or None), f"rank {rank}"
    evidence = [
        Evidence(
            says=(
                f"{SERIES[t.name]} of {who} grows by {number(t.per_step, 'bytes')} a step"
                f" since step {frame.step(t.row)}:"
                f" {number(t.last, 'bytes')} now, before {number(t.before, 'bytes')}"
            ),
            value=t.last,
            unit="bytes",
            baseline=t.before,
            ref=t.name,
        )
        for t in ([worst] if column is None else sorted(trends, key=lambda t: t.before - t.last))
    ]
    peers = _peers_evidence(frame, worst) if column is not None else None
    if peers is not None:
        evidence.append(peers)
    share = (worst.last - worst.before) / max(worst.before, 1.0)
    confidence = (0.55 + 0.4 * worst.fit) * (1 - np.exp(-8 * share - (worst.last - worst.before) / (1 << 30)))
    says = f"memory grows by {number(worst.per_step, 'bytes')} a step"
    return make(
        CauseCategory.MEMORY_LEAK,
        "memory",
        confidence=float(confidence),
        subject=subject,
        since_step=since,
        evidence=evidence,
        symptom="memory",
        path=(
            Link(metric="memory_bytes", label="memory grows", weight=prior("leak_to_oom"), says=says, kind="pattern"),
        ),
    )


def _peers_evidence(frame: Frame, worst: Trend) -> Evidence | None:
    x = frame.facts.series[worst.name]
    others = np.delete(x, worst.column, 1)
    if not others.shape[1] or not np.isfinite(others).any():
        return None
    rise = stats.rows_median(others[-5:]) - stats.rows_median(others[worst.row : worst.row + 5])
    says = f"the other ranks' {SERIES[worst.name]} changed by {number(rise, 'bytes')} in that time"
    return Evidence(says=says, value=rise, unit="bytes", ref=worst.name)


def is_out_of_memory(event: FactEvent) -> bool:
    """An allocation that failed: the event of that name, or an exception or exit whose text says so."""
    if event.name == EventName.OUT_OF_MEMORY:
        return True
    if event.name not in {EventName.EXCEPTION, EventName.EXITED}:
        return False
    text = f"{event.body} {event.attributes.get('type', '')} {event.attributes.get('message', '')}".lower()
    return any(word in text for word in OOM_WORDS)


def _first_by_rank(facts: Facts) -> list[FactEvent]:
    seen: dict[int, FactEvent] = {}
    for event in sorted((e for e in facts.events if is_out_of_memory(e)), key=lambda e: (e.job_ns or 1 << 62, e.step)):
        seen.setdefault(event.rank, event)
    return list(seen.values())


def _out_of_memory(frame: Frame, leaks: list[Finding]) -> list[Finding]:
    failed = _first_by_rank(frame.facts)
    if not failed:
        return []
    event = failed[0]
    rank = event.rank if event.rank >= 0 else None
    allocated, reserved = (float(event.attributes.get(k, 0) or 0) for k in ("allocated_bytes", "reserved_bytes"))
    lines = event.body.strip().splitlines() or [str(event.attributes.get("message", ""))]
    text = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    says = f"an allocation failed on rank {rank} at step {event.step}: {text[:200]}".rstrip(": ")
    evidence = [Evidence(says=says, value=allocated or None, unit="bytes" if allocated else "", ref=event.ref)]
    category, needs = CauseCategory.OUT_OF_MEMORY, ()
    if reserved and allocated and (reserved - allocated) > FRAGMENTED_SHARE * reserved:
        category = CauseCategory.FRAGMENTATION
        share = (reserved - allocated) / reserved
        evidence.append(
            Evidence(
                says=f"{share:.0%} of the reserved {number(reserved, 'bytes')} was free but in pieces",
                value=reserved - allocated,
                unit="bytes",
                baseline=allocated,
            )
        )
    leaking = [f for f in leaks if f.cause.subject.rank in {rank, None}]
    says_link = "an allocation failed"
    confidence = 0.97 if event.name == EventName.OUT_OF_MEMORY else 0.93
    others = [e.rank for e in failed[1:]]
    symptoms = tuple(
        Symptom(kind="out_of_memory", says=f"rank {r} failed later", subject=Subject(rank=r)) for r in others[:8]
    )
    return [
        make(
            category,
            "memory",
            confidence=confidence * (0.6 if leaking else 1.0),
            subject=Subject(rank=rank, host=event.host or None),
            since_step=event.step if event.step >= 0 else None,
            evidence=evidence,
            symptom="failed allocation",
            stops=True,
            symptoms=symptoms,
            needs=needs,
            path=(
                Link(metric="out_of_memory", label="failed allocation", weight=0.99, says=says_link, kind="pattern"),
            ),
        )
    ]
