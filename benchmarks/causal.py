"""The causal engine against its baselines: ``python -m benchmarks.causal [--quick] [--json] [--data FOLDER]``.

Right = category and subject. The baselines name ranks only, so they are counted on the faults of one rank and on the
rank alone, which flatters them. They are given the true onset; the engine is not.
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

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from benchmarks import _public
from benchmarks._sim_facts import facts_of
from lanterne.causal import Facts, diagnose, granger, rank_metrics, what_if
from lanterne.collector.sim.faults import FAULTS, simulate
from lanterne.collector.sim.model import Job, Shape, Truth
from lanterne.nouns import Cause

Floats = NDArray[np.float64]
SHAPES = (Shape(dp=64, steps=300), Shape(dp=16, pp=4, steps=300), Shape(dp=4, pp=4, tp=4, steps=300))
PAIRED = (
    "slow_compute", "slow_backward", "thermal", "slow_data", "gc_pause", "host_contention", "slow_link", "memory_leak",
    "bad_batch", "lr_jump", "replica_divergence", "checkpoint_stall",
)  # fmt: skip
SERIES = ("step_ms", "busy_ms", "wait_ms", "lateness_ms", "data_wait_ms", "forward_ms", "backward_ms", "gc_ms")
HERE = Path(__file__).parents[1]


def right(cause: Cause, truth: Truth) -> bool:
    """Category and subject: the rank, else the host, else nobody in particular."""
    if cause.category.value != truth.category:
        return False
    if truth.rank is not None:
        return cause.subject.rank == truth.rank
    return cause.subject.host == truth.host if truth.host is not None else cause.subject.rank is None


def single(seeds: range, distract: bool) -> Iterator[tuple[Job, Facts]]:
    """Every fault once a seed and shape, at a random rank and onset; each odd seed has 10% silent ranks."""
    for seed in seeds:
        for i, shape in enumerate(SHAPES):
            rng = np.random.default_rng([seed, i])
            for kind in FAULTS:
                if kind == "partition_imbalance" and shape.pp < 2:
                    continue
                where = (kind, int(rng.integers(shape.ranks)), int(rng.integers(100, 200)))
                missing = 0.1 if seed % 2 else 0.0
                job = simulate(shape, (where,), seed=seed, distract=distract, missing=missing)
                yield job, facts_of(job)


# --- baselines: each gives the rank it blames ----------------------------------------------------


def _halves(x: Floats, onset: int) -> tuple[Floats, Floats]:
    return x[20:onset], x[onset:]


def slowest_rank(facts: Facts, onset: int) -> int:
    """The longest step as the host sees it: the largest mean of the phases after the onset."""
    total = sum(facts.get(k) for k in ("data_wait_ms", "forward_ms", "backward_ms"))
    return facts.ranks[int(np.nanmean(np.asarray(total)[onset:], 0).argmax())]


def _z(facts: Facts, onset: int) -> Floats:
    """Largest absolute z of each (series, rank) after the onset, ``[series, ranks]``."""
    out = []
    for name in SERIES:
        before, after = _halves(facts.get(name), onset)
        scale = np.maximum(before.std(0), 1e-9)
        out.append(np.abs((after - before.mean(0)) / scale).mean(0) if len(after) else np.zeros(len(facts.ranks)))
    return np.nan_to_num(np.array(out))


def max_z(facts: Facts, onset: int) -> int:
    return facts.ranks[int(_z(facts, onset).max(0).argmax())]


def first_deviation(facts: Facts, onset: int) -> int:
    """The rank with the earliest |z| > 5 in any series; ties by size."""
    first = np.full(len(facts.ranks), 1 << 30)
    for name in SERIES:
        x = facts.get(name)
        before, after = _halves(x, onset)
        if not len(after):
            continue
        out = np.abs(after - before.mean(0)) > 5 * np.maximum(before.std(0), 1e-9)
        first = np.minimum(first, np.where(out.any(0), out.argmax(0), 1 << 30))
    tied = np.flatnonzero(first == first.min())
    return facts.ranks[int(tied[_z(facts, onset).max(0)[tied].argmax()])]


def _learned(facts: Facts, onset: int) -> tuple[Floats, Floats, list[int]] | None:
    """Granger p and mutual information over the 60 most anomalous series, and the rank of each."""
    z = _z(facts, onset)
    order = np.argsort(-z, axis=None)[:60]
    rows, columns = np.unravel_index(order, z.shape)
    stop = min(len(facts.steps), onset + 60)
    x = np.column_stack(
        [facts.get(SERIES[r])[max(20, onset - 60) : stop, c] for r, c in zip(rows, columns, strict=True)]
    )
    if len(x) < 20 or not np.isfinite(x).all():
        return None
    return granger.granger_all(x, 3).p_value, granger.mutual_information(x), [facts.ranks[c] for c in columns]


def granger_pagerank(facts: Facts, onset: int) -> int:
    learned = _learned(facts, onset)
    if learned is None:
        return max_z(facts, onset)
    stands = granger.benjamini_hochberg(learned[0], 0.05)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(learned[2])))
    graph.add_edges_from((int(i), int(j)) for i, j in np.argwhere(stands))  # effect -> cause
    score = nx.pagerank(graph)
    return learned[2][max(score, key=lambda k: score[k])]


def granger_mi_walk(facts: Facts, onset: int) -> int:
    """The plain walk: edge weight (1 - p) x normalised MI, decay 0.95 a hop, from the most anomalous series."""
    learned = _learned(facts, onset)
    if learned is None:
        return max_z(facts, onset)
    p, mi, ranks = learned
    weight = np.where(p < 0.05, (1 - p) * np.sqrt(1 - np.exp(-2 * mi)), 0.0)
    reach = np.zeros(len(ranks))
    reach[0] = 1.0
    for _ in range(4):
        reach = np.maximum(reach, (weight * reach[:, None]).max(0) * 0.95)
    reach[0] = 0.0
    return ranks[int(reach.argmax())] if reach.max() > 0.7 else ranks[0]


BASELINES: dict[str, Callable[[Facts, int], int]] = {
    "slowest_rank": slowest_rank,
    "max_z": max_z,
    "first_deviation": first_deviation,
    "granger_pagerank": granger_pagerank,
    "granger_mi_walk": granger_mi_walk,
}


# --- figures -------------------------------------------------------------------------------------

Figure = tuple[str, float, str, float | None, str]


def _rate(hits: list[bool]) -> float:
    return float(np.mean(hits)) if hits else float("nan")


def accuracy(seeds: range) -> Iterator[Figure]:
    """Top-1 on clean and distracted jobs, precision at 0.7, baselines on the same jobs."""
    for distract, name in ((False, "top1_clean"), (True, "top1_distractors")):
        hits, located, sure = [], [], []
        blamed: dict[str, list[bool]] = {b: [] for b in BASELINES}
        for job, facts in single(seeds, distract):
            truth = job.truths[0]
            causes = diagnose(facts).causes
            hits.append(bool(causes) and right(causes[0], truth))
            sure += [hits[-1]] if causes and causes[0].confidence >= 0.7 else []
            if truth.rank is not None and distract:
                located.append(bool(causes) and causes[0].subject.rank == truth.rank)
                for baseline, run in BASELINES.items():
                    blamed[baseline].append(run(facts, min(truth.onset, len(facts.steps) - 2)) == truth.rank)
        yield name, _rate(hits), "1", 0.95, "higher"
        yield f"{name}_cases", float(len(hits)), "1", None, "higher"
        if distract:
            yield "precision_at_07", _rate(sure), "1", 0.97, "higher"
            yield "rank_located_distractors", _rate(located), "1", None, "higher"
            for baseline, found in blamed.items():
                yield f"{baseline}_top1_distractors", _rate(found), "1", None, "higher"


def two_faults(count: int) -> Iterator[Figure]:
    both, first = [], []
    for seed in range(1000, 1000 + count):
        rng = np.random.default_rng(seed)
        kinds, ranks = rng.choice(PAIRED, 2, replace=False), rng.choice(64, 2, replace=False)
        faults = tuple((str(k), int(r), int(rng.integers(100, 200))) for k, r in zip(kinds, ranks, strict=True))
        job = simulate(SHAPES[seed % 2], faults, seed=seed, distract=True)
        causes = diagnose(facts_of(job)).causes[:3]
        both.append(all(any(right(c, t) for c in causes) for t in job.truths))
        first.append(bool(causes) and any(right(causes[0], t) for t in job.truths))
    yield "top1_two_faults", _rate(first), "1", 0.85, "higher"
    yield "both_of_two_in_top3", _rate(both), "1", 0.85, "higher"


def healthy(count: int) -> Iterator[Figure]:
    flagged = [
        bool(diagnose(facts_of(simulate(SHAPES[s % 3], (), seed=5000 + s, distract=True))).causes) for s in range(count)
    ]
    yield "healthy_flagged", _rate(flagged), "1", 0.0, "lower"
    yield "healthy_cases", float(count), "1", None, "higher"


def speed(quick: bool) -> Iterator[Figure]:
    """CPU time of one diagnosis, 500 steps x 40 series, median of five."""
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
        spent = []
        for _ in range(5):
            begin = time.process_time()
            diagnose(facts)
            spent.append(1e3 * (time.process_time() - begin))
        yield f"diagnose_{ranks}_ms", float(np.median(spent)), "ms", goal, "lower"


def public(folder: Path) -> Iterator[Figure]:
    """PetShop with and without the call graph; the what-if of the production traces that are there."""
    cases = _public.petshop_cases(folder / "petshop")
    for label, graph in (("petshop", True), ("petshop_no_graph", False)):
        rank = []
        for c in cases:
            order = (
                rank_metrics(c.table, c.onset, c.edges, symptom=c.symptom) if graph else rank_metrics(c.table, c.onset)
            )
            rank.append([r.entity for r in order].index(c.truth) + 1)
        place = np.array(rank)
        yield f"{label}_top1", float((place == 1).mean()), "1", None, "higher"
        yield f"{label}_top3", float((place <= 3).mean()), "1", 0.92 if graph else None, "higher"
        avg5 = float(np.mean([(place <= k).mean() for k in range(1, 6)]))
        yield f"{label}_avg5", avg5, "1", 0.80 if graph else None, "higher"
    yield "petshop_cases", float(len(cases)), "1", None, "higher"
    for trace in sorted((folder / "straggler").glob("trace-*.parquet")):
        result = what_if(_public.straggler_operations(trace))
        name = trace.stem.removeprefix("trace-").lower()
        yield f"what_if_{name}_slowdown", result.slowdown, "1", None, "higher"
        yield f"what_if_{name}_worker_share", float(result.worker_share.max()), "1", None, "higher"
        yield f"what_if_{name}_stage_share", float(result.stage_share.max()), "1", None, "higher"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--data", type=Path, default=HERE / "tests" / "data", help="folder with petshop/ and straggler/"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    figures = [
        *accuracy(range(100, 101 if quick else 103)),
        *two_faults(4 if quick else 24),
        *healthy(4 if quick else 24),
        *speed(quick),
        *public(arguments.data),
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    report = {
        "benchmark": "causal",
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()} {platform.system()} Python {platform.python_version()}",
        "figures": [dict(zip(("name", "value", "unit", "goal", "better"), f, strict=True)) for f in figures],
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value, unit, goal, _ in figures:
            print(f"{name:38} {value:10.4g} {unit:3} {'' if goal is None else f'goal {goal:g}'}")


if __name__ == "__main__":
    main()
