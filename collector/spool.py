"""The spool: bounded segments on disk that hold encoded batches until the backend has them.

A record is one drain of all local ranks: up to three pre-encoded OTLP bodies and the *state* (positions
in every ring, sequence counters) that holds after it. Body and state are one checksummed write, so the
spool is also the write-ahead log of the drain: a shipper that is killed and started again goes on from
the last whole record, gives no sequence number twice and drains nothing twice.

    segment  := record*                       file ``<number>.seg``
    record   := magic, lengths, crc32, head (JSON), bodies
    cursor   := first record and part not yet acknowledged, rewritten in place in ``cursor``

When the bound is reached the oldest segment goes and its events are counted (``spool_dropped``). When
the disk is full, records wait in a bounded queue in memory and the state is written in place into a file
that was allocated beforehand, so that even then no sequence number is used twice.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lanterne import limits
from lanterne.quality import Quality

_MAGIC = b"LSP1"
_HEAD = struct.Struct("<4sIII")  # magic, head bytes, body bytes, crc32 of both
_CURSOR = struct.Struct("<QQII")  # record number, part, zero, crc32
_SLOT_BYTES = 64 << 10
_SLOT = struct.Struct("<QII")  # record number, length, crc32
QUEUE_BYTES_MAX = 8 << 20
"""Bytes that wait in memory while the disk takes nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """One OTLP request body: ``signal`` is traces, metrics or logs; ``encoding`` its Content-Encoding."""

    signal: str
    encoding: str
    body: bytes
    events: int


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a part lies in the stream: record number (from 1) and part within it."""

    record: int
    part: int


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    parts: tuple[Part, ...]
    state: Mapping[str, Any]

    @property
    def size(self) -> int:
        return sum(len(p.body) for p in self.parts)

    def pack(self) -> bytes:
        head = json.dumps(
            {
                "record": self.number,
                "state": self.state,
                "parts": [[p.signal, p.encoding, len(p.body), p.events] for p in self.parts],
            },
            separators=(",", ":"),
        ).encode()
        body = b"".join(p.body for p in self.parts)
        crc = zlib.crc32(body, zlib.crc32(head))
        return _HEAD.pack(_MAGIC, len(head), len(body), crc) + head + body


def _read_record(file: BinaryIO) -> _Record | None:
    """The record at the file's position, or None where nothing whole stands there."""
    raw = file.read(_HEAD.size)
    if len(raw) < _HEAD.size:
        return None
    magic, head_bytes, body_bytes, crc = _HEAD.unpack(raw)
    if magic != _MAGIC or head_bytes > limits.BODY_WIRE_BYTES_MAX or body_bytes > 4 * limits.BODY_WIRE_BYTES_MAX:
        return None
    head, body = file.read(head_bytes), file.read(body_bytes)
    if len(body) < body_bytes or zlib.crc32(body, zlib.crc32(head)) != crc:
        return None
    plain = json.loads(head)
    parts, offset = [], 0
    for signal, encoding, length, events in plain["parts"]:
        parts.append(Part(signal, encoding, body[offset : offset + length], events))
        offset += length
    return _Record(plain["record"], tuple(parts), plain["state"])


@dataclass(slots=True)
class _Segment:
    path: Path
    size: int = 0
    first: int = 0
    last: int = 0


def read_parts(folder: Path) -> list[Part]:
    """Every whole part still in the spool of ``folder``, oldest first; for offline readers."""
    found: list[Part] = []
    for path in sorted(folder.glob("*.seg")):
        with path.open("rb") as file:
            while (record := _read_record(file)) is not None:
                found.extend(record.parts)
    return found


