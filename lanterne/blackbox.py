"""The black box of one rank: the file formats that the trainer writes and everybody else reads. Standard library only.

Three files lie in the session folder (docs/seams.md 1) and survive a SIGKILL, for the kernel owns their pages:

``rank-N.ring``   header page, interned strings, then ``capacity`` records of 128 bytes. Record number n lies in slot
                  ``n % capacity`` and carries ``n + 1`` in its first and in its last word. The writer stores the first
                  word before the body and the last one after it; a reader that finds the last word right, copies, and
                  then still finds the first word right has an untorn record. The oldest records are overwritten.
``rank-N.tap``    header page, process-group table, then records of 128 bytes, one a collective call. A record is
                  published when the call is entered and completed in place: entered and not completed is pending.
``rank-N.notes``  JSON lines: rare events with text.

:class:`BlackBox` turns them into Events in the rank's own order. Sequence and Lamport numbers are given when records
are drained: the local order is the order of completion on the rank's own monotonic clock, and at the completion of
collective ``k`` of the world's group the counter is lifted to at least ``(k + 1) << 16``. So what any rank did before
entering a world-wide collective has a lower number than what any rank did after it, with no message of ours, as long
as a rank has fewer than 65,536 events between two of them.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lanterne import limits
from lanterne.nouns import AttributeValue, Collective, Event, Identity, Kind, group_name, group_ranks

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

STEP_RECORD, PHASE_RECORD, METRICS_RECORD, EVENT_RECORD = 1, 2, 3, 4
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


def identity_from_json(found: Mapping[str, Any]) -> Identity:
    """Identity from the ``identity`` object of ``rank-N.json``; unknown keys are left out."""
    known = {f.name for f in fields(Identity)}
    return Identity(**{k: v for k, v in found.items() if k in known})


class BlackBox:
    """Everything that one rank left in its session folder, as Events in that rank's own order.

    ``state`` is what :meth:`state` gave after an earlier drain: with it a restarted reader goes on where the last
    one stopped, gives no sequence number twice and no event twice. A trainer that started anew under the same job,
    attempt and rank is read from its beginning, and the sequence goes on.
    """

    def __init__(self, folder: Path | str, rank: int, state: Mapping[str, Any] | None = None) -> None:
        self.folder, self.rank = Path(folder), rank
        state = state or {}
        self.sequence, self.lamport = int(state.get("sequence", 0)), int(state.get("lamport", 0))
        self._notes_at = int(state.get("notes", 0))
        created = int(state.get("created", 0))
        self.ring = RingReader(self.folder / f"rank-{rank}.ring", int(state.get("ring", 0)), created)
        self.tap = TapReader(self.folder / f"rank-{rank}.tap", int(state.get("tap", 0)), state.get("open", ()))
        self.ring.dropped, self.ring.torn = int(state.get("dropped", 0)), int(state.get("torn", 0))
        if self.ring.open() is not None and created and self.ring.created != created:
            self.tap.forget()
            self._notes_at = 0
        self._about: dict[str, Any] | None = None

    # --- who --------------------------------------------------------------------------------------

    @property
    def about(self) -> Mapping[str, Any]:
        """``rank-N.json``: identity, settings, endpoint, clock pair, worker-server socket, pid; {} while absent."""
        if self._about is None:
            try:
                text = (self.folder / f"rank-{self.rank}.json").read_text(encoding="utf-8")
                self._about = json.loads(text)
            except (OSError, ValueError):
                return {}
        return self._about or {}

    @property
    def identity(self) -> Identity | None:
        """Who speaks; None until the trainer wrote ``rank-N.json``."""
        found = self.about.get("identity")
        return None if found is None else identity_from_json(found)

    def unix_ns(self, monotonic_ns: int) -> int:
        """The rank's own wall clock at ``monotonic_ns`` of its host (the same for all processes of the host)."""
        return self.ring.unix_ns(monotonic_ns)

    # --- what -------------------------------------------------------------------------------------

    def drain(self, limit: int = limits.EXPORT_BATCH_EVENTS) -> list[Event]:
        """New events, numbered, in the order in which they ended; about ``limit`` records at most."""
        found = [*self._from_ring(limit), *self._from_tap(limit), *self._from_notes(limit)]
        found.sort(key=lambda pair: pair[0])
        return [self._numbered(lift, fields) for _, lift, fields in found]

    def _numbered(self, lift: int, given: dict[str, Any]) -> Event:
        self.lamport = max(self.lamport + 1, lift)
        event = Event(sequence=self.sequence, lamport=self.lamport, **given)
        self.sequence += 1
        return event

    def make(
        self, name: str, monotonic_ns: int, *, step: int = -1, body: str = "", **attributes: AttributeValue
    ) -> Event:
        """An event that the reader itself tells of this rank (stall, exit, clock), numbered like the others."""
        given = self._fields(Kind.EVENT, name, step, monotonic_ns, body=body, attributes=attributes)
        return self._numbered(0, given)

    def measure(self, name: str, value: float, monotonic_ns: int, *, step: int = -1, label: str = "") -> Event:
        """A metric point that the reader itself took of this rank (RSS, GPU), numbered like the others."""
        attributes = {"lanterne.label": label} if label else {}
        return self._numbered(
            0, self._fields(Kind.METRIC, name, step, monotonic_ns, value=value, attributes=attributes)
        )

    def _fields(self, kind: Kind, name: str, step: int, monotonic_ns: int, **rest: Any) -> dict[str, Any]:
        return {
            "kind": kind, "name": name, "step": step, "monotonic_ns": monotonic_ns,
            "unix_ns": self.ring.unix_ns(monotonic_ns), **rest,
        }  # fmt: skip

    def _from_ring(self, limit: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        string = self.ring.string
        for record in self.ring.drain(limit):
            _, kind, mask, name, step, at, duration = record[:7]
            if kind == STEP_RECORD:
                yield at + duration, 0, self._fields(Kind.STEP, "step", step, at, duration_ns=duration)
            elif kind == PHASE_RECORD:
                attributes: dict[str, AttributeValue] = {"count": mask} if mask > 1 else {}
                yield (
                    at + duration,
                    0,
                    self._fields(Kind.PHASE, string(name), step, at, duration_ns=duration, attributes=attributes),
                )
            elif kind == METRICS_RECORD:
                label = string(record[15])
                attributes = {"lanterne.label": label} if label else {}
                for i, metric in enumerate(string(name).split(SEPARATOR)):
                    if mask >> i & 1:
                        value = record[7 + i]
                        yield at, 0, self._fields(Kind.METRIC, metric, step, at, value=value, attributes=attributes)
            elif kind == EVENT_RECORD:
                attributes = _event_attributes(record, string(record[15]), string(record[16]))
                yield at, 0, self._fields(Kind.EVENT, string(name), step, at, attributes=attributes)

    def _from_notes(self, limit: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        try:
            with (self.folder / f"rank-{self.rank}.notes").open("rb") as file:
                file.seek(self._notes_at)
                lines = file.readlines(limit * 512)
        except OSError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._notes_at += len(line)
            try:
                note = json.loads(line)
                yield int(note["t"]), 0, self._fields(
                    Kind.EVENT, str(note["name"]), int(note.get("step", -1)), int(note["t"]),
                    body=str(note.get("body", "")), attributes=dict(note.get("attributes", {})),
                )  # fmt: skip
            except (ValueError, KeyError, TypeError):
                self.ring.torn += 1

    def _from_tap(self, limit: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for call in self.tap.drain(limit):
            group, sequence, op = self._slot(call)
            attributes: dict[str, AttributeValue] = {
                "lanterne.group": group,
                "lanterne.group_sequence": sequence,
                "lanterne.bytes": call.bytes,
                "lanterne.dtype": call.dtype,
            }
            if call.shape:
                attributes["lanterne.shape"] = call.shape
            if call.flags & FLAG_NO_COMPLETION:
                attributes["lanterne.completion"] = "unknown"
            if call.nonfinite:
                attributes["lanterne.nonfinite"] = call.nonfinite
            if op != call.op:
                attributes["lanterne.direction"] = call.op
            lift = (sequence + 1) << WORLD_LIFT if group == self._world() and sequence < POINT_TO_POINT else 0
            duration = max(0, call.completed - call.entered)
            yield (
                call.completed,
                lift,
                self._fields(Kind.COLLECTIVE, op, call.step, call.entered, duration_ns=duration, attributes=attributes),
            )

    def _world(self) -> str:
        identity = self.identity
        return group_name(range(identity.world_size)) if identity is not None else ""

    def _slot(self, call: TapCall) -> tuple[str, int, str]:
        """(rank set, sequence, op) of a call. A send and its receive meet in one slot of their pair."""
        name, size, _ = self.tap.group(call.group)
        group = self.ring.groups.get(name, "")
        identity = self.identity
        if not group:
            group = group_name(range(size)) if identity is not None and size == identity.world_size else f"?{name}"
        if call.op == "recv_any_source":
            return group, ANY_SOURCE + call.sequence, call.op
        if call.op not in {"send", "recv"}:
            return group, call.sequence, call.op
        ranks = group_ranks(group) if not group.startswith("?") else ()
        peer = ranks[call.peer] if 0 <= call.peer < len(ranks) else call.peer
        upwards = (peer > self.rank) == (call.op == "send")
        return group_name([self.rank, peer]), POINT_TO_POINT + 2 * call.sequence + (not upwards), "sendrecv"

    def pending(self) -> list[Collective]:
        """Collectives entered and not completed, oldest first: what this rank is waiting in."""
        view = self.ring.open()
        if view is not None:
            self.ring.read_strings(view)
        out = []
        for call in self.tap.pending():
            group, sequence, op = self._slot(call)
            out.append(
                Collective(
                    rank=self.rank, group=group, sequence=sequence, op=op, step=call.step, bytes=call.bytes,
                    dtype=call.dtype, shape=call.shape, entered_ns=self.ring.unix_ns(call.entered),
                )
            )  # fmt: skip
        return out

    def progress(self) -> Progress:
        """How far the rank is, from the ring's header: read without the rank's help."""
        return self.ring.progress()

    def counts(self) -> dict[str, int]:
        """Counters of ``lanterne.quality`` that are not zero; they only grow."""
        found = self.ring.counts()
        if self.tap.dropped:
            found["ring_dropped"] = found.get("ring_dropped", 0) + self.tap.dropped
        return found

    def state(self) -> dict[str, Any]:
        """Plain JSON to hand to the next reader; valid for everything drained (and made) so far."""
        return {
            "sequence": self.sequence, "lamport": self.lamport, "created": self.ring.created, "ring": self.ring.at,
            "tap": self.tap.at, "open": list(self.tap.unfinished), "notes": self._notes_at,
            "dropped": self.ring.dropped, "torn": self.ring.torn,
        }  # fmt: skip

    def close(self) -> None:
        self.ring.close()
        self.tap.close()


def _event_attributes(record: tuple[Any, ...], keys: str, aux_key: str) -> dict[str, AttributeValue]:
    """Attributes of a short event: named numbers, or one joined list, and a 64-bit number as hex."""
    mask, values = record[2], record[7:15]
    given = [(i, v) for i, v in enumerate(values) if mask >> i & 1]
    attributes: dict[str, AttributeValue] = {}
    if keys.startswith(LIST_KEY):
        attributes[keys[len(LIST_KEY) :]] = ",".join(str(_plain(v)) for _, v in given)
    elif keys:
        names = keys.split(SEPARATOR)
        attributes |= {names[i]: _plain(v) for i, v in given if i < len(names)}
    if aux_key:
        attributes[aux_key] = f"{record[17] & (1 << 64) - 1:016x}"
    return attributes


def _plain(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def ranks_in(folder: Path | str) -> list[int]:
    """Ranks that have a ring in a session folder, in order."""
    found = []
    for path in Path(folder).glob("rank-*.ring"):
        number = path.name[len("rank-") : -len(".ring")]
        if number.isdigit():
            found.append(int(number))
    return sorted(found)
