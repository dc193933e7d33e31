"""The logical order never contradicts the true one, and finds what collectives and messages prove."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._align_jobs import START_NS, Step, skewed
from lanterne.backend.align import lamport, matching
from lanterne.backend.align.frame import Log
from lanterne.blackbox_files import POINT_TO_POINT
from lanterne.collector.sim.model import Shape
from lanterne.nouns import Collective, group_name

SECOND = 1_000_000_000


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(8, 1, 1), (12, 2, 1), (4, 1, 4)]),
    jump=st.sampled_from([0, -10 * SECOND, SECOND]),
    missing=st.sampled_from([0.0, 0.1]),
)
def test_order_agrees_with_the_truth(seed: int, shape: tuple[int, int, int], jump: int, missing: float) -> None:
    dp, pp, tp = shape
    steps = [Step(host=0, at_ns=2 * SECOND, by_ns=jump)] if jump else []
    job = skewed(Shape(dp=dp, pp=pp, tp=tp, steps=20), seed=seed, steps=steps, missing=missing)
    found = lamport.logical(job.calls)
    truth = np.concatenate([job.entered_ns, job.completed_ns])
    rng = np.random.default_rng(seed)
    assert (found.stamp > 0).all()
    proved = 0
    for a, b in rng.integers(0, len(truth), (400, 2)).tolist():
        order = found.order(a, b)
        assert found.order(b, a) == {"before": "after", "after": "before", None: None}[order]
        if order is not None:
            proved += 1
            assert (truth[a] <= truth[b]) == (order == "before")
            assert (found.stamp[a] < found.stamp[b]) == (order == "before")
    if not missing:
        assert proved > 40


def call(
    rank: int, sequence: int, entered: int, completed: int, group: str = "0-1", op: str = "allreduce"
) -> Collective:
    done = START_NS + completed if completed else 0
    return Collective(
        rank=rank, group=group, sequence=sequence, op=op, entered_ns=START_NS + entered, completed_ns=done
    )


def test_entries_of_one_call_are_not_ordered() -> None:
    calls = matching.from_collectives([call(0, 0, 10, 90), call(1, 0, 5_000, 5_080)])
    found = lamport.logical(calls)
    assert found.order(found.event(0), found.event(1)) is None
    assert found.order(found.event(0), found.event(1, lamport.EXIT)) == "before"
    assert found.order(found.event(1, lamport.EXIT), found.event(0)) == "after"


def test_a_broadcast_and_a_call_with_a_missing_member_order_nothing_across_ranks() -> None:
    rows = [call(0, 0, 10, 20, op="broadcast"), call(1, 0, 10, 90, op="broadcast")]
    rows += [call(0, 0, 100, 120, group="0-2"), call(1, 0, 100, 120, group="0-2")]
    found = lamport.logical(matching.from_collectives(rows))
    events = range(8)
    across = [(a, b) for a in events for b in events if found.column[a] != found.column[b]]
    assert all(found.order(a, b) is None for a, b in across)


def test_a_pending_call_has_no_exit() -> None:
    found = lamport.logical(matching.from_collectives([call(0, 0, 10, 0), call(1, 0, 5, 0)]))
    assert found.order(found.event(0), found.event(1, lamport.EXIT)) is None
    assert found.stamp[found.event(0, lamport.EXIT)] == 0


def test_a_message_orders_two_ranks_that_share_no_call() -> None:
    rows = [call(0, 0, 10, 20, group="0"), call(1, 0, 1_000, 1_100, group="1")]
    sent = lamport.Message(source=0, sent_ns=START_NS + 30, target=1, received_ns=START_NS + 500)
    found = lamport.logical(matching.from_collectives(rows), [sent])
    assert found.order(found.event(0), found.event(1)) == "before"
    assert lamport.logical(matching.from_collectives(rows)).order(0, 1) is None


def test_a_contradiction_orders_nothing_instead_of_guessing() -> None:
    there = lamport.Message(source=0, sent_ns=20, target=1, received_ns=10)
    back = lamport.Message(source=1, sent_ns=20, target=0, received_ns=10)
    found = lamport.logical(matching.from_collectives([]), [there, back])
    assert not found.stamp.any()
    assert found.order(0, 3) is None


def pair(rank: int, entered: int, completed: int, number: int) -> Collective:
    """One side of a point-to-point call between ranks 0 and 1, as the wire tells it."""
    sequence = POINT_TO_POINT + number
    return call(rank, sequence, entered, completed, op="sendrecv")


@pytest.mark.parametrize(("number", "sender"), [(0, 0), (1, 1)])
def test_a_send_comes_before_its_receipt_and_not_the_other_way_round(number: int, sender: int) -> None:
    found = lamport.logical(matching.from_collectives([pair(0, 10, 90, number), pair(1, 40, 95, number)]))
    receiver = 1 - sender
    assert found.order(found.event(sender), found.event(receiver, lamport.EXIT)) == "before"
    assert found.order(found.event(receiver), found.event(sender, lamport.EXIT)) is None
    assert found.order(found.event(sender), found.event(receiver)) is None


def told(rank: int, phase: str, at: int) -> Log:
    return Log(
        name="command", rank=rank, step=1, time_ns=START_NS + at, monotonic_ns=at, body="", host="",
        attributes={"id": "c1", "phase": phase},
    )  # fmt: skip


def test_a_command_orders_ranks_whose_clocks_say_the_opposite() -> None:
    """Rank 0 received the order; rank 1 applied it, by a clock that is 10 s behind."""
    rows = [call(0, 0, 10, 20, group="0"), call(1, 0, -9_000_000_000, -8_000_000_000, group="1")]
    messages = lamport.command_messages([told(0, "received", 30), told(1, "applied", -9_500_000_000)])
    assert [(m.source, m.target) for m in messages] == [(0, 1)]
    found = lamport.logical(matching.from_collectives(rows), messages)
    assert found.order(found.event(0), found.event(1)) == "before"
    votes = [told(0, "committed", 50), told(1, "voted", 40), told(0, "voted", 41)]
    assert [(m.source, m.target) for m in lamport.command_messages(votes)] == [(1, 0)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_clocks_and_order_are_the_transitive_closure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, at = [], np.zeros(5, np.int64)
    for sequence in range(8):
        members = sorted(rng.choice(5, rng.integers(2, 4), replace=False).tolist())
        entered = at[members] + rng.integers(1, 50, len(members))
        done = entered.max() + rng.integers(1, 50, len(members))
        at[members] = np.where(rng.random(len(members)) < 0.5, done, entered)  # some calls overlap the next
        group = group_name(members)
        rows += [call(r, sequence, e, d, group=group) for r, e, d in zip(members, entered, done, strict=True)]
    calls = matching.from_collectives(rows)
    found = lamport.logical(calls)
    n = len(calls)
    time = np.concatenate([calls.entered_ns, calls.completed_ns])
    reach = np.zeros((2 * n, 2 * n), bool)
    for a in range(2 * n):
        for b in range(2 * n):
            same = calls.rank[a % n] == calls.rank[b % n]
            reach[a, b] = same and (time[a], a >= n, a) < (time[b], b >= n, b)
            reach[a, b] |= a < n <= b and calls.slot[a] == calls.slot[b - n]
    for middle in range(2 * n):
        reach |= reach[:, [middle]] & reach[[middle], :]
    for a in range(2 * n):
        past = np.append(np.flatnonzero(reach[:, a]), a) % n
        counted = {int(r): int((calls.rank[past] == r).sum()) for r in np.unique(calls.rank[past])}
        assert found.clock(a) == counted
        for b in range(2 * n):
            assert (found.order(a, b) == "before") == (a != b and bool(reach[a, b]))
