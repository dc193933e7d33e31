"""Confidence from frequencies: ``python -m benchmarks.causal_calibration [--json] [--write]``.

Simulated jobs (4, 8 and 64 ranks; plain and three times as rough; whole, small, double, healed and no faults; silent
ranks) are diagnosed with raw scores. Fit seeds give each family of causes an isotonic line from raw score to the share
that was right; test seeds, never seen by the fit, give its reliability before and after. A cause is right when its
category is an injected one and its subject is the injected one or nobody in particular. ``--write`` replaces
``causal/calibration.yaml``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import isotonic_regression

from benchmarks._causal_cases import TIMED, Case, double, healthy, right, single
from benchmarks._common import figure, report
from lanterne.causal import diagnose, engine, family_of, scoring
from lanterne.collector.sim.model import Truth
from lanterne.nouns import Cause, CauseCategory

FIT, TEST = 2000, 3000
ROUGH = (1.0, 3.0)
RAW_MIN = 0.05
BIN_ROWS_MIN, BINS_MAX = 12, 8
FAMILY_ROWS_MIN = 30
FILE = Path(__file__).parents[1] / "causal" / "calibration.yaml"

Scored = tuple[str, float, bool]
"""Family, score, right."""


def cases(first: int) -> Iterator[Case]:
    """The jobs of one half; ``first`` is its first seed."""
    sizes = (4, 8, 64)
    for rough in ROUGH:
        yield from chain(
            single(range(first, first + 1), (4, 64), rough=rough),
            single(range(first + 1, first + 2), sizes, rough=rough, kinds=TIMED, magnitude=0.3),
            single(range(first + 2, first + 3), sizes, rough=rough, kinds=TIMED, magnitude=0.12),
            double(range(first, first + 12), (8, 64), rough=rough, magnitude=0.5),
            healthy(range(first, first + 16), sizes, rough=rough),
        )
    yield from single(range(first + 3, first + 4), (8, 64), kinds=TIMED, heal_after=40)


def _fits(cause: Cause, truth: Truth) -> bool:
    nobody = cause.subject.rank is None and cause.subject.host is None
    return right(cause, truth) or (cause.category.value == truth.category and nobody)


def scores(first: int) -> tuple[list[Scored], int]:
    """Every cause that the engine gives with its uncalibrated score, and the number of jobs."""
    table, lead = dict(scoring.TABLE), engine.LEAD
    scoring.TABLE.clear()
    engine.LEAD = RAW_MIN
    found, jobs = [], 0
    try:
        for case in cases(first):
            job, jobs = case.job(), jobs + 1
            found += [
                (family_of(c.category), c.confidence, any(_fits(c, t) for t in job.truths))
                for c in diagnose(case.facts(job)).causes
                if c.category is not CauseCategory.UNKNOWN
            ]
    finally:
        scoring.TABLE.update(table)
        engine.LEAD = lead
    return found, jobs


def line(rows: list[Scored]) -> list[list[float]]:
    """Points (raw, share right) of one family: bins of equal count, Laplace's rule of succession, isotonic."""
    raw = np.array([r[1] for r in rows])
    hit = np.array([r[2] for r in rows], float)[np.argsort(raw, kind="stable")]
    raw = np.sort(raw)
    parts = np.array_split(np.arange(len(raw)), max(1, min(BINS_MAX, len(raw) // BIN_ROWS_MIN)))
    share = np.array([(hit[p].sum() + 1) / (len(p) + 2) for p in parts])
    rising = isotonic_regression(share, weights=np.array([len(p) for p in parts], float)).x
    points = {0.0: 0.0}
    for p, value in zip(parts, rising, strict=True):
        points[round(float(raw[p].mean()), 3)] = round(float(value), 3)
    points[1.0] = max(points.values())
    return [[x, points[x]] for x in sorted(points)]


def fit(rows: list[Scored]) -> dict[str, list[list[float]]]:
    """Points of each family that has enough scores."""
    families = sorted({r[0] for r in rows})
    split = {f: [r for r in rows if r[0] == f] for f in families}
    return {f: line(part) for f, part in split.items() if len(part) >= FAMILY_ROWS_MIN}


def applied(rows: list[Scored], table: dict[str, list[list[float]]]) -> list[Scored]:
    return [(f, float(np.interp(s, *np.array(table[f]).T)) if f in table else s, hit) for f, s, hit in rows]


def reliability(rows: list[Scored], label: str) -> list[dict[str, Any]]:
    """Expected calibration error over ten bins, precision and count of claims, of all scores at or above a lead."""
    kept = [r for r in rows if r[1] >= scoring.LEAD]
    score, hit = np.array([r[1] for r in kept]), np.array([r[2] for r in kept], float)
    place = np.minimum((score * 10).astype(int), 9)
    error = sum(abs(score[place == b].mean() - hit[place == b].mean()) * (place == b).mean() for b in np.unique(place))
    claims = score >= scoring.CLAIM
    return [
        figure(f"ece_{label}", float(error), "1"),
        figure(f"precision_at_07_{label}", float(hit[claims].mean()), "1", goal=0.97, better="higher"),
        figure(f"claims_{label}", float(claims.sum()), "1", better="higher"),
        figure(f"wrong_leads_{label}", float((~claims & (hit == 0)).sum()), "1"),
        figure(f"right_leads_{label}", float((~claims & (hit == 1)).sum()), "1"),
    ]


def write(table: dict[str, list[list[float]]], jobs: int, rows: int) -> None:
    head = (
        "# Raw score -> share of cases that were right, by family: isotonic regression over bins of equal count with\n"
        f"# Laplace's rule, {rows} scores of {jobs} simulated jobs, seeds from {FIT} on.\n"
        "# Recipe: `python -m benchmarks.causal_calibration --write`; reliability on other seeds: docs/causal.md.\n"
        "# A family that is not listed keeps its raw score.\n"
    )
    FILE.write_text(head + yaml.safe_dump({"families": table}, default_flow_style=None, width=110), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="replace causal/calibration.yaml")
    arguments = parser.parse_args()
    fitted, jobs = scores(FIT)
    table = fit(fitted)
    tested, test_jobs = scores(TEST)
    figures = [*reliability(tested, "raw"), *reliability(applied(tested, table), "calibrated")]
    for family in table:
        part = [r for r in tested if r[0] == family]
        figures.append(figure(f"test_scores_{family}", float(len(part)), "1", better="higher"))
    if arguments.write:
        write(table, jobs, len(fitted))
    if arguments.json:
        print(json.dumps(report("causal_calibration", figures, table=table, jobs=[jobs, test_jobs]), indent=2))
        return
    for f in figures:
        print(f"{f['name']:38} {f['value']:10.4g}")
    print(yaml.safe_dump(table, default_flow_style=None, width=110))


if __name__ == "__main__":
    main()
