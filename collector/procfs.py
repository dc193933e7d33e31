"""A process as the kernel shows it: alive, stopped, dead and how, where it sleeps. Needs nothing from it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

from lanterne import limits

_PIDFD_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, 11 ids, exit status (linux/pidfd.h, first version)
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended. Both None = it is gone and nobody could say how."""

    exit_code: int | None = None
    signal: int | None = None

    @classmethod
    def from_wait(cls, status: int) -> Ending:
        """From the status word of wait(2), which a zombie's stat file also shows."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(exit_code=os.WEXITSTATUS(status))

    def says(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return "ended, exit code unknown" if self.exit_code is None else f"exit code {self.exit_code}"


def _read(path: str, limit: int = 64 << 10) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


class ProcessView:
    """One process, told apart from a later one with the same number by its start time.

    Without /proc (not Linux) it only knows alive or not, through signal 0.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = self._stat_fields()[19:20]
        self._has_proc = os.path.isdir("/proc/self")

    def _stat_fields(self) -> list[str]:
        """Fields of /proc/PID/stat after the name: index 0 = state, 19 = start time, 49 = exit code."""
        text = _read(f"/proc/{self.pid}/stat")
        return text.rpartition(")")[2].split() if text else []

    def state(self) -> str:
        """``R S D T t Z …`` as in proc(5); empty when the process is gone."""
        if not self._has_proc:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return ""
            except PermissionError:
                pass
            return "R"
        fields = self._stat_fields()
        return fields[0] if fields and fields[19:20] == self._started else ""

    def ending(self) -> Ending | None:
        """None while it lives; a zombie still tells its exit status."""
        state = self.state()
        if state not in {"", "Z", "X", "x"}:
            return None
        if state == "Z":
            fields = self._stat_fields()
            if len(fields) > 49 and self._may_read_exit_code():
                return Ending.from_wait(int(fields[49]))
        return Ending()

    def _may_read_exit_code(self) -> bool:
        """The kernel shows 0 to readers that may not trace the process: then 0 says nothing."""
        try:
            return os.geteuid() in {0, os.stat(f"/proc/{self.pid}").st_uid}
        except OSError:
            return False

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for this signal, so that sending it does no harm."""
        for line in _read(f"/proc/{self.pid}/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def variable(self, name: str) -> str:
        """A variable of the process's environment as it was started; empty when unset or not ours to read."""
        for pair in _read(f"/proc/{self.pid}/environ", 1 << 20).split("\0"):
            key, _, value = pair.partition("=")
            if key == name:
                return value
        return ""

    def where(self) -> str:
        """State, kernel wait channel and, where allowed, kernel stack of every thread, as plain text."""
        lines = [f"process {self.pid}: state {self.state() or 'gone'}"]
        tasks = Path(f"/proc/{self.pid}/task")
        try:
            threads = sorted(tasks.iterdir(), key=lambda p: int(p.name))[:64]
        except OSError:
            threads = []
        for thread in threads:
            name, wchan = _read(f"{thread}/comm").strip(), _read(f"{thread}/wchan").strip()
            state = _read(f"{thread}/stat").rpartition(")")[2].split()[:1]
            lines.append(f"thread {thread.name} ({name}): state {''.join(state)}, kernel wait {wchan or 'none'}")
            lines.extend("    " + line for line in _read(f"{thread}/stack", 4 << 10).splitlines()[:16])
        return "\n".join(lines)[: limits.STACK_BYTES_MAX]


def open_pidfd(pid: int) -> int:
    """A descriptor that turns readable when the process ends; -1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


def ending_by_pidfd(fd: int) -> Ending | None:
    """How a process ended although its parent has reaped it already (Linux 6.15 and newer); None = cannot tell."""
    asked = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(asked)
    return Ending.from_wait(status) if mask & _PIDFD_INFO_EXIT else None
