"""Circuit breakers, one a process group (or whatever key): when not to trust a thing any more, and when again.

closed -> open at ``FAILURES`` failures within ``WINDOW_S``, or at ``SLOW`` collectives in a row above ``RATIO``
times their baseline; open -> half-open after ``CLEAN_S`` without a failure; half-open: one trial, whose success closes
it and whose failure opens it again (DESIGN 6, the seed contract). Pure: states are values, time is passed in.
A breaker is no alarm: it keeps a healer's hands off a group, while ``communication`` says whether it is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from lanterne.backend.detect.bandwidth import Speed, follow
from lanterne.causal.facts import Facts, FloatArray, IntArray
from lanterne.nouns import BreakerState, EventName

FAILURES = 3
WINDOW_S = 300.0
SLOW = 3
RATIO = 2.5
CLEAN_S = 60.0
BASELINE_CALLS = 20
"""Calls that make a group's baseline: their median, and nothing is judged before."""
FLOOR_MS = 15.0
"""A transfer shorter than this is no failure, whatever it is a multiple of."""
CHANGES_MAX = 200
KIND = 1_000
"""A call's kind is its operation times this plus twice the logarithm of its size."""


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
    """The breakers by group, the moves that led there, and what the next window goes on from.

    ``baselines``: (group, kind of call) -> its first transfers in ms; ``until``: group -> last sequence judged;
    ``told_ns``: job time up to which failures were counted; ``speeds``: group -> bandwidth of its largest calls.
    """

    breakers: Mapping[str, Breaker] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    baselines: Mapping[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)
    told_ns: int = -1
    speeds: Mapping[str, Speed] = field(default_factory=dict)

    def states(self) -> list[BreakerState]:
        """The breakers for people, the open ones first."""
        last = {change.group: change for change in self.changes}
        found = [
            BreakerState(
                group=group, state=breaker.position.value, since_step=last[group].step if group in last else None,
                opened_times=breaker.opened_times, failures=len(breaker.failures), why=breaker.why,
            )
            for group, breaker in self.breakers.items()
        ]  # fmt: skip
        order = [Position.OPEN.value, Position.HALF_OPEN.value, Position.CLOSED.value]
        return sorted(found, key=lambda b: (order.index(b.state), -b.opened_times, b.group))


