"""Every true offset lies inside its interval, whatever the clocks do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._align_jobs import Skewed, Step, skewed
from lanterne.backend.align import clocks
from lanterne.collector.sim.model import Shape

SECOND = 1_000_000_000


def found(job: Skewed) -> clocks.Clocks:
    return clocks.estimate(job.calls, hosts=job.hosts, snapshots=job.snapshots)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    dp=st.sampled_from([2, 3, 4, 6]),
    tp=st.sampled_from([1, 4, 8]),
    length=st.integers(5, 120),
    ping=st.sampled_from([0, SECOND // 2, 7 * SECOND]),
    jump=st.sampled_from([0, 200_000, -3_000_000, 10 * SECOND, -10 * SECOND]),
    asleep=st.booleans(),
    host=st.integers(0, 3),
    drift=st.sampled_from([0.0, 5.0, 45.0]),
    missing=st.sampled_from([0.0, 0.2]),
)
def test_true_offsets_lie_inside(
    seed: int, dp: int, tp: int, length: int, ping: int, jump: int, asleep: bool, host: int, drift: float,
    missing: float,
) -> None:  # fmt: skip
    at = length * 250_000_000 // 2
    steps = [Step(host=host, at_ns=at, by_ns=abs(jump) if asleep else jump, asleep=asleep)] if jump else []
    shape = Shape(dp=dp * 8 // tp if tp < 8 else dp, tp=tp, steps=length)
    job = skewed(shape, seed=seed, drift_ppm=drift, steps=steps, ping_every_ns=ping, missing=missing)
    outside, known = job.outside(found(job))
    assert known == len(job.calls)
    assert outside == 0


@pytest.mark.parametrize("jump", [2_000_000, -5_000_000_000])
def test_step_without_monotonic_clock(jump: int) -> None:
    job = skewed(Shape(dp=32, steps=80), seed=3, monotonic=False, steps=[Step(host=2, at_ns=9 * SECOND, by_ns=jump)])
    outside, known = job.outside(found(job))
    assert outside == 0
    assert known > 0.9 * len(job.calls)


@pytest.mark.parametrize(("ping", "seed"), [(0, 1), (SECOND, 1), (10 * SECOND, 2)])
def test_median_half_width_is_under_100_us(ping: int, seed: int) -> None:
    job = skewed(Shape(dp=32, steps=200), seed=seed, ping_every_ns=ping)
    estimate = found(job)
    width = estimate.median_error_ns()
    assert job.outside(estimate)[0] == 0
    assert width is not None
    assert width < 100_000


def test_pings_bound_every_clock_where_no_call_ties_them() -> None:
    job = skewed(Shape(dp=2, pp=8, tp=4, steps=60), seed=5, ping_every_ns=SECOND)
    estimate = found(job)
    assert estimate.reference == "server"
    assert job.outside(estimate)[0] == 0


def test_exits_that_contradict_the_pings_are_not_believed() -> None:
    """One host's exits are stamped 5 ms late, always: the causal bounds must stand alone, and hold."""
    job = skewed(Shape(dp=16, steps=120), seed=6, ping_every_ns=SECOND)
    late = np.where(job.calls.rank >= 8, 5_000_000, 0)
    calls = type(job.calls)(
        **{f: getattr(job.calls, f) for f in job.calls.__dataclass_fields__}
        | {"completed_ns": job.calls.completed_ns + late}
    )
    estimate = clocks.estimate(calls, hosts=job.hosts, snapshots=job.snapshots)
    assert job.outside(estimate)[0] == 0


def test_nothing_ties_two_hosts() -> None:
    job = skewed(Shape(dp=1, pp=1, tp=8, steps=5), seed=1)
    estimate = clocks.estimate(job.calls, hosts={r: f"host{r}" for r in range(8)}, ranks=range(9))
    assert estimate.at(8, int(job.calls.entered_ns[0])).error_ns >= 1 << 59
