"""Kernel tracing of a node where it is permitted: perf counters of the whole system, and bpftrace.

perf: context switches and moves between cores of all CPUs, and TCP segments sent again by tracepoint, all a second;
it costs next to nothing. bpftrace: how long runnable threads waited for a core and how long block operations took (99%,
from power-of-two histograms); it runs a program at every context switch, so it must be asked for. Both need privileges,
and say so where they have none.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Sample = tuple[str, float, str]

_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_ATTR_BYTES, _SOFTWARE, _TRACEPOINT, _CLOEXEC = 128, 1, 2, 8
_COUNTED = {"system.cpu.context_switches": (_SOFTWARE, 3), "system.cpu.migrations": (_SOFTWARE, 4)}
_RETRANSMIT = "events/tcp/tcp_retransmit_skb/id"
_TRACING = ("sys/kernel/tracing", "sys/kernel/debug/tracing")
CPUS_MAX = 1024
BPF_SCRIPT = """
tracepoint:sched:sched_wakeup, tracepoint:sched:sched_wakeup_new { @woken[args->pid] = nsecs; }
tracepoint:sched:sched_switch {
  $from = @woken[args->next_pid];
  if ($from) { @run_delay_us = hist((nsecs - $from) / 1000); delete(@woken[args->next_pid]); }
}
tracepoint:block:block_rq_issue { @issued[args->dev, args->sector] = nsecs; }
tracepoint:block:block_rq_complete {
  $from = @issued[args->dev, args->sector];
  if ($from) { @block_us = hist((nsecs - $from) / 1000); delete(@issued[args->dev, args->sector]); }
}
tracepoint:tcp:tcp_retransmit_skb { @retransmits = count(); }
interval:s:2 { print(@run_delay_us); print(@block_us); print(@retransmits);
  clear(@run_delay_us); clear(@block_us); clear(@retransmits); clear(@woken); clear(@issued); }
