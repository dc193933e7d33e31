"""The causal engine against its baselines: ``python -m benchmarks.causal [--quick] [--json] [--data FOLDER]``.

Right = category and subject (``_causal_cases.py``). The baselines name ranks only, so they are counted on the faults
of one rank and on the rank alone, which flatters them. They are given the true onset; the engine is not. Clean jobs
have the simulator's plain noise; all others have distractors, rough but healthy variability, clocks two seconds
apart through the aligner, and every odd seed 10% silent ranks. ``--only`` runs some of the parts. With ``--rows FILE``
what was measured is kept, so that the whole (half an hour) can be done in pieces of ``--budget`` seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _public
from benchmarks._causal_baselines import TABLE_BASELINES
from benchmarks._causal_cases import LAYOUTS, TIMED, double, healthy, single
from benchmarks._causal_rows import Row, Rows, all_in_top3, claims, first_right, onset_near, told
from benchmarks._common import figure, report
from benchmarks._sim_facts import facts_of
from lanterne.causal import diagnose, rank_metrics, what_if
from lanterne.causal.scoring import CLAIM
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape

HERE = Path(__file__).parents[1]
SIZES_QUICK = {64: 1}
Figures = Iterator[dict[str, Any]]
higher = partial(figure, unit="1", better="higher")


def _seeds(first: int, count: int) -> range:
    """Seeds that nothing was tuned on; odd ones, with silent ranks, where only one is taken of a large size."""
    return range(30_001 + first, 30_001 + first + count)


def _rate(hits: Iterable[bool]) -> float:
    found = list(hits)
    return float(np.mean(found)) if found else float("nan")


def clean(rows: Rows, quick: bool) -> Figures:
    found = list(rows.of(single(range(100, 101 if quick else 102), rough=0.0)))
    yield higher("top1_clean", _rate(map(first_right, found)), goal=0.95)
    yield higher("top1_clean_cases", len(found))


def distractors(rows: Rows, quick: bool) -> Figures:
    """Top-1 by size and layout, precision at 0.7, and the baselines on the same jobs."""
    plan = SIZES_QUICK if quick else {64: 2, 256: 1, 1024: 1}
    found = [r for n, seeds in plan.items() for r in rows.of(single(_seeds(n, seeds), (n,)), baselines=True)]
    yield higher("top1_distractors", _rate(map(first_right, found)), goal=0.95)
    yield higher("top1_distractors_cases", len(found))
    yield higher("onset_within_3_steps", _rate(onset_near(r) for r in found if first_right(r)))
    yield higher("precision_at_07", _rate(s for r in found for s in claims(r)), goal=0.97)
    yield from _by_layout("top1", found, first_right, 0.95)
    silent = [r for r in found if r["case"]["missing"]]
    if silent:
        yield higher("top1_missing_ranks", _rate(map(first_right, silent)), goal=0.95)
    placed = [r for r in found if r["blamed"]]
    for name in placed[0]["blamed"] if placed else ():
        yield higher(f"{name}_top1_distractors", _rate(r["blamed"][name] == r["truths"][0]["rank"] for r in placed))
    named = [bool(r["causes"]) and r["causes"][0]["rank"] == r["truths"][0]["rank"] for r in placed]
    yield higher("rank_located_distractors", _rate(named))
    yield higher("rank_cases", len(placed))


def _by_layout(name: str, found: list[Row], hit: Callable[[Row], bool], goal: float) -> Figures:
    for ranks, layout in LAYOUTS:
        part = [hit(r) for r in found if (r["case"]["ranks"], r["case"]["layout"]) == (ranks, layout)]
        if part:
            yield higher(f"{name}_{ranks}_{layout}", _rate(part), goal=goal)


def two_faults(rows: Rows, quick: bool) -> Figures:
    plan = {64: 4} if quick else {64: 36, 256: 18, 1024: 9}
    found = [r for n, count in plan.items() for r in rows.of(double(range(10_000 + n, 10_000 + n + count), (n,)))]
    yield higher("top1_two_faults", _rate(map(first_right, found)), goal=0.85)
    yield higher("both_of_two_in_top3", _rate(map(all_in_top3, found)), goal=0.85)
    yield higher("precision_at_07_two_faults", _rate(s for r in found for s in claims(r)))
    yield higher("two_faults_cases", len(found))
    yield from _by_layout("both_of_two", found, all_in_top3, 0.85)


def nothing_wrong(rows: Rows, quick: bool) -> Figures:
    plan = {64: 6} if quick else {64: 48, 256: 18, 1024: 9}
    found = [r for n, count in plan.items() for r in rows.of(healthy(range(20_000 + n, 20_000 + n + count), (n,)))]
    yield figure("healthy_flagged", _rate(not first_right(r) for r in found), "1", goal=0.0)
    yield higher("healthy_cases", len(found))


def magnitudes(rows: Rows, quick: bool) -> Figures:
    """Faults of the step time by size (1.0 = about a third of the step), and faults that heal."""
    sure: list[bool] = []
    for size in (0.25,) if quick else (0.5, 0.25, 0.15):
        for n in (64,) if quick else (64, 256, 1024):
            found = list(rows.of(single(_seeds(300 + n, 1), (n,), kinds=TIMED, magnitude=size)))
            sure += [s for r in found for s in claims(r)]
            yield higher(f"top1_size_{size:g}_{n}", _rate(map(first_right, found)))
    yield higher("precision_at_07_small", _rate(sure))
    kinds = (*TIMED, "sequence_imbalance", "partition_imbalance")
    for steps in () if quick else (60, 30, 12):
        found = list(rows.of(single(_seeds(310, 1), kinds=kinds, heal_after=steps)))
        yield higher(f"top1_healed_after_{steps}", _rate(map(first_right, found)))


def unseen(rows: Rows, quick: bool) -> Figures:
    """The culprit itself is silent: whoever is claimed then is innocent."""
    del rows
    named = []
    for case in single(range(400, 401 if quick else 402), kinds=("slow_compute", "slow_backward", "slow_data")):
        job = case.job()
        job.silent = (int(job.truths[0].rank or 0),)
        causes = diagnose(case.facts(job)).causes
        named.append(any(c.confidence >= CLAIM for c in causes))
    yield figure("innocent_claimed_for_silent_culprit", _rate(named), "1", goal=0.0)
    yield higher("silent_culprit_cases", len(named))


def speed(rows: Rows, quick: bool) -> Figures:
    """CPU time of one diagnosis, 500 steps x 40 series, median of five."""
    del rows
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


def public(folder: Path, rows: Rows, quick: bool) -> Figures:
    """PetShop with and without the call graph and beside baselines; the what-if of the production traces."""
    del rows, quick
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
    parser.add_argument("--rows", type=Path, help="JSON lines of the cases so far; new ones are added")
    parser.add_argument("--budget", type=float, default=float("inf"), help="measure no case after so many seconds")
    parser.add_argument("--misses", action="store_true", help="print each case that was wrong to stderr")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[Rows, bool], Figures]] = {
        "clean": clean, "distractors": distractors, "two": two_faults, "healthy": nothing_wrong,
        "magnitudes": magnitudes, "unseen": unseen, "speed": speed, "public": partial(public, arguments.data),
    }  # fmt: skip
    chosen = arguments.only.split(",") if arguments.only else list(parts)
    unknown = sorted(set(chosen) - set(parts))
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; choose of {', '.join(parts)}")
    rows = Rows(arguments.rows, arguments.budget)
    figures = [f for name in chosen for f in parts[name](rows, arguments.quick)]
    figures = [f for f in figures if f["value"] == f["value"]]
    if rows.short:
        sys.stderr.write(f"{rows.short} cases are not measured yet: run it again with --rows\n")
    if arguments.misses:
        sys.stderr.writelines(f"{told(r)}\n" for r in rows.used if not (first_right(r) and all(claims(r))))
    if arguments.json:
        print(json.dumps(report("causal", figures, parts=chosen, cases_left_out=rows.short), indent=2))
        return
    for f in figures:
        goal = "" if f["goal"] is None else f"goal {f['goal']:g}"
        print(f"{f['name']:38} {f['value']:10.4g} {f['unit']:3} {goal}")


if __name__ == "__main__":
    main()
