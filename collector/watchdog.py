"""The watchdog: knows how long each phase takes in this run, and says when one takes far too long.

It lives in the shipper, so it works while the trainer sits in C code, holds the GIL or is stopped.
A rank is stalled when nothing moved for ``max(hang_floor_s, 8 x p99 of that phase)``. A phase that was
never seen gets a first bound instead: 60 s before the first completed step, 10 min for checkpoint, eval
and compile. When one rank of the node stalls, those that wait with it are reported in the same breath:
the backend then sees who sits in a collective (victims) and who does not.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lanterne import limits
from lanterne.collector.procfs import ProcessView
from lanterne.nouns import LONG_PHASES, Event, Kind, Phase

STARTUP_BOUND_S = 60.0
"""No completed step yet: imports, rendezvous and the first batch take long in healthy runs."""
LONG_FIRST_BOUND_S = 600.0
"""First checkpoint, eval or compile of a run."""
BETWEEN_BOUND_S = 30.0
"""Floor for time that no phase claims (validation or file work in user code) while no collective is pending."""
P99_FACTOR = 8.0
SAMPLES = 512
WARM_UP_SAMPLES = 2
"""Left out once five are known: the first steps allocate, connect and compile."""

_BY_STACK = (
    (Phase.COMPILE, ("torch/_dynamo/", "torch/_inductor/", "triton/compiler/")),
    (Phase.CHECKPOINT, ("torch/distributed/checkpoint/", "torch/serialization.py")),
)


class PhaseBounds:
    """Durations of each phase in this run and the bound that follows from them (seconds)."""

    def __init__(self, floor_s: float) -> None:
        self.floor_s = floor_s
        self.steps = 0
        self._seen: dict[str, deque[float]] = {}
        self._count: dict[str, int] = {}

    def learn(self, events: Iterable[Event]) -> None:
        """Take the phases and steps of drained events."""
        for event in events:
            if event.kind is Kind.STEP:
                self.steps += 1
                self._add("step", event.duration_ns)
            elif event.kind is Kind.PHASE:
                self._add(event.name, event.duration_ns)

    def _add(self, phase: str, duration_ns: int) -> None:
        seen = self._seen.setdefault(phase, deque(maxlen=SAMPLES))
        self._count[phase] = self._count.get(phase, 0) + 1
        if self._count[phase] == WARM_UP_SAMPLES + 3 and phase not in LONG_PHASES:
            for _ in range(WARM_UP_SAMPLES):
                seen.popleft()
        seen.append(duration_ns / 1e9)

    def p99_s(self, phase: str) -> float | None:
        """99th percentile (nearest rank) of the last ``SAMPLES`` durations; None for a phase never seen."""
        seen = sorted(self._seen.get(phase, ()))
        return seen[min(len(seen) - 1, int(0.99 * len(seen)))] if seen else None

    def bound_s(self, phase: str, *, in_collective: bool = False) -> float:
        """Seconds without progress after which ``phase`` counts as stalled."""
        if phase in LONG_PHASES:
            learned = self.p99_s(phase)
            return LONG_FIRST_BOUND_S if learned is None else max(self.floor_s, P99_FACTOR * learned)
        if self.steps == 0:
            return max(STARTUP_BOUND_S, self.floor_s)
        learned = self.p99_s(phase)
        if learned is None and in_collective:
            learned = self.p99_s("step")
        if learned is None:
            return max(STARTUP_BOUND_S, self.floor_s)
        floor_s = max(BETWEEN_BOUND_S, self.floor_s) if phase == Phase.OTHER and not in_collective else self.floor_s
        return max(floor_s, P99_FACTOR * learned)


@dataclass(slots=True)
class Look:
    """What the watchdog sees of one rank now. Times are the host's CLOCK_MONOTONIC in ns."""

    step: int
    phase: str
    moved_ns: int
    now_ns: int
    in_collective: bool = False
    process_state: str = ""

    @property
    def idle_s(self) -> float:
        return max(0.0, (self.now_ns - self.moved_ns) / 1e9)


