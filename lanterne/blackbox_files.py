"""Formats and readers of the black box's two mapped files, the ring and the tap (see ``lanterne/blackbox.py``)."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lanterne import limits

# --- the ring's format ---------------------------------------------------------------------------

RING_MAGIC = b"LNTRING1"
HEADER_BYTES = 4096
STRING_REGION_BYTES = 1 << 20
RECORD = struct.Struct("<QHHIqqq8dIIqQ")
"""number + 1, kind, mask, name, step, monotonic_ns, duration_ns, 8 values, label, text, aux, number + 1"""
SPAN = struct.Struct("<QHHIqqq80xQ")
"""The same record with no values, label, text and aux."""
HEADER = struct.Struct("<8sIIqqqqIII")
"""magic, record bytes, capacity, created_unix_ns, clock monotonic_ns, clock unix_ns, pid, string region bytes,
string bytes used, number of strings"""
STRINGS_AT = 52
PROGRESS = struct.Struct("<qqqII")  # step, phase_since_ns, last_ns, phase (string id), closed
PROGRESS_AT = 128
COUNTERS_AT = 256
COUNTERS = ("held_dropped", "notes_dropped", "shed", "source_absent", "collector_error")
WORD = struct.Struct("<Q")
STRING = struct.Struct("<I")

STEP_RECORD, PHASE_RECORD, METRICS_RECORD, EVENT_RECORD, KERNEL_RECORD = 1, 2, 3, 4, 5
"""A kernel record has the values device, stream, and bytes of a copy; its label is the kind of activity."""
SEPARATOR = "\x1f"
GROUP_STRING = "\x01group"
"""A string ``\\x01group <SEP> process-group name <SEP> rank set`` tells the rank set of a process group."""
LIST_KEY = "[]"
"""An event whose keys are ``[]name`` joins its values into one attribute ``name`` (``"3,17,4"``)."""

if RECORD.size != limits.RING_RECORD_BYTES:
    raise AssertionError(f"ring record is {RECORD.size} bytes, limits says {limits.RING_RECORD_BYTES}")

# --- the tap's format (collector/native/tap.cpp writes the same) ---------------------------------

TAP_MAGIC = b"LNTTAP01"
TAP_HEADER = struct.Struct("<8sIIQqqQQdQ")
"""magic, record bytes, capacity, head, step, gradients flow now (0 | 1), calls with non-finite gradients, groups
in use, sum of squares of the local gradients entered into reductions since the last reset, and how many such calls"""
TAP_HEAD_AT, TAP_STEP_AT, TAP_BACKWARD_AT, TAP_HITS_AT, TAP_GROUPS_AT, TAP_SQUARES_AT = 16, 24, 32, 40, 48, 56
TAP_GROUP = struct.Struct("<56sii")  # process-group name, size, own rank in it
TAP_GROUPS_MAX = 256
TAP_RECORDS_AT = HEADER_BYTES + TAP_GROUPS_MAX * TAP_GROUP.size
TAP_RECORD = struct.Struct("<QqqqqqqIBBBBii4qdIIQ")
"""version, entered, returned, completed (monotonic ns), step, sequence in the group, bytes, group, op, dtype, dims,
flags, peer (rank in the group), non-finite samples, 4 sizes, mean square of the sampled elements, samples, reserved,
version"""
TAP_RECORDS = 1 << 13

OPS = (
    "other", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_base",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "gather", "scatter", "barrier", "send", "recv",
    "recv_any_source",
)  # fmt: skip
DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip
FLAG_NO_COMPLETION = 1
"""The backend does not tell when the call completed (device streams): ``returned`` stands for it."""
POINT_TO_POINT = 1 << 40
"""Point-to-point calls count from here on, by (sender, receiver): even numbers go to the higher rank."""
ANY_SOURCE = 1 << 41
WORLD_LIFT = 16
OPEN_MAX = 4_096

if TAP_RECORD.size != 128:
    raise AssertionError(f"tap record is {TAP_RECORD.size} bytes, not 128")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank is, read without its help. Times are the rank's CLOCK_MONOTONIC in ns; 0 = not yet."""

    step: int
    phase: str
    phase_since_monotonic_ns: int
    last_monotonic_ns: int
    closed: bool = False
    """The rank said goodbye (``Session.close``): silence is not a hang."""


