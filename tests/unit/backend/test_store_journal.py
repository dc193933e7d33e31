"""The journal: what was answered is stored, once, whatever happens to the process, the database or a file."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from backend_rows import events
from test_store_events import count, open_store, spans

from lanterne.backend.store import backup, journal
from lanterne.backend.store.batch import Batch, from_columns
from lanterne.backend.store.events import QueueFull
from lanterne.backend.store.journal import Journal
from lanterne.backend.store.writing import Writing
from lanterne.errors import LanterneError, StoreUnavailable
from lanterne.settings import ServerSettings

ROWS = 20


def foreign() -> Batch:
    """Rows without a sequence: nothing but the journal's number tells whether they are stored."""
    batch = spans(events(5))
    columns = batch.table.to_pydict()
    columns["sequence"] = [-1] * ROWS
    columns["attributes"] = [dict(row or ()) for row in columns["attributes"]]
    return from_columns("spans", columns)


def killed(folder: Path, *, stored: bool) -> None:
    """A process that answered six batches, of ours and of strangers, and died before or after it stored them."""
    code = (
        "import os, sys, threading\nsys.path[:0] = sys.argv[2:]\nfrom pathlib import Path\n"
        "from test_store_events import open_store, spans, count\nfrom test_store_journal import foreign\n"
        "from backend_rows import events\nstore = open_store(Path(sys.argv[1]))\n"
        f"gate = threading.Event()\nif not {stored}:\n"
        "    threading.Thread(target=store.work, args=(lambda _: gate.wait(60),), daemon=True).start()\n"
        "for rank in range(3):\n    store.accept(spans(events(5), rank)).result()\n"
        "    store.accept(foreign()).result()\n"
        f"assert not {stored} or count(store) == {6 * ROWS}\nos.kill(os.getpid(), 9)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, str(folder), here], timeout=120, check=False)
    assert done.returncode == -9


@pytest.mark.parametrize("stored", [False, True])
def test_answered_rows_of_a_killed_process_are_stored_once(tmp_path: Path, stored: bool) -> None:
    killed(tmp_path, stored=stored)
    for _ in range(2):
        store = open_store(tmp_path)
        assert (count(store), store.recovered) == (6 * ROWS, "")
        assert store.rows("SELECT count(*) AS n FROM rank_steps WHERE metric = 'step_ms'") == [{"n": 6 * 5}]
        store.close()
    assert not list((tmp_path / "journal").iterdir()), "all is in the file"


def test_a_damaged_log_of_the_database_costs_nothing_that_was_answered(tmp_path: Path) -> None:
    killed(tmp_path, stored=True)
    log = tmp_path / "events.duckdb.wal"
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 4
    log.write_bytes(raw)
    store = open_store(tmp_path)
    assert "kept the first" in store.recovered
    assert count(store) == 6 * ROWS
    store.close()


def test_a_back_up_of_a_killed_server_holds_what_was_answered(tmp_path: Path) -> None:
    killed(tmp_path / "data", stored=False)
    backup.export(ServerSettings(data=str(tmp_path / "data"), memory_limit="1GB"), tmp_path / "out")
    assert pq.read_metadata(tmp_path / "out" / "spans.parquet").num_rows == 6 * ROWS


def filled(folder: Path, batches: int = 3) -> Path:
    written = Journal(folder)
    for rank in range(batches):
        assert written.append([spans(events(5), rank)]) == rank + 1
    written.close()
    return folder / f"{1:016d}.log"


def test_a_torn_end_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    raw = filled(tmp_path / "whole").read_bytes()
    ends = [0]
    for _ in range(3):
        ends.append(ends[-1] + journal._HEADER.size + journal._HEADER.unpack_from(raw, ends[-1])[1])
    assert ends[-1] == len(raw)
    for cut in range(0, len(raw), 211):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / f"{1:016d}.log").write_bytes(raw[:cut])
        found = Journal(folder)
        whole = sum(end <= cut for end in ends[1:])
        assert [n for n, _ in found.after(0)] == list(range(1, whole + 1))
        assert found.damage == ""
        assert found.append([spans(events(1))]) == whole + 1
        found.close()
        assert [n for n, _ in Journal(folder).after(0)] == list(range(1, whole + 2))


def test_a_damaged_record_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    path = filled(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    found = Journal(tmp_path)
    assert [n for n, _ in found.after(0)] == [1, 3]
    assert found.damage.startswith("the journal was damaged: 1 records could not be read")
    assert found.append([spans(events(1))]) == 4


def test_segments_go_when_they_are_stored_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)
    filled(tmp_path, 5)
    found = Journal(tmp_path)
    assert [n for n, _ in found.after(3)] == [4, 5]
    size = (tmp_path / f"{5:016d}.log").stat().st_size
    found.release(4, kept_bytes=size)
    assert [n for n, _ in Journal(tmp_path).after(0)] == [5]
    found.close(stored_all=True)
    assert not list(tmp_path.iterdir())


def test_a_query_sees_what_was_answered_before_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    gate = threading.Event()
    blocked = threading.Thread(target=store.work, args=(lambda _: gate.wait(30),))
    blocked.start()
    store.accept(spans(events(5))).result()
    threading.Timer(0.3, gate.set).start()
    assert count(store) == ROWS
    blocked.join()
    store.close()


def test_answered_rows_outlive_a_commit_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database fails for a while: it says so, refuses, and stores what was answered when it works again."""
    store = open_store(tmp_path)
    commit, broken = Writing.commit, threading.Event()

    def failing(self: Writing, *arguments: object) -> object:
        if broken.is_set():
            raise duckdb.IOException("no space left")
        return commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Writing, "commit", failing)
    broken.set()
    store.accept(spans(events(5))).result()
    with pytest.raises(StoreUnavailable, match="no space left"):
        store.submit(spans(events(5), 1)).result()
    assert "no space left" in store.trouble
    broken.clear()
    while store.trouble:
        pass
    store.accept(spans(events(5), 2)).result()
    assert count(store) == 2 * ROWS
    store.work(lambda _: None)  # the writer is done with what came before
    assert store.queued_bytes == 0
    store.close()


def test_rows_that_the_tables_refuse_are_not_answered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    batch = spans(events(2))
    nulls = batch.table.set_column(7, "step", [[None] * batch.rows])
    with pytest.raises(LanterneError, match="step: a value is missing"):
        store.accept(Batch("spans", nulls, batch.runs))
    store.close()


def test_23_a_writer_that_stands_still_fills_the_queue_and_refuses_the_next(tmp_path: Path) -> None:
    """What is answered and not stored counts: the memory of the server is bounded, and nothing answered is lost."""
    batch = spans(events(20))
    store = open_store(tmp_path, queue_bytes=batch.nbytes * 2)
    gate = threading.Event()
    blocked = threading.Thread(target=store.work, args=(lambda _: gate.wait(30),))
    blocked.start()
    for rank in range(2):
        store.accept(spans(events(20), rank)).result()
    with pytest.raises(QueueFull, match="bytes wait for the writer"):
        store.accept(batch)
    gate.set()
    blocked.join()
    assert count(store) == 160
    store.work(lambda _: None)
    store.accept(spans(events(20), 2)).result()
    assert count(store) == 240
    store.close()
