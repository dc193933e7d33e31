"""The straggler, by last arrival: the rank that the others wait for in the collectives.

Wall time of a phase does not tell it: a delay inside backward shows as the same backward time on all
ranks. Arrival does. ``behind[t, r]`` is how much later rank r enters its latest collective of step t than
its peers' median. Two tests: against the rank's own past (double difference: rank minus peers, now minus
before), and against the peers alone (slow from the first step on), with a higher bar.
"""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import (
    LOST_MS,
    Mask,
    finding,
    lasting_rise,
    lost_ms,
    mad,
    median,
    rows_of,
    settled,
    step_ms,
)
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import Anomaly, Severity

WIDTH = 10
"""Steps over which a delay must last."""
SHARE_CHANGE = 0.15
SHARE_PEERS = 0.25
FLOOR_MS = 4.0
LAST_NEAR = 0.15
"""Who comes so near to the last one, as a share of its delay, is last too: partners of one copy of the model are."""
LAST_SHARE = 0.7
"""Share of the risen steps in which the rank must be the last one."""
NOISE_SIGMAS = 3.0
SPORADIC_SHARE = 0.10
SPORADIC_EVENTS = 6


def behind_peers(facts: Facts) -> FloatArray:
    """[T, R] ms behind the median of the peers; falls back to own time where no collective was seen."""
    late = facts.series.get("lateness_ms")
    if late is None or not np.isfinite(late).any():
        late = _own_time(facts)
    ranks = late.shape[1]
    if ranks < 2:
        return np.full_like(late, np.nan)
    if ranks > 8:
        return late - median(late, axis=1)[:, None]
    columns = [late[:, r] - median(np.delete(late, r, axis=1), axis=1) for r in range(ranks)]
    return np.stack(columns, axis=1)


def _own_time(facts: Facts) -> FloatArray:
    """Sum of the phases in which no rank waits for another (backward hides waiting, so it is left out)."""
    total = np.zeros((len(facts.steps), len(facts.ranks)))
    seen = np.zeros_like(total, dtype=bool)
    for name in ("data_wait_ms", "h2d_ms", "forward_ms"):
        values = facts.get(name)
        total += np.nan_to_num(values)
        seen |= np.isfinite(values)
    return np.where(seen, total, np.nan)


def detect(facts: Facts) -> list[Anomaly]:
    keep = settled(facts)
    x_all, whole = behind_peers(facts), step_ms(facts)
    rows = rows_of(keep & np.isfinite(x_all).any(axis=1))
    if len(rows) < WIDTH + 2 or len(facts.ranks) < 2:
        return []
    x, step = x_all[rows], whole[rows]
    if not np.isfinite(step).any():
        return []  # phases without a step time: nothing to measure a share of
    error = _clock_error_ms(facts)
    filled = np.where(np.isfinite(x), x, -np.inf)
    latest = filled.max(axis=1, keepdims=True)
    last = filled >= latest - LAST_NEAR * np.maximum(latest, 0.0)
    found: list[Anomaly] = []
    for r in _candidates(x):
        hit = _changed(facts, rows, x[:, r], step, last[:, r], error, r)
        hit = hit or _always(facts, rows, x, step, last[:, r], error, r)
        if hit is not None:
            found.append(hit)
    return found or _sporadic(facts, rows, x, step, error) or _by_turns(facts, rows, step, error)


