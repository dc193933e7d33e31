"""The kernel probe on a GPU: what it costs, whether its kernel times are torch.profiler's, and the overflow kernel.

One command: ``python -m benchmarks.gpu_probe --json``. Overheads are shares of the mean step of a small transformer
with the probe off (a window every 100th step does not show in a median); off, sampled (that window, the collector's
default), full and torch.profiler (kernels only) take turns, round by round. ``kernel_time_difference`` is the mean
relative difference of the mean kernel times of the names that both saw in the same round, weighted by time. The
overflow kernel goes over 512 MiB of gradients in one launch; its bandwidth is compared with that of a device copy
(read and write counted), its time with ``torch._foreach_norm`` and ``_amp_foreach_non_finite_check_and_unscale_``
over the same tensors. Without a GPU there are no figures, the reason is told and the exit code is 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._common import figure, report
from lanterne import cuda_probe
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.abi import Kinds, Probe, Status

EVERY = 100
MIB = 1 << 20
TENSORS, TENSOR_BYTES = 64, 8 * MIB


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


def _sampled(probe: Probe) -> Callable[[int], None]:
    def before(n: int) -> None:
        if n % EVERY == 1:
            probe.close()
        elif n % EVERY == 0:
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


def agreement(ours: Mapping[str, list[int]], theirs: Mapping[str, float]) -> tuple[int, float]:
    """(kernel names that both have, relative difference of their mean times weighted by our total time)."""
    both = [name for name in ours if theirs.get(name)]
    weight = {name: float(sum(ours[name])) for name in both}
    off = {name: abs(statistics.mean(ours[name]) / 1e3 / theirs[name] - 1) for name in both}
    total = sum(weight.values())
    return len(both), sum(off[n] * weight[n] for n in both) / total if total else float("nan")


def measure_probe(rounds: int, steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Figures of the probe and what stands beside them. Needs a CUDA device and a probe that collects."""
    probe, step = Probe(builder.target_folder() / builder.LIBRARY), _workload()
    _timed(step, 20)
    times: dict[str, list[float]] = defaultdict(list)
    differences: list[float] = []
    names = 0
    for _ in range(rounds):
        times["off"] += _timed(step, steps)
        times["sampled"] += _timed(step, steps, _sampled(probe))
        probe.close()
        list(probe.drain())
        ours: dict[str, list[int]] = defaultdict(list)
        if probe.open(Kinds.KERNELS) is Status.COLLECTING:
            times["full"] += _timed(step, steps)
            probe.close()
        for activity in probe.drain():
            ours[activity.name].append(activity.end_ns - activity.start_ns)
        profiled, theirs = _profiled(step, steps)
        times["torch_profiler"] += profiled
        names, difference = agreement(ours, theirs)
        differences.append(difference)
    means = {name: statistics.fmean(values) for name, values in times.items()}
    over = {name: value / means["off"] - 1 for name, value in means.items() if name != "off"}
    figures = [
        figure("overhead_full", over.get("full", float("nan")), "1", goal=0.01),
        figure("overhead_sampled", over["sampled"], "1", goal=0.003),
        figure("overhead_torch_profiler", over["torch_profiler"], "1"),
        figure("kernel_time_difference", statistics.median(differences), "1", goal=0.01),
    ]
    return figures, {"step_ms": means, "kernel_names": names, "counters": probe.counters(), "lost": probe.lost}


class _OnDevice(ctypes.Structure):
    """``ls_tensor`` of include/lanterne_stats.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def _milliseconds(work: Callable[[], object], rounds: int = 20) -> float:
    import torch

    work()
    took = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took)


def measure_overflow() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Figures of the overflow kernel; none where it was built without nvcc."""
    import torch

    library = ctypes.CDLL(str(builder.target_folder() / builder.STATS_LIBRARY))
    if not hasattr(library, "ls_stats_cuda"):
        return [], {"overflow": "built without nvcc: no device kernel"}
    tensors = [torch.randn(TENSOR_BYTES // 4, device="cuda") for _ in range(TENSORS)]
    rows = (_OnDevice * TENSORS)(*(_OnDevice(t.data_ptr(), t.numel(), 0, 0) for t in tensors))
    table = torch.frombuffer(bytearray(bytes(rows)), dtype=torch.uint8).cuda()
    out = torch.zeros(11, dtype=torch.int64, device="cuda")
    library.ls_stats_cuda.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]

    def count() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if library.ls_stats_cuda(table.data_ptr(), TENSORS, out.data_ptr(), stream):
            raise RuntimeError("the overflow kernel did not launch")

    ours = _milliseconds(count)
    source = torch.empty(TENSORS * TENSOR_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = _milliseconds(lambda: target.copy_(source))
    norm = _milliseconds(lambda: torch._foreach_norm(tensors))
    found, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    unscale = _milliseconds(lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one))
    size = TENSORS * TENSOR_BYTES
    share = (size / ours) / (2 * size / copy)
    figures = [
        figure("overflow_share_of_copy_bandwidth", share, "1", goal=0.8, better="higher"),
        figure("overflow_over_foreach_norm", ours / norm, "1"),
        figure("overflow_over_unscale", ours / unscale, "1"),
    ]
    return figures, {"overflow_ms": ours, "copy_ms": copy, "foreach_norm_ms": norm, "unscale_ms": unscale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="one round of 100 steps")
    parser.add_argument("--json", action="store_true", help="said for the sake of the others: JSON is all it prints")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 100
    why = reason_for_nothing()
    figures: list[dict[str, Any]] = []
    more: dict[str, Any] = {"reason": why}
    if not why:
        import torch

        more["card"] = torch.cuda.get_device_name()
        for found, beside in (measure_probe(options.rounds, options.steps), measure_overflow()):
            figures += found
            more |= beside
    print(json.dumps(report("gpu_probe", figures, **more)))


if __name__ == "__main__":
    main()