class _Mapped:
    """A read-only mapping of a whole file; None-like (``ok`` False) while the file is absent or too short."""

    def __init__(self, path: Path, magic: bytes, least: int) -> None:
        self.path, self.magic, self.least = path, magic, least
        self.map: mmap.mmap | None = None

    def open(self) -> mmap.mmap | None:
        if self.map is not None:
            return self.map
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.least:
                    return None
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        if found[: len(self.magic)] != self.magic:
            found.close()
            return None
        self.map = found
        return found

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
            self.map = None


class RingReader:
    """Reads a ring from record number ``at`` on. ``dropped`` and ``torn`` count what could not be read."""

    def __init__(self, path: Path, at: int = 0, created: int = 0) -> None:
        self._file = _Mapped(path, RING_MAGIC, HEADER_BYTES)
        self.at, self.created, self.dropped, self.torn = at, created, 0, 0
        self.strings: list[str] = [""]
        self.groups: dict[str, str] = {}
        self._string_at = 0
        self._hole = -1
        self._clock = (0, 0)

    def open(self) -> mmap.mmap | None:
        """The mapping, None while there is no ring yet. A new ring under the old name starts at record 0."""
        first = self._file.map is None
        view = self._file.open()
        if view is None or not first:
            return view
        head = HEADER.unpack_from(view, 0)
        if self.created and head[3] != self.created:
            self.at = 0
        self.created, self._clock = head[3], (head[4], head[5])
        self.capacity, self.pid = head[2], head[6]
        self.base = HEADER_BYTES + head[7]
        return view

    def unix_ns(self, monotonic_ns: int) -> int:
        """The rank's own wall clock at ``monotonic_ns``, by the clock pair of the ring's header."""
        self.open()
        return self._clock[1] + monotonic_ns - self._clock[0]

    def read_strings(self, view: mmap.mmap) -> None:
        used, count = struct.unpack_from("<II", view, STRINGS_AT)
        while len(self.strings) <= count and self._string_at < used:
            start = HEADER_BYTES + self._string_at
            (size,) = STRING.unpack_from(view, start)
            text = view[start + 4 : start + 4 + size].decode("utf-8", "replace")
            self._string_at += 4 + size
            self.strings.append(text)
            if text.startswith(GROUP_STRING):
                _, name, ranks = text.split(SEPARATOR, 2)
                self.groups[name] = ranks

    def string(self, number: int) -> str:
        return self.strings[number] if number < len(self.strings) else f"#{number}"

    def drain(self, limit: int) -> list[tuple[Any, ...]]:
        """Up to ``limit`` records, oldest first, as :data:`RECORD` tuples."""
        view = self.open()
        out: list[tuple[Any, ...]] = []
        if view is None:
            return out
        mask, size = self.capacity - 1, RECORD.size
        while len(out) < limit:
            slot = self.base + (self.at & mask) * size
            (last,) = WORD.unpack_from(view, slot + size - 8)
            record = RECORD.unpack_from(view, slot)
            (first,) = WORD.unpack_from(view, slot)
            wanted = self.at + 1
            if first == last == wanted == record[0]:
                out.append(record)
                self.at = wanted
            elif max(first, last) > wanted:
                self._skip(max(first, last))
            elif not self._over_hole(view):
                break
        self.read_strings(view)
        return out

    def _skip(self, seen: int) -> None:
        """The writer lapped us: go on at the oldest record that is still whole, and count the rest."""
        oldest = seen - self.capacity + 1
        if oldest <= self.at:
            self.torn += 1
            oldest = self.at + 1
        else:
            self.dropped += oldest - self.at
        self.at = oldest

    def _over_hole(self, view: mmap.mmap) -> bool:
        """A number was taken and never written (its thread died): pass it when it is still so at the next drain."""
        after = self.base + (self.at + 1 & self.capacity - 1) * RECORD.size
        if WORD.unpack_from(view, after)[0] != self.at + 2:
            return False
        if self._hole != self.at:
            self._hole = self.at
            return False
        self.torn += 1
        self.at += 1
        return True

    def progress(self) -> Progress:
        view = self.open()
        if view is None:
            return Progress(step=-1, phase="", phase_since_monotonic_ns=0, last_monotonic_ns=0)
        step, since, last, phase, closed = PROGRESS.unpack_from(view, PROGRESS_AT)
        self.read_strings(view)
        return Progress(
            step=step,
            phase=self.string(phase),
            phase_since_monotonic_ns=since,
            last_monotonic_ns=last,
            closed=bool(closed),
        )

    def counts(self) -> dict[str, int]:
        view = self.open()
        own = {"ring_dropped": self.dropped, "ring_torn": self.torn}
        if view is not None:
            own |= {name: WORD.unpack_from(view, COUNTERS_AT + 8 * i)[0] for i, name in enumerate(COUNTERS)}
        return {name: n for name, n in own.items() if n}

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class TapCall:
    """One decoded tap record; times in monotonic ns, ``completed`` 0 while pending."""

    number: int
    entered: int
    returned: int
    completed: int
    step: int
    sequence: int
    bytes: int
    group: int
    op: str
    dtype: str
    shape: str
    flags: int
    peer: int
    nonfinite: int
    mean_square: float


