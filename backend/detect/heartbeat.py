"""Heartbeats (one a second and rank): who is lost, who lives but lags behind, and the job's liveness.

Two ways of being away need two remedies: a *lost* rank says nothing (its process, shipper or host is gone), one that is
*behind* speaks, but its steps are old. Times are the server's at arrival, so no rank's clock is trusted; silence of the
whole job at once is ours or the network's and judges nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanterne.backend.detect.base import events, finding
from lanterne.backend.detect.contract import HEARTBEATS_LOST, VERSION_GAP, Absence, absence
from lanterne.backend.detect.contract import liveness as liveness_rule
from lanterne.causal.facts import Facts, FloatArray, IntArray
from lanterne.nouns import Anomaly, EventName, Ruling, Severity

KINDS = frozenset({"heartbeat_lost", "version_gap", "liveness"})
INTERVAL_S = 1.0
SAMPLES = 60
KEPT_S = 70.0
FLOOR_S = 5.0
"""No alarm about a silence below this: uploads come in batches and are tried again."""
GAPS = 2.0
"""A silence is an alarm beyond this many times the longest gap that the job's beats have shown lately."""
LAG_S = 1.0
"""A rank is behind when its step is older than what the others had done this long before."""
CONFIRM_BEATS = 3


def _none() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """Heartbeats of the last ``KEPT_S`` seconds, parallel arrays [N] sorted by arrival, and the last of each rank.

    ``heard_ns``: Unix time of arrival at the server; ``sent_ns``: rank's own Unix time; ``last``: rank -> arrival.
    """

    rank: IntArray = field(default_factory=_none)
    heard_ns: IntArray = field(default_factory=_none)
    sent_ns: IntArray = field(default_factory=_none)
    step: IntArray = field(default_factory=_none)
    last: dict[int, int] = field(default_factory=dict)

    @property
    def newest_ns(self) -> int:
        return max(self.last.values(), default=0)


def joined(old: Beats, rank: IntArray, heard_ns: IntArray, sent_ns: IntArray, step: IntArray) -> Beats:
    """``old`` with newer beats; what is older than ``KEPT_S`` is forgotten, but each rank's last arrival."""
    last = dict(old.last)
    for r, at in zip(rank.tolist(), heard_ns.tolist(), strict=True):
        last[r] = max(last.get(r, 0), at)
    heard = np.concatenate([old.heard_ns, heard_ns])
    since = max(last.values(), default=0) - int(KEPT_S * 1e9)
    keep = np.flatnonzero(heard >= since)
    keep = keep[np.argsort(heard[keep], kind="stable")]
    return Beats(
        rank=np.concatenate([old.rank, rank])[keep], heard_ns=heard[keep],
        sent_ns=np.concatenate([old.sent_ns, sent_ns])[keep], step=np.concatenate([old.step, step])[keep], last=last,
    )  # fmt: skip


def _over(facts: Facts) -> set[int]:
    return {e.rank for e in events(facts, EventName.EXITED, EventName.CLOSED, EventName.EXCEPTION)}


def silences(facts: Facts, beats: Beats) -> dict[int, float]:
    """Rank -> seconds since its last beat, counted to the newest beat of the job; ranks that ended are left out."""
    over, newest = _over(facts), beats.newest_ns
    return {r: (newest - at) / 1e9 for r, at in beats.last.items() if r not in over}


def shares(facts: Facts, beats: Beats) -> FloatArray:
    """Liveness [60], oldest first: share of the ranks heard within 3 intervals before each second.

    NaN for seconds in which nobody was heard (the server or its network was away) and before the first beat.
    """
    silent = silences(facts, beats)
    if not silent or not len(beats.rank):
        return np.full(SAMPLES, np.nan)
    ranks = np.array(sorted(silent), np.int64)
    at = np.searchsorted(ranks, beats.rank)
    known = (at < len(ranks)) & (ranks[np.minimum(at, len(ranks) - 1)] == beats.rank)
    second = np.floor((beats.newest_ns - beats.heard_ns[known]) / (INTERVAL_S * 1e9)).astype(np.int64)
    heard = np.zeros((SAMPLES + HEARTBEATS_LOST, len(ranks)), bool)
    inside = second < len(heard)
    heard[second[inside], at[known][inside]] = True
    window = np.stack([heard[k : k + HEARTBEATS_LOST].any(axis=0) for k in range(SAMPLES)])
    share = np.where(window.any(axis=1), window.mean(axis=1), np.nan)
    covered = (beats.newest_ns - int(beats.heard_ns[0])) / 1e9
    share[int(min(SAMPLES, max(covered, 0))) :] = np.nan
    return np.asarray(share[::-1], np.float64)