def _candidates(x: FloatArray) -> list[int]:
    """Columns worth a closer look: those with the largest median of half a width (and all of a small job)."""
    if x.shape[1] <= 8:
        return list(range(x.shape[1]))
    half = WIDTH // 2  # whatever lasts a width fills one of these whole
    blocks = x[: len(x) // half * half].reshape(-1, half, x.shape[1])
    top = np.nan_to_num(median(blocks, axis=1), nan=-np.inf).max(axis=0)
    return [int(r) for r in np.argsort(-top)[:16]]


def _clock_error_ms(facts: Facts) -> float:
    error = facts.quality.clock_error_ns
    return 0.0 if error is None else min(error / 1e6, 1e6)


def _changed(
    facts: Facts, rows: np.ndarray, x: FloatArray, step: FloatArray, last: Mask, error: float, r: int
) -> Anomaly | None:
    usual = float(np.nanpercentile(step, 25))
    shift = lasting_rise(x, WIDTH, max(SHARE_CHANGE * usual, FLOOR_MS))
    if shift is None:
        return None
    during = slice(shift.first, shift.last + 1)
    outside = np.ones(len(x), bool)
    outside[during] = False
    normal = float(np.nanmedian(step[outside])) if outside.sum() >= WIDTH else usual
    bar = max(SHARE_CHANGE * normal, FLOOR_MS, 3 * error, NOISE_SIGMAS * shift.noise)
    longer = float(np.nanmedian(step[during])) - normal
    steady = float(np.mean(np.nan_to_num(x[during]) > shift.baseline + 0.5 * shift.rise))
    if shift.rise < bar or last[during].mean() < LAST_SHARE or steady < LAST_SHARE or longer < 0.4 * shift.rise:
        return None
    if lost_ms(step[during], normal) < LOST_MS:
        return None
    return _say(facts, rows, shift.first, shift.last, r, shift.level, shift.baseline, normal, shift.z, "baseline")


def _always(
    facts: Facts, rows: np.ndarray, x: FloatArray, step: FloatArray, last: Mask, error: float, r: int
) -> Anomaly | None:
    """Peer comparison alone: late in most of the steps seen, far beyond what the other ranks show."""
    mine = x[:, r]
    known = np.isfinite(mine)
    if known.sum() < 2 * WIDTH:
        return None
    level, whole = float(np.nanmedian(mine)), float(np.nanmedian(step))
    bar = max(SHARE_PEERS * (whole - max(level, 0.0)), FLOOR_MS, 3 * error)
    steady = float(np.mean(mine[known] > 0.5 * level))
    if level < bar or last[known].mean() < LAST_SHARE or steady < LAST_SHARE:
        return None
    others = np.delete(x, r, axis=1)
    noise = float(mad(others - median(others, axis=1)[:, None]))
    rival = float(np.max(median(others, axis=0))) if others.shape[1] else 0.0
    if level < NOISE_SIGMAS * noise or rival > 0.5 * level or level * known.sum() < LOST_MS:
        return None
    index = np.flatnonzero(known & (np.nan_to_num(mine) > 0.5 * level))
    return _say(
        facts, rows, int(index[0]), int(index[-1]), r, level, 0.0, whole - level, level / max(noise, 1e-9), "peers"
    )


def _say(
    facts: Facts, rows: np.ndarray, first: int, last: int, r: int, level: float, baseline: float, normal: float,
    z: float, fired_by: str,
) -> Anomaly:  # fmt: skip
    rank = facts.ranks[r]
    since, until = int(facts.steps[rows[first]]), int(facts.steps[rows[last]])
    slowdown = 1 + (level - baseline) / max(normal, 1e-9)
    than = "before" if fired_by == "baseline" else "its peers"
    return finding(
        facts, "straggler",
        f"rank {rank} enters its collectives {level:.0f} ms behind its peers since step {since} "
        f"({baseline:.1f} ms {than}): the others wait for it",
        severity=Severity.P1 if slowdown > 1.1 else Severity.P2, first=since, last=until, score=min(z, 1e6),
        rank=rank, value=level, unit="ms", baseline=baseline, fired_by=fired_by,
    )  # fmt: skip


def _by_turns(facts: Facts, rows: np.ndarray, step: FloatArray, error: float) -> list[Anomaly]:
    """All ranks wait longer than they did, and it is not one rank that they wait for."""
    usual = float(np.nanpercentile(step, 25))
    bar = max(SHARE_CHANGE * usual, FLOOR_MS, 3 * error)
    if "wait_ms" not in facts.series or lasting_rise(step, 2 * WIDTH, 0.4 * bar) is None:
        return []
    x = np.percentile(np.nan_to_num(facts.series["wait_ms"][rows]), 75, axis=1)  # half of the ranks may be late
    shift = lasting_rise(x, 2 * WIDTH, bar)
    if shift is None or shift.z < 2 * NOISE_SIGMAS or shift.last - shift.first + 1 < 2 * WIDTH:
        return []
    during = slice(shift.first, shift.last + 1)
    outside = np.ones(len(x), bool)
    outside[during] = False
    normal = float(np.nanmedian(step[outside])) if outside.sum() >= WIDTH else usual
    longer = float(np.nanmedian(step[during])) - normal
    if longer < 0.4 * shift.rise or lost_ms(step[during], normal) < LOST_MS:
        return []
    since, until = int(facts.steps[rows[shift.first]]), int(facts.steps[rows[shift.last]])
    says = f"ranks wait {shift.level:.0f} ms a step for whoever is last since step {since}"
    says += f" ({shift.baseline:.1f} ms before)"
    return [
        finding(
            facts, "straggler", says, severity=Severity.P1, first=since, last=until, score=min(shift.z, 1e6),
            value=shift.level, unit="ms", baseline=shift.baseline,
        )
    ]  # fmt: skip


def _sporadic(facts: Facts, rows: np.ndarray, x: FloatArray, step: FloatArray, error: float) -> list[Anomaly]:
    """One rank is late now and then (garbage collection, retries) and costs a tenth of the time that way."""
    usual = float(np.nanmedian(step))
    bar = max(0.5 * usual, 2 * FLOOR_MS, 3 * error, 6 * float(mad(x)))
    excess = np.where(np.nan_to_num(x) > bar, np.nan_to_num(x), 0.0)
    lead = excess * (excess == excess.max(axis=1, keepdims=True))
    lost, count = lead.sum(axis=0), (lead > 0).sum(axis=0)
    if not len(lost) or lost.sum() <= 0:
        return []
    r = int(lost.argmax())
    since = int(np.flatnonzero(lead[:, r] > 0)[0])
    share = lost[r] / float(np.nansum(step[since:]))
    rivals = np.delete(count, r)
    enough = count[r] >= max(SPORADIC_EVENTS, 0.05 * len(rows)) and rivals.max(initial=0) <= count[r] / 4
    if not enough or share < SPORADIC_SHARE or lost[r] < 0.8 * lost.sum():
        return []
    hit = np.flatnonzero(lead[:, r] > 0)
    rank, first, last = facts.ranks[r], int(facts.steps[rows[hit[0]]]), int(facts.steps[rows[hit[-1]]])
    typical = float(np.median(lead[hit, r]))
    return [
        finding(
            facts,
            "intermittent_straggler",
            f"rank {rank} was {typical:.0f} ms late in {len(hit)} of {len(rows)} steps: {share:.0%} of the time lost",
            severity=Severity.P1 if share > 0.1 else Severity.P2,
            first=first,
            last=last,
            score=share / SPORADIC_SHARE,
            rank=rank,
            value=typical,
            unit="ms",
            baseline=0.0,
        )
    ]
