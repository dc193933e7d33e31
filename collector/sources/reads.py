"""How long file reads take in a rank and its loader workers: a small library that ``lanterne run`` preloads.

Opt-in (``LANTERNE_READS=1``): it stands between the program and libc (``native/readtime.cpp``). Every process of the
launch keeps four counters in a file of its own below the launch's folder; the shipper sums those of a rank's family.
Memory-mapped files are not seen.
"""

from __future__ import annotations

import struct
from pathlib import Path

import psutil

from lanterne import native
from lanterne.settings import CollectorSettings

Sample = tuple[str, float, str]

SOURCE = Path(__file__).parents[1] / "native" / "readtime.cpp"
FLAGS = (*native.FLAGS, "-std=c++17", "-D_GNU_SOURCE")
FOLDER = "LANTERNE_READ_TIMES"
COMPILE_S = 60.0
_PAGE = struct.Struct("4Q")  # calls, bytes, ns, longest ns


def library() -> Path:
    """The preloaded library, compiled if need be. Raises :class:`lanterne.native.BuildFailed` with the reason."""
    target = native.target("readtime", (SOURCE.read_text(encoding="utf-8"), *FLAGS))
    return native.build(target, [*FLAGS, str(SOURCE), "-ldl"], COMPILE_S)


def preload(settings: CollectorSettings, launch: str, preloaded: str = "") -> dict[str, str]:
    """Variables for a launch whose folder is ``launch``; {} where nobody asked. Others' preloads stay in front of ours.

    Raises :class:`lanterne.native.BuildFailed` and OSError.
    """
    if not settings.reads:
        return {}
    folder = Path(launch) / "reads"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {"LD_PRELOAD": ":".join(filter(None, [preloaded, str(library())])), FOLDER: str(folder)}


class ReadTimes:
    """Sums of a rank's family (its process and all descendants), workers that have ended included."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._family: dict[int, set[int]] = {}
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._total: dict[int, list[int]] = {}

    def sample(self, pid: int) -> list[Sample]:
        """``process.file.read_time`` (s), ``.read`` (bytes) and ``.reads`` (calls) of a rank since its start."""
        family = self._family.setdefault(pid, {pid})
        alive = {pid}
        try:
            alive |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            alive = set()
        family |= alive
        total = self._total.setdefault(pid, [0, 0, 0])
        for one in list(family):
            now = self._page(one)
            before = self._seen.get(one, (0, 0, 0))
            if now is not None:
                total[:] = [t + max(0, n - b) for t, n, b in zip(total, now, before, strict=True)]
                self._seen[one] = now
            if one not in alive:  # its last word was just read
                family.discard(one)
                self._seen.pop(one, None)
        calls, size, ns = total
        return [
            ("process.file.read_time", ns / 1e9, ""), ("process.file.read", float(size), ""),
            ("process.file.reads", float(calls), ""),
        ]  # fmt: skip

    def _page(self, pid: int) -> tuple[int, int, int] | None:
        try:
            calls, size, ns, _ = _PAGE.unpack((self.folder / f"reads-{pid}").read_bytes())
        except (OSError, struct.error):
            return None
        return calls, size, ns
