"""The breaker's moves, one by one, and over the collectives of a window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect_runs import facts, series
from hypothesis import given
from hypothesis import strategies as st

from lanterne.backend.detect import breaker, safety
from lanterne.backend.detect.base import levels_of
from lanterne.backend.detect.breaker import Breaker, Position, at, failed, observed, succeeded
from lanterne.causal.facts import Place, Waits


def test_three_failures_within_five_minutes_open_it() -> None:
    two = failed(failed(Breaker(), 0.0), 100.0)
    assert two.position is Position.CLOSED
    assert failed(two, 299.0).position is Position.OPEN
    assert failed(two, 301.0).position is Position.CLOSED  # the first is forgotten


def test_three_slow_collectives_in_a_row_open_it() -> None:
    state = Breaker()
    for now in (1.0, 2.0):
        state = observed(state, now, 60.0, 20.0)
    assert state.position is Position.CLOSED
    assert observed(state, 3.0, 60.0, 20.0).position is Position.OPEN
    broken = observed(observed(state, 3.0, 20.0, 20.0), 4.0, 60.0, 20.0)
    assert broken.position is Position.CLOSED  # not in a row


@pytest.mark.parametrize(("took", "usual"), [(50.0, 20.0), (14.0, 1.0), (60.0, float("nan")), (float("nan"), 20.0)])
def test_what_is_not_slow(took: float, usual: float) -> None:
    state = Breaker()
    for now in range(10):
        state = observed(state, float(now), took, usual)
    assert state.position is Position.CLOSED


def test_a_clean_minute_allows_one_trial() -> None:
    opened = failed(failed(failed(Breaker(), 0.0), 1.0), 2.0)
    assert not at(opened, 61.9).lets_through
    again = failed(opened, 50.0)  # it still fails: the minute begins anew
    assert at(again, 62.0).position is Position.OPEN
    half = at(opened, 62.0)
    assert half.position is Position.HALF_OPEN
    assert half.lets_through
    assert succeeded(half, 63.0).position is Position.CLOSED
    worse = failed(half, 63.0)
    assert worse.position is Position.OPEN
    assert (worse.opened_times, at(worse, 122.0).position) == (2, Position.OPEN)
    assert observed(half, 63.0, 90.0, 20.0).position is Position.OPEN


@given(st.lists(st.tuples(st.floats(0, 200), st.sampled_from(["fail", "ok", "slow"])), max_size=60))
def test_it_never_opens_without_three_bad_signs_and_never_closes_without_a_trial(
    moves: list[tuple[float, str]],
) -> None:
    state, now, bad, last_bad = Breaker(), 0.0, 0, 0.0
    for wait, what in moves:
        now += wait
        before = state.position
        match what:
            case "fail":
                state, bad, last_bad = failed(state, now), bad + 1, now
            case "slow":
                state, bad, last_bad = observed(state, now, 99.0, 20.0), bad + 1, now
            case _:
                state = succeeded(state, now)
        if before is Position.OPEN and state.position is Position.CLOSED:
            assert now - last_bad >= breaker.CLEAN_S
        assert state.position is Position.CLOSED or bad >= min(breaker.FAILURES, breaker.SLOW)
        assert len(state.failures) <= breaker.FAILURES


def _waits(steps: int, slow_from: int, group: tuple[str, ...] = ("0-3",)) -> Waits:
    step = np.repeat(np.arange(steps), 4)
    took = np.where(step >= slow_from, 80.0, 20.0)
    return Waits(
        group=group, group_index=np.zeros(len(step), np.int64), sequence=step, step=step,
        rank=np.tile(np.arange(4), steps), bytes=np.full(len(step), 1 << 20), lateness_ms=np.zeros(len(step)),
        wait_ms=np.zeros(len(step)), transfer_ms=took, error_ms=np.zeros(len(step)),
    )  # fmt: skip


def test_a_group_that_became_slow_trips_and_a_steady_one_does_not() -> None:
    spoiled = breaker.board(facts(series(), waits=_waits(200, 100)))
    assert not spoiled.breakers["0-3"].lets_through
    assert [(c.group, c.step, c.position) for c in spoiled.changes] == [("0-3", 102, Position.OPEN)]
    assert "3 collectives in a row" in spoiled.changes[0].why
    steady = breaker.board(facts(series(), waits=_waits(200, 1000)))
    assert (steady.breakers["0-3"].position, steady.changes) == (Position.CLOSED, ())
    assert breaker.board(facts(series())).breakers == {}


def test_it_closes_again_when_the_link_is_well_for_long_enough() -> None:
    waits = _waits(200, 100)
    brief = replace(waits, transfer_ms=np.where(waits.step >= 103, 20.0, waits.transfer_ms))
    board = breaker.board(facts(series(step_ms=2000.0), waits=brief))
    assert [c.position for c in board.changes] == [Position.OPEN, Position.CLOSED]
    assert board.changes[1].at_s - board.changes[0].at_s >= breaker.CLEAN_S


@pytest.mark.parametrize(("took", "broken"), [(80.0, True), (24.0, False)])
def test_bandwidth_below_seven_tenths_of_the_best_breaks_the_rule(took: float, broken: bool) -> None:
    waits = _waits(200, 100)
    slow = replace(waits, transfer_ms=np.where(waits.step >= 100, took, 20.0))
    (rule,) = [r for r in safety.look(facts(series(), waits=slow)).rules if r.rule == "bandwidth"]
    assert rule.broken is broken
    assert rule.value == pytest.approx(20.0 / took)


@pytest.mark.parametrize(
    ("levels", "hosts", "op", "value"),
    [
        ("node_gb_per_s=0.05", 1, "all_reduce", 1.57),
        ("node_gb_per_s=0.2", 1, "all_reduce", 0.39),
        ("network_gb_per_s=0.2", 2, "all_reduce", 0.39),
        ("network_gb_per_s=0.2", 1, "all_reduce", None),
        ("node_gb_per_s=0.2", 1, "all_gather", 0.2),
        ("node_gb_per_s=0.2", 1, "scatter", None),
        ("", 2, "all_reduce", None),
    ],
)
def test_bus_bandwidth_is_held_against_what_the_links_should_give(
    levels: str, hosts: int, op: str, value: float | None
) -> None:
    """1 MiB in 20 ms among four: 0.052 GB/s, and 1.5 times that on the bus."""
    waits = replace(_waits(200, 1000), op=(op,), op_index=np.zeros(800, np.int64))
    run = replace(facts(series(), waits=waits), places={r: Place(host=f"h{r * hosts // 4}") for r in range(4)})
    found = [r for r in safety.look(run, levels=levels_of(levels)).rules if r.rule == "bus_bandwidth"]
    assert [r.value for r in found] == ([] if value is None else [pytest.approx(value, abs=0.01)])
    assert [r.broken for r in found] == ([] if value is None else [value < 0.7])


def test_bandwidth_is_carried_from_window_to_window_and_short_transfers_are_left_alone() -> None:
    waits = _waits(200, 100)
    first = replace(waits, **{n: getattr(waits, n)[: 4 * 100] for n in ("group_index", "sequence", "step", "rank",
                    "bytes", "lateness_ms", "wait_ms", "transfer_ms", "error_ms")})  # fmt: skip
    before = safety.look(facts(series(), waits=first))
    after = safety.look(facts(series(), waits=waits), None, before)
    assert [r.broken for r in (*before.rules, *after.rules) if r.rule == "bandwidth"] == [False, True]
    assert after.board.breakers["0-3"].opened_times == 1
    brief = replace(waits, transfer_ms=waits.transfer_ms / 20)
    assert not safety.look(facts(series(), waits=brief)).broken
    noisy = replace(waits, transfer_ms=20 * np.exp(np.random.default_rng(0).normal(0, 0.4, len(waits.step))))
    assert not safety.look(facts(series(), waits=noisy)).broken


def test_windows_that_overlap_count_each_call_once() -> None:
    waits = _waits(200, 100)
    once = safety.look(facts(series(), waits=waits))
    again = safety.look(facts(series(), waits=waits), None, once)
    assert again.board.changes == once.board.changes
    assert again.board.speeds == once.board.speeds
