"""Scaling: how much of the added ranks' power a job gets. Pure.

efficiency(n) = throughput(n) / (throughput(n0) x n / n0), n0 the smallest world size measured. Amdahl's law,
speed-up(n) = 1 / (s + (1 - s) / n), is fitted for the serial share s by least squares on the reciprocal
speed-ups; n counts multiples of n0. MFU = model FLOP/s reached / peak FLOP/s (Chowdhery et al., PaLM, 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One world size. ``throughput`` in samples or tokens a second of the whole job."""

    world_size: int
    throughput: float
    speed_up: float
    efficiency: float
    predicted: float | None = None  # speed-up by the fitted law
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """``serial_share`` and what it bounds; None with fewer than two world sizes."""

    points: Sequence[Point]
    serial_share: float | None
    speed_up_limit: float | None  # None: no serial share could be seen
    residual: float | None  # largest |speed-up - predicted| / speed-up


def efficiency(
    throughputs: Mapping[int, float], *, flops_per_unit: float | None = None, peak_flops: float | None = None
) -> Efficiency:
    """The report over world sizes: ``{ranks: samples per second}``.

    ``flops_per_unit`` (FLOP a sample) and ``peak_flops`` (FLOP/s of one device) together give MFU. Raises
    :class:`UsageError` for world sizes below 1 and throughputs that are not positive numbers.
    """
    for size, rate in throughputs.items():
        if size < 1 or not np.isfinite(rate) or rate <= 0:
            raise UsageError(f"efficiency: {rate} /s on {size} ranks; give a positive rate for at least one rank")
    if not throughputs:
        raise UsageError("efficiency: no world size was given; measure the throughput of at least one")
    sizes = sorted(throughputs)
    base = sizes[0]
    n = np.array(sizes, np.float64) / base
    speed = np.array([throughputs[s] for s in sizes]) / throughputs[base]
    serial = _serial_share(n, speed) if len(sizes) > 1 else None
    predicted = None if serial is None else 1 / (serial + (1 - serial) / n)
    points = [
        Point(
            world_size=size, throughput=throughputs[size], speed_up=float(speed[i]), efficiency=float(speed[i] / n[i]),
            predicted=None if predicted is None else float(predicted[i]),
            mfu=throughputs[size] * flops_per_unit / (peak_flops * size) if flops_per_unit and peak_flops else None,
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    return Efficiency(
        points=points,
        serial_share=serial,
        speed_up_limit=1 / serial if serial else None,
        residual=None if predicted is None else float(np.max(np.abs(speed - predicted) / speed)),
    )


def _serial_share(n: np.ndarray, speed: np.ndarray) -> float:
    """1/S = s + (1 - s)/n, so 1/S - 1/n = s (1 - 1/n): a line through the origin, s kept in [0, 1]."""
    x, y = 1 - 1 / n, 1 / speed - 1 / n
    return float(np.clip(x @ y / (x @ x), 0.0, 1.0))


def compare(before: Efficiency, after: Efficiency) -> dict[int, float]:
    """Change of efficiency (a difference of shares) at the world sizes that both have: attempts or jobs compared."""
    old = {p.world_size: p.efficiency for p in before.points}
    return {p.world_size: p.efficiency - old[p.world_size] for p in after.points if p.world_size in old}
