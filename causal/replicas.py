"""Ranks that should be equal and are not: seeds, learning rates, and copies of the parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import numpy as np

from lanterne.causal import stats
from lanterne.causal.facts import Facts, Place
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame
from lanterne.causal.stats import Bools, Floats
from lanterne.nouns import CauseCategory, EventName, Evidence, Subject

CHECKSUM_TOLERANCE = 1e-9
"""Relative, of sums with a fraction: those may have been stored rounded."""
RATE_TOLERANCE, RATE_ROWS_MIN = 0.01, 3
NOT_SEEDS = frozenset({"rank", "local_rank", "step", "source", "time"})


def findings(frame: Frame) -> list[Finding]:
    """Seed mismatch and replica divergence."""
    return [f for f in (_seeds(frame), _divergence(frame), _rates(frame)) if f is not None]


def apart(values: Floats, reference: Floats) -> Bools:
    """Where checksums differ (NaN: they do not). Whole numbers are sums over bits: replicas have them equal to the bit,
    and one parameter that moved changes them by less than a ten-millionth."""
    whole = (values == np.rint(values)) & (reference == np.rint(reference))
    least = np.where(whole, 0.5, CHECKSUM_TOLERANCE * np.maximum(np.abs(reference), 1e-30))
    return np.asarray(np.isfinite(values) & np.isfinite(reference) & (np.abs(values - reference) > least))


def _majority(values: dict[int, Hashable]) -> tuple[Hashable, list[int]] | None:
    """(common value, ranks that differ) where more than half agree and somebody differs."""
    if len(values) < 3:
        return None
    common, count = Counter(values.values()).most_common(1)[0]
    odd = sorted(r for r, v in values.items() if v != common)
    return (common, odd) if odd and count > 0.5 * len(values) else None


def _seeds(frame: Frame) -> Finding | None:
    per_key: dict[str, dict[int, Hashable]] = defaultdict(dict)
    for event in frame.facts.events:
        if event.name == EventName.SEED and event.rank >= 0:
            for key, value in event.attributes.items():
                if key not in NOT_SEEDS:
                    per_key[key].setdefault(event.rank, value)
    evidence, odd_ranks = [], Counter[int]()
    for key, values in sorted(per_key.items()):
        found = _majority(values)
        if found is None or len(found[1]) > len(values) // 3 + 1:
            continue
        common, odd = found
        odd_ranks.update(odd)
        which = ", ".join(f"rank {r} has {values[r]}" for r in odd[:3])
        says = f"{key}: {which}; {len(values) - len(odd)} other ranks have {common}"
        evidence.append(Evidence(says=says, value=float(len(odd)), unit="ranks", baseline=0.0))
    if not evidence:
        return None
    named = [r for r, n in odd_ranks.items() if n == max(odd_ranks.values())]
    subject = Subject(rank=named[0]) if len(named) == 1 else Subject()
    path = (Link(metric="seed", label="seed differs", weight=0.98, says=evidence[0].says),)
    first = int(frame.facts.steps[0]) if len(frame.facts.steps) else 0
    return make(
        CauseCategory.SEED_MISMATCH,
        "launch",
        confidence=0.95,
        subject=subject,
        since_step=min(first, 0),
        evidence=evidence,
        symptom="different random streams",
        path=path,
    )


def _replica_groups(facts: Facts) -> list[list[int]]:
    """Columns that must hold equal parameters: same mesh place but for ``dp_replicate``."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for column, rank in enumerate(facts.ranks):
        mesh = facts.places.get(rank, Place()).mesh
        key = tuple(sorted((a, n) for a, n in mesh.items() if a != "dp_replicate"))
        groups[key].append(column)
    return [g for g in groups.values() if len(g) > 1]


def _rates(frame: Frame) -> Finding | None:
    """A rank whose learning rate is not its replicas': it updates its copy by another amount."""
    x = frame.facts.series.get("lr")
    if x is None or not np.isfinite(x).any():
        return None
    for group in _replica_groups(frame.facts):
        y = x[:, group]
        usual = stats.median(y, 1)[:, None]
        odd = np.isfinite(y) & (np.abs(y - usual) > RATE_TOLERANCE * np.maximum(np.abs(usual), 1e-30))
        often = odd.sum(0)
        column = int(often.argmax())
        if len(group) < 3 or often[column] < RATE_ROWS_MIN or (often > 0.5 * often[column]).sum() > 1:
            continue
        row = int(odd[:, column].argmax())
        rank, step = int(frame.ranks[group[column]]), frame.step(row)
        value, baseline = float(y[row, column]), float(usual[row, 0])
        says = (
            f"the learning rate of rank {rank} is {number(value)} since step {step}, of the others {number(baseline)}"
        )
        return make(
            CauseCategory.LR_MISCONFIGURED,
            "numerics",
            confidence=0.9,
            subject=Subject(rank=rank, host=frame.hosts[int(frame.host[group[column]])] or None),
            since_step=step,
            symptom="loss",
            evidence=(Evidence(says=says, value=value, unit="1", baseline=baseline, ref="lr"),),
            path=(Link(metric="lr", label="learning rate differs", weight=0.97, says=says),),
        )
    return None


def _divergence(frame: Frame) -> Finding | None:
    x = frame.facts.series.get("parameter_checksum")
    if x is None or not np.isfinite(x).any():
        return None
    best: tuple[int, list[int], int, float, float, int] | None = None
    for group in _replica_groups(frame.facts):
        y = x[:, group]
        low, high = np.where(np.isfinite(y), y, np.inf).min(1), np.where(np.isfinite(y), y, -np.inf).max(1)
        many = np.isfinite(y).sum(1) > 1
        differ = many & apart(low, high)
        if not differ.any():
            continue
        row = int(differ.argmax())
        if best is not None and row >= best[0]:
            continue
        last = int(np.flatnonzero(differ)[-1])
        odd, common = _odd_columns(y[row])
        times, seen = int((many[row:] & differ[row:]).sum()), int(np.isfinite(y[row]).sum())
        best = row, [group[i] for i in odd], times, float(y[row][odd[0]]), common, seen
        if last < row:
            break
    if best is None:
        return None
    row, odd, times, value, common, seen = best
    sure = len(odd) == 1 and seen > 2
    rank = int(frame.ranks[odd[0]]) if sure else None
    who = f"rank {rank}" if sure else "one replica"
    says = f"the checksum of {who} differs from its replicas' since step {frame.step(row)}, at {times} checks in a row"
    return make(
        CauseCategory.REPLICA_DIVERGENCE,
        "numerics",
        confidence=0.96 if sure else 0.6,
        subject=Subject(rank=rank),
        since_step=frame.step(row),
        symptom="replicas differ",
        evidence=(Evidence(says=says, value=value, unit="1", baseline=common, ref="parameter_checksum"),),
        path=(Link(metric="parameter_checksum", label="checksum differs", weight=0.99, says=says),),
        needs=() if sure else ("checksums of at least three replicas would say which one is odd",),
    )


def _odd_columns(values: np.ndarray) -> tuple[list[int], float]:
    """Members away from the most common value, and that value."""
    known = [(i, float(v)) for i, v in enumerate(values) if np.isfinite(v)]
    told = np.array([v for _, v in known])
    near = (~apart(told[:, None], told[None, :])).sum(1)
    common = float(told[int(near.argmax())])
    return [known[i][0] for i in np.flatnonzero(apart(told, np.full_like(told, common)))], common
