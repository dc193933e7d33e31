"""The detectors' cost and care: ``python -m benchmarks.detect [--quick] [--json]``.

``core_share_1024``: CPU seconds of one evaluation of all detectors, breakers and service rules over 400 steps, 1,024
ranks and 40 series, one step after the evaluation before, with one evaluation a step at one step a second.
``false_alarms_clean``: anomalies in simulated healthy runs. ``numeric_faults_found``: faults put into a healthy run's
numbers and seen by the step after the first bad one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._sim_facts import facts_of
from lanterne.backend import detect
from lanterne.backend.detect import safety
from lanterne.causal.facts import FactEvent, Facts
from lanterne.collector.sim.events import START_UNIX_NS
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape

Floats = NDArray[np.float64]
ONSET = 150
SERIES = 40
HERE = Path(__file__).parents[1]
NUMERICS = frozenset(
    {
        "nonfinite", "overflow", "loss_scale_collapse", "loss_spike", "grad_spike", "grad_explosion", "lr_drift",
        "lr_disagree", "replica_divergence", "grad_vanishing",
    }
)  # fmt: skip
SHAPES = (
    Shape(dp=2), Shape(dp=4, forward_ms=8, backward_ms=16), Shape(dp=8), Shape(dp=8, checkpoint_every=40),
    Shape(dp=8, checkpoint_ms=9000.0), Shape(dp=4, pp=4), Shape(dp=4, tp=4), Shape(dp=16, jitter=0.03),
    Shape(dp=8, data_ms=20.0), Shape(dp=32),
)  # fmt: skip


def _set(name: str, value: float, *, factor: bool = False, rank: int | None = None) -> Callable[[Facts], Facts]:
    """A fault: from ONSET on, the series of one rank or of all takes a value or is multiplied by it."""

    def spoil(facts: Facts) -> Facts:
        changed = facts.get(name).copy()
        columns = slice(None) if rank is None else rank
        changed[ONSET:, columns] = changed[ONSET:, columns] * value if factor else value
        return replace(facts, series={**facts.series, name: changed})

    return spoil


def _tell(where: str, rank: int) -> Callable[[Facts], Facts]:
    def spoil(facts: Facts) -> Facts:
        told = FactEvent(name="nonfinite", rank=rank, step=ONSET, attributes={"where": where, "count": 3})
        return replace(facts, events=[*facts.events, told])

    return spoil


FAULTS: dict[str, Callable[[Facts], Facts]] = {
    "loss x4": _set("loss", 4.0, factor=True), "loss x10": _set("loss", 10.0, factor=True),
    "loss x10, one rank": _set("loss", 10.0, factor=True, rank=2), "loss inf": _set("loss", np.inf),
    "loss inf, one rank": _set("loss", np.inf, rank=1), "grad norm x8": _set("grad_norm", 8.0, factor=True),
    "grad norm x50": _set("grad_norm", 50.0, factor=True), "grad norm 1e6": _set("grad_norm", 1e6),
    "grad norm inf": _set("grad_norm", np.inf), "local grad norm inf": _set("grad_norm_local", np.inf, rank=3),
    "non-finite gradients": _set("grad_nonfinite", 17.0, rank=3), "non-finite, all": _set("grad_nonfinite", 1.0),
    "non-finite loss told": _tell("loss", 1), "non-finite parameter told": _tell("parameter", 2),
    "non-finite gradient told": _tell("gradient", 0), "lr x10": _set("lr", 10.0, factor=True),
    "lr x2.5": _set("lr", 2.5, factor=True), "lr x0.05": _set("lr", 0.05, factor=True), "lr zero": _set("lr", 0.0),
    "lr of one rank": _set("lr", 1.7, factor=True, rank=4),
}  # fmt: skip


def clean(quick: bool) -> Iterator[Facts]:
    for seed in range(1 if quick else 3):
        for shape in SHAPES:
            yield facts_of(simulate(shape, (), seed=seed, distract=False))


def found_in_time(spoil: Callable[[Facts], Facts], healthy: Facts) -> bool:
    """Whether a numeric anomaly stands at the onset when only one step more has been seen."""
    return any(
        a.kind in NUMERICS and abs(a.first_step - ONSET) <= 1 for a in detect.run(_cut(spoil(healthy), ONSET + 2))
    )


def _cut(facts: Facts, rows: int) -> Facts:
    keep = facts.waits.step < rows
    w = facts.waits
    arrays = {
        n: getattr(w, n)[keep]
        for n in (
            "group_index", "sequence", "step", "rank", "bytes", "lateness_ms", "wait_ms", "transfer_ms", "error_ms",
        )
    }  # fmt: skip
    return replace(
        facts, steps=facts.steps[:rows], series={k: v[:rows] for k, v in facts.series.items()},
        step_start_ns=facts.step_start_ns[:rows], waits=replace(w, **arrays),
        events=[e for e in facts.events if e.step < rows],
    )  # fmt: skip


def core_share(repeats: int) -> float:
    """Median CPU seconds of one evaluation; 40 series, those that the simulator lacks filled with noise."""
    facts = facts_of(simulate(Shape(dp=1024, steps=400), (), seed=1, distract=False))
    rng = np.random.default_rng(1)
    shape = (len(facts.steps), len(facts.ranks))
    extra = {f"extra_{i}": rng.normal(1, 0.1, shape) for i in range(SERIES - len(facts.series))}
    starts = START_UNIX_NS + np.arange(len(facts.steps)) * 1_000_000_000
    facts = replace(facts, series={**facts.series, **extra}, step_start_ns=starts)
    before = safety.look(_cut(facts, len(facts.steps) - 1))
    took = []
    for _ in range(repeats):
        began = time.process_time()
        detect.run(facts)
        safety.look(facts, None, before)
        took.append(time.process_time() - began)
    return float(np.median(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, one timing: under a minute")
    parser.add_argument("--json", action="store_true", help="print the machine form only")
    options = parser.parse_args()
    alarms = [a.says for facts in clean(options.quick) for a in detect.run(facts)]
    healthy = facts_of(simulate(Shape(dp=8, steps=200), (), seed=3, distract=False))
    missed = [name for name, spoil in FAULTS.items() if not found_in_time(spoil, healthy)]
    share = core_share(1 if options.quick else 5)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    seen = len(FAULTS) - len(missed)
    figures = [
        {"name": "core_share_1024", "value": round(share, 3), "unit": "core", "goal": 0.5, "better": "lower"},
        {"name": "false_alarms_clean", "value": len(alarms), "unit": "1", "goal": 0, "better": "lower"},
        {"name": "numeric_faults_found", "value": seen, "unit": "1", "goal": 20, "better": "higher"},
    ]  # fmt: skip
    machine = f"{platform.machine()} {platform.system()} Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"benchmark": "detect", "commit": commit, "machine": machine, "figures": figures}))
        return
    for figure in figures:
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']})")
    for text in [*alarms, *(f"missed: {name}" for name in missed)]:
        print(f"  {text}")


if __name__ == "__main__":
    main()
