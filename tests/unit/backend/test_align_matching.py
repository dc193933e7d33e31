"""Calls are matched by rank set and order alone; the last arrival is named only where the clocks allow it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.backend.align import clocks, matching, waits
from lanterne.nouns import Collective, group_ranks

START = 1_760_000_000_000_000_000
MS = 1_000_000


def call(rank: int, group: str, sequence: int, entered: int, completed: int, **more: object) -> Collective:
    done = START + completed * MS if completed else 0
    return Collective(
        rank=rank, group=group, sequence=sequence, op=str(more.get("op", "allreduce")), step=sequence,
        bytes=int(str(more.get("bytes", 1024))), entered_ns=START + entered * MS, completed_ns=done,
    )  # fmt: skip


def sub_groups() -> list[Collective]:
    """World 0-3 with groups 0-1 and 2-3; every rank counts each group's calls by itself."""
    rows = [call(r, "0-3", s, 100 * s + r, 100 * s + 10) for r in range(4) for s in range(3)]
    return rows + [
        call(r, "0-1" if r < 2 else "2-3", s, 100 * s + 50, 100 * s + 60) for r in range(4) for s in range(3)
    ]


@given(st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(shuffle: random.Random) -> None:
    rows = sub_groups()
    ordered = matching.from_collectives(rows)
    shuffle.shuffle(rows)
    mixed = matching.from_collectives(rows)
    assert len(mixed.first) == 9
    assert [matching.as_collective(mixed, i) for i in range(len(mixed))] != []
    key = sorted((c.group, c.sequence, c.rank, c.entered_ns) for c in rows)
    for calls in (ordered, mixed):
        seen = [matching.as_collective(calls, i) for i in range(len(calls))]
        assert sorted((c.group, c.sequence, c.rank, c.entered_ns) for c in seen) == key
        slots = {(c.group, c.sequence): int(calls.slot[i]) for i, c in enumerate(seen)}
        assert len(set(slots.values())) == len(slots)


def test_a_pending_report_gives_way_to_the_completed_one() -> None:
    calls = matching.from_collectives([call(0, "0-1", 0, 5, 9), call(0, "0-1", 0, 5, 0), call(1, "0-1", 0, 6, 0)])
    assert len(calls) == 2
    assert (calls.completed_ns > 0).tolist() == [True, False]


def test_missing_members_are_gaps() -> None:
    rows = [call(r, "0-3", s, 100 * s, 100 * s + 9) for r in range(4) for s in range(3) if (r, s) != (2, 2)]
    (gap,) = matching.gaps(matching.from_collectives(rows))
    assert (gap.sequence, gap.missing, gap.present) == (2, (2,), (0, 1, 3))
    assert matching.lost_share(matching.from_collectives(rows)) == pytest.approx(1 / 3)


def test_the_odd_one_out_is_named_and_a_tie_is_not() -> None:
    rows = [call(r, "0-2", 0, 0, 9, op="broadcast" if r == 1 else "allreduce") for r in range(3)]
    (found,) = matching.mismatches(matching.from_collectives(rows))
    assert (found.what, found.odd) == ("op", (1,))
    tied = [call(r, "0-1", 0, 0, 9, bytes=100 + r) for r in range(2)]
    (found,) = matching.mismatches(matching.from_collectives(tied))
    assert (found.what, found.odd) == ("size", ())


def attribution(rows: list[Collective], hosts: dict[int, str]) -> tuple[matching.Calls, waits.Attribution]:
    calls = matching.from_collectives(rows)
    return calls, waits.attribute(calls, clocks.estimate(calls, hosts=hosts))


def test_the_last_to_enter_is_named_though_its_call_is_the_shortest() -> None:
    rows = [call(r, "0-3", 0, 40 if r == 2 else r, 50) for r in range(4)]
    calls, found = attribution(rows, dict.fromkeys(range(4), "one"))
    assert set(found.last.tolist()) == {2}
    assert found.wait_ns[calls.rank == 0][0] == 40 * MS
    assert found.transfer_ns.tolist() == [10 * MS] * 4


def test_nobody_is_named_within_the_error_of_the_clocks() -> None:
    rows = [call(r, "0-1", 0, r, 50) for r in range(2)]
    _, found = attribution(rows, {0: "a", 1: "b"})
    assert set(found.last.tolist()) == {-1}


def test_a_rank_that_computes_after_an_async_call_is_blocked_only_from_its_next_call() -> None:
    rows = [
        call(0, "0-1", 0, 0, 100),
        call(1, "0-1", 0, 90, 100),
        call(0, "0-1", 1, 70, 120),
        call(1, "0-1", 1, 110, 120),
    ]
    calls, found = attribution(rows, {0: "a", 1: "a"})
    first = np.flatnonzero((calls.sequence == 0) & (calls.rank == 0))[0]
    assert found.wait_ns[first] == 90 * MS
    assert found.blocked_ns()[first] == 20 * MS


def test_waits_of_a_call_with_a_missing_member_are_not_facts() -> None:
    rows = [call(r, "0-3", s, 100 * s + r, 100 * s + 9) for r in range(4) for s in range(2) if (r, s) != (2, 1)]
    calls, found = attribution(rows, dict.fromkeys(range(4), "one"))
    assert set(waits.as_facts(calls, found).sequence.tolist()) == {0}


def test_a_group_of_no_sane_size_is_no_rank_set() -> None:
    assert group_ranks("0-2,8") == (0, 1, 2, 8)
    for name in ("0-99999999999", f"0-{10**30}", "x", "0-131071,7"):
        with pytest.raises(ValueError, match=r"group|literal"):
            group_ranks(name)