class TapReader:
    """Reads collectives from call number ``at`` on; ``open`` holds the numbers of calls seen but not completed."""

    def __init__(self, path: Path, at: int = 0, unfinished: Iterable[int] = ()) -> None:
        self._file = _Mapped(path, TAP_MAGIC, TAP_RECORDS_AT)
        self.at, self.dropped = at, 0
        self.unfinished: list[int] = list(unfinished)
        self._names: dict[int, tuple[str, int, int]] = {}

    def forget(self) -> None:
        """A new process writes under the old name: start at call 0."""
        self.at, self.unfinished = 0, []

    def group(self, number: int) -> tuple[str, int, int]:
        """(process-group name, size, own rank in it) of a group number of the tap."""
        view = self._file.open()
        if number in self._names or view is None:
            return self._names.get(number, ("", 0, 0))
        name, size, rank = TAP_GROUP.unpack_from(view, HEADER_BYTES + number * TAP_GROUP.size)
        self._names[number] = (name.rstrip(b"\0").decode("utf-8", "replace"), size, rank)
        return self._names[number]

    def _call(self, view: mmap.mmap, capacity: int, number: int) -> TapCall | None:
        slot = TAP_RECORDS_AT + (number & (capacity - 1)) * TAP_RECORD.size
        record = TAP_RECORD.unpack_from(view, slot)
        (version,) = WORD.unpack_from(view, slot)
        if not record[0] == version == record[-1] == 2 * number + 2:
            return None
        dims, sizes = record[10], record[14:18]
        shape = "x".join(str(n) for n in sizes[: min(dims, 4)]) + ("x…" if dims > 4 else "")
        return TapCall(
            number, record[1], record[2], record[3], record[4], record[5], record[6], record[7],
            OPS[record[8]] if record[8] < len(OPS) else OPS[0],
            DTYPES[record[9]] if record[9] < len(DTYPES) else "", shape, record[11], record[12], record[13], record[18],
        )  # fmt: skip

    def drain(self, limit: int) -> list[TapCall]:
        """Calls completed since the last drain, in the order of entry, at most about ``limit``."""
        view = self._file.open()
        if view is None:
            return []
        capacity = TAP_HEADER.unpack_from(view, 0)[2]
        (head,) = WORD.unpack_from(view, TAP_HEAD_AT)
        oldest = head - capacity + 1
        if oldest > self.at:
            self.dropped += oldest - self.at
            self.at = oldest
        done: list[TapCall] = []
        still: list[int] = []
        fresh = range(self.at, min(head, self.at + limit))
        for number in [*self.unfinished, *fresh]:
            call = self._call(view, capacity, number)
            if call is None:
                if number >= fresh.start and number == self.at:
                    break  # being written just now: come back
                self.dropped += 1
            elif call.completed:
                done.append(call)
            else:
                still.append(number)
            if number >= fresh.start:
                self.at = number + 1
        self.dropped += max(0, len(still) - OPEN_MAX)
        self.unfinished = still[-OPEN_MAX:]
        return done

    def pending(self) -> list[TapCall]:
        """Calls entered and not completed, oldest first, also those that were not drained yet."""
        view = self._file.open()
        if view is None:
            return []
        capacity = TAP_HEADER.unpack_from(view, 0)[2]
        (head,) = WORD.unpack_from(view, TAP_HEAD_AT)
        numbers = [*self.unfinished, *range(max(self.at, head - capacity), head)]
        calls = (self._call(view, capacity, number) for number in numbers)
        return [call for call in calls if call is not None and not call.completed]

    def close(self) -> None:
        self._file.close()
