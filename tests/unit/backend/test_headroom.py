"""Memory that runs out soon, judged from a job's own series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect_runs import Floats, facts, series

from lanterne.backend.detect import safety
from lanterne.backend.detect.headroom import headroom
from lanterne.causal.facts import Facts

GB = 1e9
LIMIT = 16 * GB


def held(level: Callable[[Floats], Floats], *, step_ms: float = 500.0, steps: int = 300, memory: str = "rss") -> Facts:
    """Rank 1 holds ``level(seconds)`` bytes of 16 GB; the others a quarter."""
    found = series(steps, 4, step_ms=step_ms)
    seconds = np.arange(steps) * step_ms / 1e3
    x = np.full((steps, 4), LIMIT / 4)
    x[:, 1] = level(seconds)
    name = {"rss": "rss_bytes", "gpu": "gpu_allocated_bytes"}[memory]
    return facts(found | {name: x, f"{memory}_limit_bytes": np.full((steps, 4), LIMIT)})


@pytest.mark.parametrize("memory", ["rss", "gpu"])
def test_a_rank_that_is_about_to_run_out_is_named(memory: str) -> None:
    run = held(lambda t: 0.5 * LIMIT + np.maximum(t - 100, 0) * 0.009 * LIMIT, memory=memory)
    rules = [r for r in safety.look(run).rules if r.rule == "memory_ahead"]
    assert [(r.rank, r.broken) for r in rules] == [(1, True)]
    first = headroom(run)[0]
    assert (first.rank, first.memory, first.advice) == (1, {"rss": "host", "gpu": "device"}[memory], "act")
    assert first.horizon_s == pytest.approx(10, rel=0.1)
    assert first.reserve_bytes > LIMIT / 10


@pytest.mark.parametrize(
    "level",
    [
        lambda t: np.full_like(t, 0.99 * LIMIT),  # full, and it stays so
        lambda t: 0.5 * LIMIT + 0.3 * LIMIT * (1 - np.exp(-t / 20)),  # caches that fill
        lambda t: 0.2 * LIMIT + t * 0.001 * LIMIT,  # a slow leak, far from the limit
        lambda t: (0.9 + 0.08 * (np.floor(t) % 2)) * LIMIT,  # up and down with every step
        lambda t: np.where(t > 140, 0.6, 0.8) * LIMIT,  # given back
    ],
)
def test_neighbours_hold(level: Callable[[Floats], Floats]) -> None:
    run = held(level)
    assert not [r for r in safety.look(run).broken if r.rule == "memory_ahead"]
    assert headroom(run)


def test_a_limit_that_others_eat_up_counts_as_growth() -> None:
    run = held(lambda t: np.full_like(t, 0.6 * LIMIT))
    shrinking = np.broadcast_to(np.linspace(LIMIT, 0.61 * LIMIT, 300)[:, None], (300, 4)).copy()
    shrinking[:200] = shrinking[200:201]
    shrinking[280:] = np.linspace(float(shrinking[279, 0]), 0.615 * LIMIT, 20)[:, None]
    run = facts({**run.series, "rss_limit_bytes": shrinking})
    assert next((h.rank, h.memory) for h in headroom(run)) == (1, "host")


@pytest.mark.parametrize("steps", [5, 15])
def test_a_window_that_is_too_short_says_nothing(steps: int) -> None:
    assert headroom(held(lambda t: np.full_like(t, 0.99 * LIMIT), steps=steps)) == []


def test_samples_that_are_far_apart_look_further_ahead() -> None:
    run = held(lambda t: np.floor(t / 5) * 5 * 0.004 * LIMIT + 0.2 * LIMIT, step_ms=100.0, steps=700)
    (first, *_) = headroom(run)
    assert first.horizon_s == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize(
    ("held_share", "used_share", "broken"), [(0.95, 0.6, [True]), (0.95, 0.85, [False]), (0.7, 0.3, [])]
)
def test_a_full_device_that_cannot_use_what_it_holds(held_share: float, used_share: float, broken: list[bool]) -> None:
    found = series()
    for name, share in (("reserved", held_share), ("allocated", used_share), ("limit", 1.0)):
        found[f"gpu_{name}_bytes"] = np.full((200, 4), share * 80 * GB)
    rules = [r for r in safety.look(facts(found)).rules if r.rule == "fragmentation"]
    assert [r.broken for r in rules] == broken
