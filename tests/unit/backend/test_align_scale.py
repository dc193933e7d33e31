"""The whole size that is promised: 1,024 ranks, 1,000 steps, clocks that drift, step and sleep. Run by hand."""

from __future__ import annotations

import pytest

from benchmarks.align import SECOND, job_of, wrong_orders
from lanterne.backend.align import lamport, stream


@pytest.mark.heavy
@pytest.mark.parametrize("ping_every_ns", [0, SECOND])
def test_a_thousand_ranks_for_a_thousand_steps(ping_every_ns: int) -> None:
    """20 us of jitter, 20 ppm of drift, offsets to 10 s, one host set by 3 ms, one asleep for 10 s."""
    job = job_of(1024, 1000, ping_every_ns)
    found = stream.whole(job.calls, job.snapshots, job.hosts)
    outside, known = job.outside(found.clocks)
    assert (outside, known) == (0, len(job.calls))
    width = found.clocks.median_error_ns()
    assert width is not None
    assert width < 100_000
    ordered = lamport.logical(job.calls)
    assert ordered.stamp.all()
    assert wrong_orders(job, ordered, 300) == 0
