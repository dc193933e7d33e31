"""Objectives with error budgets and burn rates; recoveries and their levels. Pure.

error budget = 1 - target. burn rate = (1 - value) / (1 - target): 1 spends the budget exactly by the end of the
window (Google SRE Workbook, chapter 5). What was not measured is None, never a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lanterne.backend.sla.account import IN_TRAINING, Account, Life, Steps, Trouble

LEVELS: Mapping[str, float] = {"L1": 30.0, "L2": 60.0, "L3": 180.0}
"""Level -> seconds within which a recovery must be over (the seed contract, DESIGN 6)."""
CHECKS: Mapping[str, tuple[str, ...]] = {
    "L1": ("ranks_report", "loss_finite"),
    "L2": ("ranks_report", "loss_finite", "replicas_agree"),
    "L3": ("ranks_report", "loss_finite", "replicas_agree", "checkpoint_verified"),
}
"""Mandatory checks of a recovery; a deeper one has more to prove."""
BURN_WINDOWS = ((3600.0, 300.0, 14.4, "page"), (21600.0, 1800.0, 6.0, "page"), (259200.0, 21600.0, 1.0, "ticket"))
"""(long window s, short window s, burn rate, what to do): SRE Workbook, "Alerting on SLOs", recommended values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets of the objectives, each a share. The recovery targets hold for every level."""

    availability: float = 0.995
    job_success: float = 0.95
    ettr: float = 0.90
    liveness: float = 0.9995
    checkpoint_success: float = 0.997
    recovery: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One row of the answer. ``error_budget``: share of the budget left (0 = spent); None = not measured."""

    name: str
    target: float
    value: float | None
    level: str | None = None
    error_budget: float | None = None
    burn_rate: float | None = None
    met: bool | None = None
    checks: Mapping[str, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnAlert:
    """The budget burns too fast in a long and in a short window at once."""

    objective: str
    window_s: float
    burn_rate: float
    threshold: float
    action: str  # "page" or "ticket"


def objective(
    name: str, target: float, value: float | None, *, level: str | None = None,
    checks: Mapping[str, bool | None] | None = None,
) -> Objective:  # fmt: skip
    """Fill in budget, burn rate and whether it is met. Raises ValueError for a target outside [0, 1)."""
    if not 0 <= target < 1:
        raise ValueError(f"objective {name}: target {target} leaves no error budget; use a share below 1")
    said = dict(checks or {})
    if value is None:
        return Objective(name=name, target=target, value=None, level=level, checks=said)
    burn = max(0.0, 1 - value) / (1 - target)
    met: bool | None = value >= target
    if met and said:
        met = False if False in said.values() else None if None in said.values() else True
    return Objective(
        name=name, target=target, value=value, level=level, error_budget=max(0.0, 1 - burn), burn_rate=burn, met=met,
        checks=said,
    )  # fmt: skip


def availability(account: Account) -> float | None:
    """Share of the wall time in which the job made its way; the first start-up is not down time."""
    if account.wall_s <= 0:
        return None
    down = sum(s for cause, s in account.badput.items() if cause not in IN_TRAINING)
    first = next((s for s in account.slices if s.cause == "start_up"), None)
    start = first.seconds if first is not None and first is account.slices[0] else 0.0
    whole = account.wall_s - start
    return max(0.0, 1 - (down - start) / whole) if whole > 0 else None


def ettr(account: Account) -> float | None:
    """Effective training time ratio: productive / wall time."""
    return account.productive_s / account.wall_s if account.wall_s > 0 else None


def job_success(lives: Sequence[Life]) -> float | None:
    """Attempts that ended well among those whose end is known."""
    ended = [a.succeeded for a in lives if a.succeeded is not None]
    return sum(ended) / len(ended) if ended else None


def failures(lives: Sequence[Life], troubles: Sequence[Trouble]) -> int:
    """Attempts that ended badly, and fatal troubles that were mended within an attempt."""
    return sum(a.succeeded is False for a in lives) + len(_mended(lives, troubles))


def _mended(lives: Sequence[Life], troubles: Sequence[Trouble]) -> list[Trouble]:
    """Fatal troubles with an end that lie inside one attempt which outlived them."""
    return [
        t
        for t in troubles
        if t.fatal and t.end_ns and any(a.first_ns <= t.start_ns and t.end_ns < a.last_ns for a in lives)
    ]


def recoveries(steps: Steps, lives: Sequence[Life], troubles: Sequence[Trouble]) -> list[float]:
    """Seconds from each failure to progress: the end of the next attempt's first new step, or the mend in place.

    A failure that nothing followed has no recovery and is not in the list.
    """
    found: list[float] = []
    ordered = sorted(lives, key=lambda a: a.attempt)
    for now, following in itertools.pairwise(ordered):
        if now.succeeded is not False:
            continue
        mine, next_ = steps.attempt == now.attempt, steps.attempt == following.attempt
        if not next_.any():
            continue
        ends = steps.start_ns + (steps.duration_ms * 1e6).astype(steps.start_ns.dtype)
        failed = int(ends[mine].max()) if mine.any() else now.first_ns
        found.append((int(ends[next_].min()) - failed) / 1e9)
    return found + [(t.end_ns - t.start_ns) / 1e9 for t in _mended(lives, troubles)]


def recovery_objectives(
    took_s: Sequence[float], targets: Targets, checks: Mapping[str, bool | None]
) -> list[Objective]:
    """One objective a level: the share of recoveries within its seconds, with the level's mandatory checks."""
    return [
        objective(
            f"recovery_{seconds:.0f}s", targets.recovery,
            sum(s < seconds for s in took_s) / len(took_s) if took_s else None, level=level,
            checks={name: checks.get(name) for name in CHECKS[level]},
        )
        for level, seconds in LEVELS.items()
    ]  # fmt: skip


def burn_alerts(name: str, target: float, account: Account, now_ns: int) -> list[BurnAlert]:
    """Multi-window alerts on the productive share: both windows of a pair must burn above its rate.

    A pair whose long window is not covered by a tenth at least says nothing: too little was seen.
    """
    found = []
    for long_s, short_s, threshold, action in BURN_WINDOWS:
        rates = []
        for window_s in (long_s, short_s):
            part = account.between(now_ns - int(window_s * 1e9), now_ns + 1)
            share = ettr(part)
            seen = share is not None and part.wall_s >= 0.1 * window_s
            rates.append((1 - share) / (1 - target) if seen and share is not None else 0.0)
        if min(rates) >= threshold:
            found.append(
                BurnAlert(objective=name, window_s=long_s, burn_rate=rates[0], threshold=threshold, action=action)
            )
    return found