class Spool:
    """Bounded, ordered, crash-safe store of parts. Thread-safe: one appends, one sends.

    ``state`` is what the last append said (empty for a fresh spool). No method raises OSError once the
    folder exists: what the disk refuses waits in memory, and what does not fit there is counted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quality: Quality,
        bytes_max: int = limits.SPOOL_BYTES_DEFAULT,
        segment_bytes: int = limits.SPOOL_SEGMENT_BYTES,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._quality = folder, quality
        self._bytes_max = bytes_max
        self._segment_bytes = max(min(segment_bytes, bytes_max // 4), 4 << 10)
        self._lock = threading.RLock()
        self._segments: deque[_Segment] = deque()
        self._queue: deque[_Record] = deque()
        self._unsent: deque[tuple[int, tuple[int, ...]]] = deque()  # record number, events of each part
        self._cursor = Place(1, 0)
        self._read_at: tuple[Path, int] | None = None  # where the record after the held one starts
        self._held: _Record | None = None
        self._next = 1
        self.state: dict[str, Any] = {}
        self._load()
        self._fixed = self._open_fixed()

    # --- opening ---------------------------------------------------------------------------------

    def _load(self) -> None:
        self._cursor = self._load_cursor()
        paths = sorted(self._folder.glob("*.seg"))
        for path in paths:
            segment = _Segment(path)
            with path.open("rb") as file:
                while (record := _read_record(file)) is not None:
                    segment.size = file.tell()
                    segment.first = segment.first or record.number
                    segment.last = record.number
                    self.state, self._next = dict(record.state), record.number + 1
                    if record.number >= self._cursor.record:
                        self._unsent.append((record.number, tuple(p.events for p in record.parts)))
            if path.stat().st_size > segment.size:
                self._truncate(path, segment.size)  # a write that the kill cut short
            if segment.size:
                self._segments.append(segment)
            else:
                path.unlink(missing_ok=True)
        self._load_slots()
        self._next = max(self._next, self._cursor.record)
        if self._segments and self._segments[0].first > self._cursor.record:
            self._cursor = Place(self._segments[0].first, 0)
        self._prune()

    def _load_cursor(self) -> Place:
        try:
            record, part, _, crc = _CURSOR.unpack((self._folder / "cursor").read_bytes()[: _CURSOR.size])
        except (OSError, struct.error):
            return Place(1, 0)
        return Place(record, part) if crc == zlib.crc32(_CURSOR.pack(record, part, 0, 0)[:-4]) else Place(1, 0)

    def _load_slots(self) -> None:
        try:
            raw = (self._folder / "state").read_bytes()
        except OSError:
            return
        for start in (0, _SLOT_BYTES):
            if len(raw) < start + _SLOT.size:
                continue
            number, length, crc = _SLOT.unpack_from(raw, start)
            text = raw[start + _SLOT.size : start + _SLOT.size + length]
            if length and zlib.crc32(text) == crc and number >= self._next:
                self.state, self._next = json.loads(text), number + 1

    def _open_fixed(self) -> dict[str, int]:
        """File descriptors of ``cursor`` and ``state``, blocks allocated now, rewritten in place later."""
        opened: dict[str, int] = {}
        for name, size in (("cursor", _CURSOR.size), ("state", 2 * _SLOT_BYTES)):
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened[name] = fd
            try:
                if os.fstat(fd).st_size < size:
                    os.posix_fallocate(fd, 0, size)
            except OSError:
                continue  # full already: writes into it may fail and are tolerated
        return opened

    @staticmethod
    def _truncate(path: Path, size: int) -> None:
        try:
            os.truncate(path, size)
        except OSError:
            pass

    # --- appending -------------------------------------------------------------------------------

    def append(self, parts: Sequence[Part], state: Mapping[str, Any]) -> None:
        """Keep one drain. Never raises on a full disk; drops the oldest and counts it beyond the bound."""
        with self._lock:
            record = _Record(self._next, tuple(parts), dict(state))
            self._next += 1
            self.state = dict(state)
            self._queue.append(record)
            self._unsent.append((record.number, tuple(p.events for p in record.parts)))
            while self._queue and self._write(self._queue[0]):
                self._queue.popleft()
            if self._queue:
                self._write_slot(record)
                while sum(r.size for r in self._queue) > QUEUE_BYTES_MAX and len(self._queue) > 1:
                    self._drop_until(self._queue.popleft().number + 1)

    def _write(self, record: _Record) -> bool:
        raw = record.pack()
        self._make_room(len(raw))
        for _ in range(2 + len(self._segments)):
            if self._append_raw(record.number, raw):
                return True
            if not self._drop_oldest():
                return False
        return False

    def _append_raw(self, number: int, raw: bytes) -> bool:
        last = self._segments[-1] if self._segments else None
        if last is None or last.size + len(raw) > self._segment_bytes:
            last = _Segment(self._folder / f"{number:012d}.seg", first=number)
        try:
            with open(last.path, "ab", buffering=0) as file:
                written = file.write(raw)
        except OSError:
            written = -1
        if written != len(raw):
            self._truncate(last.path, last.size)
            if last.size == 0:
                last.path.unlink(missing_ok=True)
            return False
        if not last.size:
            self._segments.append(last)
        last.size += len(raw)
        last.last = number
        self._prune()
        return True

    def _make_room(self, wanted: int) -> None:
        while self._segments and sum(s.size for s in self._segments) + wanted > self._bytes_max:
            if not self._drop_oldest():
                return

    def _drop_oldest(self) -> bool:
        """Delete the oldest segment, count what the backend never got. False when there is none."""
        if not self._segments:
            return False
        segment = self._segments.popleft()
        segment.path.unlink(missing_ok=True)
        self._drop_until(segment.last + 1)
        return True

    def _drop_until(self, record: int) -> None:
        lost = 0
        while self._unsent and self._unsent[0][0] < record:
            number, events = self._unsent.popleft()
            lost += sum(events[self._cursor.part :] if number == self._cursor.record else events)
        if lost:
            self._quality.add("spool_dropped", lost)
        if self._cursor.record < record:
            self._move(Place(record, 0))

    def _write_slot(self, record: _Record) -> None:
        text = json.dumps(record.state, separators=(",", ":")).encode()
        if len(text) > _SLOT_BYTES - _SLOT.size:
            return
        raw = _SLOT.pack(record.number, len(text), zlib.crc32(text)) + text
        try:
            os.pwrite(self._fixed["state"], raw, (record.number % 2) * _SLOT_BYTES)
        except OSError:
            pass

    # --- sending ---------------------------------------------------------------------------------

    def next(self) -> tuple[Place, Part] | None:
        """The oldest part that is not acknowledged, or None. Asking again gives the same part."""
        with self._lock:
            while True:
                record = self._current()
                if record is None:
                    return None
                if self._cursor.part < len(record.parts):
                    return self._cursor, record.parts[self._cursor.part]
                self._leave(record.number)

    def _current(self) -> _Record | None:
        if self._held is not None and self._held.number == self._cursor.record:
            return self._held
        found = self._find(self._cursor.record)
        if found is not None and found.number > self._cursor.record:
            self._drop_until(found.number)
        self._held = found
        return found

    def _find(self, number: int) -> _Record | None:
        for segment in self._segments:
            if number > segment.last:
                continue
            record = self._scan(segment, number)
            if record is not None:
                return record
        return next((r for r in self._queue if r.number >= number), None)

    def _scan(self, segment: _Segment, number: int) -> _Record | None:
        """The first record of a segment at or after ``number``."""
        try:
            with segment.path.open("rb") as file:
                if self._read_at is not None and self._read_at[0] == segment.path:
                    file.seek(self._read_at[1])
                while file.tell() < segment.size and (record := _read_record(file)) is not None:
                    if record.number >= number:
                        self._read_at = (segment.path, file.tell())
                        return record
        except OSError:
            pass
        self._read_at = None
        return None

    def acknowledge(self, place: Place) -> None:
        """The backend has this part (or refused it for good): go on behind it. Old places are ignored."""
        with self._lock:
            record = self._current()
            if place != self._cursor or record is None:
                return
            if place.part + 1 < len(record.parts):
                self._move(Place(place.record, place.part + 1))
            else:
                self._leave(place.record)

    def _leave(self, number: int) -> None:
        while self._unsent and self._unsent[0][0] <= number:
            self._unsent.popleft()
        if self._queue and self._queue[0].number <= number:
            self._queue.popleft()
        self._move(Place(number + 1, 0))
        self._prune()

    def _move(self, place: Place) -> None:
        self._cursor = place
        if self._held is not None and self._held.number < place.record:
            self._held = None
        plain = _CURSOR.pack(place.record, place.part, 0, 0)[:-4]
        try:
            os.pwrite(self._fixed["cursor"], plain + struct.pack("<I", zlib.crc32(plain)), 0)
        except OSError:
            pass  # the parts behind an old cursor are sent again; the store keeps one of each

    def _prune(self) -> None:
        """Delete acknowledged segments; the newest stays, it holds the state."""
        while len(self._segments) > 1 and self._segments[0].last < self._cursor.record:
            self._segments.popleft().path.unlink(missing_ok=True)

    def unsent_events(self) -> int:
        """Events that wait for the backend."""
        with self._lock:
            return sum(
                sum(events[self._cursor.part :] if number == self._cursor.record else events)
                for number, events in self._unsent
            )

    def size(self) -> int:
        """Bytes on disk and in the queue."""
        with self._lock:
            return sum(s.size for s in self._segments) + sum(r.size for r in self._queue)

    def close(self) -> None:
        with self._lock:
            for fd in self._fixed.values():
                os.close(fd)
            self._fixed = {"cursor": -1, "state": -1}
