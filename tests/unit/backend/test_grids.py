"""Metrics kept as arrays hold what the store holds, whatever came in, in whatever order, and whatever left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backend_rows import events, identity

from lanterne import wire
from lanterne.backend.api import grids
from lanterne.backend.api.grids import Grids
from lanterne.backend.store.batch import from_columns
from lanterne.backend.store.changes import BEYOND, COMMITS_KEPT
from lanterne.backend.store.events import EventStore
from lanterne.nouns import Event, Kind
from lanterne.settings import ServerSettings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    found = EventStore.open(ServerSettings(data=str(tmp_path), memory_limit="1GB"))
    yield found
    found.close()


def send(store: EventStore, rank: int, found: list[Event]) -> None:
    encoded = wire.encode(identity(rank), found)
    for signal, request, decode in (
        ("spans", encoded.traces, wire.decode_traces), ("points", encoded.metrics, wire.decode_metrics),
    ):  # fmt: skip
        if request is not None:
            store.submit(from_columns(signal, decode(request))).result()


def truth(store: EventStore, metric: str) -> dict[tuple[int, int], float]:
    sql = (
        "SELECT rank, step, sum(value) AS v FROM rank_steps WHERE metric = ? GROUP BY rank, step"
        if metric.endswith("_ms")
        else "SELECT rank, step, any_value(value) AS v FROM points WHERE name = ? GROUP BY rank, step"
    )
    return {(row["rank"], row["step"]): row["v"] for row in store.rows(sql, [metric])}


def held(grid: grids.Grid) -> dict[tuple[int, int], float]:
    steps, ranks = np.nonzero(~np.isnan(grid.values))
    return {(int(r), int(s) + grid.first): float(grid.values[s, r]) for s, r in zip(steps, ranks, strict=True)}


@pytest.mark.parametrize("metric", ["step_ms", "forward_ms", "training.loss"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_array_follows_the_store(store: EventStore, metric: str, seed: int) -> None:
    random_ = random.Random(seed)
    kept = Grids(store)
    pieces = [(rank, first) for rank in range(4) for first in (0, 7, 14, 21)]
    random_.shuffle(pieces)
    for rank, first in pieces:
        send(store, rank, events(7, first_step=first, first_sequence=first * 6, rank=rank, now_ns=10**18))
        if random_.random() < 0.6:
            grid, expected = kept.of("demo", 0, metric), truth(store, metric)
            assert grid.plain
            assert held(grid) == pytest.approx(expected)
            low, high = sorted(random_.choices(range(28), k=2))
            part = kept.part("demo", 0, metric, low, high)
            assert held(part) == pytest.approx({k: v for k, v in expected.items() if low <= k[1] <= high})
            for how, numpy_of in (("median", np.median), ("max", np.max)):
                over = {s: numpy_of([v for (_, at), v in expected.items() if at == s]) for _, s in expected}
                found = {s: v for s, v in enumerate(grid.over(how).tolist(), grid.first) if not np.isnan(v)}
                assert found == pytest.approx(over)


def test_only_what_changed_is_read_again(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Grids(store)
    send(store, 0, events(20))
    kept.of("demo", 0, "step_ms")
    asked: list[int] = []
    query = store.query
    monkeypatch.setattr(store, "query", lambda sql, params: asked.append(params["low"]) or query(sql, params))
    kept.of("demo", 0, "step_ms")
    assert asked == []
    send(store, 0, events(5, first_step=20, first_sequence=200))
    assert kept.of("demo", 0, "step_ms").last == 24
    assert asked == [20]


def test_rows_that_left_leave_the_array(store: EventStore) -> None:
    kept = Grids(store)
    send(store, 0, events(20))
    assert kept.of("demo", 0, "step_ms").first == 0
    store.work(lambda connection: connection.execute("DELETE FROM rank_steps WHERE step < 8"))
    assert kept.of("demo", 0, "step_ms").first == 8


def test_a_series_of_several_values_a_step_is_no_array(store: EventStore) -> None:
    one = Event(kind=Kind.METRIC, name="hw.power", sequence=0, lamport=0, unix_ns=1, monotonic_ns=1, step=3, value=1.0)
    send(store, 0, [one, replace(one, sequence=1, unix_ns=2, value=9.0)])
    assert not Grids(store).of("demo", 0, "hw.power").plain


def test_the_history_of_changes_is_bounded_and_says_when_it_does_not_know(store: EventStore) -> None:
    send(store, 0, events(1))
    before, another = store.changes.version("demo", 0), store.changes.version("another", 0)
    assert store.changes.lowest("demo", 0, before) == BEYOND
    batch = from_columns("spans", wire.decode_traces(wire.encode(identity(0), events(1)).traces))
    for _ in range(COMMITS_KEPT):
        store.changes.note([batch], [])
    assert store.changes.lowest("demo", 0, before) is None
    assert store.changes.lowest("demo", 0, store.changes.version("demo", 0)) == BEYOND
    assert store.changes.version("another", 0) == another
