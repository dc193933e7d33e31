"""What the collector costs: ``python -m benchmarks.collector [--quick] [--json] [--rivals-python PATH]``.

One process, one thread, a small model under DDP on a gloo group of one, so that a step is short and the difference
shows. The loops (plain, ours, each rival that is installed) take turns, a block of steps each; the figure is the
difference of the lower deciles of the CPU time of the training thread a step, which a busy machine moves least.
The cost does not depend on the step's length, so the share is that of a step of 100 ms. Rivals are measured where
``--rivals-python`` (or ``LANTERNE_BENCH_RIVALS_PYTHON``) names an interpreter that has torch and them; each against
the plain loop in a process of its own, the median of several. One that is not there is null, with the reason.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import lanterne
from benchmarks._collector_rivals import LOOPS
from benchmarks._common import figure, report
from benchmarks._training import Training, decile_us, group, plain
from lanterne import wire
from lanterne.blackbox import BlackBox
from lanterne.collector import native
from lanterne.nouns import Event

STEPS_A_BATCH = 5  # 0.5 s of steps of 100 ms: what one export carries


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


def step_costs(folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """us a step above the plain loop, by loop: the median over rounds in which the loops take turns."""
    training = Training()
    decile_us(plain(training, steps))
    differences: dict[str, list[float]] = {"ours": [], "torch_profiler": []}
    for number in range(rounds):
        bare = decile_us(plain(training, steps))
        differences["ours"].append(decile_us(_ours(training, steps, folder, number)) - bare)
        differences["torch_profiler"].append(decile_us(_torch_profiler(training, steps // 4)) - bare)
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


def rival_cost(python: str, name: str, rounds: int, steps: int) -> tuple[float | None, str]:
    """(us a step above the plain loop, "") of a rival, or (None, why it could not be measured)."""
    if not python:
        return None, "no interpreter was named that has it (--rivals-python)"
    root, found = Path(__file__).parents[1], []
    for _ in range(rounds):
        done = subprocess.run(
            [python, "-m", "benchmarks._collector_rivals", name, str(steps)],
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return None, (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]
        found.append(float(json.loads(lines[-1])["us"]))
    return median(found), ""


def run(quick: bool, python: str = "") -> dict[str, Any]:
    """Measure everything; one gloo group of one rank for the time of it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    native.build()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where sessions lie by default
    with tempfile.TemporaryDirectory(dir=shared) as name, group():
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
    skipped = {}
    for rival in LOOPS:
        found, why = rival_cost(python, rival, 1 if quick else 5, 200 if quick else 800)
        figures.append(figure(f"rival_{rival}_us_per_step", found, "us"))
        skipped |= {rival: why} if why else {}
    return report("collector", figures, skipped=skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, noisier")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--rivals-python", default=os.environ.get("LANTERNE_BENCH_RIVALS_PYTHON", ""))
    arguments = parser.parse_args()
    found = run(arguments.quick, arguments.rivals_python)
    if arguments.json:
        print(json.dumps(found))
        return
    for line in found["figures"]:
        print(f"{line['name']:32} {line['value'] or '-':>10} {line['unit']:4} goal {line['goal']}")
    print("skipped:", found["skipped"])


if __name__ == "__main__":
    main()