def board(facts: Facts, before: Board | None = None) -> Board:
    """Run what is new since ``before`` through one breaker a group. Calls without a time are placed by their step.

    A call's transfer is its fastest member's (the others' waits are no transfer). Calls of a group are of one kind
    when operation and size (within a fifth) agree. Failures are mismatches and standstills inside a call.
    """
    old = before or Board()
    w = facts.waits
    if not len(facts.step_start_ns):
        return old
    breakers, until, baselines, speeds = dict(old.breakers), dict(old.until), dict(old.baselines), dict(old.speeds)
    changes = list(old.changes)
    for calls in _fresh(facts, old):
        group = w.group[calls.group]
        usual = _usual(baselines, group, calls)
        state = breakers.get(group, Breaker())
        slow = (calls.took_ms > RATIO * usual) & (calls.took_ms >= FLOOR_MS)
        if slow.any() or state.position is not Position.CLOSED or state.slow_in_a_row:
            state = _through(state, group, calls, usual, changes)
        breakers[group], until[group] = state, int(calls.sequence[-1])
        ops = {int(k): str(w.op[k // KIND]) for k in np.unique(calls.kind) if k // KIND < len(w.op)}
        speed = follow(speeds.get(group), calls.kind, calls.size, calls.took_ms, ops)
        speeds |= {group: speed} if speed is not None else {}
    for group, step, at_s in _failures(facts, old.told_ns):
        was = breakers.get(group, Breaker())
        breakers[group] = failed(was, at_s)
        _note(changes, group, step, at_s, was, breakers[group])
    now_s = facts.now_ns / 1e9
    told = max((e.job_ns for e in facts.events), default=old.told_ns)
    return Board(
        breakers={g: at(b, now_s) for g, b in breakers.items()} if facts.now_ns else breakers,
        changes=tuple(sorted(changes, key=lambda c: c.at_s))[-CHANGES_MAX:], baselines=baselines, until=until,
        told_ns=max(told, old.told_ns), speeds=speeds,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Calls:
    """New calls of one group in order; arrays [N]."""

    group: int
    sequence: IntArray
    step: IntArray
    at_s: FloatArray
    took_ms: FloatArray
    kind: IntArray
    size: IntArray


def _fresh(facts: Facts, old: Board) -> Iterator[_Calls]:
    w = facts.waits
    if not len(w.step):
        return
    until = np.array([old.until.get(group, -1) for group in w.group], np.int64)
    rows = np.flatnonzero((w.step >= 0) & np.isfinite(w.transfer_ms) & (w.sequence > until[w.group_index]))
    if not len(rows):
        return
    rows = rows[np.lexsort((w.sequence[rows], w.group_index[rows]))]
    group, sequence = w.group_index[rows], w.sequence[rows]
    first = np.flatnonzero((np.diff(group, prepend=-1) != 0) | (np.diff(sequence, prepend=-1) != 0))
    took = np.minimum.reduceat(w.transfer_ms[rows], first)
    head = rows[first]
    row = np.clip(np.searchsorted(facts.steps, w.step[head]), 0, len(facts.step_start_ns) - 1)
    at_s = facts.step_start_ns[row] / 1e9
    op = w.op_index[head] if len(w.op_index) else np.zeros(len(head), np.int64)
    kind = op * KIND + np.round(2 * np.log2(np.maximum(w.bytes[head], 1))).astype(np.int64)
    edges = np.flatnonzero(np.diff(w.group_index[head], prepend=-1))
    for part in np.split(np.arange(len(head)), edges[1:]):
        yield _Calls(
            int(w.group_index[head[part[0]]]), w.sequence[head[part]], w.step[head[part]], at_s[part], took[part],
            kind[part], w.bytes[head[part]],
        )  # fmt: skip


def _usual(baselines: dict[tuple[str, int], tuple[float, ...]], group: str, calls: _Calls) -> FloatArray:
    """The baseline of each call in ms, NaN while its kind has none; takes the first calls of a kind into it."""
    usual = np.full(len(calls.took_ms), np.nan)
    for kind in np.unique(calls.kind):
        mine = np.flatnonzero(calls.kind == kind)
        known = baselines.get((group, int(kind)), ())
        lacking = BASELINE_CALLS - len(known)
        if lacking > 0:
            known = (*known, *calls.took_ms[mine[:lacking]].tolist())
            baselines[group, int(kind)] = known
            mine = mine[lacking:]
        if len(mine):
            usual[mine] = float(np.median(known))
    return usual


def _through(state: Breaker, group: str, calls: _Calls, usual: FloatArray, changes: list[Change]) -> Breaker:
    for i in range(len(calls.took_ms)):
        at_s = float(calls.at_s[i])
        was, state = state, observed(state, at_s, float(calls.took_ms[i]), float(usual[i]))
        _note(changes, group, int(calls.step[i]), at_s, was, state)
    return state


def _note(changes: list[Change], group: str, step: int, at_s: float, was: Breaker, now: Breaker) -> None:
    if now.position is not was.position:
        changes.append(Change(group=group, step=step, at_s=at_s, position=now.position, why=now.why))


def _failures(facts: Facts, told_ns: int) -> list[tuple[str, int, float]]:
    """(group, step, time s) of calls that failed after ``told_ns``: each standstill or mismatch of a call once."""
    seen: dict[tuple[str, int], tuple[str, int, float]] = {}
    for event in facts.events:
        group = str(event.attributes.get("group", ""))
        stuck = event.name == EventName.STALL and event.attributes.get("waiting") is True
        if group and event.job_ns > told_ns and (stuck or event.name == "collective_mismatch"):
            seen.setdefault((group, event.step), (group, event.step, event.job_ns / 1e9))
    return list(seen.values())
