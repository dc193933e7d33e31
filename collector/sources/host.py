"""The host: CPU, steal, run queue, network, disk, a process's own CPU time. Read by the shipper each second."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

Sample = tuple[str, float, str]  # metric, value, label


class HostSource:
    """Keeps the last counters, so that rates are over the time between two samples. One for each shipper."""

    def __init__(self) -> None:
        self._cpu = psutil.cpu_times()
        self._process: dict[int, tuple[float, float]] = {}

    def sample(self, pid: int = 0) -> list[Sample]:
        """(metric, value, label): host-wide shares (0 to 1) and counters, and with ``pid`` that process's own numbers.

        ``process.cpu.time`` with label ``share`` is in cores; the other counters are totals since boot.
        """
        return [*self._host(), *(self._of(pid) if pid else [])]

    def _host(self) -> list[Sample]:
        now, before = psutil.cpu_times(), self._cpu
        self._cpu = now
        total = sum(now) - sum(before)
        out: list[Sample] = []
        if total > 0:
            idle = now.idle - before.idle + getattr(now, "iowait", 0.0) - getattr(before, "iowait", 0.0)
            out.append(("system.cpu.utilization", min(1.0, max(0.0, 1.0 - idle / total)), ""))
            steal = getattr(now, "steal", 0.0) - getattr(before, "steal", 0.0)
            out.append(("system.cpu.steal", min(1.0, max(0.0, steal / total)), ""))
        out.append(("system.cpu.runqueue", float(run_queue()), ""))
        try:
            for name, nic in psutil.net_io_counters(pernic=True).items():
                if nic.bytes_sent or nic.bytes_recv:
                    out.append(("system.network.io", float(nic.bytes_sent), f"{name} sent"))
                    out.append(("system.network.io", float(nic.bytes_recv), f"{name} received"))
            disk = psutil.disk_io_counters()
            if disk is not None and hasattr(disk, "busy_time"):
                out.append(("system.disk.io_time", disk.busy_time / 1e3, ""))
        except (OSError, RuntimeError):
            pass
        retransmits = tcp_retransmits()
        if retransmits is not None:
            out.append(("system.network.retransmits", float(retransmits), ""))
        return out

    def _of(self, pid: int) -> list[Sample]:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            self._process.pop(pid, None)
            return []
        used, at = times.user + times.system, time.monotonic()
        before = self._process.get(pid)
        self._process[pid] = (used, at)
        if before is None or at <= before[1]:
            return []
        return [("process.cpu.time", (used - before[0]) / (at - before[1]), "share")]


class CpuDelay:
    """``process.cpu.delay``: how long a process's main thread stood ready without a core, in seconds a second.

    From ``/proc/<pid>/schedstat`` (proc(5)); the thread of a training loop, so another thread's wait is not counted.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def sample(self, pid: int) -> list[Sample]:
        """Since the last call for ``pid``; nothing at the first. Raises OSError where the kernel does not tell."""
        waited = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1])
        at = time.monotonic()
        before = self._last.get(pid)
        self._last[pid] = (waited, at)
        if before is None or at <= before[1]:
            return []
        return [("process.cpu.delay", min(1.0, max(0.0, (waited - before[0]) / 1e9 / (at - before[1]))), "")]


def run_queue() -> int:
    """Processes that run or want to run on this host now (``procs_running``), 0 where it is not told."""
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("procs_running "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def tcp_retransmits() -> int | None:
    """TCP segments sent again since boot, from /proc/net/snmp; None where it is not told."""
    try:
        lines = [
            x.split() for x in Path("/proc/net/snmp").read_text(encoding="ascii").splitlines() if x.startswith("Tcp:")
        ]
        return int(dict(zip(lines[0], lines[1], strict=True))["RetransSegs"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
