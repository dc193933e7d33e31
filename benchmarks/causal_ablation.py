"""What each part of the engine adds: ``python -m benchmarks.causal_ablation [--json]``.

The same jobs (64 ranks, three layouts, distractors, rough variability, skewed clocks) are diagnosed with one part taken
out at a time:

* ``structure``: own time and roles; without it the engine compares whole phase times, which hold the wait for others;
* ``learned``: Granger causality and mutual information; without them the edges keep prior and effect size alone, and
  ``strong_learned`` multiplies each edge's weight by them in full;
* ``patterns``: upstream templates; without them a late rank is only late in a phase;
* ``counterfactual``: saving by repair; without it every changed rank counts with its own excess.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks._causal_cases import TIMED, Case, double, healthy, right, single
from benchmarks._common import figure, report
from lanterne.causal import Facts, diagnose, granger, timing, upstream
from lanterne.causal.scoring import CLAIM

KINDS = (*TIMED, "sequence_imbalance", "partition_imbalance", "memory_leak")
"""The parts concern step time; the other faults are found by the same rules in every row."""
Swap = tuple[ModuleType, str, Any]


@contextmanager
def swapped(*swaps: Swap) -> Iterator[None]:
    """Replace attributes of modules for the time of the block."""
    with ExitStack() as stack:
        for module, name, value in swaps:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _same(facts: Facts) -> Facts:
    return facts


def _durations(facts: Facts) -> Facts:
    """Whole phase times instead of own time, and nobody's place in the mesh."""
    total = sum(facts.get(k) for k in ("data_wait_ms", "forward_ms", "backward_ms"))
    series = {k: v for k, v in facts.series.items() if k != "lateness_ms"} | {"busy_ms": np.asarray(total)}
    return replace(facts, series=series, places={r: replace(p, mesh={}) for r, p in facts.places.items()})


def _by_excess(x: Any, rows: Any, group: list[timing.Change]) -> tuple[float, float]:
    del x, rows
    return max(c.shift_ms for c in group), 1.0


ROWS: dict[str, tuple[tuple[Swap, ...], Callable[[Facts], Facts]]] = {
    "full": ((), _same),
    "no_structure": ((), _durations),
    "strong_learned": (((upstream, "TIE", 1.0),), _same),
    "no_learned": (
        ((granger, "strength", lambda *_: 1.0), (upstream, "_refused", lambda *_: ())), _same,
    ),
    "no_patterns": (((upstream, "UPSTREAM", ()),), _same),
    "no_counterfactual": (((timing, "_saving", _by_excess),), _same),
}  # fmt: skip


def _cases() -> dict[str, list[Case]]:
    return {
        "top1": list(single(range(8600, 8602), kinds=KINDS)),
        "top1_small": list(single(range(8610, 8611), kinds=TIMED, magnitude=0.3)),
        "both_of_two": list(double(range(8620, 8638))),
        "healthy_flagged": list(healthy(range(8640, 8658))),
    }


def row(name: str, cases: dict[str, list[tuple[Any, Facts]]]) -> list[dict[str, Any]]:
    """Figures of one row; ``wrong_claims``: claims at 0.7 that no injected fault explains, per job."""
    swaps, change = ROWS[name]
    out, wrong, jobs = [], 0, 0
    with swapped(*swaps):
        for what, jobs_facts in cases.items():
            hits = []
            for job, facts in jobs_facts:
                causes = diagnose(change(facts)).causes
                fits = [[right(c, t) for c in causes[:3]] for t in job.truths]
                wrong += sum(c.confidence >= CLAIM and not any(right(c, t) for t in job.truths) for c in causes)
                jobs += 1
                if what == "healthy_flagged":
                    hits.append(bool(causes))
                elif what == "both_of_two":
                    hits.append(all(any(f) for f in fits))
                else:
                    hits.append(bool(fits[0]) and fits[0][0])
            better = "lower" if what == "healthy_flagged" else "higher"
            out.append(figure(f"{name}_{what}", float(np.mean(hits)), "1", better=better))
    out.append(figure(f"{name}_wrong_claims_per_job", wrong / jobs, "1"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = {what: [(job := c.job(), c.facts(job)) for c in found] for what, found in _cases().items()}
    figures = [f for name in ROWS for f in row(name, cases)]
    if arguments.json:
        print(json.dumps(report("causal_ablation", figures, jobs={k: len(v) for k, v in cases.items()}), indent=2))
        return
    for f in figures:
        print(f"{f['name']:44} {f['value']:8.3f}")


if __name__ == "__main__":
    main()
