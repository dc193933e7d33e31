"""Memory of a process and of its container, by pid: the shipper samples it, so the trainer pays nothing.

The CUDA allocator's own numbers can only be read inside the trainer: :func:`cuda_sample`, every 16 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

Sample = tuple[str, float, str]  # metric, value, label
CUDA_EVERY = 16


def sample(pid: int) -> list[Sample]:
    """(metric, bytes, label) of one process now: RSS and the most it may reach, its children's, its cgroup's, /dev/shm.

    [] once it is gone.
    """
    out: list[Sample] = []
    try:
        process = psutil.Process(pid)
        out.append(("process.memory.usage", float(process.memory_info().rss), ""))
        workers = [child.memory_info().rss for child in process.children(recursive=True)]
        if workers:
            out.append(("process.memory.usage", float(sum(workers)), "children"))
    except psutil.Error:
        return out
    folder = cgroup_of(pid)
    if folder is not None:
        out += _cgroup(folder)
    out.append(("process.memory.limit", out[0][1] + available(folder), ""))
    try:
        shared = psutil.disk_usage("/dev/shm")
        out.append(("system.shm.usage", float(shared.used), ""))
        out.append(("system.shm.usage", float(shared.total), "limit"))
    except OSError:
        pass
    return out


def cgroup_of(pid: int) -> Path | None:
    """The cgroup v2 folder of a process, or the memory controller's v1 folder; None where there is none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/memory"
        if controllers not in {"", "memory"}:
            continue
        for folder in (Path(root + path), Path(root)):
            if (folder / "memory.current").exists() or (folder / "memory.usage_in_bytes").exists():
                return folder
    return None


def available(folder: Path | None) -> float:
    """Bytes that the host, and the cgroup with a limit, can still give: free, or cached and given up when asked for."""
    left = float(psutil.virtual_memory().available)
    if folder is None:
        return left
    known = {label: value for _, value, label in _cgroup(folder)}
    if "limit" in known and "" in known:
        left = min(left, known["limit"] - known[""] + _reclaimable(folder))
    return max(left, 0.0)


def _reclaimable(folder: Path) -> float:
    """Bytes of file cache in a cgroup that nobody has used lately (v2: inactive_file; v1: total_inactive_file)."""
    try:
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        stat = {row[0]: float(row[1]) for row in rows if len(row) == 2}
    except (OSError, ValueError):
        return 0.0
    return stat.get("total_inactive_file", stat.get("inactive_file", 0.0))


def _cgroup(folder: Path) -> list[Sample]:
    out: list[Sample] = []
    for name, label in (
        ("memory.current", ""), ("memory.usage_in_bytes", ""),
        ("memory.max", "limit"), ("memory.limit_in_bytes", "limit"),
    ):  # fmt: skip
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # "max" and v1's huge number mean no limit
            out.append(("container.memory.usage", float(text), label))
    return out


def oom_kills(pid: int) -> int:
    """How many processes of this process's cgroup the kernel has killed for memory so far; 0 where it is not told."""
    folder = cgroup_of(pid)
    if folder is None:
        return 0
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (folder / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def cuda_sample() -> list[Sample]:
    """Allocated, reserved and all bytes of this process's current CUDA device; [] without one. About 100 us."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    stats = torch.cuda.memory_stats()
    index = torch.cuda.current_device()
    device = f"cuda:{index}"
    return [
        ("hw.gpu.memory.usage", float(stats.get("allocated_bytes.all.current", 0)), device),
        ("hw.gpu.memory.reserved", float(stats.get("reserved_bytes.all.current", 0)), device),
        ("hw.gpu.memory.limit", float(torch.cuda.get_device_properties(index).total_memory), device),
    ]
