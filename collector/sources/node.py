"""The node under the ranks: pressure, cgroups, disks, links, scheduler delay, and who else uses the CPU.

Every source either works or says why it is absent. Rates are over the time between two samples, so the first sample
only lays the baseline. All files are read below ``root``, so that a copied tree reads like the real one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lanterne.clock import Clock, SystemClock
from lanterne.collector.sources.node_disks import Blocks, Space
from lanterne.collector.sources.node_tracing import BpfTrace, Perf

Sample = tuple[str, float, str]  # metric, value, label

CGROUPS_MAX = 512
PROCESSES_MAX = 20_000
NEIGHBOURS_SHOWN = 5
_IB_COUNTERS = (
    "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors",
)  # fmt: skip


class Part(Protocol):
    """One source. ``absent`` is the reason why it gives nothing here, empty while it works."""

    name: str
    absent: str

    def read(self, elapsed_s: float) -> list[Sample]:
        """Samples now; ``elapsed_s`` is the time since the last call, 0 at the first."""
        ...


class Deltas:
    """What counters gained since the last look; a counter seen for the first time gained nothing."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def gained(self, key: str, value: float) -> float:
        """Growth of ``key``; a counter that went back (restart, wrap) gives 0."""
        before = self._last.get(key, value)
        self._last[key] = value
        return max(0.0, value - before)

    def keep(self, keys: Iterable[str]) -> None:
        """Forget the counters that no longer exist."""
        alive = set(keys)
        self._last = {k: v for k, v in self._last.items() if k in alive}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _table(path: Path) -> dict[str, float]:
    """``key value`` lines as numbers; a file that is not there gives an empty table."""
    try:
        rows = [line.split() for line in _text(path).splitlines()]
        return {r[0]: float(r[1]) for r in rows if len(r) == 2}
    except (OSError, ValueError):
        return {}


class Pressure:
    """PSI: the share of the last ten seconds in which some task waited for CPU, memory or I/O (0 to 1)."""

    name = "psi"

    def __init__(self, root: Path) -> None:
        self._folder = root / "proc/pressure"
        self.absent = "" if self._folder.is_dir() else "this kernel tells no pressure (CONFIG_PSI, or boot with psi=1)"

    def read(self, elapsed_s: float) -> list[Sample]:
        del elapsed_s
        out = []
        for what in ("cpu", "memory", "io"):
            words = _text(self._folder / what).split()
            avg10 = next(float(w.removeprefix("avg10=")) for w in words if w.startswith("avg10="))
            out.append((f"system.psi.{what}", avg10 / 100, ""))
        return out


class Cgroups:
    """CPU quotas that stop a group, and memory near its limit; cgroup v2 and v1. Label = the group's path.

    ``system.cgroup.throttled_share`` is the share of quota periods in which the group was stopped;
    ``system.cgroup.throttled_time`` the seconds a second that its run queues stood still (cores lost).
    """

    name = "cgroup"

    def __init__(self, root: Path) -> None:
        base = root / "sys/fs/cgroup"
        self._v2 = (base / "cgroup.controllers").exists()
        self._cpu = base if self._v2 else next((p for n in ("cpu,cpuacct", "cpu") if (p := base / n).is_dir()), base)
        self._memory = base if self._v2 else base / "memory"
        known = self._v2 or (self._cpu / "cpu.stat").exists()
        self.absent = "" if known else "no cgroup file system with a CPU controller is mounted"
        self._deltas = Deltas()

    def _groups(self, base: Path, file: str) -> list[Path]:
        found = []
        for folder, below, files in os.walk(base):
            if file in files:
                found.append(Path(folder))
            if len(found) >= CGROUPS_MAX:
                below.clear()
                break
        return found

    def read(self, elapsed_s: float) -> list[Sample]:
        out: list[Sample] = []
        keys = []
        for group in self._groups(self._cpu, "cpu.stat"):
            stat, label = _table(group / "cpu.stat"), f"/{group.relative_to(self._cpu)}".replace("/.", "/")
            if not stat.get("nr_periods"):
                continue
            stopped_s = stat.get("throttled_usec", 0.0) / 1e6 or stat.get("throttled_time", 0.0) / 1e9
            keys += [f"{label} {k}" for k in ("periods", "throttled", "time")]
            periods = self._deltas.gained(f"{label} periods", stat["nr_periods"])
            throttled = self._deltas.gained(f"{label} throttled", stat.get("nr_throttled", 0.0))
            lost = self._deltas.gained(f"{label} time", stopped_s)
            if periods >= 1 and elapsed_s > 0:
                out.append(("system.cgroup.throttled_share", min(1.0, throttled / periods), label))
                out.append(("system.cgroup.throttled_time", lost / elapsed_s, label))
        self._deltas.keep(keys)
        return out + self._memory_shares()

    def _memory_shares(self) -> list[Sample]:
        """Memory in use over the limit (0 to 1), of groups that have a limit."""
        used_file, limit_file = ("memory.current", "memory.max") if self._v2 else (
            "memory.usage_in_bytes", "memory.limit_in_bytes",
        )  # fmt: skip
        out = []
        for group in self._groups(self._memory, limit_file):
            try:
                limit, used = _text(group / limit_file).strip(), float(_text(group / used_file))
                bounded = limit.isdigit() and 0 < int(limit) < 1 << 60
            except (OSError, ValueError):
                continue
            if bounded:
                label = f"/{group.relative_to(self._memory)}".replace("/.", "/")
                out.append(("system.cgroup.memory_share", used / int(limit), label))
        return out


