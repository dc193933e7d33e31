"""Healthy variability of a job that is no laboratory: nothing here is a fault, and none of it may be blamed.

Heavy-tailed step noise (Student's t), a pace that wanders for the whole job and a little for each rank, stages that
are uneven from the start, periodic evaluation, unsynchronised small collections, loader hiccups, network bursts,
devices that warm with the room, benign spikes of the local gradient norm and bumps of the loss, and host memory that
fills its caches.
"""

from __future__ import annotations

import numpy as np

from lanterne.collector.sim.model import HOSTS_PER_SWITCH, RANKS_PER_HOST, Floats, Job

TAIL_FREEDOM = 3.0
EVAL_EVERY, EVAL_MS = 70, 600.0
HICCUP_SHARE, HICCUP_MS = 0.002, 25.0
BURST_SHARE = 0.02
GC_EVERY, GC_MS = (40, 60), 10.0


def roughen(job: Job, level: float = 1.0) -> None:
    """Roughen a blank job, before any fault; ``level`` scales the amplitudes. Seeded by the job's own seed."""
    rng = np.random.default_rng([job.seed, 4])
    _pace(job, rng, level)
    _pauses(job, rng, level)
    _devices(job, rng, level)
    _numbers(job, rng, level)


def _tails(rng: np.random.Generator, scale: float, shape: tuple[int, ...]) -> Floats:
    """Multipliers with Student-t logarithms, clipped to [-20%, +60%]."""
    return np.asarray(np.exp(np.clip(scale * rng.standard_t(TAIL_FREEDOM, shape), -0.2, 0.6)))


def _pace(job: Job, rng: np.random.Generator, level: float) -> None:
    t, r = job.shape.steps, job.ranks
    walk = np.clip(np.cumsum(rng.normal(0, 2e-3 * level, t)), -0.05, 0.05)[:, None]
    private = rng.normal(0, 3e-3 * level, r) * np.linspace(-1, 1, t)[:, None]
    stage = np.array([job.mesh(rank)["pp"] for rank in range(r)])
    some = min(level, 1.0)  # beyond that a stage is too heavy to call it healthy
    uneven = np.exp(rng.normal(0, 0.02 * some, job.shape.pp))
    uneven[-1] *= 1 + (0.05 * some if job.shape.pp > 1 else 0.0)  # the head and the loss
    for part in ("forward", "backward"):
        job.work[part] *= np.exp(walk + private) * uneven[stage] * _tails(rng, 0.01 * level, (t, r))


def _pauses(job: Job, rng: np.random.Generator, level: float) -> None:
    t, r = job.shape.steps, job.ranks
    job.work["eval"][EVAL_EVERY - 1 :: EVAL_EVERY] = EVAL_MS * np.exp(rng.normal(0, 0.05, r))
    every, phase = rng.integers(*GC_EVERY, r), rng.integers(0, GC_EVERY[1], r)
    collects = (np.arange(t)[:, None] + phase) % every == 0
    job.work["gc"] += collects * GC_MS * level * np.exp(rng.normal(0, 0.2, (t, r)))
    job.work["data"] += (rng.random((t, r)) < HICCUP_SHARE) * rng.exponential(HICCUP_MS * level, (t, r))
    burst = (rng.random(t) < BURST_SHARE) * rng.exponential(1.5 * level, t)
    job.work["transfer"] *= 1 + burst[:, None]


def _devices(job: Job, rng: np.random.Generator, level: float) -> None:
    t, r = job.shape.steps, job.ranks
    switch = np.arange(r) // (RANKS_PER_HOST * HOSTS_PER_SWITCH)
    room = np.sin(2 * np.pi * (np.arange(t)[:, None] / 400 + rng.random(switch[-1] + 1)))
    job.series["gpu_temperature_c"] += 2.5 * level * room[:, switch]
    host = np.arange(r) // RANKS_PER_HOST
    busy = rng.random((t, host[-1] + 1)) < 0.01
    job.series["host_cpu_percent"] += 15 * level * busy[:, host]
    job.series["host_runqueue"] += 6 * level * busy[:, host]
    job.series["net_retries"] += rng.poisson(2 * level, (t, r)) * (rng.random((t, r)) < 0.02)
    filling = 1 - np.exp(-np.arange(t) / 15)
    job.series["rss_bytes"] += 1.5e9 * level * filling[:, None] * np.exp(rng.normal(0, 0.1, r))


def _numbers(job: Job, rng: np.random.Generator, level: float) -> None:
    t, r = job.shape.steps, job.ranks
    job.series["grad_norm_local"] *= _tails(rng, 0.05 * level, (t, r))
    job.series["grad_norm"] *= _tails(rng, 0.05 * level, (t, 1))
    bumps = np.convolve((rng.random(t) < 0.01) * rng.exponential(0.1 * level, t), np.exp(-np.arange(8) / 3))[:t]
    job.series["loss"] += bumps[:, None] + 0.02 * level * rng.standard_t(TAIL_FREEDOM, (t, r)).clip(-6, 6)
    job.series["tokens"] = np.rint(job.series["tokens"] * np.exp(rng.normal(0, 0.004 * level, (t, r))))
