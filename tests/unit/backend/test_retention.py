"""Old days move to Parquet and can still be asked; what is too old or too much goes; a stepped clock takes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_rows import events, identity

from lanterne import wire
from lanterne.backend.store.batch import Batch, from_columns
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.retention import DAY_NS, HOT_DAYS, Keeper, bytes_used
from lanterne.clock import SimulatedClock
from lanterne.settings import ServerSettings

START = 20_000 * DAY_NS + DAY_NS // 2


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(unix_ns=START)


def opened(folder: Path, clock: SimulatedClock) -> EventStore:
    return EventStore(folder / "events.duckdb", queue_bytes=1 << 26, clock=clock)


@pytest.fixture
def store(tmp_path: Path, clock: SimulatedClock) -> Iterator[EventStore]:
    found = opened(tmp_path, clock)
    yield found
    found.close()


def batch(rank: int, first: int = 0) -> Batch:
    request = wire.encode(identity(rank), events(5, first_sequence=first, now_ns=START)).traces
    assert request is not None
    return from_columns("spans", wire.decode_traces(request))


def counts(store: EventStore) -> tuple[int, int]:
    """Rows in the database and rows in all."""
    sql = "SELECT (SELECT count(*) FROM spans) AS hot, (SELECT count(*) FROM spans_history) AS whole"
    row = store.rows(sql)[0]
    return row["hot"], row["whole"]


def keeper(store: EventStore, clock: SimulatedClock, *, days: float = 0.0, size: int = 0) -> Keeper:
    return Keeper(store, ServerSettings(retention_days=days, retention_bytes=size), clock)


def test_days_that_are_over_move_to_parquet_and_answer_as_before(store: EventStore, clock: SimulatedClock) -> None:
    store.submit(batch(0)).result()
    clock.advance(DAY_NS)
    store.submit(batch(1)).result()
    clock.advance(HOT_DAYS * DAY_NS)
    before = store.query("SELECT * FROM spans_history ORDER BY rank, sequence").to_pylist()
    keeper(store, clock).run_once()
    assert counts(store) == (20, 40)
    assert [f.name for f in store.tier.glob("spans-*.parquet")] == ["spans-20241004.parquet"]
    assert store.query("SELECT * FROM spans_history ORDER BY rank, sequence").to_pylist() == before


def test_a_replay_of_rows_that_have_moved_stores_nothing_also_after_a_restart(
    tmp_path: Path, clock: SimulatedClock
) -> None:
    store = opened(tmp_path, clock)
    store.submit(batch(0)).result()
    clock.advance((1 + HOT_DAYS) * DAY_NS)
    keeper(store, clock).run_once()
    assert counts(store) == (0, 20)
    store.close()
    store = opened(tmp_path, clock)
    assert store.submit(batch(0)).result().duplicates == 20
    assert store.submit(batch(0, first=1_000)).result().stored == 20
    assert counts(store) == (20, 40)
    store.close()


def test_late_rows_of_a_day_join_its_file(store: EventStore, clock: SimulatedClock) -> None:
    store.submit(batch(0)).result()
    clock.advance((1 + HOT_DAYS) * DAY_NS)
    keeper(store, clock).run_once()
    clock.step_wall(-(1 + HOT_DAYS) * DAY_NS)  # received again on the day that has moved
    store.submit(batch(1)).result()
    clock.step_wall((1 + HOT_DAYS) * DAY_NS)
    keeper(store, clock).run_once()
    assert counts(store) == (0, 40)
    assert len(list(store.tier.glob("*.parquet"))) == 1
    assert not list(store.tier.glob("*.partial"))


def test_too_old_and_too_much_goes_the_oldest_first(store: EventStore, clock: SimulatedClock) -> None:
    for rank in range(3):
        store.submit(batch(rank)).result()
        clock.advance(DAY_NS)
    clock.advance(HOT_DAYS * DAY_NS)
    keeper(store, clock).run_once()
    assert counts(store) == (0, 60)
    keeper(store, clock, days=HOT_DAYS + 2).run_once()
    assert [r["rank"] for r in store.rows("SELECT DISTINCT rank FROM spans_history ORDER BY rank")] == [1, 2]
    oldest = min(store.tier.glob("*.parquet"))
    keeper(store, clock, size=bytes_used(store) - 1).run_once()
    assert not oldest.exists()
    assert [r["rank"] for r in store.rows("SELECT DISTINCT rank FROM spans_history")] == [2]


def test_22_a_clock_stepped_back_a_day_loses_and_repeats_nothing(store: EventStore, clock: SimulatedClock) -> None:
    store.submit(batch(0)).result()
    clock.step_wall(-DAY_NS)
    assert store.submit(batch(0)).result().duplicates == 20
    assert store.submit(batch(0, first=500)).result().stored == 20
    keeper(store, clock, days=1.0).run_once()
    clock.step_wall(DAY_NS)
    keeper(store, clock, days=1.0).run_once()
    assert counts(store) == (40, 40)
