"""The kernel probe on a GPU: what it costs, and whether its kernel times are torch.profiler's.

One command: ``python -m benchmarks.gpu_probe``. Prints one JSON object. ``step_ms`` is the median step of a small
transformer with the probe off, windowed (every 10th step), full, and under torch.profiler, interleaved by round;
``agreement`` compares the mean time of the kernels that both saw, by name. Without a GPU every figure is null with
the reason, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from lanterne import cuda_probe
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.abi import Kinds, Probe, Status

FIGURES = ("step_ms", "overhead", "agreement", "card")
EVERY = 10


def reason_for_nothing() -> str:
    """Why nothing can be measured here; empty where it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    built = cuda_probe.build()
    if not built["built"]:
        return str(built["reason"])
    found = cuda_probe.status()
    return "" if found["collecting"] else f"{found['status']}: {found['reason']}"


def _workload() -> Callable[[], None]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda", dtype=torch.bfloat16)
    batch = torch.randn(16, 512, 1024, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        layer(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(step: Callable[[], None], steps: int, before: Callable[[int], None] = lambda _: None) -> list[float]:
    import torch

    out = []
    for n in range(steps):
        start = time.perf_counter()
        before(n)
        step()
        torch.cuda.synchronize()
        out.append((time.perf_counter() - start) * 1e3)
    return out


def _windowed(probe: Probe) -> Callable[[int], None]:
    def before(n: int) -> None:
        probe.close()
        if n % EVERY == 0:
            probe.open(Kinds.KERNELS)

    return before


def _profiled(step: Callable[[], None], steps: int) -> tuple[list[float], dict[str, float]]:
    """Step times under torch.profiler, and the mean microseconds of each kernel name."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        times = _timed(step, steps)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if str(event.device_type) == "DeviceType.CUDA":
            spent[event.name].append(event.time_range.elapsed_us())
    return times, {name: statistics.mean(us) for name, us in spent.items()}


def _agreement(ours: Mapping[str, list[int]], theirs: Mapping[str, float]) -> dict[str, float | int]:
    """Relative difference of mean kernel times of the names that both have, weighted by our total time."""
    both = [name for name in ours if theirs.get(name)]
    weight = {name: float(sum(ours[name])) for name in both}
    off = {name: abs(statistics.mean(ours[name]) / 1e3 / theirs[name] - 1) for name in both}
    total = sum(weight.values())
    mean = sum(off[n] * weight[n] for n in both) / total if total else float("nan")
    return {
        "kernels": len(both),
        "mean_difference": mean,
        "largest_difference": max(off.values(), default=float("nan")),
    }


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """All figures. Needs a CUDA device and a probe that collects."""
    import torch

    probe, step = Probe(builder.target_folder() / builder.LIBRARY), _workload()
    _timed(step, 20)
    times: dict[str, list[float]] = defaultdict(list)
    ours: dict[str, list[int]] = defaultdict(list)
    theirs: dict[str, float] = {}
    for _ in range(rounds):
        times["off"] += _timed(step, steps)
        times["windowed"] += _timed(step, steps, _windowed(probe))
        probe.close()
        list(probe.drain())
        if probe.open(Kinds.KERNELS) is Status.COLLECTING:
            times["full"] += _timed(step, steps)
            probe.close()
        for activity in probe.drain():
            ours[activity.name].append(activity.end_ns - activity.start_ns)
        profiled, theirs = _profiled(step, steps)
        times["torch_profiler"] += profiled
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "step_ms": medians,
        "overhead": {name: value / medians["off"] - 1 for name, value in medians.items() if name != "off"},
        "agreement": _agreement(ours, theirs),
        "card": torch.cuda.get_device_name(),
        "counters": probe.counters(),
        "lost": probe.lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="one round of 50 steps")
    parser.add_argument("--json", action="store_true", help="said for the sake of the others: JSON is all it prints")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 50
    why = reason_for_nothing()
    found = (
        {**dict.fromkeys(FIGURES), "reason": why} if why else {**measure(options.rounds, options.steps), "reason": ""}
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
