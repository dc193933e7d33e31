"""Collectives: the tap's file, the three tiers that may write it, and the rank sets of process groups.

1. the C++ tap on the dispatcher (``native/tap.cpp``): every call of every caller, under a microsecond;
2. torch's own process-group hooks (torch >= 2.14) where no compiler is at hand;
3. wrapped ``torch.distributed`` functions as the last resort: calls from Python only, DDP's buckets unseen.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne import blackbox_files as blackbox
from lanterne.collector import native
from lanterne.collector.ring import Ring, create_mapped
from lanterne.collector.sources.patches import Patches
from lanterne.nouns import group_name

if TYPE_CHECKING:
    import torch

_WORD = blackbox.WORD
_SUMS = struct.Struct("<QQdQ")  # hits, groups, squares, buckets: TAP_HITS_AT onwards
RETRY_STEPS = 16
_loaded: ctypes.CDLL | None = None


class TapFile:
    """The memory-mapped file of one rank's collectives; ``step`` and ``backward`` are told to the writer through it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.tap"
        size = blackbox.TAP_RECORDS_AT + blackbox.TAP_RECORDS * blackbox.TAP_RECORD.size
        self.map: mmap.mmap = create_mapped(self.path, size)
        blackbox.TAP_HEADER.pack_into(
            self.map, 0, blackbox.TAP_MAGIC, blackbox.TAP_RECORD.size, blackbox.TAP_RECORDS, 0, 0, 0, 0, 0, 0.0, 0
        )
        pack, view = struct.Struct("<q").pack_into, self.map

        def tell_step(step: int) -> None:
            pack(view, blackbox.TAP_STEP_AT, step)

        def tell_backward(on: int) -> None:
            pack(view, blackbox.TAP_BACKWARD_AT, on)

        self.tell_step, self.tell_backward = tell_step, tell_backward

    def hits(self) -> int:
        """Reductions entered with non-finite gradients so far."""
        return int(_WORD.unpack_from(self.map, blackbox.TAP_HITS_AT)[0])

    def buckets(self) -> int:
        """Reductions of local gradients since the squares were last taken."""
        return int(_SUMS.unpack_from(self.map, blackbox.TAP_HITS_AT)[3])

    def take_squares(self) -> tuple[float, int]:
        """(sum of squares of local gradients that entered a reduction, number of calls) since the last take."""
        _, _, squares, buckets = _SUMS.unpack_from(self.map, blackbox.TAP_HITS_AT)
        if buckets:
            struct.pack_into("<dQ", self.map, blackbox.TAP_SQUARES_AT, 0.0, 0)
        return squares, buckets


class PythonWriter:
    """Writes tap records from Python, for the tiers without a compiler. One call is about 5 us."""

    def __init__(self, tap: TapFile) -> None:
        self._map, self._lock, self._head = tap.map, threading.Lock(), 0
        self._groups: dict[str, int] = {}
        self._pairs: dict[tuple[int, int, str], int] = {}

    def group(self, pg: Any) -> int:
        name = str(pg.group_name)
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = min(len(self._groups), blackbox.TAP_GROUPS_MAX - 1)
            blackbox.TAP_GROUP.pack_into(
                self._map,
                blackbox.HEADER_BYTES + found * blackbox.TAP_GROUP.size,
                name.encode()[:55],
                pg.size(),
                pg.rank(),
            )
        return found

    def enter(self, pg: Any, op: str, tensors: list[torch.Tensor], peer: int = -1) -> int:
        """A call begins; returns its number for :meth:`leave`."""
        with self._lock:
            number, self._head = self._head, self._head + 1
            group = self.group(pg)
            if op in {"send", "recv"}:
                sequence = self._pairs.get((group, peer, op), 0)
                self._pairs[(group, peer, op)] = sequence + 1
            else:
                sequence = _backend_sequence(pg)
        first = tensors[0] if tensors else None
        sizes = [*first.shape[:4]] if first is not None else []
        slot = self._slot(number)
        dtype = str(first.dtype).removeprefix("torch.") if first is not None else ""
        (step,) = struct.unpack_from("<q", self._map, blackbox.TAP_STEP_AT)
        blackbox.TAP_RECORD.pack_into(
            self._map, slot, 2 * number + 2, monotonic_ns(), 0, 0, step, sequence,
            sum(t.nbytes for t in tensors), group, blackbox.OPS.index(op),
            blackbox.DTYPES.index(dtype) if dtype in blackbox.DTYPES else 255, first.dim() if first is not None else 0,
            0, peer, 0, *(sizes + [0] * (4 - len(sizes))), 0.0, 0, 0, 2 * number + 2,
        )  # fmt: skip
        _WORD.pack_into(self._map, blackbox.TAP_HEAD_AT, number + 1)
        return number

    def leave(self, number: int) -> None:
        """The call is complete."""
        slot = self._slot(number)
        if _WORD.unpack_from(self._map, slot)[0] == 2 * number + 2:
            now = monotonic_ns()
            struct.pack_into("<qq", self._map, slot + 16, now, now)

    def _slot(self, number: int) -> int:
        return blackbox.TAP_RECORDS_AT + (number & blackbox.TAP_RECORDS - 1) * blackbox.TAP_RECORD.size


