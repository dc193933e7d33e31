"""The clock exchange: the interval holds the truth, the sharpest exchange wins, nonsense is refused."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from lanterne.clock import SimulatedClock
from lanterne.collector.clock_sync import ClockSync, Snapshot

MS = 1_000_000


class Server:
    """A backend whose clock is ``ahead_ns`` ahead, behind a network with the given ways."""

    def __init__(self, clock: SimulatedClock, ahead_ns: int, ways: list[tuple[int, int]]) -> None:
        self.clock, self.ahead_ns, self.ways = clock, ahead_ns, list(ways)

    def fetch(self) -> bytes:
        there, back = self.ways.pop(0)
        self.clock.advance(there)
        received = self.clock.unix_ns() + self.ahead_ns
        self.clock.advance(50_000)
        sent = self.clock.unix_ns() + self.ahead_ns
        self.clock.advance(back)
        return json.dumps({"received_ns": received, "sent_ns": sent}).encode()


@given(
    ahead=st.integers(-3600 * 10**9, 3600 * 10**9),
    ways=st.lists(st.tuples(st.integers(0, 900 * MS), st.integers(0, 900 * MS)), min_size=4, max_size=4),
)
def test_the_true_offset_lies_within_half_the_round_trip(ahead: int, ways: list[tuple[int, int]]) -> None:
    clock = SimulatedClock()
    found = ClockSync(Server(clock, ahead, ways).fetch, clock).round()
    assert found is not None
    assert abs(found.offset_ns - ahead) <= found.round_trip_ns / 2 + 1
    assert found.round_trip_ns == min(a + b for a, b in ways)


def test_a_wall_clock_that_steps_during_the_exchange_spoils_it() -> None:
    clock = SimulatedClock()
    server = Server(clock, 0, [(MS, MS)])

    def fetch() -> bytes:
        body = server.fetch()
        clock.step_wall(50 * MS)
        return body

    assert ClockSync(fetch, clock).exchange() is None


def test_an_answer_that_is_no_time_is_refused() -> None:
    clock = SimulatedClock()
    for body in (b"", b"[]", b"{}", b'{"received_ns": "x", "sent_ns": 1}', b'{"received_ns": 9e30, "sent_ns": 1}'):
        assert ClockSync(lambda body=body: body, clock).exchange() is None  # type: ignore[misc]


def test_a_server_that_does_not_answer_gives_no_reading() -> None:
    def fetch() -> bytes:
        raise ConnectionRefusedError

    sync = ClockSync(fetch, SimulatedClock())
    assert sync.round() is None
    assert sync.best() is None


def test_the_event_carries_all_four_readings() -> None:
    assert Snapshot(1, 2, 3, 4, 5).attributes() == {"t0_ns": 1, "t1_ns": 2, "t2_ns": 3, "t3_ns": 4}
