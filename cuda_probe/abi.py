"""The C ABI of the CUPTI probe in Python: ctypes, and the ring as plain tuples. No torch, no numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path


class Status(IntEnum):
    """Status words of the probe; ``word`` is what users see."""

    COLLECTING = 0
    IDLE = 1
    NO_CUPTI = 2
    NO_DRIVER = 3
    NO_DEVICE = 4
    BUSY = 5
    DENIED = 6
    TOO_OLD = 7
    ERROR = 8

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")


class Kinds(IntFlag):
    """What a window collects."""

    KERNELS = 1
    MEMCPY = 2
    MEMSET = 4
    OVERHEAD = 8
    SYNCHRONIZATION = 16
    GRAPHS = 32
    RANGES = 64


KIND_NAMES = {1: "memcpy", 2: "memset", 3: "kernel", 10: "kernel", 12: "range", 38: "synchronization", 51: "graph"}
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


class _Record(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint64),
        ("start_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("bytes_or_blocks", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("correlation", ctypes.c_uint32),
        ("graph", ctypes.c_uint32),
        ("threads_per_block", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


COUNTER_NAMES = (
    "records", "dropped_by_cupti", "starved_buffers", "buffers", "parse_ns", "cupti_overhead_ns", "names_refused",
)  # fmt: skip


class _Total(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("ns", ctypes.c_uint64),
    )


class _Taken(ctypes.Structure):
    _fields_ = (
        ("records", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("kept", ctypes.c_uint32),
        ("totals", ctypes.c_uint32),
    )


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTER_NAMES)


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that the device did, or a ``range`` (NVTX) in which the program launched it.

    Times in ns on CLOCK_MONOTONIC; ``size`` is bytes, or blocks of a kernel.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    device: int
    stream: int
    size: int
    correlation: int
    graph: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What a window collected: the longest ``activities`` in order of their starts, and the sums of all.

    ``totals`` holds (name, count, ns) of every kernel name and kind of copy, longest first; ``busy_ns`` is the time in
    which the device did anything (overlapping work counts once); ``lost`` records were overwritten.
    """

    activities: tuple[Activity, ...]
    totals: tuple[tuple[str, int, int], ...]
    records: int
    lost: int
    busy_ns: int


class Probe:
    """The loaded probe library. Raises OSError when the file cannot be loaded."""

    def __init__(self, library: str | Path) -> None:
        lib = ctypes.CDLL(str(library))
        lib.lp_open.argtypes = [ctypes.c_char_p, ctypes.c_uint32]
        lib.lp_status_text.restype = lib.lp_name.restype = ctypes.c_char_p
        lib.lp_name.argtypes = [ctypes.c_uint32]
        lib.lp_ring.restype = ctypes.POINTER(_Record)
        lib.lp_head.restype = ctypes.c_uint64
        lib.lp_cupti_version.restype = lib.lp_capacity.restype = lib.lp_name_count.restype = ctypes.c_uint32
        lib.lp_clock_offset_ns.restype = lib.lp_clock_error_ns.restype = ctypes.c_int64
        lib.lp_count.argtypes = [ctypes.POINTER(_Counters)]
        lib.lp_take.restype = None
        lib.lp_take.argtypes = [
            ctypes.POINTER(_Record), ctypes.c_uint32, ctypes.POINTER(_Total), ctypes.c_uint32, ctypes.POINTER(_Taken),
        ]  # fmt: skip
        self._lib = lib
        self._ring = lib.lp_ring()
        self._capacity = int(lib.lp_capacity())
        self._read = 0
        self.lost = 0

    def open(self, kinds: Kinds = Kinds.KERNELS, cupti_path: str = "") -> Status:
        """Open a window; the answer is a status, never an exception. ``cupti_path`` is tried after what is mapped."""
        return Status(self._lib.lp_open(cupti_path.encode(), int(kinds)))

    def stop(self) -> Status:
        """What is launched from now on is left out of the window; what was launched may still run."""
        return Status(self._lib.lp_stop())

    def close(self) -> Status:
        """Close the window; records that CUPTI still held are flushed into the ring first."""
        return Status(self._lib.lp_close())

    def flush(self) -> None:
        """Ask CUPTI for the buffers that are complete."""
        self._lib.lp_flush()

    @property
    def status(self) -> Status:
        return Status(self._lib.lp_status())

    @property
    def reason(self) -> str:
        """The status in a plain sentence."""
        return (self._lib.lp_status_text() or b"").decode(errors="replace")

    @property
    def cupti_version(self) -> int:
        return int(self._lib.lp_cupti_version())

    @property
    def clock(self) -> tuple[int, int]:
        """(offset_ns, error_ns) between CUPTI's clock and CLOCK_MONOTONIC; (0, 0) where CUPTI stamps with ours."""
        return int(self._lib.lp_clock_offset_ns()), int(self._lib.lp_clock_error_ns())

    def counters(self) -> dict[str, int]:
        """Records, drops and times so far; see lanterne_probe.h."""
        out = _Counters()
        self._lib.lp_count(ctypes.byref(out))
        return {name: int(getattr(out, name)) for name in COUNTER_NAMES}

    def _name(self, kind: int, name: int) -> str:
        if KIND_NAMES.get(kind) == "memcpy":
            return f"memcpy {COPY_KINDS.get(name, 'other')}"
        if KIND_NAMES.get(kind) not in ("kernel", "range"):
            return KIND_NAMES.get(kind, "other")
        return (self._lib.lp_name(name) or b"?").decode(errors="replace")

    def _activity(self, r: _Record) -> Activity:
        return Activity(
            KIND_NAMES.get(r.kind, "other"), self._name(r.kind, r.name), r.start_ns, r.end_ns, r.device, r.stream,
            r.bytes_or_blocks, r.correlation, r.graph,
        )  # fmt: skip

    def take(self, most: int, most_totals: int = 512) -> Taken:
        """What came since the last take: at most ``most`` single activities (the longest), and the sums of all.

        Independent of :meth:`drain`. The work on all records is done in the library.
        """
        records, totals, taken = (_Record * most)(), (_Total * most_totals)(), _Taken()
        self._lib.lp_take(records, most, totals, most_totals, ctypes.byref(taken))
        return Taken(
            tuple(self._activity(records[i]) for i in range(taken.kept)),
            tuple((self._name(t.kind, t.name), t.count, t.ns) for t in totals[: taken.totals]),
            taken.records, taken.lost, taken.busy_ns,
        )  # fmt: skip

    def drain(self) -> Iterator[Activity]:
        """Records since the last drain, oldest first; what was overwritten meanwhile is counted in ``lost``."""
        head = int(self._lib.lp_head())
        first = max(self._read, head - self._capacity)
        self.lost += first - self._read
        self._read = head
        for n in range(first, head):
            slot = self._ring[n & (self._capacity - 1)]
            if slot.version != 2 * n + 2:
                self.lost += 1
                continue
            yield self._activity(slot)
