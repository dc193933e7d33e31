"""Synthetic facts for the detectors' tests: clean runs of many shapes, and the hands that spoil them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanterne.causal.facts import FactEvent, Facts, Place
from lanterne.nouns import AttributeValue, Collective

Floats = NDArray[np.float64]
T0 = 1_700_000_000_000_000_000
MB = 1e6


def series(steps: int = 200, ranks: int = 4, *, seed: int = 0, step_ms: float = 120.0) -> dict[str, Floats]:
    """A quiet synchronous run: what a healthy rank reports, with jitter, natural stragglers and growing caches."""
    rng = np.random.default_rng(seed)
    shape = (steps, ranks)
    t = np.arange(steps, dtype=np.float64)[:, None]
    late = np.abs(rng.normal(0, 1.0, shape)) + (rng.random(shape) < 0.02) * rng.exponential(5.0, shape)
    late -= np.median(late, axis=1, keepdims=True)
    whole = step_ms * np.exp(rng.normal(0, 0.02, (steps, 1))) + late.max(axis=1, keepdims=True)
    whole[0] *= 12  # set-up
    loss = 2.5 * np.exp(-t / 150) + 0.8 + rng.normal(0, 0.02, (steps, 1))
    return {
        "step_ms": whole + rng.normal(0, 0.1, shape),
        "data_wait_ms": np.abs(rng.normal(2.0, 0.6, shape)),
        "forward_ms": 0.3 * step_ms * np.exp(rng.normal(0, 0.02, shape)),
        "backward_ms": 0.55 * whole + rng.normal(0, 0.5, shape),
        "lateness_ms": late,
        "wait_ms": late.max(axis=1, keepdims=True) - late,
        "transfer_ms": 0.08 * step_ms * np.exp(rng.normal(0, 0.08, shape)),
        "gc_ms": (rng.random(shape) < 0.02) * rng.exponential(6.0, shape),
        "loss": loss + rng.normal(0, 0.005, shape),
        "grad_norm": np.broadcast_to(1.5 * np.exp(-t / 300) * np.exp(rng.normal(0, 0.15, (steps, 1))), shape).copy(),
        "lr": np.full(shape, 3e-4),
        "lr_planned": np.full(shape, 3e-4),
        "loss_scale": np.full(shape, 65536.0),
        "parameter_checksum": np.where(t % 20 == 0, 1000 + t, np.nan) * np.ones(shape),
        "rss_bytes": 2e9 + 120 * MB * (1 - np.exp(-t / 20)) + rng.normal(0, 2 * MB, shape),
        "gpu_allocated_bytes": np.full(shape, 3e10),
        "gpu_clock_mhz": np.full(shape, 1980.0) + rng.normal(0, 5, shape),
        "gpu_throttle": np.zeros(shape),
        "gpu_ecc_errors": np.zeros(shape),
    }


def facts(
    found: Mapping[str, Floats], events: Sequence[FactEvent] = (), collectives: Sequence[Collective] = (), **more: Any
) -> Facts:
    """Facts of one attempt over the series' steps."""
    steps, ranks = found["step_ms"].shape
    ends = np.cumsum(np.nan_to_num(np.nanmax(found["step_ms"], axis=1)) * 1e6).astype(np.int64)
    return Facts(
        job="job", ranks_expected=ranks, ranks=tuple(range(ranks)), steps=np.arange(steps),
        step_start_ns=T0 + np.concatenate([[0], ends[:-1]]), series=dict(found),
        places={r: Place(host=f"h{r // 2}", device=f"cuda:{r % 2}") for r in range(ranks)}, events=tuple(events),
        collectives=tuple(collectives), groups={f"0-{ranks - 1}": tuple(range(ranks))}, now_ns=T0 + int(ends[-1]),
        sources=("live",), **more,
    )  # fmt: skip


def event(name: str, rank: int = 0, step: int = 100, body: str = "", **attributes: AttributeValue) -> FactEvent:
    return FactEvent(name=name, rank=rank, step=step, job_ns=T0 + step * 120_000_000, attributes=attributes, body=body)


