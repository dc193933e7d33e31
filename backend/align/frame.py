"""Rows of the event store (or of plain Events) as numpy columns: what the whole of ``align`` reads.

Text columns are coded once (``codes`` into ``values``) so that everything after is integer work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lanterne import wire
from lanterne.nouns import NO_STEP, AttributeValue, Event, EventName, Identity, Kind

NODES_BEFORE_NS, NODES_AFTER_NS = 90 * 10**9, 30 * 10**9
"""The agent repeats a finding that lasts once a minute."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Store(Protocol):
    """The part of the event store that alignment reads: SQL in, Arrow table out."""

    def query(self, sql: str, params: Sequence[Any] = ...) -> Any: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A text column: ``values[codes[i]]`` is row i."""

    codes: Ints
    values: tuple[str, ...]

    @classmethod
    def of(cls, rows: Iterable[str]) -> Text:
        index: dict[str, int] = {}
        codes = np.fromiter((index.setdefault(row, len(index)) for row in rows), np.int64)
        return cls(codes, tuple(index))

    def where(self, value: str) -> NDArray[np.bool_]:
        """Rows equal to ``value`` as a mask."""
        code = self.values.index(value) if value in self.values else -1
        mask: NDArray[np.bool_] = self.codes == code
        return mask


def _no_ints() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Steps, phases and collectives; times in the rank's own Unix ns, ``monotonic_ns`` at the start (0 = not known)."""

    kind: Text = field(default_factory=lambda: Text.of(()))
    name: Text = field(default_factory=lambda: Text.of(()))
    group: Text = field(default_factory=lambda: Text.of(()))
    signature: Text = field(default_factory=lambda: Text.of(()))  # dtype and shape, for mismatches
    rank: Ints = field(default_factory=_no_ints)
    step: Ints = field(default_factory=_no_ints)
    start_ns: Ints = field(default_factory=_no_ints)
    end_ns: Ints = field(default_factory=_no_ints)
    monotonic_ns: Ints = field(default_factory=_no_ints)
    group_sequence: Ints = field(default_factory=_no_ints)
    bytes: Ints = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Metric points. A value recorded as NaN stays NaN here and becomes inf in the facts (where NaN = not known)."""

    name: Text = field(default_factory=lambda: Text.of(()))
    rank: Ints = field(default_factory=_no_ints)
    step: Ints = field(default_factory=_no_ints)
    time_ns: Ints = field(default_factory=_no_ints)
    value: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One event of one rank in that rank's own clock."""

    name: str
    rank: int
    step: int
    time_ns: int
    monotonic_ns: int
    body: str
    host: str
    attributes: Mapping[str, AttributeValue]
    lamport: int = -1
    sequence: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A window of one attempt of one job."""

    job: str
    attempt: int
    spans: Spans = field(default_factory=Spans)
    points: Points = field(default_factory=Points)
    logs: Sequence[Log] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)


AROUND_NS = 60_000_000_000
"""Clock exchanges this long before and after some steps still bound the offsets within them."""
_STEPS = ("training.step", "training.phase")
_CALLS = ("training.collective",)
_SPANS = (
    "SELECT kind, name, group_name, dtype || '|' || coalesce(attributes['lanterne.shape'], '') AS signature, rank,"
    " step, start_ns, end_ns, monotonic_ns, group_sequence, bytes, host, received_ns FROM spans"
)
_LOGS = (
    "SELECT name, rank, step, time_ns, monotonic_ns, body, host, attributes, lamport, sequence, received_ns FROM logs"
)


def _coded(column: Any) -> Text:
    combined = column.combine_chunks().dictionary_encode()
    if hasattr(combined, "num_chunks"):
        combined = combined.chunk(0) if combined.num_chunks else combined.combine_chunks()
    codes = combined.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return Text(codes, tuple("" if v is None else v for v in combined.dictionary.to_pylist()))


def _ints(column: Any, default: int = 0) -> Ints:
    filled: Ints = column.fill_null(default).to_numpy().astype(np.int64)
    return filled


def number(text: Any) -> AttributeValue:
    """Attributes are stored as text: give numbers and booleans their type back."""
    if not isinstance(text, str):
        return text if isinstance(text, (bool, int, float)) else str(text)
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def last_step(store: Store, job: str, attempt: int) -> int:
    """Largest step of any step span of the attempt; -1 where there is none."""
    table = store.query(
        "SELECT max(step) AS m FROM spans WHERE job = ? AND attempt = ? AND kind = 'training.step'", [job, attempt]
    )
    found = table.column("m").to_pylist()[0]
    return NO_STEP if found is None else int(found)


_WHOLE = (
    "(label = '' OR (starts_with(label, 'cuda:') AND starts_with(name, 'hw.'))"
    " OR (regexp_full_match(label, 'gpu[0-9]+') AND starts_with(name, 'hw.') AND name <> 'hw.gpu.memory.usage'))"
)
"""Points that stand for their rank: without a label, or of the rank's own device. What a device holds in all (NVML) is
left out: the allocator of the process tells what this rank holds."""


def read(store: Store, job: str, attempt: int, first_step: int, last: int, *, calls: bool = True) -> Frame:
    """The rows of steps ``first_step..last`` (inclusive), all logs, and points without a step of the same span of time.

    ``calls`` False: without collectives and clock exchanges. Raises whatever the store raises
    (:class:`lanterne.errors.StoreUnavailable`).
    """
    kinds = _STEPS + (_CALLS if calls else ())
    spans = store.query(
        f"{_SPANS} WHERE job = ? AND attempt = ? AND step BETWEEN ? AND ? AND kind IN {kinds}",
        [job, attempt, first_step, last],
    )
    columns = {name: spans.column(name) for name in spans.column_names}
    starts = _ints(columns["start_ns"])
    since = int(starts.min()) if len(starts) else 0
    points = store.query(
        f"SELECT name, rank, step, time_ns, value FROM points WHERE job = ? AND attempt = ? AND {_WHOLE}"
        " AND (step BETWEEN ? AND ? OR (step < 0 AND time_ns >= ?))",
        [job, attempt, first_step, last, since],
    )
    unread = ("heartbeat",) + (() if calls else (str(EventName.CLOCK_SNAPSHOT), str(EventName.COLLECTIVE_PENDING)))
    logs = store.query(
        f"{_LOGS} WHERE job = ? AND attempt = ? AND name NOT IN (SELECT unnest(?)) ORDER BY time_ns",
        [job, attempt, list(unread)],
    )
    rows = logs.to_pylist()
    hosts = _hosts(columns, rows)
    if len(starts):
        until = int(_ints(columns["end_ns"]).max())
        rows += _of_nodes(store, sorted({h for h in hosts.values() if h}), since, until)
    return Frame(
        job=job,
        attempt=attempt,
        spans=_spans(columns, _ints(columns["rank"]), starts),
        points=Points(
            name=_coded(points.column("name")),
            rank=_ints(points.column("rank"), -1),
            step=_ints(points.column("step"), NO_STEP),
            time_ns=_ints(points.column("time_ns")),
            value=points.column("value").fill_null(np.nan).to_numpy().astype(np.float64),
        ),
        logs=[_log(row) for row in rows],
        hosts=hosts,
    )


def _of_nodes(store: Store, hosts: Sequence[str], since_ns: int, until_ns: int) -> list[dict[str, Any]]:
    """What the host agents found on these hosts, from a little before the window to a little after it."""
    if not hosts:
        return []
    found = store.query(
        "SELECT name, -1 AS rank, -1 AS step, time_ns, monotonic_ns, body, host, attributes, lamport, sequence"
        " FROM logs WHERE job = ? AND name = ? AND host IN (SELECT unnest(?))"
        " AND time_ns BETWEEN ? AND ? ORDER BY time_ns",
        [
            wire.NODES_JOB, str(EventName.HOST_FINDING), list(hosts), since_ns - NODES_BEFORE_NS,
            until_ns + NODES_AFTER_NS,
        ],
    )  # fmt: skip
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def read_calls(store: Store, job: str, attempt: int, first_step: int, since_ns: int) -> tuple[Frame, int]:
    """Collectives of ``first_step`` and later, clock exchanges and pending calls that the store got at ``since_ns``
    (its own Unix time) or later, and the newest such time among them, 0 where there is nothing."""
    spans = store.query(
        f"{_SPANS} WHERE job = ? AND attempt = ? AND step >= ? AND received_ns >= ? AND kind = '{_CALLS[0]}'",
        [job, attempt, first_step, since_ns],
    )
    names = [str(EventName.CLOCK_SNAPSHOT), str(EventName.COLLECTIVE_PENDING)]
    logs = store.query(
        f"{_LOGS} WHERE job = ? AND attempt = ? AND received_ns >= ? AND name IN (SELECT unnest(?)) ORDER BY time_ns",
        [job, attempt, since_ns, names],
    )
    columns = {name: spans.column(name) for name in spans.column_names}
    rows = logs.to_pylist()
    newest = max([int(_ints(columns["received_ns"]).max(initial=0)), *(int(r["received_ns"] or 0) for r in rows)])
    frame = Frame(
        job=job,
        attempt=attempt,
        spans=_spans(columns, _ints(columns["rank"]), _ints(columns["start_ns"])),
        logs=[_log(row) for row in rows],
        hosts=_hosts(columns, rows),
    )
    return frame, newest


def read_steps(store: Store, job: str, attempt: int, first_step: int, last: int) -> Frame:
    """Steps, phases and collectives of ``first_step..last`` (inclusive), and the clock exchanges around them."""
    spans = store.query(
        f"{_SPANS} WHERE job = ? AND attempt = ? AND step BETWEEN ? AND ? AND kind IN {_STEPS + _CALLS}",
        [job, attempt, first_step, last],
    )
    columns = {name: spans.column(name) for name in spans.column_names}
    starts, ends = _ints(columns["start_ns"]), _ints(columns["end_ns"])
    span = [int(starts.min(initial=1 << 62)) - AROUND_NS, int(ends.max(initial=0)) + AROUND_NS]
    logs = store.query(
        f"{_LOGS} WHERE job = ? AND attempt = ? AND name = ? AND time_ns BETWEEN ? AND ? ORDER BY time_ns",
        [job, attempt, str(EventName.CLOCK_SNAPSHOT), *span],
    ).to_pylist()
    return Frame(
        job=job, attempt=attempt, spans=_spans(columns, _ints(columns["rank"]), starts),
        logs=[_log(row) for row in logs], hosts=_hosts(columns, logs),
    )  # fmt: skip


def _hosts(spans: Mapping[str, Any], logs: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    hosts = {int(r["rank"]): str(r["host"]) for r in logs if r["host"] and r["rank"] >= 0}
    ranks, named = _ints(spans["rank"]), _coded(spans["host"])
    distinct, at = np.unique(ranks, return_index=True)
    return hosts | {int(r): named.values[named.codes[i]] for r, i in zip(distinct, at, strict=True)}


def _spans(columns: Mapping[str, Any], ranks: Ints, starts: Ints) -> Spans:
    return Spans(
        kind=_coded(columns["kind"]),
        name=_coded(columns["name"]),
        group=_coded(columns["group_name"]),
        signature=_coded(columns["signature"]),
        rank=ranks,
        step=_ints(columns["step"], NO_STEP),
        start_ns=starts,
        end_ns=_ints(columns["end_ns"]),
        monotonic_ns=_ints(columns["monotonic_ns"]),
        group_sequence=_ints(columns["group_sequence"], -1),
        bytes=_ints(columns["bytes"]),
    )


def _log(row: Mapping[str, Any]) -> Log:
    found = row["attributes"] or {}
    pairs = found.items() if isinstance(found, Mapping) else found
    return Log(
        name=str(row["name"]),
        rank=int(row["rank"]),
        step=int(row["step"]),
        time_ns=int(row["time_ns"]),
        monotonic_ns=int(row["monotonic_ns"] or 0),
        body=str(row["body"] or ""),
        host=str(row["host"] or ""),
        attributes={str(k): number(v) for k, v in pairs if v is not None},
        lamport=int(row["lamport"]),
        sequence=int(row["sequence"]),
    )


def from_events(sources: Iterable[tuple[Identity, Iterable[Event]]]) -> Frame:
    """The same frame from plain Events (black box, spool, simulator): one (identity, events) pair a rank."""
    spans: list[tuple[Identity, Event]] = []
    points: list[tuple[Identity, Event]] = []
    logs: list[Log] = []
    job, attempt, hosts = "", 0, {}
    for identity, events in sources:
        job, attempt = identity.job, identity.attempt
        hosts[identity.rank] = identity.host
        for event in events:
            if event.kind is Kind.METRIC:
                if not event.attributes.get(wire.LABEL):
                    points.append((identity, event))
            elif event.kind is Kind.EVENT:
                logs.append(_log_of(identity, event))
            elif event.kind is not Kind.KERNEL:
                spans.append((identity, event))

    def ints(rows: Iterable[Any]) -> Ints:
        return np.fromiter(rows, np.int64)

    return Frame(
        job=job,
        attempt=attempt,
        hosts=hosts,
        logs=sorted(logs, key=lambda log: log.time_ns),
        spans=Spans(
            kind=Text.of(e.kind.value for _, e in spans),
            name=Text.of(e.name for _, e in spans),
            group=Text.of(str(e.attributes.get(wire.GROUP, "")) for _, e in spans),
            signature=Text.of(
                f"{e.attributes.get(wire.DTYPE, '')}|{e.attributes.get('lanterne.shape', '')}" for _, e in spans
            ),
            rank=ints(i.rank for i, _ in spans),
            step=ints(e.step for _, e in spans),
            start_ns=ints(e.unix_ns for _, e in spans),
            end_ns=ints(e.unix_ns + e.duration_ns for _, e in spans),
            monotonic_ns=ints(e.monotonic_ns for _, e in spans),
            group_sequence=ints(int(e.attributes.get(wire.GROUP_SEQUENCE, -1)) for _, e in spans),
            bytes=ints(int(e.attributes.get(wire.BYTES, 0)) for _, e in spans),
        ),
        points=Points(
            name=Text.of(e.name for _, e in points),
            rank=ints(i.rank for i, _ in points),
            step=ints(e.step for _, e in points),
            time_ns=ints(e.unix_ns for _, e in points),
            value=np.fromiter((np.nan if e.value is None else e.value for _, e in points), np.float64),
        ),
    )


def _log_of(identity: Identity, event: Event) -> Log:
    return Log(
        name=event.name,
        rank=identity.rank,
        step=event.step,
        time_ns=event.unix_ns,
        monotonic_ns=event.monotonic_ns,
        body=event.body,
        host=identity.host,
        attributes=dict(event.attributes),
        lamport=event.lamport,
        sequence=event.sequence,
    )