def tier_here() -> dict[str, str]:
    """Which tier a run on this machine would use, and why: ``probe``, ``status`` (tap, hooks, python), ``reason``."""
    try:
        library = native.library_path()
        if library.exists():
            native.load(library)
            return {"probe": "collectives", "status": "tap", "reason": f"compiled: {library}"}
        found = native.compiler()
        if found is not None:
            return {"probe": "collectives", "status": "tap", "reason": f"compiled at the first attach with {found}"}
        why = "no C++ compiler for the tap"
    except (native.TapUnavailable, OSError, ImportError) as error:
        why = str(error)
    try:
        from lanterne.collector.sources import collectives_python

        status = "hooks" if collectives_python.hooks_available() else "python"
    except ImportError:
        return {"probe": "collectives", "status": "absent", "reason": "torch is not installed"}
    return {"probe": "collectives", "status": status, "reason": why}


def _backend_sequence(pg: Any) -> int:
    """How many calls the backend has counted in this group; the next call has this number on every rank."""
    try:
        return int(pg._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return 0


class Collectives:
    """Chooses a tier and tells readers the rank sets of groups. ``tier`` is what writes now ("" = none yet)."""

    def __init__(self, folder: Path, rank: int, ring: Ring, mode: str = "auto") -> None:
        self.tap = TapFile(folder, rank)
        self.ring, self.mode, self.tier, self.reason = ring, mode, "", ""
        self._library: Path | None = None
        self._builder: subprocess.Popen[bytes] | None = None
        self._named = 0
        self._patches = Patches()

    def start(self) -> None:
        """Begin with the best tier at hand; a tap that has to be compiled first is waited for in :meth:`look`."""
        if self.mode == "off":
            self.reason = "switched off by LANTERNE_TAP=off"
            return
        if self.mode == "python":
            self._second_best("LANTERNE_TAP=python")
            return
        try:
            self._library = native.library_path()
            if self._library.exists():
                self._start_tap(self._library)
            elif native.compiler() is None:
                self._second_best("no C++ compiler")
            else:
                self._builder = subprocess.Popen(
                    [sys.executable, "-m", "lanterne.collector.native"],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
        except (native.TapUnavailable, OSError) as error:
            self._second_best(str(error))

    def look(self, step: int) -> None:
        """At a step boundary: name new groups, and take the tap into use once it is compiled."""
        if self._builder is not None and step % RETRY_STEPS == 0 and self._builder.poll() is not None:
            builder, self._builder = self._builder, None
            try:
                if self._library is not None and self._library.exists():
                    self._start_tap(self._library)
                else:
                    said = builder.stderr.read().decode("utf-8", "replace")[-500:] if builder.stderr else ""
                    self._second_best(said.strip() or f"compilation ended with code {builder.returncode}")
            except native.TapUnavailable as error:
                self._second_best(str(error))
        self.name_groups()

    def wait(self, seconds: float) -> bool:
        """Wait for a tap that is being compiled; True when it is in use. For tests and for those who ask."""
        if self._builder is not None:
            try:
                self._builder.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self.look(0)
        return self.tier == "tap"

    def _start_tap(self, library: Path) -> None:
        global _loaded
        if _loaded is None:
            _loaded = native.load(library)
        if _loaded.lanterne_tap_start(str(self.tap.path).encode()) < 0:
            raise native.TapUnavailable(f"{self.tap.path} cannot be mapped by the tap")
        self._patches.add(lambda: _loaded.lanterne_tap_enable(0) if _loaded else None)
        self.tier = "tap"

    def _second_best(self, reason: str) -> None:
        from lanterne.collector.sources import collectives_python

        self.reason = reason
        writer = PythonWriter(self.tap)
        if collectives_python.hooks_available():
            collectives_python.install_hooks(writer, self._patches)
            self.tier = "hooks"
        else:
            collectives_python.install_wrappers(writer, self._patches)
            self.tier = "python"
        self.ring.note(
            "source_absent", -1, monotonic_ns(),
            {"source": "collective tap", "reason": reason, "instead": self.tier},
        )  # fmt: skip
        self.ring.count("source_absent")

    def name_groups(self) -> None:
        """Write the rank sets of groups that appeared since the last call; constant time when there is none."""
        world = _world()
        if world is None or len(world.pg_names) == self._named:
            return
        for pg, name in list(world.pg_names.items()):
            ranks = world.pg_group_ranks.get(pg)
            if ranks:
                self.ring.name_group(str(name), group_name(ranks))
        self._named = len(world.pg_names)

    def stop(self) -> None:
        self.name_groups()
        self._patches.undo()
        self.tier = ""


def _world() -> Any:
    """torch's registry of process groups, None while torch.distributed is not in use."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(module, "_world", None)
