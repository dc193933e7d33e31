"""What the collector costs: ``python -m benchmarks.collector [--quick] [--json]``.

One process, one thread, a small model under DDP on a gloo group of one, so that a step is short and the difference
shows. The loops (plain, ours, each rival that is installed) take turns, a block of steps each; the figure is the
difference of the lower deciles of the CPU time of the training thread a step, which a busy machine moves least.
The cost does not depend on the step's length, so the share is that of a step of 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lanterne
from benchmarks._common import figure, report
from lanterne import wire
from lanterne.blackbox import BlackBox
from lanterne.collector import native
from lanterne.nouns import Event

STEPS_A_BATCH = 5  # 0.5 s of steps of 100 ms: what one export carries
NOT_MEASURED = {
    "traceml": "traceml", "trainscope": "trainscope", "wandb": "wandb", "mlflow": "mlflow",
}  # fmt: skip
"""Rivals by the module that would have to be installed."""


class Training:
    """The loop that everybody observes: three linear layers, DDP, clipping, AdamW, batches ``[8, 32]``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1_000_000)
        self.x = torch.randn(8, 32)

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.x).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss


def _plain(training: Training, steps: int) -> Iterator[None]:
    for _ in range(steps):
        training.step()
        yield


def _ours(training: Training, steps: int, folder: Path, number: int) -> Iterator[None]:
    session = lanterne.attach(
        training.model, training.optimizer, scheduler=training.scheduler, job=f"bench-{number}", dir=str(folder),
        shipper="none", commands=False,
    )  # fmt: skip
    try:
        for _ in session.steps([training.x] * steps):
            session.log(loss=training.step())
            yield
    finally:
        session.close()


def _torch_profiler(training: Training, steps: int) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            training.step()
            profiler.step()
            yield


def _decile_us(steps: Iterator[None]) -> float:
    """Lower decile of the thread's CPU time a step, in us; the first tenth warms up."""
    found, last = [], time.thread_time_ns()
    for _ in steps:
        now = time.thread_time_ns()
        found.append(now - last)
        last = now
    kept = sorted(found[len(found) // 10 :])
    return kept[len(kept) // 10] / 1e3


def step_costs(folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """us a step above the plain loop, by loop: the median over rounds in which the loops take turns."""
    training = Training()
    _decile_us(_plain(training, steps))
    differences: dict[str, list[float]] = {"ours": [], "torch_profiler": []}
    for number in range(rounds):
        plain = _decile_us(_plain(training, steps))
        differences["ours"].append(_decile_us(_ours(training, steps, folder, number)) - plain)
        differences["torch_profiler"].append(_decile_us(_torch_profiler(training, steps // 4)) - plain)
    return {name: median(values) for name, values in differences.items()}


def collective_cost(folder: Path, rounds: int, calls: int) -> float:
    """us of the calling thread that the tap adds to one all-reduce of 4 KiB: on against off, in turns."""
    session = lanterne.attach(job="bench-tap", dir=str(folder), shipper="none", commands=False)
    if not session.collectives.wait(600):
        session.close()
        return float("nan")
    tap, tensor = native.load(native.build()), torch.ones(1024)

    def block() -> float:
        began = time.thread_time_ns()
        for _ in range(calls):
            dist.all_reduce(tensor)
        return (time.thread_time_ns() - began) / calls / 1e3

    differences = []
    for _ in range(rounds):
        tap.lanterne_tap_enable(0)
        off = block()
        tap.lanterne_tap_enable(1)
        differences.append(block() - off)
    session.close()
    return median(differences)


def wire_bytes(folder: Path, job: str) -> float:
    """Compressed bytes a step on the wire, from the events that the measured run left in its black box."""
    box = BlackBox(folder / job / "0", 0)
    found: list[Event] = []
    while more := box.drain():
        found += more
    identity = box.identity
    assert identity is not None
    by_batch: dict[int, list[Event]] = {}
    for event in found:
        if event.step >= 64:  # the first steps tell more: attached, seeds
            by_batch.setdefault(event.step // STEPS_A_BATCH, []).append(event)
    sizes = []
    for events in list(by_batch.values())[:-1]:
        encoded = wire.encode(identity, events)
        bodies = (encoded.traces, encoded.metrics, encoded.logs)
        sizes.append(sum(len(gzip.compress(b.SerializeToString(), 6)) for b in bodies if b is not None))
    return sum(sizes) / len(sizes) / STEPS_A_BATCH


def run(quick: bool) -> dict[str, Any]:
    """Measure everything; one gloo group of one rank for the time of it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    native.build()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where sessions lie by default
    with tempfile.TemporaryDirectory(dir=shared) as name, _group():
        folder = Path(name)
        costs = step_costs(folder, 3 if quick else 9, 400 if quick else 1_500)
        collective = collective_cost(folder, 5 if quick else 15, 1_000)
        size = wire_bytes(folder, "bench-0")
    ours = costs.pop("ours")
    figures = [
        figure("overhead_us_per_step", ours, "us", goal=50),
        figure("overhead_percent_100ms", ours / 1_000, "%", goal=0.5),
        figure("per_collective_us", collective, "us", goal=10),
        figure("wire_bytes_per_rank_step", size, "By", goal=3_000),
        *(figure(f"rival_{rival}_us_per_step", cost, "us") for rival, cost in costs.items()),
    ]
    skipped = {
        rival: "not installed" if importlib.util.find_spec(module) is None else "installed, but no loop for it here yet"
        for rival, module in NOT_MEASURED.items()
    }
    return report("collector", figures, skipped=skipped)


@contextlib.contextmanager
def _group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        store: Any = torch._C._distributed_c10d.FileStore(str(Path(name) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, noisier")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    arguments = parser.parse_args()
    found = run(arguments.quick)
    if arguments.json:
        print(json.dumps(found))
        return
    for line in found["figures"]:
        print(f"{line['name']:32} {line['value']:>10} {line['unit']:4} goal {line['goal']}")
    print("skipped:", found["skipped"])


if __name__ == "__main__":
    main()
