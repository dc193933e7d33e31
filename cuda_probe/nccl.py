"""The NCCL profiler plugin from Python: its path for ``NCCL_PROFILER_PLUGIN`` and its ring as plain tuples."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

NO_SEQUENCE = 2**64 - 1


class _Record(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint64),
        ("communicator", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("enqueued_ns", ctypes.c_uint64),
        ("enqueue_ended_ns", ctypes.c_uint64),
        ("gpu_first_ns", ctypes.c_uint64),
        ("gpu_last_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("channels", ctypes.c_uint8),
        ("channels_started", ctypes.c_uint8),
        ("channels_done", ctypes.c_uint8),
        ("function", ctypes.c_char * 20),
        ("algorithm", ctypes.c_char * 12),
        ("protocol", ctypes.c_char * 12),
        ("datatype", ctypes.c_char * 16),
        ("reserved", ctypes.c_char * 20),
    )


COUNTER_NAMES = ("callbacks", "records", "overwritten", "communicators")


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTER_NAMES)


@dataclass(frozen=True, slots=True)
class NcclCall:
    """One call of this process. Host times on CLOCK_MONOTONIC; GPU times on the device's globaltimer; 0 = not seen.

    ``done`` is true when as many channels stopped as the call has. ``peer`` is -1 for a collective, ``sequence`` is -1
    for a point-to-point call.
    """

    communicator: int
    sequence: int
    function: str
    algorithm: str
    protocol: str
    datatype: str
    bytes: int
    rank: int
    ranks: int
    peer: int
    enqueued_ns: int
    enqueue_ended_ns: int
    gpu_first_ns: int
    gpu_last_ns: int
    channels: int
    done: bool


class NcclRing:
    """The ring of the plugin that NCCL loaded in this process (same file). Raises OSError where it cannot be loaded."""

    def __init__(self, library: str | Path) -> None:
        lib = ctypes.CDLL(str(library))
        lib.ln_ring.restype = ctypes.POINTER(_Record)
        lib.ln_head.restype = ctypes.c_uint64
        lib.ln_capacity.restype = ctypes.c_uint32
        lib.ln_communicator_name.restype = ctypes.c_char_p
        lib.ln_communicator_name.argtypes = [ctypes.c_uint64]
        lib.ln_count.argtypes = [ctypes.POINTER(_Counters)]
        self._lib = lib
        self._ring = lib.ln_ring()
        self._capacity = int(lib.ln_capacity())
        self._read = 0
        self.lost = 0

    @property
    def abi_version(self) -> int:
        """The plugin version that NCCL picked (4, 5 or 6); 0 = NCCL has not loaded it."""
        return int(self._lib.ln_abi_version())

    def counters(self) -> dict[str, int]:
        """Callbacks, records, updates that came after the ring had gone round, communicators."""
        out = _Counters()
        self._lib.ln_count(ctypes.byref(out))
        return {name: int(getattr(out, name)) for name in COUNTER_NAMES}

    def communicator_name(self, communicator: int) -> str:
        """NCCL's own name of a communicator, empty where it has none."""
        return (self._lib.ln_communicator_name(communicator) or b"").decode(errors="replace")

    def skip(self) -> None:
        """Leave out what came so far."""
        self._read = int(self._lib.ln_head())

    def drain(self) -> list[NcclCall]:
        """Calls since the last drain or skip, oldest first; overwritten ones are counted in ``lost``."""
        out: list[NcclCall] = []
        head = int(self._lib.ln_head())
        first = max(self._read, head - self._capacity)
        self.lost += first - self._read
        self._read = head
        for n in range(first, head):
            r = self._ring[n & (self._capacity - 1)]
            if r.version != 2 * n + 2:
                self.lost += 1
                continue
            out.append(NcclCall(
                r.communicator, -1 if r.sequence == NO_SEQUENCE else r.sequence, r.function.decode(),
                r.algorithm.decode(), r.protocol.decode(), r.datatype.decode(), r.bytes, r.rank, r.ranks, r.peer,
                r.enqueued_ns, r.enqueue_ended_ns, r.gpu_first_ns, r.gpu_last_ns, r.channels,
                r.channels_done >= r.channels > 0,
            ))  # fmt: skip
        return out
