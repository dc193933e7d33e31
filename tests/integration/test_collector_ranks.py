"""Two real ranks under torchrun: collectives meet by (group, sequence), the late rank is the one that enters last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lanterne.blackbox import BlackBox
from lanterne.blackbox_files import POINT_TO_POINT
from lanterne.collector import native
from lanterne.nouns import Event, Kind

pytestmark = pytest.mark.slow
JOB = Path(__file__).with_name("collector_job.py")
SLOW, ONSET = 1, 20


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ, "LANTERNE_DIR": str(folder), "LANTERNE_JOB": "ranks", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **more,
    }  # fmt: skip


def torchrun(*arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(JOB), *arguments,
    ]  # fmt: skip


def events(folder: Path, rank: int) -> list[Event]:
    box, out = BlackBox(folder / "ranks" / "0", rank), []
    while found := box.drain():
        out += found
    return out


@pytest.fixture(scope="module")
def tap() -> None:
    try:
        native.build()
    except native.TapUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="module")
def run(tap: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        torchrun("on"), env=environment(folder), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def collectives(found: list[Event]) -> dict[tuple[str, int], Event]:
    calls = [e for e in found if e.kind is Kind.COLLECTIVE]
    by_slot = {(str(e.attributes["lanterne.group"]), int(e.attributes["lanterne.group_sequence"])): e for e in calls}
    assert len(by_slot) == len(calls), "a slot occurs twice"
    return by_slot


def test_every_bucket_meets_in_the_same_slot_on_both_ranks(run: tuple[Path, str]) -> None:
    one, two = (collectives(events(run[0], rank)) for rank in (0, 1))
    world = {slot for slot in one if slot[0] == "0-1" and slot[1] < POINT_TO_POINT}
    assert world == {slot for slot in two if slot[0] == "0-1" and slot[1] < POINT_TO_POINT}
    sequences = sorted(sequence for _, sequence in world)
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    buckets = [
        slot for slot in world if one[slot].name == "allreduce" and one[slot].attributes["lanterne.bytes"] > 1000
    ]
    assert len(buckets) >= 40
    for slot in world:
        a, b = one[slot], two[slot]
        assert (a.name, a.step, a.attributes["lanterne.bytes"]) == (b.name, b.step, b.attributes["lanterne.bytes"])
        assert a.duration_ns > 0
        assert b.duration_ns > 0


def test_the_slow_rank_enters_last_and_waits_least(run: tuple[Path, str]) -> None:
    ranks = [collectives(events(run[0], rank)) for rank in (0, 1)]
    first: dict[int, tuple[str, int]] = {}  # step -> its first bucket
    for slot, event in sorted(ranks[0].items(), key=lambda item: item[0][1]):
        if event.step > ONSET and slot[0] == "0-1" and slot[1] < POINT_TO_POINT:
            first.setdefault(event.step, slot)
    pairs = [(ranks[1 - SLOW][slot], ranks[SLOW][slot]) for slot in first.values()]
    assert len(pairs) >= 19
    assert sum(slow.monotonic_ns > other.monotonic_ns for other, slow in pairs) >= 0.75 * len(pairs)
    assert sum(slow.duration_ns < other.duration_ns for other, slow in pairs) >= 0.75 * len(pairs)


def test_subgroups_and_point_to_point_are_named_by_their_ranks(run: tuple[Path, str]) -> None:
    for rank in (0, 1):
        found = collectives(events(run[0], rank))
        assert sorted(s for g, s in found if g == str(rank)) == [0, 1, 2, 3]
        pairs = {slot: e for slot, e in found.items() if slot[1] >= POINT_TO_POINT}
        assert [s - POINT_TO_POINT for _, s in sorted(pairs)] == [0, 2, 4, 6]
        assert {e.name for e in pairs.values()} == {"sendrecv"}
        assert {e.attributes["lanterne.direction"] for e in pairs.values()} == {"send" if rank == 0 else "recv"}


def test_what_precedes_a_collective_anywhere_precedes_what_follows_it(run: tuple[Path, str]) -> None:
    ranks = [events(run[0], rank) for rank in (0, 1)]
    for before, after in ((0, 1), (1, 0)):
        for slot, entered in collectives(ranks[before]).items():
            if slot[0] != "0-1" or slot[1] >= POINT_TO_POINT:
                continue
            met = collectives(ranks[after])[slot]
            ended = [e for e in ranks[before] if e.monotonic_ns + e.duration_ns < entered.monotonic_ns]
            assert not ended or max(e.lamport for e in ended) < met.lamport
    for found in ranks:
        assert [e.lamport for e in found] == sorted(e.lamport for e in found)


def test_training_is_the_same_bit_for_bit(run: tuple[Path, str], tmp_path: Path) -> None:
    done = subprocess.run(
        torchrun("off"), env=environment(tmp_path), capture_output=True, text=True, timeout=200, check=True
    )
    line = next(x for x in done.stdout.splitlines() if x.startswith("weights"))
    assert line == next(x for x in run[1].splitlines() if x.startswith("weights"))
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_leaves_its_pending_collective_and_stacks_come_on_the_signal(tap: None, tmp_path: Path) -> None:
    job = subprocess.Popen(
        torchrun("on", "stick"), env=environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert job.stdout is not None
        while "stuck" not in job.stdout.readline():
            assert job.poll() is None
        folder = tmp_path / "ranks" / "0"
        box, stuck = BlackBox(folder, 0), BlackBox(folder, SLOW)
        deadline = time.monotonic() + 30
        while [c.shape for c in box.pending()] != ["7"] and time.monotonic() < deadline:
            time.sleep(0.1)
        (call,) = box.pending()
        assert (call.group, call.op, call.bytes, call.shape, call.step) == ("0-1", "allreduce", 28, "7", 40)
        assert stuck.pending() == []
        os.kill(int(stuck.about["pid"]), int(stuck.about["stacks_signal"]))
        stacks = folder / f"rank-{SLOW}.stacks"
        while "collector_job.py" not in stacks.read_text("utf-8") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "in main" in stacks.read_text("utf-8")
        for rank in (0, 1):
            os.kill(int(BlackBox(folder, rank).about["pid"]), signal.SIGKILL)
        time.sleep(0.5)
        assert [c.shape for c in BlackBox(folder, 0).pending()] == ["7"]
        assert len([e for e in events(tmp_path, 0) if e.kind is Kind.STEP]) >= 39
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        if job.stdout is not None:
            job.stdout.close()


def test_without_a_compiler_the_calls_from_python_are_seen_and_the_loss_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        torchrun("on"), env=environment(tmp_path, LANTERNE_TAP="python"), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [events(tmp_path, rank) for rank in (0, 1)]
    (absent,) = [e for e in ranks[0] if e.name == "source_absent"]
    assert absent.attributes["source"] == "collective tap"
    for rank, found in enumerate(ranks):
        calls = collectives(found)
        assert len([s for s in calls if s[0] == str(rank)]) == 4
        assert [
            e.attributes["lanterne.bytes"] for s, e in calls.items() if s[0] == "0-1" and s[1] < POINT_TO_POINT
        ] == [28]
