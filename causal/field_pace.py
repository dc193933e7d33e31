"""Pace from trainer files: pauses that wander, a host with too many threads, a slowness that cannot be localised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanterne.causal.facts import Facts
from lanterne.causal.words import Words, cause, evidence
from lanterne.nouns import Cause, Cost
from lanterne.nouns import CauseCategory as C

PAUSE_FACTOR = 1.5  # a pause is a step this much above the rank's median …
PAUSE_MS = 300.0  # … and by at least this
EQUAL_SHARE = 0.05
COLLECTION_MS = 200.0
UNEVEN_TOKENS = 1.3  # the heaviest rank over the mean
SLOWER = 0.75
GAP_FACTOR = 10.0
SLOW_SHARE, SLOW_SIGMAS, SLOW_STEADY, SLOW_STEPS_MIN = 0.15, 4.0, 0.9, 6
"""A rank whose own step is this much longer than its peers', beyond their spread, in this share of the steps."""
BLOCKED = ("backward_ms", "forward_ms", "step_ms")
OWN = ("busy_ms", "step_ms", "forward_ms", "backward_ms", "optimizer_ms")
STARVED_SHARE, STARVED_MS, STARVED_ROWS_MIN = 0.4, 50.0, 8
"""A step that goes by with waiting for data to this share, and by at least so much, in the usual row."""


def candidates(facts: Facts, words: Words) -> list[Cause]:
    """At most one cause; CPU load first, then wandering pauses, then what cannot be localised."""
    return (
        _threads(facts)
        or _collections(facts)
        or _pauses(facts)
        or _lengths(facts)
        or _equal(facts)
        or next((c for name in OWN if (c := _one_slower(facts, name))), [])
        or _starved(facts)
        or _throughput(facts)
        or _one_long_step(facts, words)
    )


def _threads(facts: Facts) -> list[Cause]:
    """A long run queue or a saturated host with idle devices."""
    queue, cpu, gpu = facts.get("host_runqueue"), facts.get("host_cpu_percent"), facts.get("gpu_utilization")
    idle = float(np.nanmedian(gpu)) if np.isfinite(gpu).any() else np.nan
    if not np.isfinite(idle) or idle > (0.3 if np.nanmax(gpu) <= 1 else 30):
        return []
    runnable = float(np.nanmedian(queue)) if np.isfinite(queue).any() else 0.0
    busy = float(np.nanmedian(cpu)) if np.isfinite(cpu).any() else 0.0
    if runnable < 32 and busy < 90:
        return []
    says = evidence(
        f"devices are idle ({idle:.0f}) while {runnable:.0f} threads want to run on the host (CPU {busy:.0f}%)",
        value=max(runnable, busy),
        unit="threads" if runnable >= 32 else "%",
        baseline=idle,
    )
    return [cause(C.HOST_CONTENTION, 0.75, [says], do="set OMP_NUM_THREADS in the launcher to cores / local ranks")]


def _collections(facts: Facts) -> list[Cause]:
    """Garbage collection that the ranks timed themselves."""
    table = np.nan_to_num(facts.get("gc_ms"))
    long = table >= COLLECTION_MS if table.size else np.zeros((0, 0), bool)
    if not long.any():
        return []
    owners = [facts.ranks[c] for c in np.flatnonzero(long.any(axis=0))]
    says = (
        f"{int(long.sum())} garbage collections of up to {table.max():.0f} ms on {len(owners)} rank(s), "
        f"at {int(long.any(axis=1).sum())} different steps"
    )
    proof = [evidence(says, value=float(table.max()), unit="ms", baseline=float(np.median(table)))]
    do = "collect on a common step on all ranks (gc.disable, then gc.collect every N steps)"
    step = int(facts.steps[int(np.argmax(long.any(axis=1)))])
    return [cause(C.GC_PAUSE, 0.85, proof, rank=owners[0] if len(owners) == 1 else None, step=step, do=do)]


