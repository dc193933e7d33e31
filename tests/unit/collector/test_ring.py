"""The black box: what was written is read, once, in order, whole, or counted as lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanterne import blackbox_files as blackbox
from lanterne.blackbox import BlackBox
from lanterne.blackbox_files import METRICS_RECORD, PHASE_RECORD, STEP_RECORD
from lanterne.collector.ring import Ring
from lanterne.nouns import Identity, Kind


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path, 3, 1024)


def test_everything_comes_back_as_it_was_written(ring: Ring, tmp_path: Path) -> None:
    now = time.monotonic_ns()
    ring.span(STEP_RECORD, 0, 0, 7, now, 5_000)
    ring.span(PHASE_RECORD, 3, ring.intern("forward"), 7, now + 5_001, 2_000)
    ring.metric("training.loss", 7, now + 8_000, float("inf"), "layer")
    ring.event("batch", 7, now + 9_000, "[]sample_ids", (3.0, 17.0), "fingerprint", (1 << 64) - 1)
    ring.note("exception", 7, now + 10_000, {"type": "ValueError"}, "größer")
    step, phase, loss, batch, note = BlackBox(tmp_path, 3).drain()
    assert (step.kind, step.step, step.duration_ns, step.monotonic_ns) == (Kind.STEP, 7, 5_000, now)
    assert (phase.kind, phase.name, phase.attributes) == (Kind.PHASE, "forward", {"count": 3})
    assert (loss.name, loss.value, loss.attributes) == ("training.loss", float("inf"), {"lanterne.label": "layer"})
    assert batch.attributes == {"sample_ids": "3,17", "fingerprint": "f" * 16}
    assert (note.name, note.attributes, note.body) == ("exception", {"type": "ValueError"}, "größer")
    assert [e.sequence for e in (step, phase, loss, batch, note)] == [0, 1, 2, 3, 4]
    assert abs(step.unix_ns - time.time_ns()) < 60_000_000_000


@given(bursts=st.lists(st.integers(0, 3_000), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_read_or_counted_across_wrap_arounds(tmp_path: Path, bursts: list[int]) -> None:
    ring = Ring(tmp_path, 0, 1024)
    box, name, written, seen = BlackBox(tmp_path, 0), ring.intern("other"), 0, []
    for burst in bursts:
        for _ in range(burst):
            ring.span(PHASE_RECORD, 1, name, written, written + 1, 0)
            written += 1
        while found := box.drain():
            seen += [e.step for e in found]
    lost = box.counts().get("ring_dropped", 0)
    assert len(seen) + lost == written
    assert seen == sorted(set(seen))
    assert seen[-100:] == list(range(max(0, written - 100), written))[-len(seen[-100:]) :]


def test_a_reader_beside_a_fast_writer_never_sees_a_torn_record(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 0, 1024)
    names = ring.intern(blackbox.SEPARATOR.join("abcdefgh"))
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            ring.record(METRICS_RECORD, 0xFF, names, n, n, (float(n),) * 8)

    writer = threading.Thread(target=write)
    writer.start()
    box, read = BlackBox(tmp_path, 0), 0
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for event in box.drain(500):
                read += 1
                assert event.value == float(event.step) == float(event.monotonic_ns)
    finally:
        stop.set()
        writer.join()
    assert read > 1_000


def test_threads_write_without_losing_records(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 0, 1 << 14)
    name = ring.intern("other")

    def write(k: int) -> None:
        for i in range(2_000):
            ring.span(PHASE_RECORD, 1, name, k * 2_000 + i, 1, 0)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    box, seen = BlackBox(tmp_path, 0), []
    while found := box.drain():
        seen += [e.step for e in found]
    assert sorted(seen) == list(range(8_000))


def test_a_restarted_reader_goes_on_and_repeats_nothing(ring: Ring, tmp_path: Path) -> None:
    (tmp_path / "rank-3.json").write_text(json.dumps({"identity": {"job": "j", "world_size": 4}}), encoding="utf-8")
    for step in range(10):
        ring.metric("x", step, step + 1, 1.0)
        ring.note("n", step, step + 1, {})
    first = BlackBox(tmp_path, 3)
    before = first.drain()
    state = json.loads(json.dumps(first.state()))
    ring.metric("x", 10, 11, 1.0)
    second = BlackBox(tmp_path, 3, state)
    after = second.drain()
    assert [e.step for e in after] == [10]
    assert after[0].sequence == before[-1].sequence + 1
    assert after[0].lamport > before[-1].lamport
    assert second.identity == Identity(job="j", world_size=4)


def test_a_new_trainer_under_the_same_name_is_read_from_its_beginning(ring: Ring, tmp_path: Path) -> None:
    ring.metric("x", 0, 1, 1.0)
    box = BlackBox(tmp_path, 3)
    assert len(box.drain()) == 1
    again = Ring(tmp_path, 3, 1024)
    again.metric("x", 0, 1, 2.0)
    fresh = BlackBox(tmp_path, 3, box.state())
    (event,) = fresh.drain()
    assert (event.value, event.sequence) == (2.0, 1)


def test_progress_is_seen_while_the_phase_lasts(ring: Ring, tmp_path: Path) -> None:
    box = BlackBox(tmp_path, 3)
    assert box.progress().step == -1
    ring.progress(12, ring.intern("backward"), 1_000, 2_000)
    found = box.progress()
    assert (found.step, found.phase, found.phase_since_monotonic_ns, found.closed) == (12, "backward", 1_000, False)
    ring.say_closed()
    assert box.progress().closed


def test_notes_are_bounded_and_the_loss_is_counted(ring: Ring, tmp_path: Path) -> None:
    for _ in range(200):
        ring.note("n", 0, 1, {}, "x" * 60_000)
    assert (tmp_path / "rank-3.notes").stat().st_size <= 8 << 20
    assert BlackBox(tmp_path, 3).counts()["notes_dropped"] > 0


def test_a_half_written_note_waits_for_its_end(ring: Ring, tmp_path: Path) -> None:
    ring.note("n", 0, 1, {})
    with (tmp_path / "rank-3.notes").open("ab") as file:
        file.write(b'{"name": "late", "t": 2')
    box = BlackBox(tmp_path, 3)
    assert [e.name for e in box.drain()] == ["n"]
    with (tmp_path / "rank-3.notes").open("ab") as file:
        file.write(b"}\n")
    assert [e.name for e in box.drain()] == ["late"]


def test_records_outlive_a_killed_writer(tmp_path: Path) -> None:
    script = (
        "import sys, os, pathlib; from lanterne.collector.ring import Ring\n"
        "ring = Ring(pathlib.Path(sys.argv[1]), 0, 1024); name = ring.intern('forward')\n"
        "n = 0\n"
        "while True:\n"
        "    ring.span(2, 1, name, n, n + 1, 5); ring.progress(n, name, n, n); n += 1\n"
        "    if n == 500: print('ready', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    box, seen = BlackBox(tmp_path, 0), []
    while found := box.drain():
        seen += [e.step for e in found]
    assert len(seen) >= 400
    assert seen == list(range(seen[0], seen[-1] + 1))
    assert box.progress().step in {seen[-1], seen[-1] - 1}


def test_a_full_string_table_costs_names_and_not_training(ring: Ring, tmp_path: Path) -> None:
    for i in range(400):
        ring.intern(f"{i}-" + "x" * 4_000)
    ring.metric("late name", 0, 1, 5.0)
    (event,) = BlackBox(tmp_path, 3).drain()
    assert event.value == 5.0
    assert BlackBox(tmp_path, 3).counts()["notes_dropped"] > 0
