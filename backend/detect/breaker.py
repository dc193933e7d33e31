"""Circuit breakers, one a process group (or whatever key): when not to trust a thing any more, and when again.

closed -> open at ``FAILURES`` failures within ``WINDOW_S``, or at ``SLOW`` collectives in a row above ``RATIO``
times their baseline; open -> half-open after ``CLEAN_S`` without a failure; half-open: one trial, whose success closes
it and whose failure opens it again (DESIGN 6, the seed contract). Pure: states are values, time is passed in.
A breaker is no alarm: it keeps a healer's hands off a group, while ``communication`` says whether it is slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from lanterne.causal.facts import Facts

FAILURES = 3
WINDOW_S = 300.0
SLOW = 3
RATIO = 2.5
CLEAN_S = 60.0
BASELINE_CALLS = 20
"""Calls that make a group's baseline: their median, and nothing is judged before."""
FLOOR_MS = 15.0
"""A transfer shorter than this is no failure, whatever it is a multiple of."""


class Position(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """One breaker's state. Times in seconds on the caller's clock."""

    position: Position = Position.CLOSED
    failures: tuple[float, ...] = ()  # within WINDOW_S, oldest first
    slow_in_a_row: int = 0
    opened_s: float = 0.0
    last_bad_s: float = float("-inf")
    opened_times: int = 0
    why: str = ""

    @property
    def lets_through(self) -> bool:
        """Whether work may go over it now: always when closed, one trial when half-open."""
        return self.position is not Position.OPEN


def at(breaker: Breaker, now_s: float) -> Breaker:
    """The breaker as time alone makes it: open turns half-open after a clean minute; old failures are forgotten."""
    recent = tuple(t for t in breaker.failures if now_s - t < WINDOW_S)
    if breaker.position is Position.OPEN and now_s - breaker.last_bad_s >= CLEAN_S:
        return replace(breaker, position=Position.HALF_OPEN, failures=(), slow_in_a_row=0)
    return breaker if recent == breaker.failures else replace(breaker, failures=recent)


def failed(breaker: Breaker, now_s: float, why: str = "") -> Breaker:
    """A failure at ``now_s``; opens a closed one at the third within the window, a half-open one at once."""
    now = at(breaker, now_s)
    failures = (*now.failures, now_s)
    if now.position is Position.HALF_OPEN or (now.position is Position.CLOSED and len(failures) >= FAILURES):
        return _opened(now, now_s, why or f"{FAILURES} failures within {WINDOW_S:.0f} s", failures)
    return replace(now, failures=failures[-FAILURES:], last_bad_s=now_s)


def succeeded(breaker: Breaker, now_s: float) -> Breaker:
    """A success at ``now_s``: the trial of a half-open breaker closes it."""
    now = at(breaker, now_s)
    if now.position is Position.HALF_OPEN:
        return replace(now, position=Position.CLOSED, failures=(), slow_in_a_row=0, why="")
    return replace(now, slow_in_a_row=0) if now.slow_in_a_row else now


def observed(breaker: Breaker, now_s: float, took_ms: float, baseline_ms: float) -> Breaker:
    """A collective that took ``took_ms`` against its group's baseline; a missing baseline judges nothing."""
    if not (np.isfinite(took_ms) and np.isfinite(baseline_ms)) or baseline_ms <= 0:
        return at(breaker, now_s)
    if took_ms <= RATIO * baseline_ms or took_ms < FLOOR_MS:
        return succeeded(breaker, now_s)
    now = at(breaker, now_s)
    if now.position is Position.HALF_OPEN:
        return failed(now, now_s, f"the trial took {took_ms:.0f} ms ({baseline_ms:.1f} ms usually)")
    streak = now.slow_in_a_row + 1
    if now.position is Position.CLOSED and streak >= SLOW:
        why = f"{SLOW} collectives in a row above {RATIO:g} times their {baseline_ms:.1f} ms (last {took_ms:.0f} ms)"
        return _opened(now, now_s, why, now.failures)
    return replace(now, slow_in_a_row=streak, last_bad_s=now_s)


def _opened(breaker: Breaker, now_s: float, why: str, failures: tuple[float, ...]) -> Breaker:
    return replace(
        breaker, position=Position.OPEN, opened_s=now_s, last_bad_s=now_s, failures=failures[-FAILURES:],
        slow_in_a_row=0, opened_times=breaker.opened_times + 1, why=why,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A breaker that moved: for the timeline and the incident."""

    group: str
    step: int
    at_s: float
    position: Position
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The breakers of a window by group, with the moves that led there."""

    breakers: dict[str, Breaker] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


def board(facts: Facts) -> Board:
    """Run the collectives of a window through one breaker a group. Calls without a time are placed by their step."""
    w = facts.waits
    breakers: dict[str, Breaker] = {}
    changes: list[Change] = []
    if not len(w.step) or not len(facts.step_start_ns):
        return Board()
    start_s = (facts.step_start_ns - facts.step_start_ns[0]) / 1e9
    for g, group in enumerate(w.group):
        state = Breaker()
        for step, at_s, took, usual in _calls(facts, g, start_s):
            before = state.position
            state = observed(state, at_s, took, usual)
            if state.position is not before:
                changes.append(Change(group=group, step=step, at_s=at_s, position=state.position, why=state.why))
        end = at(state, (facts.now_ns - int(facts.step_start_ns[0])) / 1e9) if facts.now_ns else state
        breakers[group] = end
    return Board(breakers=breakers, changes=tuple(sorted(changes, key=lambda c: c.at_s)))


def _calls(facts: Facts, g: int, start_s: np.ndarray) -> Iterable[tuple[int, float, float, float]]:
    """(step, time s, transfer ms, baseline ms) of a group's calls in order; one baseline a size of call."""
    w = facts.waits
    mine = np.flatnonzero((w.group_index == g) & np.isfinite(w.transfer_ms) & (w.step >= 0))
    if not len(mine):
        return
    order = mine[np.argsort(w.sequence[mine], kind="stable")]
    first = np.flatnonzero(np.diff(w.sequence[order], prepend=-1))
    took = np.minimum.reduceat(w.transfer_ms[order], first)  # the fastest member's: the others' waits are not transfer
    steps, sizes = w.step[order][first], w.bytes[order][first]
    row = np.searchsorted(facts.steps, steps)
    for size in np.unique(sizes):
        if (sizes == size).sum() <= BASELINE_CALLS:
            sizes = np.where(sizes == size, -1, sizes)  # too few of the kind: no baseline of its own
    baseline = {int(s): float(np.median(took[sizes == s][:BASELINE_CALLS])) for s in np.unique(sizes) if s >= 0}
    seen: dict[int, int] = {}
    for i in range(len(took)):
        size = int(sizes[i])
        seen[size] = seen.get(size, 0) + 1
        usual = baseline.get(size, float("nan")) if seen[size] > BASELINE_CALLS else float("nan")
        at_s = float(start_s[row[i]]) if row[i] < len(start_s) else float(start_s[-1])
        yield int(steps[i]), at_s, float(took[i]), usual
