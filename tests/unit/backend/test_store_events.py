"""The event store: answered means stored, once; refusals are clear; what was committed survives."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from backend_rows import events, identity

from lanterne import wire
from lanterne.backend.store.batch import Batch, from_columns
from lanterne.backend.store.events import EventStore, QueueFull
from lanterne.backend.store.views import views
from lanterne.errors import LanterneError, StoreUnavailable
from lanterne.nouns import Event, Kind
from lanterne.settings import ServerSettings


def open_store(folder: Path, **more: object) -> EventStore:
    return EventStore.open(ServerSettings(**{"data": str(folder), "memory_limit": "1GB", **more}))  # type: ignore[arg-type]


def spans(found: list[Event], rank: int = 0) -> Batch:
    request = wire.encode(identity(rank), found).traces
    assert request is not None
    return from_columns("spans", wire.decode_traces(request))


def points(found: list[Event], rank: int = 0) -> Batch:
    request = wire.encode(identity(rank), found).metrics
    assert request is not None
    return from_columns("points", wire.decode_metrics(request))


def count(store: EventStore, table: str = "spans") -> int:
    return int(store.rows(f"SELECT count(*) AS n FROM {table}")[0]["n"])


def test_a_repeated_batch_is_stored_once_also_after_a_restart(tmp_path: Path) -> None:
    batch = spans(events(5))
    store = open_store(tmp_path)
    assert store.submit(batch).result().stored == 20
    assert store.submit(batch).result().duplicates == 20
    store.close()
    store = open_store(tmp_path)
    receipt = store.submit(batch).result()
    assert (receipt.stored, receipt.duplicates, count(store)) == (0, 20, 20)
    assert store.quality.counts() == {"duplicate": 20}
    store.close()


def test_signals_share_one_counter_and_none_hides_the_other(tmp_path: Path) -> None:
    store, found = open_store(tmp_path), events(5)
    late, early = spans(found), points(found)  # the points' sequences lie between those of the spans
    assert store.submit(late).result().duplicates == 0
    assert store.submit(early).result().stored == 5
    store.close()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_any_cut_of_batches_gives_each_row_once(tmp_path: Path, seed: int) -> None:
    """A relay may reorder batches, cut them anew, and send some twice; three starts lie between."""
    chance = random.Random(seed)
    found = [e for e in events(60) if e.kind is not Kind.METRIC and e.kind is not Kind.EVENT]
    pieces: list[list[Event]] = []
    for _ in range(3):
        order = found[:]
        if chance.random() < 0.5:
            order = order[::2] + order[1::2]  # two halves that lie inside each other
        at = 0
        while at < len(order):
            size = chance.randint(1, 40)
            pieces.append(order[at : at + size])
            at += size
    chance.shuffle(pieces)
    third = len(pieces) // 3
    for part in (pieces[:third], pieces[third : 2 * third], pieces[2 * third :]):
        store = open_store(tmp_path)
        for future in [store.submit(spans(piece)) for piece in part]:
            future.result()
        stored = {row["sequence"] for row in store.rows("SELECT sequence FROM spans")}
        total = count(store)
        store.close()
    assert (total, stored) == (len(found), {e.sequence for e in found})


def test_more_batches_out_of_order_than_the_marks_remember(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    found = [e for e in events(100) if e.kind is Kind.STEP]
    for event in [*found[1::2], *found[0::2], *found]:
        store.submit(spans([event])).result()
    assert count(store) == 100
    store.close()


def test_rows_of_foreign_programs_have_no_sequence_and_are_all_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    columns = wire.decode_traces(wire.encode(identity(), events(2)).traces)  # type: ignore[arg-type]
    columns["sequence"] = [-1] * len(columns["sequence"])
    assert store.append("spans", columns).stored == store.append("spans", columns).stored == 8
    assert count(store) == 16
    store.close()


def test_a_full_queue_refuses_at_once_and_takes_again_when_drained(tmp_path: Path) -> None:
    batch = spans(events(20))
    store = open_store(tmp_path, queue_bytes=batch.nbytes * 2)
    gate = threading.Event()
    blocked = threading.Thread(target=store.work, args=(lambda _: gate.wait(30),))
    blocked.start()
    while not store._queue.empty():  # the writer has taken the work and stands in it
        pass
    taken = [store.submit(spans(events(20), rank)) for rank in range(2)]
    with pytest.raises(QueueFull, match="bytes wait for the writer"):
        store.submit(batch)
    assert not any(f.done() for f in taken)
    gate.set()
    blocked.join()
    assert [f.result().stored for f in taken] == [80, 80]
    assert store.submit(spans(events(20), 3)).result().stored == 80
    assert store.queued_bytes == 0
    store.close()


def test_one_bad_batch_does_not_fail_the_others_of_its_commit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    good = [spans(events(3), rank) for rank in range(3)]
    unlike = spans(events(3), 3)
    table = unlike.table
    nulls = pa.array([None] * table.num_rows, table.schema.field("step").type)
    broken = Batch("spans", table.set_column(table.column_names.index("step"), "step", nulls), unlike.runs)
    gate = threading.Event()
    blocked = threading.Thread(target=store.work, args=(lambda _: gate.wait(30),))
    blocked.start()
    futures: list[Future[object]] = [store.submit(b) for b in (good[0], broken, *good[1:])]  # type: ignore[misc]
    gate.set()
    blocked.join()
    with pytest.raises(LanterneError, match="NOT NULL"):
        futures[1].result()
    assert [f.result().stored for f in futures[:1] + futures[2:]] == [12, 12, 12]  # type: ignore[attr-defined]
    assert count(store) == 36
    store.close()


def test_roll_ups_follow_the_rows_in_the_same_commit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.submit(spans(events(3))).result()
    store.submit(spans(events(3))).result()
    rows = store.rows("SELECT metric, count(*) AS n, min(value) AS v FROM rank_steps GROUP BY metric ORDER BY metric")
    assert [tuple(r.values()) for r in rows] == [
        ("backward_ms", 3, 60.0),
        ("forward_ms", 3, 30.0),
        ("step_ms", 3, 100.0),
    ]
    store.append_waits(
        {
            "job": ["demo"] * 2, "attempt": [0] * 2, "group_name": ["0-3"] * 2, "group_sequence": [4, 5],
            "step": [2] * 2, "rank": [1] * 2, "bytes": [8] * 2, "lateness_ms": [1.0, 5.0], "wait_ms": [2.0, 3.0],
            "transfer_ms": [1.0, 1.0], "error_ms": [0.1, 0.1],
        }
    )  # fmt: skip
    rows = store.rows("SELECT metric, value FROM rank_steps WHERE rank = 1 ORDER BY metric")
    assert [tuple(r.values()) for r in rows] == [("lateness_ms", 5.0), ("transfer_ms", 2.0), ("wait_ms", 5.0)]
    store.close()


def test_subscribers_hear_of_commits_and_a_bad_one_harms_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    heard: list[int] = []

    def bad(_: object) -> None:
        raise RuntimeError("no")

    store.subscribe(bad)
    leave = store.subscribe(lambda batches: heard.append(sum(b.rows for b in batches)))
    store.submit(spans(events(2))).result()
    store.work(lambda _: None)
    leave()
    store.submit(spans(events(2), 1)).result()
    store.work(lambda _: None)
    assert heard == [8]
    store.close()


def test_a_closed_store_refuses_clearly(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    future = store.submit(spans(events(2)))
    store.close()
    store.close()
    assert future.result().stored == 8
    with pytest.raises(StoreUnavailable):
        store.submit(spans(events(2)))
    with pytest.raises(StoreUnavailable):
        store.query("SELECT 1")


def test_a_second_process_is_told_that_the_store_is_held(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    code = (
        "from lanterne.settings import ServerSettings\nfrom lanterne.backend.store.events import EventStore\n"
        f"EventStore.open(ServerSettings(data={str(tmp_path)!r}, memory_limit='1GB'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "another process holds the event store" in done.stderr
    store.close()


def _killed_with_a_log(folder: Path) -> tuple[Path, int]:
    """A store whose process died: 6 commits lie in the write-ahead log only."""
    code = (
        "import os, sys\nsys.path[:0] = sys.argv[2:]\nfrom backend_rows import events\n"
        "from test_store_events import open_store, spans\nfrom pathlib import Path\n"
        "store = open_store(Path(sys.argv[1]))\n"
        "for rank in range(6):\n    store.submit(spans(events(5), rank)).result()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(folder), here], timeout=120, check=False)
    log = folder / "events.duckdb.wal"
    assert log.stat().st_size > 0
    return log, 6 * 20


def test_rows_of_a_killed_process_are_there(tmp_path: Path) -> None:
    _, rows = _killed_with_a_log(tmp_path)
    store = open_store(tmp_path)
    assert (count(store), store.recovered) == (rows, "")
    store.close()


def test_a_damaged_log_is_set_aside_and_its_sound_beginning_kept(tmp_path: Path) -> None:
    log, rows = _killed_with_a_log(tmp_path)
    raw = bytearray(log.read_bytes())
    raw[len(raw) * 2 // 3] ^= 4
    log.write_bytes(raw)
    store = open_store(tmp_path)
    kept = count(store)
    assert 0 < kept < rows
    assert kept % 20 == 0
    assert "kept the first" in store.recovered
    assert store.ready
    aside = list(tmp_path.glob("events.duckdb.wal.damaged-*"))
    assert [a.read_bytes() for a in aside] == [bytes(raw)]
    for rank in range(6):  # what a spool would send again
        store.submit(spans(events(5), rank)).result()
    assert count(store) == rows
    store.close()


def test_the_store_reads_and_writes_no_other_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    for sql in (
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM '{secret}'",
        "SELECT * FROM read_text('/etc/passwd')",
    ):
        with pytest.raises(duckdb.PermissionException):
            store.query(sql)
    with pytest.raises(StoreUnavailable):
        store.copy_out("SELECT 1 AS a", {}, tmp_path / "out.parquet")
    with pytest.raises(duckdb.Error):
        store.work(lambda c: c.execute("SET enable_external_access = true"))
    store.close()


def test_a_slow_query_is_interrupted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreUnavailable, match="took longer"):
        store.query(
            "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range = 7", timeout_s=0.2
        )
    store.close()


@pytest.mark.parametrize("view", views(), ids=lambda v: v.name)
def test_each_view_runs_and_its_columns_are_documented(tmp_path: Path, view: object) -> None:
    store = open_store(tmp_path)
    store.submit(spans(events(3))).result()
    found = store.query(f"SELECT * FROM {view.name}")  # type: ignore[attr-defined]
    assert found.column_names == list(view.columns)  # type: ignore[attr-defined]
    assert view.says  # type: ignore[attr-defined]
    store.close()