def _schedule(shape: str, steps: int) -> Floats:
    t = np.arange(steps, dtype=np.float64)
    match shape:
        case "warm_up":
            return 3e-4 * np.minimum(1, (t + 1) / 60)
        case "cosine":
            return 3e-5 + 1.35e-4 * (1 + np.cos(np.pi * t / steps))
        case "restarts":
            return 1e-5 + 1.45e-4 * (1 + np.cos(np.pi * (t % 70) / 70))
        case _:
            return np.full(steps, 3e-4)


SHAPES = (
    "warm_up",
    "cosine",
    "restarts",
    "small_batch",
    "rl",
    "accumulation",
    "periodic",
    "large_norm",
    "noisy_host",
    "tiny",
)


def clean(shape: str, seed: int) -> Facts:
    """A healthy run of a named shape. 10 shapes; each differs by what a naive rule would take for a fault."""
    rng = np.random.default_rng([seed, SHAPES.index(shape)])
    steps, ranks = (60, 2) if shape == "tiny" else (int(rng.integers(200, 400)), int(rng.choice([2, 4, 8])))
    found = series(steps, ranks, seed=int(rng.integers(1 << 30)), step_ms=float(rng.choice([20, 120, 900])))
    t = np.arange(steps, dtype=np.float64)[:, None]
    rate = _schedule(shape, steps)[:, None] * np.ones((1, ranks))
    found |= {"lr": rate, "lr_planned": rate.copy()}
    events: list[FactEvent] = []
    match shape:
        case "restarts":
            del found["lr_planned"]
            found["loss"] += 0.15 * np.exp(-(t % 70) / 8)
        case "small_batch":
            found["loss"] = found["loss"] * np.exp(rng.normal(0, 0.2, (steps, 1)))
            found["grad_norm"] = found["grad_norm"] * np.exp(rng.normal(0, 0.5, (steps, 1)))
        case "rl":
            found["loss"] = rng.standard_t(5, (steps, 1)) * 0.6 * np.ones((1, ranks))
            found["grad_norm"] = np.exp(rng.normal(0, 0.6, (steps, 1))) * np.ones((1, ranks))
        case "accumulation":
            micro = np.arange(steps) % 4 != 3
            found["grad_norm"][micro] = np.nan
            found["transfer_ms"][micro] = 0.0
            found["step_ms"][~micro] *= 1.3
        case "periodic":
            each = np.arange(steps)
            found["checkpoint_ms"] = np.zeros((steps, ranks))
            found["eval_ms"] = np.zeros((steps, ranks))
            found["checkpoint_ms"][each % 50 == 49] = 8e3 * np.exp(rng.normal(0, 0.2, ((each % 50 == 49).sum(), 1)))
            found["eval_ms"][each % 40 == 39] = 5e3
            found["step_ms"] += found["checkpoint_ms"] + found["eval_ms"]
            events += [
                event("checkpoint_saved", r, s, path=f"c{s}") for s in range(49, steps, 50) for r in range(ranks)
            ]
            events += [event("checkpoint_verified", 0, s, ok=True, path=f"c{s}") for s in range(49, steps, 50)]
        case "large_norm":
            found["grad_norm"] *= 40
            found["loss_spikeness"] = np.full((steps, ranks), 0.5)
        case "noisy_host":
            found["step_ms"] *= np.exp(rng.normal(0, 0.1, (steps, 1)))
            found["data_wait_ms"] *= np.exp(rng.normal(0, 0.5, (steps, ranks)))
            scaled = range(3, steps, 60)
            events += [event("overflow", r, s, scale_before=2.0, scale_after=1.0) for s in scaled for r in range(ranks)]
            events.append(event("recompile", 0, 5))
    events += [event("seed", r, 0, torch=1234 + r, numpy=77) for r in range(ranks)]
    return facts(found, events)