"""
BPF_NAMES = {"@run_delay_us": "system.cpu.run_delay", "@block_us": "system.disk.latency_p99"}
BPF_INTERVAL_S = 2.0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def capable(root: Path, *capabilities: int) -> bool:
    """Has this process one of these capabilities? False where the process is not found below ``root``."""
    try:
        rows = [r.split() for r in _text(root / "proc/self/status").splitlines() if r.startswith("CapEff:")]
    except OSError:  # the /proc of another process namespace
        return False
    mask = int(rows[0][1], 16) if rows else 0
    return any(mask >> c & 1 for c in capabilities)


def perf_absent(root: Path) -> str:
    """Why perf events of the whole system cannot be read here; empty when they can."""
    try:
        level = int(_text(root / "proc/sys/kernel/perf_event_paranoid"))
    except (OSError, ValueError):
        return "the kernel has no perf events"
    if platform.machine() not in _PERF_EVENT_OPEN:
        return f"perf events are not read on {platform.machine()}"
    if level <= 0 or capable(root, _CAP_PERFMON, _CAP_SYS_ADMIN):
        return ""
    return f"kernel.perf_event_paranoid is {level}: the whole system may be read at 0 or with CAP_PERFMON only"


def bpf_absent(root: Path, asked: bool) -> str:
    """Why bpftrace is not used here; empty when it is."""
    if not shutil.which("bpftrace"):
        return "bpftrace is not installed"
    if not capable(root, _CAP_BPF, _CAP_SYS_ADMIN):
        return "bpftrace needs root or CAP_BPF"
    return "" if asked else "not asked for: --trace lets bpftrace run (it costs time at every context switch)"


class Perf:
    """Counters by ``perf_event_open``: a second and system-wide; those that the kernel refuses are left out."""

    name = "perf"

    def __init__(self, root: Path) -> None:
        self.absent = perf_absent(root)
        self._files: dict[str, list[int]] = {}
        self._last: dict[str, int] = {}
        if self.absent:
            return
        wanted = dict(_COUNTED)
        for folder in _TRACING:
            try:
                wanted["system.network.retransmit_rate"] = (_TRACEPOINT, int(_text(root / folder / _RETRANSMIT)))
                break
            except (OSError, ValueError):
                continue
        refused = self._open_all(wanted)
        if not self._files:
            self.absent = f"perf_event_open: {refused}"

    def _open_all(self, wanted: Mapping[str, tuple[int, int]]) -> str:
        refused = ""
        for name, (kind, config) in wanted.items():
            found = []
            for cpu in range(min(os.cpu_count() or 1, CPUS_MAX)):
                fd, why = _open(kind, config, cpu)
                refused = why or refused
                if fd >= 0:
                    found.append(fd)
            if found:
                self._files[name] = found
        return refused

    def read(self, elapsed_s: float) -> list[Sample]:
        out: list[Sample] = []
        for name, files in self._files.items():
            now = sum(struct.unpack("Q", os.read(fd, 8))[0] for fd in files)
            before = self._last.get(name, now)
            self._last[name] = now
            if elapsed_s > 0:
                out.append((name, (now - before) / elapsed_s, ""))
        return out

    def close(self) -> None:
        for files in self._files.values():
            for fd in files:
                os.close(fd)
        self._files.clear()


def _open(kind: int, config: int, cpu: int) -> tuple[int, str]:
    """(file descriptor of a counter, "") or (-1, reason)."""
    attributes = (ctypes.c_char * _ATTR_BYTES)()
    struct.pack_into("IIQ", attributes, 0, kind, _ATTR_BYTES, config)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _PERF_EVENT_OPEN[platform.machine()]
    fd = int(libc.syscall(number, attributes, -1, cpu, -1, ctypes.c_ulong(_CLOEXEC)))
    return (fd, "") if fd >= 0 else (-1, os.strerror(ctypes.get_errno()))


class BpfTrace:
    """A bpftrace child that prints histograms as JSON every two seconds; read without waiting for it.

    It starts with the second look. ``command`` is bpftrace, with what stands before its own arguments.
    """

    name = "ebpf"

    def __init__(
        self, root: Path, *, asked: bool, command: Sequence[str] = ("bpftrace",), absent: str | None = None
    ) -> None:
        self.absent = bpf_absent(root, asked) if absent is None else absent
        self._command = [*command, "-f", "json", "-e", BPF_SCRIPT]
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def read(self, elapsed_s: float) -> list[Sample]:
        if elapsed_s <= 0:
            return []
        if self._child is None:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert self._child.stdout is not None
            os.set_blocking(self._child.stdout.fileno(), False)
            return []
        assert self._child.stdout is not None
        data = self._rest
        while chunk := self._child.stdout.read(1 << 16):
            data += chunk
        *lines, self._rest = data.split(b"\n")
        if self._child.poll() is not None:
            assert self._child.stderr is not None
            last = self._child.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            self.absent = f"bpftrace ended with {self._child.returncode}: {' '.join(last)}"[:200]
            self.close()
        return newest(lines)

    def close(self) -> None:
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(2)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            for stream in (self._child.stdout, self._child.stderr):
                if stream is not None:
                    stream.close()
            self._child = None


def newest(lines: Sequence[bytes]) -> list[Sample]:
    """The last histograms and counts of bpftrace's JSON lines: 99% quantiles in seconds, retransmits a second."""
    found: dict[str, float] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        data = row.get("data") if isinstance(row, dict) else None
        if not isinstance(data, dict):
            continue
        for key, value in data.items():
            if row.get("type") == "hist" and key in BPF_NAMES and isinstance(value, list):
                found[BPF_NAMES[key]] = quantile(value, 0.99) / 1e6
            elif key == "@retransmits" and isinstance(value, (int, float)):
                found["system.network.retransmit_rate"] = float(value) / BPF_INTERVAL_S
    return [(name, value, "") for name, value in found.items()]


def quantile(buckets: Sequence[Mapping[str, float]], share: float) -> float:
    """Upper edge of the bucket (``min``, ``max``, ``count``) in which a share of the counts lies; 0 without counts."""
    total = sum(float(b.get("count", 0)) for b in buckets)
    passed = 0.0
    for bucket in buckets:
        passed += float(bucket.get("count", 0))
        if total and passed >= share * total:
            return float(bucket.get("max", bucket.get("min", 0)))
    return 0.0
