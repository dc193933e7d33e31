"""A healthy day and thirty healthy runs, judged again and again as the live runner does: not one alarm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from detect_runs import SHAPES, T0, clean, event, facts, series
from test_heartbeat import beats, healthy

from lanterne.backend import detect
from lanterne.backend.detect import safety
from lanterne.backend.detect.safety import Safety
from lanterne.causal.facts import FactEvent, Facts

HOUR = 3_600
RANKS = 8
WINDOW, EVERY = 400, 100


def day(seed: int, hours: int) -> tuple[dict[str, np.ndarray], list[FactEvent]]:
    """A job of about one step a second: compile at the start and after each restart of shapes, an eval every 1,000
    steps, a checkpoint of ten minutes every two hours, slow shards and noisy neighbours now and then."""
    rng = np.random.default_rng(seed)
    steps = hours * HOUR
    found = series(steps, RANKS, seed=seed, step_ms=900.0)
    for name in ("checkpoint_ms", "eval_ms", "compile_ms"):
        found[name] = np.zeros((steps, RANKS))
    found["compile_ms"][[1, 2, *range(5_000, steps, 20_000)]] = 90_000.0
    found["eval_ms"][999::1_000] = 120_000.0 * np.exp(rng.normal(0, 0.1, (len(range(999, steps, 1_000)), 1)))
    at = range(2 * HOUR - 1, steps, 2 * HOUR)
    found["checkpoint_ms"][at] = 600_000.0 * np.exp(rng.normal(0, 0.05, (len(at), 1)))
    for onset in rng.integers(50, steps - 50, steps // 400):  # a slow shard: one rank waits, the others wait for it
        length, wait = int(rng.integers(1, 4)), float(rng.uniform(100, 500))
        rows, rank = slice(onset, onset + length), int(rng.integers(RANKS))
        found["data_wait_ms"][rows, rank] += wait
        found["lateness_ms"][rows, rank] += wait
        found["wait_ms"][rows] += wait
        found["wait_ms"][rows, rank] -= wait
        found["step_ms"][rows] += wait
    for onset in rng.integers(50, steps - 50, steps // 2_000):  # a neighbour on the network
        found["transfer_ms"][onset : onset + 5] *= 2.0
    t = np.arange(steps)[:, None]
    rate = 3e-4 * np.minimum(1, (t + 1) / 2_000) * (0.55 + 0.45 * np.cos(np.pi * t / steps)) * np.ones((1, RANKS))
    found |= {"lr": rate, "lr_planned": rate.copy()}
    found["loss"] = 2.0 + 4 * np.exp(-t / 8_000) + rng.normal(0, 0.04, (steps, 1)) + rng.normal(0, 0.01, (steps, RANKS))
    found["grad_norm"] = 0.8 * np.exp(rng.normal(0, 0.15, (steps, 1))) * np.ones((1, RANKS))
    found["rss_bytes"] = 8e9 + 3e8 * (1 - np.exp(-t / 300)) + rng.normal(0, 3e6, (steps, RANKS))
    found["step_ms"] += found["checkpoint_ms"] + found["eval_ms"] + found["compile_ms"]
    told = [event("checkpoint_saved", r, s, path=f"c{s}") for s in at for r in range(RANKS)]
    told += [event("checkpoint_verified", 0, s, ok=True) for s in at]
    scaled = rng.integers(20, steps, steps // 2_000)
    told += [event("overflow", r, int(s), scale_before=2.0, scale_after=1.0) for s in scaled for r in range(RANKS)]
    return found, told


def windows(found: dict[str, np.ndarray], told: list[FactEvent]) -> Iterator[Facts]:
    steps = len(found["step_ms"])
    ends = T0 + np.cumsum(found["step_ms"].max(axis=1) * 1e6).astype(np.int64)
    for end in range(20, steps + 1, EVERY):
        first = max(0, end - WINDOW)
        part = facts({name: x[first:end] for name, x in found.items()}, [e for e in told if e.step < end])
        yield Facts(
            job=part.job, ranks_expected=RANKS, ranks=part.ranks, steps=np.arange(first, end),
            step_start_ns=np.concatenate([[T0], ends])[first:end], series=part.series, places=part.places,
            events=part.events, groups=part.groups, now_ns=int(ends[end - 1]), sources=("live",),
        )  # fmt: skip


def alarms(found: dict[str, np.ndarray], told: list[FactEvent]) -> list[str]:
    said: list[str] = []
    before: Safety | None = None
    heard = beats(healthy(120, RANKS))
    for part in windows(found, told):
        said += [f"step {part.steps[-1]}: {a.kind}: {a.says}" for a in detect.run(part, None, heard)]
        before = safety.look(part, heard, before)
        said += [f"step {part.steps[-1]}: rule {r.rule}: {r.says}" for r in before.broken]
        said += [f"breaker {b.group}: {b.why}" for b in before.moved]
    return said


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_day_raises_nothing(seed: int) -> None:
    assert alarms(*day(seed, 24)) == []


def test_a_healthy_hour_raises_nothing() -> None:
    assert alarms(*day(3, 1)) == []


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES)
def test_thirty_clean_runs_judged_as_they_grow(shape: str) -> None:
    for seed in range(3, 6):
        whole = clean(shape, seed)
        parts = windows(dict(whole.series), list(whole.events))
        assert [(seed, a.kind, a.says) for part in parts for a in detect.run(part)] == []
