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
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lanterne import limits
from lanterne.blackbox_files import (
    ANY_SOURCE,
    EVENT_RECORD,
    FLAG_NO_COMPLETION,
    KERNEL_RECORD,
    LIST_KEY,
    METRICS_RECORD,
    PHASE_RECORD,
    POINT_TO_POINT,
    SEPARATOR,
    STEP_RECORD,
    WORLD_LIFT,
    Progress,
    RingReader,
    TapCall,
    TapReader,
)
from lanterne.nouns import AttributeValue, Collective, Event, Identity, Kind, group_name, group_ranks


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
            elif kind == KERNEL_RECORD:
                attributes = {"device": int(record[7]), "stream": int(record[8]), "activity": string(record[15])}
                if record[9]:
                    attributes["lanterne.bytes"] = int(record[9])
                given = self._fields(Kind.KERNEL, string(name), step, at, duration_ns=duration, attributes=attributes)
                yield at + duration, 0, given

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
