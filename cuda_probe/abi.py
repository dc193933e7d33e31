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


KIND_NAMES = {1: "memcpy", 2: "memset", 3: "kernel", 10: "kernel", 38: "synchronization", 51: "graph"}
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


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTER_NAMES)


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that the device did. Times in ns on CLOCK_MONOTONIC; ``size`` is bytes, or blocks of a kernel."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    device: int
    stream: int
    size: int
    correlation: int
    graph: int


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
        self._lib = lib
        self._ring = lib.lp_ring()
        self._capacity = int(lib.lp_capacity())
        self._read = 0
        self.lost = 0

    def open(self, kinds: Kinds = Kinds.KERNELS, cupti_path: str = "") -> Status:
        """Open a window; the answer is a status, never an exception. ``cupti_path`` is tried after what is mapped."""
        return Status(self._lib.lp_open(cupti_path.encode(), int(kinds)))

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

    def _name(self, record: _Record) -> str:
        if KIND_NAMES.get(record.kind) == "memcpy":
            return COPY_KINDS.get(record.name, "copy")
        if KIND_NAMES.get(record.kind) != "kernel":
            return KIND_NAMES.get(record.kind, "other")
        return (self._lib.lp_name(record.name) or b"?").decode(errors="replace")

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
            yield Activity(
                KIND_NAMES.get(slot.kind, "other"), self._name(slot), slot.start_ns, slot.end_ns, slot.device,
                slot.stream, slot.bytes_or_blocks, slot.correlation, slot.graph,
            )  # fmt: skip
