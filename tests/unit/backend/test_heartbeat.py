"""Heartbeats: the lost, the late, and the job's liveness; uploads that stutter are no fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from detect_runs import T0, event, facts, series

from lanterne.backend.detect import heartbeat, safety
from lanterne.backend.detect.heartbeat import Beats, joined
from lanterne.causal.facts import FactEvent

NS = 1_000_000_000
Row = tuple[int, float, float, int]  # rank, heard s, sent s, step


def beats(rows: Iterable[Row], *, parts: int = 1) -> Beats:
    found = Beats()
    table = sorted(rows, key=lambda row: row[1])
    for part in np.array_split(np.arange(len(table)), parts):
        rank = np.array([table[i][0] for i in part], np.int64)
        heard, sent = (np.array([T0 + int(table[i][k] * NS) for i in part], np.int64) for k in (1, 2))
        found = joined(found, rank, heard, sent, np.array([table[i][3] for i in part], np.int64))
    return found


def healthy(seconds: int = 120, ranks: int = 4, *, seed: int = 0) -> list[Row]:
    """One beat a second and rank, with clocks that differ and uploads of up to 0.7 s; ten steps a second."""
    rng = np.random.default_rng(seed)
    offset = rng.normal(0, 3, ranks)
    return [
        (r, s + float(rng.uniform(0.05, 0.7)), s + float(offset[r]), 10 * s)
        for r in range(ranks)
        for s in range(seconds)
    ]


def without(rank: int, since: float, until: float = 1e9) -> list[Row]:
    return [row for row in healthy() if row[0] != rank or not since <= row[1] < until]


def delayed(rank: int, since: float, until: float) -> list[Row]:
    """The rank's node uploads nothing for a while, then all of it at once."""
    return [(r, until if r == rank and since <= at < until else at, sent, s) for r, at, sent, s in healthy()]


def lagging(rank: int, by: int) -> list[Row]:
    return [(r, at, sent, step - by if r == rank and at > 80 else step) for r, at, sent, step in healthy()]


def outage() -> list[Row]:
    """The server was away for half a minute: nobody was heard, then everything came at once."""
    return [(r, 110.0 if 80 < at < 110 else at, sent, step) for r, at, sent, step in healthy()]


def ended() -> list[FactEvent]:
    return [event("exited", 2, 100, exit_code=0)]


CASES: dict[str, tuple[str, Callable[[], list[Row]], Callable[[], list[Row]]]] = {
    "a rank that is lost": ("heartbeat_lost", lambda: without(2, 100), lambda: without(2, 117)),
    "a stutter that passed": ("heartbeat_lost", lambda: without(2, 100), lambda: without(2, 80, 90)),
    "uploads that came late": ("heartbeat_lost", lambda: without(2, 100), lambda: delayed(2, 100, 108)),
    "nobody was heard": ("heartbeat_lost", lambda: without(2, 100), outage),
    "a rank that lags": ("version_gap", lambda: lagging(1, 30), lambda: lagging(1, 3)),
    "a rank that is late, not behind": ("version_gap", lambda: lagging(1, 30), lambda: delayed(1, 100, 108)),
    "liveness of a minute": ("liveness", lambda: without(2, 45), lambda: without(2, 75)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_its_neighbour_does_not(name: str) -> None:
    kind, faulty, neighbour = CASES[name]
    run = facts(series())
    assert kind in {a.kind for a in heartbeat.detect(run, beats(faulty()))}
    assert kind not in {a.kind for a in heartbeat.detect(run, beats(neighbour()))}


@pytest.mark.parametrize("seed", range(5))
def test_healthy_beats_raise_nothing_however_they_come(seed: int) -> None:
    rows = healthy(seed=seed)
    run = facts(series())
    assert heartbeat.detect(run, beats(rows, parts=7)) == []
    rules = safety.look(run, beats(rows, parts=7)).rules
    assert [r.rule for r in rules if r.broken] == []
    assert [r.value for r in rules if r.rule == "liveness"] == [1.0]


def test_the_two_ways_of_being_away_are_told_apart() -> None:
    run = facts(series())
    lost = {(r.rule, r.rank) for r in safety.look(run, beats(without(2, 115))).broken}
    behind = {(r.rule, r.rank) for r in safety.look(run, beats(lagging(1, 30))).broken}
    assert (lost, behind) == ({("heartbeat_lost", 2)}, {("version_gap", 1)})  # 3 intervals break the rule, not an alarm


def test_who_ended_is_not_missed() -> None:
    assert heartbeat.detect(facts(series(), ended()), beats(without(2, 45))) == []
    assert heartbeat.detect(facts(series()), Beats()) == []


def test_only_the_last_minute_is_kept() -> None:
    kept = beats(healthy(600), parts=20)
    assert len(kept.rank) <= 4 * (heartbeat.KEPT_S + 2)
    assert set(kept.last) == {0, 1, 2, 3}
