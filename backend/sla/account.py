"""Where a job's time went: productive, or lost to a named cause. Pure; times are Unix ns, lengths seconds.

Every nanosecond between the first sign of a job and its last goes to exactly one cause:

- ``start_up``: first sign of an attempt to its first step (imports, rendezvous, loading of the checkpoint);
- ``restart``: end of one attempt's last step to the next attempt's first sign;
- ``recomputed``: steps that an earlier attempt had already done;
- ``checkpoint``, ``eval``, ``compile``: the longest rank's phase, as the others wait for it; ``data_wait``: the median;
- excess of a step over ``EXCESS`` times the run's typical step, and pauses between steps: the cause of the
  incident that covers them, else ``slow_steps`` or ``idle``;
- the rest of a step is productive.

Goodput and badput by type follow Google's ML Goodput measurement; ETTR = productive / wall time (Kokolis et al.,
"Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lanterne.causal.facts import FloatArray, IntArray

EXCESS = 1.25
"""A step longer than this many typical steps lost time; below it is noise."""
PHASES = ("checkpoint", "eval", "compile", "data_wait")
PAUSE_STEPS = 2.0
"""A pause between steps below this many typical steps belongs to the loop and counts as idle, never as an incident."""
LAG_NS = 60 * 10**9
"""What is told at once is here well within this; beyond it, signs and steps are on different clocks."""
IN_TRAINING = frozenset({"checkpoint", "eval", "compile", "data_wait", "recomputed", "slow_steps"})
"""Losses during which the job still makes its way: the job is available, although not productive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Finished steps of all attempts in order of time. Arrays ``[N]``; phases in ms."""

    attempt: IntArray
    step: IntArray
    start_ns: IntArray
    duration_ms: FloatArray
    phases: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One attempt: first and last sign of it, and how it ended (None = it has not, or nobody said)."""

    attempt: int
    first_ns: int
    last_ns: int
    succeeded: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An incident as far as time is concerned; ``end_ns`` 0 = not over."""

    cause: str
    start_ns: int
    end_ns: int = 0
    fatal: bool = False  # it stopped the job (P0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of time that went to one cause; steps are split by their parts, so slices of a step may overlap."""

    start_ns: int
    seconds: float
    cause: str  # "productive" or a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Sums and the slices behind them."""

    slices: tuple[Slice, ...]
    wall_s: float

    def total(self, cause: str) -> float:
        return float(sum(s.seconds for s in self.slices if s.cause == cause))

    @property
    def productive_s(self) -> float:
        return self.total("productive")

    @property
    def badput(self) -> dict[str, float]:
        """Seconds lost by cause, the largest first; causes that cost nothing are left out."""
        lost: dict[str, float] = {}
        for s in self.slices:
            if s.cause != "productive" and s.seconds > 0:
                lost[s.cause] = lost.get(s.cause, 0.0) + s.seconds
        return dict(sorted(lost.items(), key=lambda kv: -kv[1]))

    def between(self, start_ns: int, end_ns: int) -> Account:
        """The account of the slices that begin in ``[start_ns, end_ns)``."""
        mine = tuple(s for s in self.slices if start_ns <= s.start_ns < end_ns)
        return Account(slices=mine, wall_s=sum(s.seconds for s in mine))


def account(steps: Steps, lives: Sequence[Life], troubles: Sequence[Trouble] = ()) -> Account:
    """The account of a whole job. ``lives`` in order of attempts; steps of unknown attempts are ignored."""
    slices: list[Slice] = []
    reached, previous_end = -1, 0
    for life in sorted(lives, key=lambda a: a.attempt):
        rows = np.flatnonzero(steps.attempt == life.attempt)
        rows = rows[np.argsort(steps.start_ns[rows], kind="stable")]
        life = _on_clock_of(life, steps, rows)
        first = int(steps.start_ns[rows[0]]) if len(rows) else life.last_ns
        begin = min(max(life.first_ns, previous_end), first)
        if previous_end:
            slices += _slice(previous_end, begin, "restart")
        slices += _slice(begin, first, "start_up")
        if len(rows):
            slices += _of_steps(steps, rows, reached, troubles)
            reached = max(reached, int(steps.step[rows].max()))
            end = int(steps.start_ns[rows[-1]] + steps.duration_ms[rows[-1]] * 1e6)
            usual_ns = float(np.median(steps.duration_ms[rows])) * 1e6
            if life.last_ns - end > PAUSE_STEPS * usual_ns:
                slices += _slice(end, life.last_ns, _cause(troubles, end, life.last_ns) or "idle")
            previous_end = max(end, life.last_ns)
        else:
            previous_end = max(previous_end, life.last_ns)
    return Account(slices=tuple(slices), wall_s=sum(s.seconds for s in slices))


def _on_clock_of(life: Life, steps: Steps, rows: IntArray) -> Life:
    """Signs are timed by the server, steps by the job. Where the two do not even overlap (sent afterwards from a spool,
    a clock that is off), the server's times say nothing of the job, and the steps alone tell its beginning and end."""
    if not len(rows):
        return life
    first, end = int(steps.start_ns[rows[0]]), int(steps.start_ns[rows[-1]] + steps.duration_ms[rows[-1]] * 1e6)
    apart = max(life.first_ns - end, first - life.last_ns)
    return replace(life, first_ns=first, last_ns=end) if apart > LAG_NS else life


def _slice(start_ns: int, end_ns: int, cause: str) -> list[Slice]:
    return [Slice(start_ns=start_ns, seconds=(end_ns - start_ns) / 1e9, cause=cause)] if end_ns > start_ns else []


def _cause(troubles: Sequence[Trouble], start_ns: int, end_ns: int) -> str | None:
    """Cause of the trouble that overlaps a stretch the most; None where none does."""
    best, most = None, 0
    for t in troubles:
        overlap = min(end_ns, t.end_ns or end_ns) - max(start_ns, t.start_ns)
        if overlap > most:
            best, most = t.cause, overlap
    return best


def _of_steps(steps: Steps, rows: IntArray, reached: int, troubles: Sequence[Trouble]) -> list[Slice]:
    start, length = steps.start_ns[rows], steps.duration_ms[rows]
    known = {name: np.nan_to_num(steps.phases.get(name, np.zeros(len(steps.step)))[rows]) for name in PHASES}
    plain = length - np.minimum(sum(known[name] for name in PHASES if name != "data_wait"), length)
    usual = float(np.median(plain)) if len(plain) else 0.0
    found: list[Slice] = []
    for i in range(len(rows)):
        at, left = int(start[i]), float(length[i])
        if i and at > (end := int(start[i - 1] + length[i - 1] * 1e6)):
            long_pause = (at - end) / 1e6 > PAUSE_STEPS * usual
            found += _slice(end, at, (_cause(troubles, end, at) if long_pause else None) or "idle")
        if int(steps.step[rows[i]]) <= reached:
            found.append(Slice(start_ns=at, seconds=left / 1e3, cause="recomputed"))
            continue
        for name in PHASES:
            part = min(float(known[name][i]), left)
            if part > 0:
                found.append(Slice(start_ns=at, seconds=part / 1e3, cause=name))
                left -= part
        if left > EXCESS * usual:
            cause = _cause(troubles, at, at + int(length[i] * 1e6)) or "slow_steps"
            found.append(Slice(start_ns=at, seconds=(left - usual) / 1e3, cause=cause))
            left = usual
        found.append(Slice(start_ns=at, seconds=left / 1e3, cause="productive"))
    return found
