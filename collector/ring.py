"""The trainer's end of the black box: fixed-size records into a memory-mapped file, in constant time.

No lock: a record's number is taken from one ``itertools.count`` (atomic under the interpreter's lock), so the
training thread, autograd's threads and garbage-collection callbacks may all write. The oldest records are
overwritten; readers count them. Format and reader: ``lanterne/blackbox.py``.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lanterne import blackbox_files as blackbox
from lanterne import limits
from lanterne.blackbox_files import EVENT_RECORD, KERNEL_RECORD, METRICS_RECORD, SEPARATOR
from lanterne.clock import Clock, SystemClock

NOTES_BYTES_MAX = 8 << 20
STRING_BYTES_MAX = 4 << 10
_ZEROS = (0.0,) * 8


def create_mapped(path: Path, size: int) -> mmap.mmap:
    """A fresh file of ``size`` bytes, mapped shared, mode 0600; it replaces an older one under the same name.

    The blocks are really allocated, so that a full disk or a small /dev/shm is an OSError here and not a SIGBUS in
    the middle of training.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        mapped = mmap.mmap(fd, size)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapped


class Ring:
    """Writes one ``rank-N.ring`` and its ``rank-N.notes``. Raises OSError when the files cannot be made.

    ``span(kind, times, name id, step, at, duration)`` writes a step or phase; ``record(kind, mask, name id, step, at,
    eight values, label id, text id, aux)`` up to eight values at one instant, the valid ones marked in ``mask`` (a
    metrics record names them in one interned text, joined by ``SEPARATOR``); ``event`` a short event, ``note`` an event
    with text; ``progress(step, phase id, since, last)`` shows where the rank is. Times are CLOCK_MONOTONIC in ns.
    ``take()`` gives the number of the next record. A compiled core (``core.py``) puts its own writers in their place.
    """

    def __init__(
        self, folder: Path, rank: int, records: int = limits.RING_RECORDS_DEFAULT, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        records = 1 << (records - 1).bit_length()
        self.path, self.notes_path = folder / f"rank-{rank}.ring", folder / f"rank-{rank}.notes"
        self.notes_path.unlink(missing_ok=True)
        region = blackbox.STRING_REGION_BYTES
        self.base, self.records = blackbox.HEADER_BYTES + region, records
        self.map = create_mapped(self.path, self.base + records * blackbox.RECORD.size)
        self.clock_pair = (clock.monotonic_ns(), clock.unix_ns())
        blackbox.HEADER.pack_into(
            self.map, 0, blackbox.RING_MAGIC, blackbox.RECORD.size, records, self.clock_pair[1], *self.clock_pair,
            os.getpid(), region, 0, 0,
        )  # fmt: skip
        blackbox.PROGRESS.pack_into(self.map, blackbox.PROGRESS_AT, -1, 0, 0, 0, 0)
        self._strings: dict[str, int] = {"": 0}
        self._string_bytes = 0
        self._string_lock = threading.Lock()
        self._note_lock = threading.Lock()
        self._note_bytes = 0
        self._counts = dict.fromkeys(blackbox.COUNTERS, 0)
        self._bind()

    def _bind(self) -> None:
        """Build the writers as closures over locals: a third of the cost of attribute look-ups."""
        size, base, mask = blackbox.RECORD.size, self.base, self.records - 1
        pack, pack_span = blackbox.RECORD.pack_into, blackbox.SPAN.pack_into
        view, take = self.map, count().__next__
        show, progress_at = struct.Struct("<qqqI").pack_into, blackbox.PROGRESS_AT

        def span(kind: int, times: int, name: int, step: int, at: int, duration: int) -> None:
            n = take()
            pack_span(view, base + (n & mask) * size, n + 1, kind, times, name, step, at, duration, n + 1)

        def record(
            kind: int, mask_bits: int, name: int, step: int, at: int, values: tuple[float, ...],
            label: int = 0, text: int = 0, aux: int = 0,
        ) -> None:  # fmt: skip
            n = take()
            pack(
                view,
                base + (n & mask) * size,
                n + 1,
                kind,
                mask_bits,
                name,
                step,
                at,
                0,
                *values,
                label,
                text,
                aux,
                n + 1,
            )

        def progress(step: int, phase: int, since: int, last: int) -> None:
            show(view, progress_at, step, since, last, phase)

        self.span = span
        self.record = record
        self.progress = progress
        self.take = take

    # --- strings ----------------------------------------------------------------------------------

    def intern(self, text: str) -> int:
        """The number of ``text`` in the string table, 0 when the table (1 MiB) is full. Cheap the second time."""
        found = self._strings.get(text)
        if found is not None:
            return found
        raw = text.encode("utf-8", "replace")[:STRING_BYTES_MAX]
        with self._string_lock:
            if text in self._strings:
                return self._strings[text]
            end = self._string_bytes + 4 + len(raw)
            if end > blackbox.STRING_REGION_BYTES:
                self.count("notes_dropped")
                return 0
            start = blackbox.HEADER_BYTES + self._string_bytes
            self.map[start : start + 4 + len(raw)] = blackbox.STRING.pack(len(raw)) + raw
            number = len(self._strings)
            struct.pack_into("<II", self.map, blackbox.STRINGS_AT, end, number)
            self._string_bytes = end
            self._strings[text] = number
            return number

    def name_group(self, process_group: str, ranks: str) -> None:
        """Tell readers the rank set of a process group."""
        self.intern(SEPARATOR.join((blackbox.GROUP_STRING, process_group, ranks)))

    # --- records ----------------------------------------------------------------------------------

    def metric(self, name: str, step: int, at: int, value: float, label: str = "") -> None:
        """One value under a name that need not be known beforehand."""
        self.record(METRICS_RECORD, 1, self.intern(name), step, at, (value, *_ZEROS[1:]), self.intern(label))

    def event(
        self,
        name: str,
        step: int,
        at: int,
        keys: str = "",
        values: tuple[float, ...] = (),
        aux_key: str = "",
        aux: int = 0,
    ) -> None:
        """A short event: up to eight numbers under ``keys`` (joined by ``SEPARATOR``) and one 64-bit number as hex."""
        values = values[:8]
        self.record(
            EVENT_RECORD, (1 << len(values)) - 1, self.intern(name), step, at, values + _ZEROS[len(values) :],
            self.intern(keys), self.intern(aux_key), aux - (1 << 64) if aux >> 63 else aux,
        )  # fmt: skip

    def kernel(
        self, name: str, step: int, at: int, duration: int, *, device: int, stream: int, size: int, kind: str
    ) -> None:
        """One thing that a device did (``kind``: kernel, memcpy, …); ``size`` is bytes of a copy, else 0."""
        label, called = self.intern(kind), self.intern(name)
        n = self.take()
        at_record = self.base + (n & self.records - 1) * blackbox.RECORD.size
        blackbox.RECORD.pack_into(
            self.map, at_record, n + 1, KERNEL_RECORD, 0, called, step, at, duration, device, stream, size, *_ZEROS[3:],
            label, 0, 0, n + 1,
        )  # fmt: skip

    def note(self, name: str, step: int, at: int, attributes: Mapping[str, Any], body: str = "") -> None:
        """An event with text, appended to the notes in one write; beyond 8 MiB it is counted and left out."""
        line = json.dumps(
            {
                "name": name,
                "step": step,
                "t": at,
                "attributes": dict(attributes),
                "body": body[: limits.STACK_BYTES_MAX],
            },
            ensure_ascii=False,
            default=str,
        )
        raw = line.encode("utf-8", "replace") + b"\n"
        with self._note_lock:
            if self._note_bytes + len(raw) > NOTES_BYTES_MAX:
                self.count("notes_dropped")
                return
            self._note_bytes += len(raw)
            with open(self.notes_path, "ab", buffering=0, opener=_private) as file:
                file.write(raw)

    # --- header -----------------------------------------------------------------------------------

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter of ``blackbox.COUNTERS`` in the header, for readers to report."""
        self._counts[name] += n
        blackbox.WORD.pack_into(self.map, blackbox.COUNTERS_AT + 8 * blackbox.COUNTERS.index(name), self._counts[name])

    def say_closed(self) -> None:
        struct.pack_into("<I", self.map, blackbox.PROGRESS_AT + 28, 1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
