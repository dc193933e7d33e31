"""Data that comes in piece by piece, in any order, gives the answer of a batch over the whole job."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._align_jobs import Skewed, Step, skewed
from lanterne.backend.align import matching, stream
from lanterne.backend.align.stream import BLOCK_STEPS, Aligned, Aligner
from lanterne.backend.align.waits import Attribution
from lanterne.collector.sim.model import Shape
from lanterne.nouns import Collective

SECOND = 1_000_000_000
Key = tuple[str, int, int]


def answers(found: Aligned) -> dict[Key, tuple[object, ...]]:
    """Everything that is said of each call."""
    calls = found.calls
    columns = [getattr(found.attribution, f.name).tolist() for f in fields(Attribution)]
    offset, error = found.clocks.offsets(calls.rank, calls.entered_ns, calls.monotonic_ns)
    values = zip(*columns, offset.tolist(), error.tolist(), strict=True)
    names = (calls.groups[g] for g in calls.group.tolist())
    return dict(zip(zip(names, calls.sequence.tolist(), calls.rank.tolist(), strict=True), values, strict=True))


def arrive(job: Skewed, aligner: Aligner, rng: np.random.Generator, delay_steps: int, pieces: int) -> dict[Key, object]:
    """Push all rows in ``pieces``, each rank late by its own time and rows out of order, some twice; the last word
    on every call."""
    calls = job.calls
    last = int(calls.step.max())
    behind = rng.integers(0, delay_steps // 2 + 1, int(calls.rank.max()) + 1)[calls.rank]
    when = calls.step + behind + rng.integers(0, delay_steps // 2 + 1, len(calls))
    edges = np.linspace(0, last + delay_steps + 1, pieces + 1)
    share = np.array_split(np.array(job.snapshots, object), pieces)
    said: dict[Key, object] = {}
    for piece, (low, high) in enumerate(pairwise(edges)):
        now = (when >= low) & (when < high)
        again = (when < low) & (when >= low - 2) & (rng.random(len(calls)) < 0.05)
        order = rng.permutation(np.flatnonzero(now | again))
        aligner.push(matching.joined([calls], [order]), list(share[piece]), job.hosts)
        if rng.random() < 0.6 or piece == pieces - 1:
            said.update(answers(aligner.aligned()))
    return said


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(16, 1, 1), (6, 2, 2), (3, 1, 8)]),
    ping=st.sampled_from([0, SECOND, 7 * SECOND]),
    jump=st.sampled_from([0, 3_000_000, -3_000_000, 10 * SECOND]),
    asleep=st.booleans(),
    missing=st.sampled_from([0.0, 0.15]),
    monotonic=st.booleans(),
)
def test_stream_equals_batch(
    seed: int, shape: tuple[int, int, int], ping: int, jump: int, asleep: bool, missing: float, monotonic: bool
) -> None:
    dp, pp, tp = shape
    steps = [Step(host=1, at_ns=9 * SECOND, by_ns=abs(jump) if asleep else jump, asleep=asleep)] if jump else []
    job = skewed(
        Shape(dp=dp, pp=pp, tp=tp, steps=100), seed=seed, steps=steps, ping_every_ns=ping, missing=missing,
        monotonic=monotonic,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    whole = stream.whole(job.calls, job.snapshots, job.hosts)
    assert len(whole.calls) == len(job.calls)
    assert not job.outside(whole.clocks)[0] or (jump and not monotonic)
    aligner = Aligner()
    arrive(job, aligner, rng, delay_steps=40, pieces=int(rng.integers(2, 9)))
    assert answers(aligner.aligned()) == answers(whole)
    assert aligner.late == 0


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), missing=st.sampled_from([0.0, 0.2]))
def test_bounded_memory_says_the_same_of_every_call(seed: int, missing: float) -> None:
    """Without exchanges, whose host's blocks a test would have to know; every call's last word is the batch's."""
    job = skewed(Shape(dp=16, steps=250), seed=seed, missing=missing)
    aligner = Aligner(keep_steps=64)
    said = arrive(job, aligner, np.random.default_rng(seed), delay_steps=48, pieces=25)
    assert said == answers(stream.whole(job.calls, job.snapshots, job.hosts))
    assert aligner.late == 0
    assert aligner.rows <= len(job.calls) * (64 + 4 * BLOCK_STEPS) // 250


def test_what_comes_after_its_block_was_sealed_is_counted() -> None:
    job = skewed(Shape(dp=16, steps=300), seed=1)
    aligner = Aligner(keep_steps=32)
    old = job.calls.rank == 3
    aligner.push(matching.joined([job.calls], [~old]), (), job.hosts)
    aligner.aligned()
    first = aligner.first_step
    assert 0 < first < 300
    aligner.push(matching.joined([job.calls], [old]), (), job.hosts)
    assert aligner.late == int((old & (job.calls.step < first)).sum())
    kept = aligner.aligned()
    assert set(kept.calls.step[kept.calls.rank == 3].tolist()) == set(range(first, 300))


def test_memory_has_a_bound_of_its_own() -> None:
    job = skewed(Shape(dp=8, steps=400), seed=2)
    aligner = Aligner(keep_steps=10**6, rows_max=5_000)
    aligner.push(job.calls, (), job.hosts)
    aligner.aligned()
    assert aligner.rows <= 5_000


@pytest.mark.parametrize("late_first", [False, True])
def test_a_call_whose_members_stand_in_two_blocks_is_one(late_first: bool) -> None:
    """Rank 1 counts its steps one ahead of rank 0."""
    rows = [
        Collective(
            rank=r, group="0-1", sequence=n, op="allreduce", step=n + r, entered_ns=10**9 + n * 10**6,
            completed_ns=10**9 + n * 10**6 + 10**5,
        )
        for n in range(2 * BLOCK_STEPS)
        for r in range(2)
    ]  # fmt: skip
    first, second = rows[: 2 * BLOCK_STEPS], rows[2 * BLOCK_STEPS :]
    aligner = Aligner()
    for part in [second, first] if late_first else [first, second]:
        aligner.push(matching.from_collectives(part), (), {0: "a", 1: "a"})
        aligner.aligned()
    found = aligner.aligned()
    assert len(found.calls.first) == 2 * BLOCK_STEPS
    assert (found.calls.sizes == 2).all()
    assert found.attribution.whole.all()
