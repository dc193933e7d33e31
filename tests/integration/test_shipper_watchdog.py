"""Real processes that hang, stop or hold the interpreter: the shipper tells, with stacks, while they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shipper_backend import Backend

TRAINER = Path(__file__).with_name("ring_trainer.py")
pytestmark = pytest.mark.slow


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def start(folder: Path, url: str, rank: int, ending: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "LANTERNE_ENDPOINT": url, "LANTERNE_HANG_FLOOR_S": "2"}
    command = [sys.executable, str(TRAINER), str(folder), str(rank), "40", ending, "0.01"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def trained(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"


@pytest.mark.parametrize(("ending", "function"), [("hang", "wait_for_godot"), ("gil", "hold_the_interpreter")])
def test_a_hang_is_told_with_the_stack_of_the_python_line(
    tmp_path: Path, started: list[subprocess.Popen[str]], ending: str, function: str
) -> None:
    with Backend() as backend:
        started.append(start(tmp_path / "ring-job" / "0", backend.url, 0, ending))
        assert backend.wait(lambda: backend.events("stall"))
        (row,) = backend.events("stall")
        assert function in row["body"]
        assert row["step"] == 39
        told = row["attributes"]
        assert (told["phase"], told["bound_s"], told["waiting"]) == ("forward", "2.0", "false")
        assert float(told["stalled_s"]) > 2.0
        assert started[0].poll() is None


def test_all_stalled_ranks_of_the_node_are_told_together(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    with Backend() as backend:
        folder = tmp_path / "ring-job" / "0"
        started.extend(start(folder, backend.url, rank, "hang") for rank in range(3))
        assert backend.wait(lambda: len(backend.events("stall")) >= 3)
        assert sorted(row["rank"] for row in backend.events("stall")) == [0, 1, 2]


def test_a_stopped_process_is_told_as_stopped_and_its_return_ends_the_stall(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    with Backend() as backend:
        started.append(start(tmp_path / "ring-job" / "0", backend.url, 0, "pause"))
        trained(started[0])
        started[0].send_signal(signal.SIGSTOP)
        assert backend.wait(lambda: backend.events("stall"))
        (row,) = backend.events("stall")
        assert row["attributes"]["process_state"] == "T"
        assert row["attributes"]["stacks_from"] == "proc"
        started[0].send_signal(signal.SIGCONT)
        assert backend.wait(lambda: backend.events("stall_ended"))
        assert backend.wait(lambda: backend.events("exited"))


def test_a_healthy_run_raises_nothing(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    with Backend() as backend:
        started.append(start(tmp_path / "ring-job" / "0", backend.url, 0, "close"))
        assert backend.wait(lambda: backend.events("exited"))
        assert backend.events("heartbeat")
        assert backend.events("stall") == []