@dataclass(slots=True)
class RankWatch:
    """Stall state of one rank. ``since_ns`` 0 = not stalled."""

    bounds: PhaseBounds
    since_ns: int = 0
    moved_ns: int = 0
    phase_by_stack: str = ""
    stack_for_ns: int = 0
    look: Look | None = None
    known: set[tuple[str, int]] = field(default_factory=set)  # pending collectives already reported

    def phase(self) -> str:
        """The phase as declared, or as its stack showed it (a recompile hides in forward)."""
        assert self.look is not None
        return self.phase_by_stack or self.look.phase or Phase.OTHER

    def bound_s(self) -> float:
        assert self.look is not None
        return self.bounds.bound_s(self.phase(), in_collective=self.look.in_collective)

    def see(self, look: Look) -> float | None:
        """Take a look. Returns how long the stall lasted (s) when this look ends one, else None."""
        moved = look.moved_ns > self.moved_ns
        self.look = look
        if not moved:
            return None
        self.moved_ns = look.moved_ns
        self.phase_by_stack = ""
        self.known.clear()
        if not self.since_ns:
            return None
        lasted = (look.moved_ns - self.since_ns) / 1e9
        self.since_ns = 0
        return max(0.0, lasted)

    def overdue(self) -> bool:
        """Past its bound and not yet reported."""
        return self.look is not None and not self.since_ns and self.look.idle_s > self.bound_s()

    def joins(self) -> bool:
        """Idle long enough to be reported together with a stalled neighbour (half the floor)."""
        if self.look is None or self.since_ns or self.phase() in LONG_PHASES or self.bounds.steps == 0:
            return False
        return self.look.idle_s > self.bounds.floor_s / 2

    def read_stack(self, text: str) -> bool:
        """Whether the stack shows a long phase that nobody declared; the rank is then given that bound."""
        assert self.look is not None
        if self.look.in_collective or self.phase() in LONG_PHASES:
            return False
        main = main_thread(text)
        for phase, marks in _BY_STACK:
            if any(mark in main for mark in marks):
                self.phase_by_stack = phase
                return not self.overdue()
        return False


def newly_stalled(watches: Mapping[int, RankWatch]) -> list[int]:
    """Local ranks to report now: those past their bound, and those that wait with them."""
    overdue = {rank for rank, watch in watches.items() if watch.overdue()}
    if not overdue and not any(watch.since_ns for watch in watches.values()):
        return []
    return sorted(overdue | {rank for rank, watch in watches.items() if watch.joins()})


# --- stacks --------------------------------------------------------------------------------------


def main_thread(text: str) -> str:
    """The main thread's part of a faulthandler dump: faulthandler writes it last."""
    return text.rpartition("\n\n")[2] if "\n\n" in text else text


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask_worker_server(path: str, handler: str, timeout_s: float = 1.0) -> str:
    """POST /handler/NAME to torch's in-process worker server (C++ thread, needs no GIL); empty when it fails."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        text = answer.read(limits.STACK_BYTES_MAX * 8).decode("utf-8", "replace")
        return text if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class StackDoor:
    """How a rank's Python stacks can be had: signal and file of faulthandler, worker-server socket."""

    process: ProcessView
    file: Path
    signal: int = 0
    socket: str = ""

    def size(self) -> int:
        try:
            return self.file.stat().st_size
        except OSError:
            return 0

    def ring(self) -> bool:
        """Send the signal, but only to a process that is known to catch it."""
        if not self.signal or self.process.state() in {"", "Z", "T", "t"} or not self.process.catches(self.signal):
            return False
        try:
            os.kill(self.process.pid, self.signal)
        except OSError:
            return False
        return True

    def read(self, since: int) -> str:
        try:
            with self.file.open("rb") as file:
                file.seek(since)
                raw = file.read(limits.STACK_BYTES_MAX * 4)
        except OSError:
            return ""
        return raw[-limits.STACK_BYTES_MAX :].decode("utf-8", "replace")


def collect_stacks(doors: Mapping[int, StackDoor], patience_s: float = 1.0) -> dict[int, tuple[str, str]]:
    """rank -> (text, source) for all doors at once. ``source``: faulthandler, worker_server or proc.

    faulthandler writes from a C signal handler, so it answers while the GIL is held; the worker server
    is asked where the signal got no answer; /proc is what is left for a stopped or silent process.
    """
    before = {rank: door.size() for rank, door in doors.items()}
    rung = {rank for rank, door in doors.items() if door.ring()}
    deadline, settled = time.monotonic() + patience_s, dict(before)
    while rung and time.monotonic() < deadline:
        time.sleep(0.05)
        sizes = {rank: doors[rank].size() for rank in rung}
        if all(sizes[rank] > before[rank] and sizes[rank] == settled[rank] for rank in rung):
            break
        settled |= sizes
    found: dict[int, tuple[str, str]] = {}
    for rank, door in doors.items():
        text, source = (door.read(before[rank]), "faulthandler") if rank in rung else ("", "")
        if not text and door.socket:
            text, source = ask_worker_server(door.socket, "dump_traceback"), "worker_server"
        if not text:
            text, source = door.process.where(), "proc"
        found[rank] = (text, source)
    return found
