"""The path crosses from the victim to the rank it waited for, through every group on the way."""

from __future__ import annotations

from itertools import pairwise

from lanterne.backend.align import clocks, matching, waits
from lanterne.backend.align.critical_path import WORK, critical_path
from lanterne.nouns import Collective


def test_path_goes_through_both_groups_to_the_late_rank() -> None:
    """Rank 3 is late in 2-3; its tensor peer 2 is therefore late in 0,2."""
    times = [(2, "2-3", 10, 110), (3, "2-3", 100, 110), (0, "0,2", 20, 140), (2, "0,2", 120, 140)]
    rows = [
        Collective(
            rank=r, group=g, sequence=0, op="allreduce", step=7, entered_ns=10_000 * t, completed_ns=10_000 * done
        )
        for r, g, t, done in times
    ]
    calls = matching.from_collectives(rows)
    found = waits.attribute(calls, clocks.estimate(calls, hosts=dict.fromkeys(range(4), "one")))
    path = critical_path(calls, found, 7, 0, {0: 1_500_000, 2: 1_400_000, 3: 1_100_000})
    assert [(s.rank, s.name, s.end_ns - s.start_ns) for s in path] == [
        (3, WORK, 1_000_000), (2, "allreduce", 100_000), (2, WORK, 100_000), (0, "allreduce", 200_000),
        (0, WORK, 100_000),
    ]  # fmt: skip
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
    assert critical_path(calls, found, 7, 0, {}) == []
