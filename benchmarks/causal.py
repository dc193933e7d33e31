"""The causal engine against its baselines: ``python -m benchmarks.causal [--quick] [--json] [--data FOLDER]``.

Right = category and subject (``_causal_cases.py``). The baselines name ranks only, so they are counted on the faults
of one rank and on the rank alone, which flatters them. They are given the true onset; the engine is not. Clean jobs
have the simulator's plain noise; all others have distractors, rough but healthy variability, clocks two seconds
apart through the aligner, and every odd seed 10% silent ranks. ``--only`` runs some of the parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _public
from benchmarks._causal_baselines import BASELINES, TABLE_BASELINES
from benchmarks._causal_cases import LAYOUTS, TIMED, Case, double, healthy, right, single
from benchmarks._common import figure, report
from benchmarks._sim_facts import facts_of
from lanterne.causal import diagnose, rank_metrics, what_if
from lanterne.causal.scoring import CLAIM
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape

HERE = Path(__file__).parents[1]
ONSET_STEPS = 3
Figures = Iterator[dict[str, Any]]
higher = partial(figure, unit="1", better="higher")


def _rate(hits: Iterable[bool]) -> float:
    found = list(hits)
    return float(np.mean(found)) if found else float("nan")


def _judge(case: Case) -> tuple[bool, bool, list[bool]]:
    """(top-1 right, its onset within three steps, every claim at 0.7 right?)."""
    job = case.job()
    causes = diagnose(case.facts(job)).causes
    fits = [[t for t in job.truths if right(c, t)] for c in causes]
    sure = [bool(fit) for cause, fit in zip(causes, fits, strict=True) if cause.confidence >= CLAIM]
    first = bool(fits and fits[0])
    since = causes[0].since_step if causes else None
    near = first and since is not None and any(abs(since - t.onset) <= ONSET_STEPS for t in fits[0])
    return first, near, sure


def clean(quick: bool) -> Figures:
    hits = [_judge(case)[0] for case in single(range(100, 101 if quick else 102), rough=0.0)]
    yield higher("top1_clean", _rate(hits), goal=0.95)
    yield higher("top1_clean_cases", len(hits))


def distractors(quick: bool) -> Figures:
    """Top-1 by size and layout, precision at 0.7, and the baselines on the same jobs."""
    plan = [(64, range(200, 201 if quick else 202))] + (
        [] if quick else [(256, range(203, 204)), (1024, range(205, 206))]
    )
    rows: list[tuple[Case, bool, bool, list[bool]]] = []
    blamed: dict[str, list[bool]] = {b: [] for b in (*BASELINES, "engine")}
    for ranks, seeds in plan:
        for case in single(seeds, (ranks,)):
            job = case.job()
            facts = case.facts(job)
            causes, truth = diagnose(facts).causes, job.truths[0]
            fits = [right(c, truth) for c in causes]
            near = bool(fits) and fits[0] and abs((causes[0].since_step or 0) - truth.onset) <= ONSET_STEPS
            sure = [fit for cause, fit in zip(causes, fits, strict=True) if cause.confidence >= CLAIM]
            rows.append((case, bool(fits) and fits[0], near, sure))
            if truth.rank is not None:
                blamed["engine"].append(bool(causes) and causes[0].subject.rank == truth.rank)
                for name, run in BASELINES.items():
                    blamed[name].append(run(facts, min(truth.onset, len(facts.steps) - 2)) == truth.rank)
    yield higher("top1_distractors", _rate(r[1] for r in rows), goal=0.95)
    yield higher("top1_distractors_cases", len(rows))
    yield higher("onset_within_3_steps", _rate(r[2] for r in rows if r[1]))
    yield higher("precision_at_07", _rate(s for r in rows for s in r[3]), goal=0.97)
    for ranks, layout in LAYOUTS:
        part = [r[1] for r in rows if (r[0].ranks, r[0].layout) == (ranks, layout)]
        if part:
            yield higher(f"top1_{ranks}_{layout}", _rate(part), goal=0.95)
    if any(r[0].missing for r in rows):
        yield higher("top1_missing_ranks", _rate(r[1] for r in rows if r[0].missing), goal=0.95)
    yield higher("rank_located_distractors", _rate(blamed.pop("engine")))
    yield higher("rank_cases", len(next(iter(blamed.values()))))
    for name, found in blamed.items():
        yield higher(f"{name}_top1_distractors", _rate(found))


def two_faults(quick: bool) -> Figures:
    plan = [(64, 4 if quick else 36)] + ([] if quick else [(256, 9), (1024, 6)])
    both, first = [], []
    for ranks, count in plan:
        for case in double(range(1000, 1000 + count), (ranks,)):
            job = case.job()
            causes = diagnose(case.facts(job)).causes[:3]
            both.append(all(any(right(c, t) for c in causes) for t in job.truths))
            first.append(bool(causes) and any(right(causes[0], t) for t in job.truths))
    yield higher("top1_two_faults", _rate(first), goal=0.85)
    yield higher("both_of_two_in_top3", _rate(both), goal=0.85)
    yield higher("two_faults_cases", len(first))


def nothing_wrong(quick: bool) -> Figures:
    plan = [(64, 6 if quick else 48)] + ([] if quick else [(256, 9), (1024, 6)])
    flagged = [
        bool(diagnose(case.facts(case.job())).causes)
        for ranks, count in plan
        for case in healthy(range(5000, 5000 + count), (ranks,))
    ]
    yield figure("healthy_flagged", _rate(flagged), "1", goal=0.0)
    yield higher("healthy_cases", len(flagged))


def magnitudes(quick: bool) -> Figures:
    """Faults of the step time by size (1.0 = about a third of the step), and faults that heal."""
    sure: list[bool] = []
    for size in (0.25,) if quick else (1.0, 0.5, 0.25, 0.15, 0.1):
        found = [_judge(c) for c in single(range(300, 301), kinds=TIMED, magnitude=size)]
        sure += [s for f in found for s in f[2]]
        yield higher(f"top1_size_{size:g}", _rate(f[0] for f in found))
    yield higher("precision_at_07_small", _rate(sure))
    kinds = (*TIMED, "sequence_imbalance", "partition_imbalance")
    for steps in () if quick else (60, 30, 12):
        found = [_judge(c) for c in single(range(310, 311), kinds=kinds, heal_after=steps)]
        yield higher(f"top1_healed_after_{steps}", _rate(f[0] for f in found))


def unseen(quick: bool) -> Figures:
    """The culprit itself is silent: whoever is claimed then is innocent."""
    named = []
    for case in single(range(400, 401 if quick else 402), kinds=("slow_compute", "slow_backward", "slow_data")):
        job = case.job()
        job.silent = (int(job.truths[0].rank or 0),)
        causes = diagnose(case.facts(job)).causes
        named.append(any(c.confidence >= CLAIM for c in causes))
    yield figure("innocent_claimed_for_silent_culprit", _rate(named), "1", goal=0.0)
    yield higher("silent_culprit_cases", len(named))


def speed(quick: bool) -> Figures:
    """CPU time of one diagnosis, 500 steps x 40 series, median of five."""
    spent: dict[int, float] = {}
    for ranks, goal in ((64, 50.0), (256, None), (1024, 500.0)):
        steps = 200 if quick else 500
        job = simulate(
            Shape(dp=ranks, steps=steps), (("thermal", 37, 100), ("slow_data", 9, 90)), seed=1, distract=True
        )
        facts = facts_of(job)
        more, rng = dict(facts.series), np.random.default_rng(0)
        for i in range(40 - len(more)):
            more[f"other_{i}"] = rng.normal(size=(steps, ranks))
        facts = replace(facts, series=more)
        times = []
        for _ in range(5):
            begin = time.process_time()
            diagnose(facts)
            times.append(1e3 * (time.process_time() - begin))
        spent[ranks] = float(np.median(times))
        yield figure(f"diagnose_{ranks}_ms", spent[ranks], "ms", goal=goal)
    slope = float(np.polyfit(np.log(list(spent)), np.log(list(spent.values())), 1)[0])
    yield figure("scaling_exponent", slope, "1", goal=1.1)


def public(folder: Path, quick: bool) -> Figures:
    """PetShop with and without the call graph and beside baselines; the what-if of the production traces."""
    del quick
    cases = _public.petshop_cases(folder / "petshop")
    place: dict[str, list[int]] = {}
    for c in cases:
        orders = {
            "petshop": [r.entity for r in rank_metrics(c.table, c.onset, c.edges, symptom=c.symptom)],
            "petshop_no_graph": [r.entity for r in rank_metrics(c.table, c.onset)],
        }
        orders |= {f"petshop_{n}": run(c.table, c.onset, c.edges, c.symptom) for n, run in TABLE_BASELINES.items()}
        for name, order in orders.items():
            place.setdefault(name, []).append(order.index(c.truth) + 1 if c.truth in order else 1 << 20)
    for name, found in place.items():
        ours = name == "petshop"
        at = np.array(found)
        yield higher(f"{name}_top1", float((at == 1).mean()))
        yield higher(f"{name}_top3", float((at <= 3).mean()), goal=0.92 if ours else None)
        yield higher(
            f"{name}_avg5", float(np.mean([(at <= k).mean() for k in range(1, 6)])), goal=0.8 if ours else None
        )
    yield higher("petshop_cases", len(cases))
    for trace in sorted((folder / "straggler").glob("trace-*.parquet")):
        result = what_if(_public.straggler_operations(trace))
        name = trace.stem.removeprefix("trace-").lower()
        yield higher(f"what_if_{name}_slowdown", result.slowdown)
        yield higher(f"what_if_{name}_worker_share", float(result.worker_share.max()))
        yield higher(f"what_if_{name}_stage_share", float(result.stage_share.max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--data", type=Path, default=HERE / "tests" / "data", help="folder with petshop/ and straggler/"
    )
    parser.add_argument("--only", default="", help="parts, comma-separated")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[bool], Figures]] = {
        "clean": clean, "distractors": distractors, "two": two_faults, "healthy": nothing_wrong,
        "magnitudes": magnitudes, "unseen": unseen, "speed": speed, "public": partial(public, arguments.data),
    }  # fmt: skip
    chosen = arguments.only.split(",") if arguments.only else list(parts)
    unknown = sorted(set(chosen) - set(parts))
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; choose of {', '.join(parts)}")
    figures = [f for name in chosen for f in parts[name](arguments.quick)]
    if arguments.json:
        print(json.dumps(report("causal", figures, parts=chosen), indent=2))
        return
    for f in figures:
        goal = "" if f["goal"] is None else f"goal {f['goal']:g}"
        print(f"{f['name']:38} {f['value']:10.4g} {f['unit']:3} {goal}")


if __name__ == "__main__":
    main()
