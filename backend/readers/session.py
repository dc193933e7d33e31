"""Lanterne's own files: the black box of a session folder (rings, taps, notes) and the shipper's spool.

The black box is read by :mod:`lanterne.blackbox`; a spool segment holds OTLP bodies, turned back into Events here.
What both hold is taken once: events are told apart by (rank, sequence).
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import blackbox, limits, wire
from lanterne.backend.align.facts import facts_from_events
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source
from lanterne.causal.facts import Facts
from lanterne.errors import UnreadableInput
from lanterne.nouns import NO_STEP, Event, Identity, Kind

MAGIC = b"LSP1"
_HEAD = struct.Struct("<4sIII")  # magic, head bytes, body bytes, crc32 of both
EVENTS_MAX = 2_000_000
_REQUESTS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
_OWN = frozenset({wire.STEP, wire.SEQUENCE, wire.LAMPORT, wire.MONOTONIC, wire.NAME, wire.EVENT_NAME})


def is_segment(source: Source) -> bool:
    """A spool segment starts with its record magic."""
    return source.head[:4] == MAGIC


def folders(paths: Iterable[Path]) -> list[Path]:
    """Session folders among the given files: those with rings or rank files."""
    return sorted({p.parent for p in paths if p.suffix == ".ring" and p.name.startswith("rank-")})


def belongs(path: Path, sessions: Iterable[Path]) -> bool:
    """True for a file of a session folder that the black box already covers (stderr and stacks are read as text)."""
    inside = any(path.parent == s or s in path.parents for s in sessions)
    return inside and path.suffix not in {".seg", ".stderr", ".stacks"}


def _black_boxes(folder: Path, gather: Gather) -> Iterator[tuple[Identity, list[Event]]]:
    for rank in blackbox.ranks_in(folder):
        try:
            box = blackbox.BlackBox(folder, rank)
            identity = box.identity
            events: list[Event] = []
            while len(events) < EVENTS_MAX and (more := box.drain()):
                events += more
            if identity is None:
                gather.gap(f"{folder}/rank-{rank}.json: not there or not readable; the ring is used without it")
                identity = Identity(job="offline", rank=rank)
            lost = sum(box.ring.counts().values())
            gather.dropped += box.ring.dropped + box.ring.torn
            del lost
        except (OSError, ValueError, TypeError, KeyError, IndexError, struct.error) as error:
            gather.gap(f"{folder}/rank-{rank}.ring: {error}")
            continue
        exit_file = folder / f"rank-{rank}.exit.json"
        if exit_file.is_file():
            events += _exit(exit_file, box, gather)
        yield identity, events


def _exit(path: Path, box: blackbox.BlackBox, gather: Gather) -> list[Event]:
    try:
        row = json.loads(path.read_text(errors="replace"))
        told: dict[str, Any] = {k: v for k, v in row.items() if isinstance(v, (int, str, float)) and k != "step"}
        return [box.make("exited", int(row.get("monotonic_ns", row.get("t", 0)) or 0), **told)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        gather.gap(f"{path}: {error}")
        return []


def _segment(path: Path, gather: Gather) -> Iterator[tuple[str, bytes]]:
    """(signal, body) of every whole record; a torn tail is noted."""
    with path.open("rb") as file:
        while True:
            at = file.tell()
            raw = file.read(_HEAD.size)
            if not raw:
                return
            if len(raw) < _HEAD.size or raw[:4] != MAGIC:
                gather.gap(f"{path} at byte {at}: no whole record, the rest is left out")
                return
            _, head_bytes, body_bytes, crc = _HEAD.unpack(raw)
            if head_bytes > limits.BODY_WIRE_BYTES_MAX or body_bytes > 4 * limits.BODY_WIRE_BYTES_MAX:
                gather.gap(f"{path} at byte {at}: record of {body_bytes} bytes is beyond the bound")
                return
            head, body = file.read(head_bytes), file.read(body_bytes)
            if len(body) < body_bytes or zlib.crc32(body, zlib.crc32(head)) != crc:
                gather.gap(f"{path} at byte {at}: record with a wrong checksum, the rest is left out")
                return
            try:
                parts = json.loads(head)["parts"]
                start = 0
                for signal, encoding, length, _ in parts:
                    yield str(signal), _inflate(body[start : start + length], str(encoding))
                    start += length
            except (ValueError, KeyError, TypeError, RecursionError, OSError, zlib.error) as error:
                gather.gap(f"{path} at byte {at}: {error}")


def _inflate(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompress(body, max_output_size=limits.BODY_INFLATED_BYTES_MAX)
    return body


def _attributes(items: Any) -> dict[str, Any]:
    return {kv.key: wire.plain(kv.value) for kv in items}


def _event(kind: Kind, name: str, own: dict[str, Any], unix_ns: int, **rest: Any) -> Event:
    plain = {k: v for k, v in own.items() if k not in _OWN and isinstance(v, (str, int, float, bool))}
    return Event(
        kind=kind,
        name=name,
        sequence=int(own.get(wire.SEQUENCE, -1)),
        lamport=int(own.get(wire.LAMPORT, 0)),
        unix_ns=unix_ns,
        monotonic_ns=int(own.get(wire.MONOTONIC, 0)),
        step=int(own.get(wire.STEP, NO_STEP)),
        attributes=plain,
        **rest,
    )


def events_of(signal: str, body: bytes) -> list[tuple[Identity, list[Event]]]:
    """Events of one OTLP request of ours. Raises DecodeError on bytes that are none."""
    request = _REQUESTS[signal]()
    request.ParseFromString(body)
    out = []
    for block in getattr(
        request, {"traces": "resource_spans", "metrics": "resource_metrics", "logs": "resource_logs"}[signal]
    ):
        events: list[Event] = []
        if signal == "traces":
            for span in (s for scope in block.scope_spans for s in scope.spans):
                own, kind = _attributes(span.attributes), Kind(span.name) if span.name in set(Kind) else None
                if kind is not None:
                    long = max(0, span.end_time_unix_nano - span.start_time_unix_nano)
                    events.append(
                        _event(kind, str(own.get(wire.NAME, "")), own, span.start_time_unix_nano, duration_ns=long)
                    )
        elif signal == "metrics":
            for metric in (m for scope in block.scope_metrics for m in scope.metrics):
                events += [
                    _event(Kind.METRIC, metric.name, _attributes(p.attributes), p.time_unix_nano, value=p.as_double)
                    for p in metric.gauge.data_points
                ]
        else:
            for record in (r for scope in block.scope_logs for r in scope.log_records):
                own = _attributes(record.attributes)
                name = record.event_name or str(own.get(wire.EVENT_NAME, ""))
                events.append(_event(Kind.EVENT, name, own, record.time_unix_nano, body=record.body.string_value))
        out.append((wire.identity_of(_attributes(block.resource.attributes)), events))
    return out


def read(sessions: Iterable[Path], segments: Iterable[Path], gather: Gather) -> Facts | None:
    """Facts of the newest attempt found in black boxes and spool together; None where there is none of either."""
    found: dict[tuple[str, int], dict[int, tuple[Identity, dict[int, Event]]]] = {}

    def add(identity: Identity, events: list[Event]) -> None:
        ranks = found.setdefault((identity.job, identity.attempt), {})
        _, known = ranks.setdefault(identity.rank, (identity, {}))
        for event in events:
            known.setdefault(event.sequence if event.sequence >= 0 else -1 - len(known), event)

    for path in segments:
        for signal, body in _segment(path, gather):
            try:
                for identity, events in events_of(signal, body):
                    add(identity, events)
            except (DecodeError, ValueError, KeyError, TypeError, OverflowError) as error:
                gather.gap(f"{path}: a body could not be decoded: {error}")
    for folder in sessions:
        for identity, events in _black_boxes(folder, gather):
            add(identity, events)
    if not found:
        return None
    key = max(found, key=lambda k: (k[1], len(found[k])))
    if len(found) > 1:
        gather.gap(f"{len(found)} jobs or attempts found; judged is job {key[0]}, attempt {key[1]}")
    pairs = [(i, sorted(e.values(), key=lambda x: x.sequence)) for _, (i, e) in sorted(found[key].items())]
    try:
        facts = facts_from_events(pairs)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise UnreadableInput(str(key[0]), f"the events of its session do not fit together: {error}") from error
    return replace(facts, job=key[0], attempt=key[1])
