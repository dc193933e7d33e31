"""Room on the file systems that matter, and how long block devices take. A mount that hangs is asked on a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Sample = tuple[str, float, str]  # metric, value, label

PATIENCE_S = 1.0
"""A file system that does not say its size within this long does not answer (a dead NFS server, say)."""
PATHS_MAX = 64
_KEPT = frozenset((
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay", "nfs", "nfs4", "lustre",
    "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "wekafs", "glusterfs",
))  # fmt: skip
"""Types of file systems that a job may write to; images that are full by design (squashfs, iso9660) are not here."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes and inodes of a file system; ``*_free`` is what an ordinary user may still take."""

    size: float
    free: float
    inodes: float
    inodes_free: float


def room(path: str) -> Room:
    """statvfs of ``path``. Raises OSError."""
    v = os.statvfs(path)
    return Room(v.f_blocks * v.f_frsize, v.f_bavail * v.f_frsize, v.f_files, v.f_favail)


class _Asked:
    """One question on a daemon thread: a mount that hangs costs a thread, never the caller."""

    def __init__(self, call: Callable[[str], Room], path: str) -> None:
        self.answer: Room | OSError | None = None
        self._thread = threading.Thread(target=self._ask, args=(call, path), name="lanterne-statvfs", daemon=True)
        self._thread.start()

    def _ask(self, call: Callable[[str], Room], path: str) -> None:
        try:
            self.answer = call(path)
        except OSError as error:
            self.answer = error

    def wait(self, seconds: float) -> Room | OSError | None:
        self._thread.join(seconds)
        return self.answer


def mounts(root: Path) -> list[str]:
    """Mount points that may be written to, of file systems that hold data; the last mount on a place counts."""
    try:
        rows = [r.split() for r in (root / "proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    found = {
        r[1].encode().decode("unicode_escape"): (r[2] in _KEPT or r[2].startswith("fuse.")) and "rw" in r[3].split(",")
        for r in rows
        if len(r) > 3 and not r[1].startswith(("/proc", "/sys"))
    }
    return [path for path, kept in found.items() if kept]


class Space:
    """``system.disk.utilization`` and ``system.disk.inodes`` (shares in use), ``system.disk.free`` (bytes), by path.

    ``system.disk.silent`` is 1 for a path that does not answer. ``paths`` are watched besides the mounts.
    """

    name = "disk_space"

    def __init__(self, root: Path, paths: Sequence[str] = (), ask: Callable[[str], Room] = room) -> None:
        self._root, self._paths, self._ask = root, list(paths), ask
        self._open: dict[str, _Asked] = {}
        self.absent = (
            "" if self._all() else "no file system to look at: /proc/self/mounts names none and no path is given"
        )

    def _all(self) -> list[str]:
        return list(dict.fromkeys([*self._paths, *mounts(self._root)]))[:PATHS_MAX]

    def read(self, elapsed_s: float) -> list[Sample]:
        del elapsed_s
        paths = self._all()
        fresh = [path for path in paths if path not in self._open]
        self._open |= {path: _Asked(self._ask, path) for path in fresh}
        out: list[Sample] = []
        patience = PATIENCE_S
        for path in paths:
            answer = self._open[path].wait(patience if path in fresh else 0.0)
            if answer is None:
                patience = 0.0 if path in fresh else patience
                out.append(("system.disk.silent", 1.0, path))
                continue
            del self._open[path]
            if isinstance(answer, Room) and answer.size > 0:
                out.append(("system.disk.utilization", 1 - answer.free / answer.size, path))
                out.append(("system.disk.free", answer.free, path))
                if answer.inodes > 0:
                    out.append(("system.disk.inodes", 1 - answer.inodes_free / answer.inodes, path))
        return out


class Blocks:
    """``system.disk.busy`` (share of time) and ``system.disk.latency`` (s an operation) by device, from diskstats."""

    name = "disk_io"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/diskstats"
        self._last: dict[str, tuple[float, float, float]] = {}
        try:
            used = self._counters()
        except OSError as error:
            self.absent = f"no /proc/diskstats ({error.strerror})"
        else:
            self.absent = "" if used else "no block device has done anything since boot"

    def _counters(self) -> dict[str, tuple[float, float, float]]:
        """device -> operations, ms in them, ms busy; devices that never did anything are left out."""
        found = {}
        for line in self._path.read_text(encoding="ascii", errors="replace").splitlines():
            f = line.split()
            if len(f) >= 13 and not f[2].startswith(("loop", "ram")):
                n = [float(x) for x in f[3:13]]
                if n[0] + n[4]:
                    found[f[2]] = (n[0] + n[4], n[3] + n[7], n[9])
        return found

    def read(self, elapsed_s: float) -> list[Sample]:
        now, before, out = self._counters(), self._last, []
        self._last = now
        for device, (operations, spent_ms, busy_ms) in now.items():
            if device not in before or elapsed_s <= 0:
                continue
            was = before[device]
            done = operations - was[0]
            out.append(("system.disk.busy", min(1.0, max(0.0, busy_ms - was[2]) / 1e3 / elapsed_s), device))
            if done > 0:
                out.append(("system.disk.latency", max(0.0, spent_ms - was[1]) / 1e3 / done, device))
        return out