def _lengths(facts: Facts) -> list[Cause]:
    """Ranks get different numbers of tokens in a step, and their time goes with it."""
    tokens = facts.get("tokens")
    full = np.isfinite(tokens).sum(axis=1) >= 2 if tokens.size else np.zeros(0, bool)
    if int(full.sum()) < 12:
        return []
    ratio = np.nanmax(tokens[full], axis=1) / np.maximum(np.nanmean(tokens[full], axis=1), 1e-9)
    if float(np.median(ratio)) < UNEVEN_TOKENS:
        return []
    for name in ("busy_ms", "forward_ms", "backward_ms", "step_ms"):
        times = facts.get(name)
        both = np.isfinite(times) & np.isfinite(tokens) if times.size else np.zeros((0, 0), bool)
        if int(both.sum()) < 24 or np.ptp(times[both]) <= 0 or np.ptp(tokens[both]) <= 0:
            continue
        together = float(np.corrcoef(tokens[both], times[both])[0, 1])
        if together < 0.7:
            continue
        heavy = np.nanargmax(np.nan_to_num(tokens[full], nan=-1.0), axis=1)
        always = int(np.bincount(heavy).argmax())
        one = facts.ranks[always] if float(np.mean(heavy == always)) > 0.8 else None
        says = (
            f"the heaviest rank of a step has {np.median(ratio):.2f} times the mean number of tokens, and "
            f"{name.removesuffix('_ms')} time goes with it (correlation {together:.2f})"
        )
        proof = [evidence(says, value=float(np.median(ratio)), unit="1", baseline=1.0)]
        do = "pack or balance sequences over the ranks of a step"
        return [cause(C.SEQUENCE_IMBALANCE, 0.8, proof, rank=one, step=int(facts.steps[full][0]), do=do)]
    return []