class Links:
    """Errors and drops of network interfaces and TCP segments sent again: totals since boot."""

    name = "network"

    def __init__(self, root: Path) -> None:
        self._root = root
        self.absent = "" if (root / "proc/net/dev").exists() else "no /proc/net/dev"

    def read(self, elapsed_s: float) -> list[Sample]:
        del elapsed_s
        out: list[Sample] = []
        for line in _text(self._root / "proc/net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            f = numbers.split()
            if len(f) >= 12 and name.strip() != "lo":
                out.append(("system.network.errors", float(f[2]) + float(f[10]), name.strip()))
                out.append(("system.network.dropped", float(f[3]) + float(f[11]), name.strip()))
        rows = [r.split() for r in _text(self._root / "proc/net/snmp").splitlines() if r.startswith("Tcp:")]
        if len(rows) == 2 and "RetransSegs" in rows[0]:
            out.append(("system.network.retransmits", float(rows[1][rows[0].index("RetransSegs")]), ""))
        return out


class Infiniband:
    """Error counters of InfiniBand and RoCE ports: totals, label ``<device>/<port> <counter>``."""

    name = "infiniband"

    def __init__(self, root: Path) -> None:
        self._folder = root / "sys/class/infiniband"
        self.absent = "" if self._folder.is_dir() and any(self._folder.iterdir()) else "no InfiniBand or RoCE device"

    def read(self, elapsed_s: float) -> list[Sample]:
        del elapsed_s
        out = []
        for port in sorted(self._folder.glob("*/ports/*")):
            for counter in _IB_COUNTERS:
                try:
                    value = float(_text(port / "counters" / counter))
                except (OSError, ValueError):
                    continue
                out.append(("hw.network.errors", value, f"{port.parent.parent.name}/{port.name} {counter}"))
        return out


class Processes:
    """CPU of processes outside the job, in cores: ``process.neighbour.cpu``, the busiest and their sum (label ``all``).

    ``mine`` gives the job's process ids; their descendants belong to the job too. Kernel threads are left out.
    """

    name = "neighbours"

    def __init__(self, root: Path, mine: Callable[[], Iterable[int]]) -> None:
        self._root, self._mine = root / "proc", mine
        self._tick = os.sysconf("SC_CLK_TCK")
        self._deltas = Deltas()
        self.absent = "" if (self._root / "stat").exists() else "no /proc/stat"
        self.job_pids: frozenset[int] = frozenset()
        self.names: dict[int, str] = {}

    def _stats(self) -> dict[int, tuple[str, int, float]]:
        """pid -> (name, parent, CPU seconds)."""
        found: dict[int, tuple[str, int, float]] = {}
        for entry in os.scandir(self._root):
            if not entry.name.isdigit() or len(found) >= PROCESSES_MAX:
                continue
            try:
                text = _text(Path(entry.path, "stat"))
            except OSError:
                continue
            head, _, tail = text.rpartition(")")
            f = tail.split()
            if len(f) > 12 and not int(f[6]) & 0x00200000:  # PF_KTHREAD
                found[int(entry.name)] = (head.partition("(")[2], int(f[1]), (int(f[11]) + int(f[12])) / self._tick)
        return found

    def read(self, elapsed_s: float) -> list[Sample]:
        stats = self._stats()
        self.names = {pid: s[0] for pid, s in stats.items()}
        self.job_pids = family(self._mine(), {pid: s[1] for pid, s in stats.items()})
        used = []
        for pid, (name, _, cpu_s) in stats.items():
            gained = self._deltas.gained(f"{pid} {name}", cpu_s)
            if pid not in self.job_pids and elapsed_s > 0:
                used.append((gained / elapsed_s, f"{name} (pid {pid})"))
        self._deltas.keep(f"{pid} {s[0]}" for pid, s in stats.items())
        used.sort(reverse=True)
        shown = [("process.neighbour.cpu", c, who) for c, who in used[:NEIGHBOURS_SHOWN] if c >= 0.05]
        return [*shown, ("process.neighbour.cpu", sum(c for c, _ in used), "all")] if elapsed_s > 0 else []


class SchedulerDelay:
    """``process.cpu.delay``: the longest that a process's main thread waited for a core, in seconds a second.

    Of the job's processes where there are any, else of all; from ``/proc/<pid>/schedstat``. Label = the process.
    """

    name = "scheduler"

    def __init__(self, root: Path, processes: Processes) -> None:
        self._root, self._processes = root / "proc", processes
        self._deltas = Deltas()
        try:
            _text(self._root / "self/schedstat")
            self.absent = ""
        except OSError as error:
            self.absent = f"/proc/self/schedstat: {error.strerror}: the kernel has no CONFIG_SCHED_INFO"

    def read(self, elapsed_s: float) -> list[Sample]:
        names = self._processes.names
        waited: list[tuple[float, str]] = []
        seen = []
        for pid in self._processes.job_pids or names:
            try:
                wait_ns = float(_text(self._root / str(pid) / "schedstat").split()[1])
            except (OSError, ValueError, IndexError):
                continue
            seen.append(str(pid))
            gained = self._deltas.gained(str(pid), wait_ns) / 1e9
            if elapsed_s > 0:
                waited.append((gained / elapsed_s, f"{names.get(pid, '?')} (pid {pid})"))
        self._deltas.keep(seen)
        return [("process.cpu.delay", *max(waited))] if waited else []


def family(pids: Iterable[int], parents: Mapping[int, int]) -> frozenset[int]:
    """The processes with all their descendants."""
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return frozenset(found)


class Load:
    """Share of CPU time in use (0 to 1), processes that want to run, and how many cores there are."""

    name = "cpu"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/stat"
        self._deltas = Deltas()
        self.absent = "" if self._path.exists() else "no /proc/stat"

    def read(self, elapsed_s: float) -> list[Sample]:
        rows = [line.split() for line in _text(self._path).splitlines()]
        cores = sum(r[0].startswith("cpu") and r[0] != "cpu" for r in rows)
        whole = next(r for r in rows if r[0] == "cpu")[1:9]
        gained = [self._deltas.gained(str(i), float(v)) for i, v in enumerate(whole)]
        queue = next((float(r[1]) for r in rows if r[0] == "procs_running"), 0.0)
        out = [("system.cpu.count", float(cores), ""), ("system.cpu.runqueue", queue, "")]
        if sum(gained) > 0 and elapsed_s > 0:
            out.append(("system.cpu.utilization", 1 - (gained[3] + gained[4]) / sum(gained), ""))
            out.append(("system.cpu.steal", gained[7] / sum(gained) if len(gained) > 7 else 0.0, ""))
        return out


class NodeSource:
    """All sources of one node. ``states`` tells for each source "" (works) or why it is absent.

    ``tracing`` (the host agent): also perf counters, and bpftrace with ``bpf``. ``close`` ends what they hold.
    """

    def __init__(
        self,
        root: str | Path = "/",
        *,
        paths: Sequence[str] = (),
        job_pids: Callable[[], Iterable[int]] = tuple,
        clock: Clock | None = None,
        tracing: bool = False,
        bpf: bool = False,
    ) -> None:
        base = Path(root)
        self._clock: Clock = clock or SystemClock()
        self._last_ns = 0
        self.processes = Processes(base, job_pids)
        self.parts: list[Part] = [
            Load(base), Pressure(base), Cgroups(base), Space(base, paths),
            Blocks(base), Links(base), Infiniband(base), self.processes,
            SchedulerDelay(base, self.processes),
        ]  # fmt: skip
        self._tracing: list[Perf | BpfTrace] = [Perf(base), BpfTrace(base, asked=bpf)] if tracing else []
        self.parts += self._tracing

    @property
    def states(self) -> dict[str, str]:
        return {part.name: part.absent for part in self.parts}

    def sample(self) -> list[Sample]:
        """(metric, value, label) of every source that works; one that fails becomes absent with its error."""
        now = self._clock.monotonic_ns()
        elapsed_s = (now - self._last_ns) / 1e9 if self._last_ns else 0.0
        self._last_ns = now
        out: list[Sample] = []
        for part in self.parts:
            if part.absent:
                continue
            try:
                out += part.read(elapsed_s)
            except (OSError, ValueError, LookupError, StopIteration) as error:
                part.absent = f"{type(error).__name__}: {error}"[:200]
        return out

    def close(self) -> None:
        """End what the tracing sources hold: counters and a child."""
        for part in self._tracing:
            part.close()


def worst(samples: Iterable[Sample], metrics: Iterable[str]) -> list[Sample]:
    """The largest value of each of these metrics: what a rank's own facts need to know of its node."""
    wanted = set(metrics)
    found: dict[str, Sample] = {}
    for sample in samples:
        if sample[0] in wanted and (sample[0] not in found or sample[1] > found[sample[0]][1]):
            found[sample[0]] = sample
    return list(found.values())
