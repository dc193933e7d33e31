"""The watchdog's bounds and judgement, on looks of our own making and on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.collector.procfs import Ending, ProcessView, ending_by_pidfd, open_pidfd
from lanterne.collector.watchdog import (
    BETWEEN_BOUND_S,
    LONG_FIRST_BOUND_S,
    STARTUP_BOUND_S,
    Look,
    PhaseBounds,
    RankWatch,
    StackDoor,
    collect_stacks,
    newly_stalled,
)
from lanterne.nouns import Event, Kind

S = 1_000_000_000


def phase(name: str, seconds: float, kind: Kind = Kind.PHASE) -> Event:
    return Event(kind=kind, name=name, sequence=0, lamport=0, unix_ns=0, monotonic_ns=0, duration_ns=int(seconds * S))


def trained(forward_s: float = 0.1, steps: int = 50) -> PhaseBounds:
    bounds = PhaseBounds(5.0)
    for _ in range(steps):
        bounds.learn([phase("forward", forward_s), phase("step", forward_s * 3, Kind.STEP)])
    return bounds


def watch(
    bounds: PhaseBounds, moved_s: float, now_s: float, phase_now: str = "forward", pending: bool = False
) -> RankWatch:
    found = RankWatch(bounds)
    found.see(Look(7, phase_now, int(moved_s * S), int(now_s * S), in_collective=pending))
    return found


def test_the_bound_is_the_floor_or_eight_times_the_p99() -> None:
    assert trained(0.1).bound_s("forward") == 5.0
    assert trained(2.0).bound_s("forward") == pytest.approx(16.0)


def test_the_warm_up_does_not_widen_the_bound() -> None:
    bounds = PhaseBounds(5.0)
    for seconds in (20.0, 6.0, *[0.1] * 20):
        bounds.learn([phase("forward", seconds), phase("step", seconds, Kind.STEP)])
    assert bounds.bound_s("forward") == 5.0


def test_before_the_first_step_and_for_unknown_phases_there_is_patience() -> None:
    assert PhaseBounds(5.0).bound_s("forward") == STARTUP_BOUND_S
    assert trained().bound_s("other") == STARTUP_BOUND_S
    assert trained().bound_s("other", in_collective=True) == 5.0


def test_time_between_the_phases_is_given_more_unless_others_wait() -> None:
    bounds = trained()
    bounds.learn([phase("other", 0.01)] * 20)
    assert bounds.bound_s("other") == BETWEEN_BOUND_S
    assert bounds.bound_s("other", in_collective=True) == 5.0


@pytest.mark.parametrize("name", ["checkpoint", "eval", "compile"])
def test_long_phases_have_their_own_bound(name: str) -> None:
    bounds = trained()
    assert bounds.bound_s(name) == LONG_FIRST_BOUND_S
    bounds.learn([phase(name, 3.0)])
    assert bounds.bound_s(name) == pytest.approx(24.0)


def test_a_healthy_rank_is_left_alone_and_a_stalled_one_is_found() -> None:
    assert newly_stalled({0: watch(trained(), 100, 104.9)}) == []
    assert newly_stalled({0: watch(trained(), 100, 105.1)}) == [0]


def test_those_that_wait_are_reported_with_the_one_that_stalled() -> None:
    ranks = {
        0: watch(trained(), 100.0, 105.1),
        1: watch(trained(1.0), 100.4, 105.1, "backward", pending=True),
        2: watch(trained(), 104.9, 105.1),
    }
    assert newly_stalled(ranks) == [0, 1]


def test_a_stall_ends_with_the_next_movement_and_tells_how_long_it_was() -> None:
    found = watch(trained(), 100, 106)
    found.since_ns = 100 * S
    assert found.see(Look(7, "forward", 100 * S, 107 * S)) is None
    assert found.see(Look(8, "forward", 109 * S, 109 * S)) == pytest.approx(9.0)
    assert newly_stalled({0: found}) == []


def test_a_recompile_inside_forward_is_not_a_stall() -> None:
    found = watch(trained(), 100, 106)
    stack = 'Thread 0x1 (most recent call first):\n  File "a/b.py", line 1 in worker\n\nCurrent thread 0x2:\n'
    assert not found.read_stack(stack + '  File "train.py", line 3 in step')
    assert found.read_stack(stack + '  File "/x/torch/_inductor/codecache.py", line 3 in load')
    assert newly_stalled({0: found}) == []
    found.see(Look(7, "forward", 100 * S, int(100 + LONG_FIRST_BOUND_S + 1) * S))
    assert newly_stalled({0: found}) == [0]


# --- real processes ------------------------------------------------------------------------------

SLEEPER = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "w"), all_threads=True)
def wait_in_user_code():
    print("ready", flush=True)
    time.sleep(600)
wait_in_user_code()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    stacks = tmp_path / "rank-0.stacks"
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(stacks)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process, stacks
    process.kill()
    process.wait()
    process.stdout.close()


def test_stacks_of_a_sleeping_process_come_from_faulthandler(sleeper: tuple[subprocess.Popen[str], Path]) -> None:
    process, stacks = sleeper
    door = StackDoor(ProcessView(process.pid), stacks, int(signal.SIGUSR2))
    text, source = collect_stacks({0: door}, 10.0)[0]
    assert source == "faulthandler"
    assert "wait_in_user_code" in text
    assert process.poll() is None


def test_a_stopped_process_is_told_by_the_kernel_and_not_touched(sleeper: tuple[subprocess.Popen[str], Path]) -> None:
    process, stacks = sleeper
    process.send_signal(signal.SIGSTOP)
    view = ProcessView(process.pid)
    while view.state() != "T":
        time.sleep(0.01)
    text, source = collect_stacks({0: StackDoor(view, stacks, int(signal.SIGUSR2))}, 0.2)[0]
    assert source == "proc"
    assert f"process {process.pid}: state T" in text


def test_a_process_without_a_handler_never_gets_the_signal(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        door = StackDoor(ProcessView(process.pid), tmp_path / "none", int(signal.SIGUSR2))
        assert collect_stacks({0: door}, 0.2)[0][1] == "proc"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("code", "ending"),
    [("import os; os._exit(7)", Ending(exit_code=7)), ("import os; os.kill(os.getpid(), 9)", Ending(signal=9))],
)
def test_a_zombie_tells_how_it_ended(code: str, ending: Ending) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input();" + code], stdin=subprocess.PIPE)
    view, fd = ProcessView(process.pid), open_pidfd(process.pid)
    assert view.ending() is None
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    while view.state() != "Z":
        time.sleep(0.01)
    assert view.ending() == ending
    process.wait()
    assert view.state() == ""
    assert view.ending() == Ending()
    if fd >= 0:
        assert ending_by_pidfd(fd) in {ending, None}  # None before Linux 6.15
        os.close(fd)