def _throughput(facts: Facts) -> list[Cause]:
    """The trainer's own throughput fell and stays down: the job is slow, and one number does not say who."""
    if np.isfinite(facts.get("step_ms")).any():
        return []
    x = facts.get("throughput")
    known = np.isfinite(x).any(axis=1) if x.size else np.zeros(0, bool)
    if int(known.sum()) < 30:
        return []
    level = np.nanmedian(x[known], axis=1)
    third = len(level) // 3
    before, after = float(np.median(level[:third])), float(np.median(level[-third:]))
    tenth = level[-max(3, third // 2) :]
    if not (0 < after < SLOWER * before and float(tenth.max()) < 0.9 * before):
        return []
    low = level < (before + after) / 2
    at = int(np.flatnonzero(~low)[-1]) + 1 if (~low).any() else 0
    says = f"throughput fell from {before:,.0f} to {after:,.0f} and stays there: slow, rank not identifiable"
    needs = ("collective entry times per rank: one number for the job does not say who is slow",)
    step = int(facts.steps[known][min(at, len(level) - 1)])
    return [cause(C.UNKNOWN, 0.6, [evidence(says, value=after, unit="1/s", baseline=before)], step=step, needs=needs)]


def _pauses(facts: Facts) -> list[Cause]:
    """Rare pauses of one length, each rank at its own steps, at a steady distance: generation-2 garbage collection."""
    step = facts.get("step_ms")
    if len(facts.ranks) < 2 or len(step) < 60:
        return []
    wandering: dict[int, NDArray[Any]] = {}
    sizes: list[float] = []
    for column, rank in enumerate(facts.ranks):
        x = step[:, column]
        usual = float(np.nanmedian(x)) if np.isfinite(x).any() else np.nan
        rows = np.flatnonzero(np.isfinite(x) & (x > max(PAUSE_FACTOR * usual, usual + PAUSE_MS)))
        if 2 <= len(rows) <= 0.1 * len(x):
            wandering[rank] = rows
            sizes += list(x[rows] - usual)
    if len(wandering) < max(2, len(facts.ranks) // 2):
        return []
    everyone = np.concatenate(list(wandering.values()))
    shared = len(everyone) - len(np.unique(everyone))
    gaps = np.concatenate([np.diff(r) for r in wandering.values()])
    steady = float(np.median(np.abs(gaps - np.median(gaps)))) <= 0.2 * float(np.median(gaps))
    if shared > 0.3 * len(everyone) or not steady or np.ptp(sizes) > 1.5 * float(np.median(sizes)):
        return []
    says = evidence(
        f"{len(wandering)} ranks pause {np.median(sizes) / 1000:.2f} s every {np.median(gaps):.0f} steps, each at "
        f"its own steps; the rest waits",
        value=float(np.median(sizes)),
        unit="ms",
    )
    return [
        cause(
            C.GC_PAUSE,
            0.7,
            [says],
            needs=(
                "gc_ms per rank (gc.callbacks): the rhythm is that of garbage collection, the proof is its own time",
            ),
            do="collect on a common step on all ranks (gc.disable, then gc.collect every N steps)",
        )
    ]


def _equal(facts: Facts) -> list[Cause]:
    """All ranks slower by the same amount in a blocking phase: somebody is slow and this cannot say who."""
    if len(facts.ranks) < 2 or any(np.isfinite(facts.get(n)).any() for n in ("lateness_ms", "busy_ms", "wait_ms")):
        return []
    data = facts.get("data_wait_ms")
    if np.isfinite(data).any() and _one_above(np.nanmedian(data[-max(1, len(data) // 2) :], axis=0)):
        return _loader(facts, data)
    for name in BLOCKED:
        x = facts.get(name)
        full = np.isfinite(x).all(axis=1) if x.size else np.zeros(0, bool)
        rows = x[full]
        if len(rows) < 12:
            continue
        level = np.median(rows, axis=1)
        third = len(level) // 3
        before, after = float(np.median(level[:third])), float(np.median(level[-third:]))
        spread = float(np.median(np.ptp(rows[-third:], axis=1)))
        if after > 1.2 * before and spread < EQUAL_SHARE * after:
            values = "/".join(f"{v:.1f}" for v in np.median(rows[-third:], axis=0)[:8])
            says = evidence(
                f"{name.removesuffix('_ms')} takes {values} ms on all ranks alike, {before:.1f} ms before: slow, "
                f"rank not identifiable (cannot localise)",
                value=after,
                unit="ms",
                baseline=before,
            )
            needs = (
                "the time from launch to collective entry per rank: blocking collectives spread one rank's delay "
                "over all",
            )
            return [
                cause(
                    C.UNKNOWN,
                    0.6,
                    [says],
                    needs=needs,
                    step=int(facts.steps[full][int(np.argmax(level > (before + after) / 2))]),
                    do="collect collective entry times per rank (lanterne.attach); do not swap a node yet",
                )
            ]
    return []


def _starved(facts: Facts) -> list[Cause]:
    """All ranks alike spend much of each step waiting for data."""
    data, step = facts.get("data_wait_ms"), facts.get("step_ms")
    if not data.size or not step.size:
        return []
    both = np.isfinite(data) & np.isfinite(step) & (step > 0)
    if int(both.sum()) < STARVED_ROWS_MIN:
        return []
    share, wait = float(np.median(data[both] / np.maximum(step[both], data[both]))), float(np.median(data[both]))
    if share < STARVED_SHARE or wait < STARVED_MS:
        return []
    says = f"{share:.0%} of a step is waiting for data: {wait:,.0f} ms of {np.median(step[both]):,.0f} ms"
    proof = [evidence(says, value=wait, unit="ms", baseline=float(np.median(step[both])))]
    do = "more loader workers, a larger prefetch, a nearer or faster store; then look at decoding and augmentation"
    needs = ("throughput of the data's store and CPU load of the loader workers",)
    return [cause(C.DATA_STALL, 0.75, proof, step=int(facts.steps[0]), do=do, needs=needs)]


def _one_slower(facts: Facts, name: str) -> list[Cause]:
    """One rank's steps take longer than its peers' until the end: a timer that leaves the waiting out shows who."""
    told = [n for n in ("lateness_ms", "busy_ms", "wait_ms") if n != name and np.isfinite(facts.get(n)).any()]
    if len(facts.ranks) < 2 or told:
        return []
    x = facts.get(name)
    x = x[:, np.isfinite(x).any(axis=0)] if x.size else x
    ranks = [r for c, r in enumerate(facts.ranks) if np.isfinite(facts.get(name)[:, c]).any()]
    full = np.isfinite(x).all(axis=1) if x.size else np.zeros(0, bool)
    if int(full.sum()) < SLOW_STEPS_MIN or len(ranks) < 2:
        return []
    rows, steps = x[full], facts.steps[full]
    late = rows[len(rows) // 2 :]  # it lasts to the end; what began earlier is dated below
    column = int(np.median(late, axis=0).argmax())
    others = np.delete(rows, column, axis=1)
    usual = np.median(others, axis=1)
    excess = rows[:, column] - usual
    spread = float(1.4826 * np.median(np.abs(others - usual[:, None])))
    tail = excess[len(rows) // 2 :]
    robust = float(1.4826 * np.median(np.abs(tail - np.median(tail))))
    own = robust if len(tail) >= 10 else float(tail.std(ddof=1))  # few values agree by chance
    now, peers = float(np.median(tail)), float(np.median(usual[len(rows) // 2 :]))
    high = excess >= 0.5 * now
    rival = float((np.median(np.delete(late, column, axis=1), axis=0) - peers).max())
    bar = max(SLOW_SHARE * peers, SLOW_SIGMAS * max(spread, own))
    if now < bar or high[len(rows) // 2 :].mean() < SLOW_STEADY or rival > 0.5 * now:
        return []
    at = 0 if high.mean() >= SLOW_STEADY else int(np.flatnonzero(~high[: len(rows) // 2 + 1])[-1]) + 1
    what = name.removesuffix("_ms")
    says = evidence(
        f"rank {ranks[column]} takes {now + peers:.1f} ms a {what}, its peers {peers:.1f} ms", value=now + peers,
        unit="ms", baseline=peers, ref=name,
    )  # fmt: skip
    needs = (f"what rank {ranks[column]} does longer: wait for data, kernels, clock and host load",)
    score = 0.75 if len(ranks) > 2 else 0.6
    named = cause(C.SLOW_COMPUTE, score, [says], rank=ranks[column], step=int(steps[at]), needs=needs)
    return [replace(named, cost=Cost(saving_ms_per_step=now))]


def _one_above(x: NDArray[Any]) -> bool:
    known = x[np.isfinite(x)]
    if len(known) < 2:
        return False
    top, rest = float(known.max()), float(np.median(np.sort(known)[:-1]))
    return top > 3 * rest and top - rest > 20


def _loader(facts: Facts, data: NDArray[Any]) -> list[Cause]:
    tail = np.nanmedian(data[-max(1, len(data) // 2) :], axis=0)
    column = int(np.nanargmax(tail))
    others = float(np.median(np.delete(tail, column)))
    says = evidence(
        f"rank {facts.ranks[column]} waits {tail[column]:.1f} ms for data a step, the others {others:.1f} ms",
        value=float(tail[column]),
        unit="ms",
        baseline=others,
    )
    return [cause(C.DATA_STALL, 0.85, [says], rank=facts.ranks[column])]


def _one_long_step(facts: Facts, words: Words) -> list[Cause]:
    """One step of an event log far beyond the others, with nothing else said about it."""
    rows = words.fact("step_span")
    seconds = np.array([float(e.attributes.get("seconds", 0.0)) for e in rows])
    if len(seconds) < 3:
        return []
    usual, worst = float(np.median(seconds)), int(np.argmax(seconds))
    rest = float(np.median(np.delete(seconds, worst)))
    if seconds[worst] < max(GAP_FACTOR * rest, 60.0):
        return []
    del usual
    says = evidence(
        f"step {rows[worst].step} took {seconds[worst]:,.0f} s, the others {rest:.1f} s",
        value=float(seconds[worst]),
        unit="s",
        baseline=rest,
        ref=rows[worst].ref,
    )
    return [
        cause(
            C.UNKNOWN,
            0.6,
            [says],
            step=rows[worst].step,
            needs=("logs or dumps of the ranks during that step", "collective entry times per rank"),
        )
    ]
