"""Simulated cases on which the causal engine is judged: which faults, where, how large, under which nuisances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks._sim_facts import aligned_facts, facts_of
from lanterne.causal import Facts
from lanterne.collector.sim.faults import FAULTS, simulate
from lanterne.collector.sim.model import Job, Shape, Truth
from lanterne.nouns import Cause

CHECKPOINT_EVERY = 60
CLOCK_OFFSET_MS, CLOCK_DRIFT_PPM = 2_000.0, 20.0
LAST = ("out_of_memory", "nonfinite", "hang", "crash")
"""Faults that stop the job or leave no numbers: in a pair they come second."""
TIMED = ("slow_compute", "slow_backward", "thermal", "slow_data", "gc_pause", "host_contention", "slow_link")
"""Faults whose size is a share of the step."""
LAYOUTS = {
    (4, "dp"): (4, 1, 1), (8, "dp"): (8, 1, 1),
    (64, "dp"): (64, 1, 1), (64, "dp_pp"): (16, 4, 1), (64, "dp_tp_pp"): (4, 4, 4),
    (256, "dp"): (256, 1, 1), (256, "dp_pp"): (64, 4, 1), (256, "dp_tp_pp"): (16, 4, 4),
    (1024, "dp"): (1024, 1, 1), (1024, "dp_pp"): (128, 8, 1), (1024, "dp_tp_pp"): (16, 8, 8),
}  # fmt: skip
"""(ranks, layout) -> (dp, pp, tp)."""


def steps_of(ranks: int) -> int:
    """Length of a case's window."""
    return 240 if ranks > 64 else 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job to diagnose. ``rough``: level of healthy variability; above 0 also distractors and skewed clocks."""

    ranks: int
    layout: str
    faults: tuple[tuple[str, int, int], ...]
    seed: int
    size: float = 1.0
    rough: float = 1.0
    missing: float = 0.0
    heal_after: int | None = None

    @property
    def shape(self) -> Shape:
        dp, pp, tp = LAYOUTS[self.ranks, self.layout]
        steps = steps_of(self.ranks)
        if self.rough <= 0:
            return Shape(dp=dp, pp=pp, tp=tp, steps=steps, checkpoint_every=CHECKPOINT_EVERY)
        return Shape(
            dp=dp, pp=pp, tp=tp, steps=steps, checkpoint_every=CHECKPOINT_EVERY, clock_offset_ms=CLOCK_OFFSET_MS,
            clock_drift_ppm=CLOCK_DRIFT_PPM,
        )  # fmt: skip

    def job(self) -> Job:
        return simulate(
            self.shape, self.faults, seed=self.seed, size=self.size, distract=self.rough > 0, missing=self.missing,
            rough=self.rough, heal_after=self.heal_after,
        )  # fmt: skip

    def facts(self, job: Job) -> Facts:
        return aligned_facts(job) if self.rough > 0 else facts_of(job)


def right(cause: Cause, truth: Truth) -> bool:
    """Category and subject: the rank, else the host, else nobody in particular."""
    if cause.category.value != truth.category:
        return False
    if truth.rank is not None:
        return cause.subject.rank == truth.rank
    return cause.subject.host == truth.host if truth.host is not None else cause.subject.rank is None


def _place(seed: int, ranks: int, layout: str, kind: str, steps: int) -> tuple[int, int]:
    """Random rank and onset of a case; the onset leaves 40 healthy and 60 faulty steps at least.

    Storage that is slow for everybody is no fault without a checkpoint that was faster, so one comes first there."""
    rng = np.random.default_rng([seed, ranks, *layout.encode(), *kind.encode()])
    first = CHECKPOINT_EVERY if kind == "storage_slow" else 40
    return int(rng.integers(ranks)), int(rng.integers(first, steps - 60))


def single(
    seeds: range, sizes: tuple[int, ...] = (64,), *, rough: float = 1.0, kinds: tuple[str, ...] = tuple(FAULTS),
    magnitude: float = 1.0, heal_after: int | None = None,
) -> Iterator[Case]:  # fmt: skip
    """Each fault once a seed and layout; under rough conditions each odd seed has 10% silent ranks."""
    for seed in seeds:
        for (ranks, layout), (_, pp, _) in LAYOUTS.items():
            if ranks not in sizes:
                continue
            for kind in kinds:
                if kind == "partition_imbalance" and pp < 2:
                    continue
                rank, onset = _place(seed, ranks, layout, kind, steps_of(ranks))
                yield Case(
                    ranks=ranks, layout=layout, faults=((kind, rank, onset),), seed=seed, size=magnitude, rough=rough,
                    missing=0.1 if rough > 0 and seed % 2 else 0.0, heal_after=heal_after,
                )  # fmt: skip


def double(
    seeds: range, sizes: tuple[int, ...] = (64,), *, rough: float = 1.0, magnitude: float = 1.0
) -> Iterator[Case]:
    """Two different faults of any kinds on two ranks at two onsets; each odd seed has 10% silent ranks."""
    names = [k for k in LAYOUTS if k[0] in sizes]
    for seed in seeds:
        ranks, layout = names[seed % len(names)]
        rng = np.random.default_rng([seed, 2])
        paired = [k for k in FAULTS if k != "partition_imbalance" or LAYOUTS[ranks, layout][1] > 1]
        kinds = rng.choice([k for k in paired if k not in LAST], 2, replace=False)
        if seed % 3 == 0:
            kinds[1] = rng.choice(LAST)
        where, steps = rng.choice(ranks, 2, replace=False), steps_of(ranks)
        onsets = rng.integers(60, steps - 80, 2)
        if kinds[1] in LAST:  # after the other fault has shown: 40 steps, or a checkpoint of its own
            onsets[0] = rng.integers(CHECKPOINT_EVERY, steps - 2 * CHECKPOINT_EVERY)
            shown = (onsets[0] // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY + 5
            onsets[1] = rng.integers(max(shown, onsets[0] + 40), steps - 10)
        faults = tuple((str(k), int(r), int(o)) for k, r, o in zip(kinds, where, onsets, strict=True))
        yield Case(
            ranks=ranks,
            layout=layout,
            faults=faults,
            seed=seed,
            rough=rough,
            size=magnitude,
            missing=0.1 if seed % 2 else 0.0,
        )


def healthy(seeds: range, sizes: tuple[int, ...] = (64,), *, rough: float = 1.0) -> Iterator[Case]:
    """No fault, every nuisance; each odd seed has 10% silent ranks."""
    names = [k for k in LAYOUTS if k[0] in sizes]
    for seed in seeds:
        ranks, layout = names[seed % len(names)]
        yield Case(ranks=ranks, layout=layout, faults=(), seed=seed, rough=rough, missing=0.1 if seed % 2 else 0.0)
