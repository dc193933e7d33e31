"""The journal: batches are on disk here before they are acknowledged, and in the event store soon after.

A commit of the event store may stand still for a checkpoint; an append to a file does not. A record is a header
(magic, length and CRC-32 of what follows, number) and one batch: a JSON line with signal and runs, then an Arrow IPC
stream. Records count up from 1 without a gap over the segments, files named by their first number. The store writes
the number of the last record of a commit in the same transaction, so :meth:`Journal.after` gives, after a crash,
exactly what it lacks. The newest ``KEPT_BYTES`` stay although they were stored: should the event store's own log be
damaged, what it loses is here.

A torn end (the process died within a write) was never acknowledged and is cut off in silence; damage elsewhere is told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from lanterne.backend.store.batch import SCHEMAS, Batch, Run
from lanterne.backend.store.folders import make_folder

log = logging.getLogger(__name__)

SEGMENT_BYTES = 32 << 20
KEPT_BYTES = 64 << 20
"""At least twice what the event store's log holds before it is folded into the file, as rows are larger there."""
RECORD_BYTES_MAX = 1 << 30
_HEADER = struct.Struct("<4sIIQ")
_MAGIC = b"LNJ1"


def _packed(number: int, batch: Batch) -> list[bytes | pa.Buffer]:
    head = {"signal": batch.signal, "runs": [[r.job, r.attempt, r.rank, r.start, r.stop] for r in batch.runs]}
    line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.table.schema) as stream:
        stream.write_table(batch.table)
    body = sink.getvalue()
    checksum = zlib.crc32(body, zlib.crc32(line))
    return [_HEADER.pack(_MAGIC, len(line) + body.size, checksum, number), line, body]


def _unpacked(raw: bytes) -> Batch:
    line, _, body = raw.partition(b"\n")
    head = json.loads(line)
    table = pa.ipc.open_stream(pa.py_buffer(body)).read_all().cast(SCHEMAS[head["signal"]])
    return Batch(head["signal"], table, [Run(*run) for run in head["runs"]])


class Journal:
    """Segments in one folder. ``append`` and ``release`` are for one thread each; ``after`` comes before both."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreUnavailable when the folder cannot be made."""
        make_folder(folder)
        self.folder = folder
        self.damage = ""
        self._file: int | None = None
        self._size = 0
        self._next = 1

    def after(self, stored: int) -> Iterator[tuple[int, Batch]]:
        """Records with numbers above ``stored``, in order; sets ``damage`` to a sentence when some cannot be read.

        Appending goes on in a new segment, with numbers above all that were ever given.
        """
        self._next = stored + 1
        segments = self._segments()
        for at, (first, path) in enumerate(segments):
            until = segments[at + 1][0] if at + 1 < len(segments) else None
            if until is not None and until <= stored + 1:
                continue
            lost = 0
            number = first
            for raw in _records(path, first):
                self._next = max(self._next, number + 1)
                if raw is None:
                    lost += number > stored
                elif number > stored:
                    yield number, _unpacked(raw)
                number += 1
            if until is not None and number < until:
                lost += until - max(number, stored + 1)
                self._next = max(self._next, until)
            if lost:
                aside = path.with_suffix(".damaged")
                path.replace(aside)
                self.damage = f"the journal was damaged: {lost} records could not be read; they lie at {aside.name}"

    def append(self, found: Sequence[Batch]) -> int:
        """Write batches and wait until they are on the disk; the number of the last.

        Raises OSError when the disk refuses; nothing of the call then counts as written.
        """
        parts: list[bytes | pa.Buffer] = []
        for n, batch in enumerate(found):
            parts += _packed(self._next + n, batch)
        if self._file is None or self._size >= SEGMENT_BYTES:
            self._open_segment()
        file = self._file
        assert file is not None
        try:
            written = _write_all(file, parts)
            os.fdatasync(file)
        except OSError:
            self._forget_tail(file)
            raise
        self._size += written
        self._next += len(found)
        return self._next - 1

    def release(self, stored: int, kept_bytes: int = KEPT_BYTES) -> None:
        """Delete segments whose records are all stored, but for the newest ``kept_bytes``."""
        segments = self._segments()
        sizes = [path.stat().st_size for _, path in segments]
        for at, (_, path) in enumerate(segments[:-1]):
            if segments[at + 1][0] > stored + 1 or sum(sizes[at + 1 :]) < kept_bytes:
                return
            path.unlink(missing_ok=True)

    def close(self, *, stored_all: bool = False) -> None:
        """Close the segment; ``stored_all``: the event store holds everything in its file, nothing is needed here."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if stored_all:
            for _, path in self._segments():
                path.unlink(missing_ok=True)

    def _segments(self) -> list[tuple[int, Path]]:
        return sorted((int(path.stem), path) for path in self.folder.glob("*.log") if path.stem.isdigit())

    def _open_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        path = self.folder / f"{self._next:016d}.log"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        self._size = 0
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name of the new file, too
        finally:
            os.close(folder)

    def _forget_tail(self, file: int) -> None:
        """Cut off what a failed write left; where that fails too, go on in a new segment of the same number."""
        try:
            os.ftruncate(file, self._size)
            os.lseek(file, self._size, os.SEEK_SET)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(file)
            self._file = None


def _write_all(file: int, parts: Sequence[bytes | pa.Buffer]) -> int:
    total = 0
    for part in parts:
        view = memoryview(part)
        while len(view):
            done = os.write(file, view)
            view, total = view[done:], total + done
    return total


def _records(path: Path, first: int) -> Iterator[bytes | None]:
    """The records of a segment in order, None for one that is damaged; ends before a torn one."""
    size = path.stat().st_size
    number = first
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            magic, length, checksum, told = _HEADER.unpack(header)
            end = file.tell() + length
            sound = magic == _MAGIC and told == number and end <= size
            raw = file.read(length) if sound else b""
            if not sound or zlib.crc32(raw) != checksum:
                if end >= size or magic != _MAGIC or told != number:
                    if any(raw) or magic != bytes(4):
                        log.warning("journal: %s ends within record %d", path.name, number)
                    return
                yield None
            else:
                yield raw
            number += 1