def behind(facts: Facts, beats: Beats) -> dict[int, int]:
    """Rank -> steps that it lags, for ranks that kept up at first and were behind in their last three beats."""
    found: dict[int, int] = {}
    newest = {r: int(beats.step[np.flatnonzero(beats.rank == r)[-1]]) for r in np.unique(beats.rank).tolist()}
    if len(newest) < 3:
        return found
    usual, over = float(np.median(list(newest.values()))), _over(facts)
    for rank, step in newest.items():
        if usual - step < VERSION_GAP or rank in over:
            continue
        mine, others = np.flatnonzero(beats.rank == rank), np.flatnonzero(beats.rank != rank)
        at = _corrected(beats, mine)
        when, steps, ranks = _corrected(beats, others), beats.step[others], beats.rank[others]
        gaps = [_gap(at[i], int(beats.step[mine[i]]), when, steps, ranks) for i in range(len(mine))]
        late = [g for g in gaps[-CONFIRM_BEATS:] if g >= VERSION_GAP]
        if len(late) == CONFIRM_BEATS and min(gaps) < VERSION_GAP:
            found[rank] = int(late[-1])
    return found


def _corrected(beats: Beats, rows: IntArray) -> FloatArray:
    """When beats were sent, s on the server's clock: own time plus the rank's quickest way here."""
    delay = beats.heard_ns[rows] - beats.sent_ns[rows]
    quickest = {r: int(delay[beats.rank[rows] == r].min()) for r in np.unique(beats.rank[rows]).tolist()}
    shift = np.array([quickest[r] for r in beats.rank[rows].tolist()], np.int64)
    return np.asarray((beats.sent_ns[rows] + shift) / 1e9, np.float64)


def _gap(at_s: float, step: int, when_s: FloatArray, steps: IntArray, ranks: IntArray) -> float:
    """Steps by which the others, a second before ``at_s``, were ahead already; 0 where none was heard by then."""
    before = (when_s <= at_s - LAG_S) & (when_s > at_s - LAG_S - 3 * INTERVAL_S)
    if not before.any():
        return 0.0
    _, who = np.unique(ranks[before], return_inverse=True)
    newest = np.zeros(int(who.max()) + 1, np.int64)
    np.maximum.at(newest, who, steps[before])
    return float(np.median(newest) - step)


def rulings(facts: Facts, beats: Beats) -> list[Ruling]:
    """The contract's three rules on heartbeats: liveness, lost (3 intervals) and behind (5 steps)."""
    found = []
    share = shares(facts, beats)
    live = liveness_rule(share)
    if live is not None:
        found.append(live)
    silent, lag = silences(facts, beats), behind(facts, beats)
    for rank, seconds in silent.items():
        state = absence(seconds, 0, lag.get(rank, 0), interval_s=INTERVAL_S)
        if state is Absence.SILENT:
            found.append(
                Ruling(
                    rule="heartbeat_lost", broken=True, value=seconds, threshold=HEARTBEATS_LOST * INTERVAL_S, unit="s",
                    says=f"rank {rank} was last heard {seconds:.1f} s ago", rank=rank,
                )
            )  # fmt: skip
        elif state is Absence.BEHIND:
            found.append(
                Ruling(
                    rule="version_gap", broken=True, value=lag[rank], threshold=VERSION_GAP, unit="{step}",
                    says=f"rank {rank} lives, but is {lag[rank]} steps behind", rank=rank,
                )
            )  # fmt: skip
    return found


def detect(facts: Facts, beats: Beats) -> list[Anomaly]:
    """Alarms: a lost rank beyond what the job's own beats vary, a rank left behind, and liveness low for a minute."""
    silent = silences(facts, beats)
    bound = max(HEARTBEATS_LOST * INTERVAL_S, FLOOR_S, GAPS * _longest_gap(beats))
    lost = sorted(r for r, seconds in silent.items() if seconds > bound)
    step = int(facts.steps[-1]) if len(facts.steps) else 0
    found = [
        finding(
            facts, "heartbeat_lost",
            f"rank {rank} was last heard {silent[rank]:.0f} s before its peers' newest heartbeat "
            f"(bound {bound:.1f} s): its process, shipper or host is gone",
            severity=Severity.P1, first=step, last=step, score=silent[rank] / bound, rank=rank,
            at_ns=beats.last[rank], value=silent[rank], unit="s", baseline=bound,
        )
        for rank in lost[:8]
    ]  # fmt: skip
    for rank, gap in behind(facts, beats).items():
        if rank not in lost:
            found.append(
                finding(
                    facts, "version_gap",
                    f"rank {rank} lives, but is {gap} steps behind what its peers had done {LAG_S:.0f} s before",
                    severity=Severity.P1, first=max(step - gap, 0), last=step, score=gap / VERSION_GAP, rank=rank,
                    value=float(gap), unit="{step}", baseline=0.0,
                )
            )  # fmt: skip
    live = liveness_rule(shares(facts, beats))
    if live is not None and live.broken and lost:
        found.append(
            finding(
                facts, "liveness", live.says, severity=Severity.P0, first=step, last=step, score=1.0,
                rank=lost[0] if len(lost) == 1 else None, at_ns=beats.last[lost[0]], value=live.value, unit="1",
                baseline=live.threshold, fired_by="level",
            )
        )  # fmt: skip
    return found


def _longest_gap(beats: Beats) -> float:
    """Longest time in seconds between two beats of one rank within the window."""
    order = np.lexsort((beats.heard_ns, beats.rank))
    gap, same = np.diff(beats.heard_ns[order]), np.diff(beats.rank[order]) == 0
    return float(gap[same].max() / 1e9) if same.any() else 0.0
