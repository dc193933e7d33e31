"""Event <-> OTLP, both ways, one file. The schema is documented in docs/wire.md.

Encoding builds the three OTLP export requests from our Events (identity belongs in the resource).
Decoding turns any OTLP request, ours or foreign, into columns ready for the store: a dict of
equally long lists per table (``SPAN_COLUMNS``, ``POINT_COLUMNS``, ``LOG_COLUMNS``).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from lanterne import limits
from lanterne.nouns import MESH_AXES, NO_RANK, NO_STEP, AttributeValue, Event, Identity, Kind

SCOPE = "lanterne"
NODES_JOB = "nodes"
"""The job under which the host agents speak."""
SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"

# resource attributes
JOB, ATTEMPT, RANK = "lanterne.job", "lanterne.attempt", "lanterne.rank"
LOCAL_RANK, WORLD_SIZE, BACKEND = "lanterne.local_rank", "lanterne.world_size", "lanterne.backend"
DEVICE, MESH = "lanterne.device", "lanterne.mesh."
SERVICE, HOST, PID = "service.name", "host.name", "process.pid"

# record attributes: the hot ones become typed columns
STEP, SEQUENCE, LAMPORT, MONOTONIC = "lanterne.step", "lanterne.sequence", "lanterne.lamport", "lanterne.monotonic_ns"
NAME, GROUP, GROUP_SEQUENCE = "lanterne.name", "lanterne.group", "lanterne.group_sequence"
BYTES, DTYPE, LABEL, UNIT = "lanterne.bytes", "lanterne.dtype", "lanterne.label", "lanterne.unit"
EVENT_NAME = "event.name"

UNITS: Mapping[str, str] = {
    "training.loss": "1",
    "training.grad_norm": "1",
    "training.grad_norm_local": "1",
    "training.grad_nonfinite": "{element}",
    "training.loss_spikeness": "1",
    "training.lr": "1",
    "training.lr_planned": "1",
    "training.lr_drift": "1",
    "training.loss_scale": "1",
    "training.update_ratio": "1",
    "training.throughput": "{sample}/s",
    "training.tokens": "{token}",
    "training.samples": "{sample}",
    "training.parameter_checksum": "1",
    "training.fp16_underflow": "1",
    "training.fp16_overflow": "1",
    "training.e4m3_underflow": "1",
    "training.e4m3_overflow": "1",
    "training.grad_std": "1",
    "training.mfu": "1",
    "lanterne.collector.time": "s",
    "process.memory.usage": "By",
    "process.memory.limit": "By",
    "process.cpu.time": "s",
    "process.gc.time": "s",
    "process.file.read_time": "s",
    "process.file.read": "By",
    "process.file.reads": "{read}",
    "container.memory.usage": "By",
    "hw.gpu.memory.usage": "By",
    "hw.gpu.memory.reserved": "By",
    "hw.gpu.memory.limit": "By",
    "hw.gpu.utilization": "1",
    "hw.gpu.clock": "MHz",
    "hw.gpu.throttle": "1",
    "hw.temperature": "Cel",
    "hw.power": "W",
    "hw.errors": "{error}",
    "system.cpu.utilization": "1",
    "system.cpu.steal": "1",
    "system.cpu.runqueue": "{process}",
    "system.network.io": "By",
    "system.network.retransmits": "{packet}",
    "system.network.send_queue": "By",
    "system.disk.io_time": "s",
    "system.shm.usage": "By",
    "system.cpu.count": "{cpu}",
    "system.psi.cpu": "1",
    "system.psi.memory": "1",
    "system.psi.io": "1",
    "system.cgroup.throttled_share": "1",
    "system.cgroup.throttled_time": "{cpu}",
    "system.cgroup.memory_share": "1",
    "system.disk.utilization": "1",
    "system.disk.inodes": "1",
    "system.disk.free": "By",
    "system.disk.silent": "1",
    "system.disk.busy": "1",
    "system.disk.latency": "s",
    "system.network.errors": "{packet}",
    "system.network.dropped": "{packet}",
    "hw.network.errors": "{error}",
    "process.neighbour.cpu": "{cpu}",
    "system.cpu.context_switches": "{switch}/s",
    "system.cpu.migrations": "{move}/s",
    "system.cpu.run_delay": "s",
    "system.disk.latency_p99": "s",
    "system.network.retransmit_rate": "{packet}/s",
    "process.cpu.delay": "1",
}
"""Metric name -> UCUM unit. Other names may be logged by users; their unit is empty."""

SPAN_COLUMNS = (
    "job", "attempt", "rank", "sequence", "lamport", "kind", "name", "step", "start_ns", "end_ns", "monotonic_ns",
    "group_name", "group_sequence", "bytes", "dtype", "host", "service", "trace_id", "span_id", "attributes",
)  # fmt: skip
POINT_COLUMNS = (
    "job", "attempt", "rank", "sequence", "lamport", "name", "step", "time_ns", "monotonic_ns", "value", "unit",
    "label", "host", "service", "attributes",
)  # fmt: skip
LOG_COLUMNS = (
    "job", "attempt", "rank", "sequence", "lamport", "name", "step", "time_ns", "monotonic_ns", "severity", "body",
    "host", "service", "attributes",
)  # fmt: skip


# --- encoding ------------------------------------------------------------------------------------


def resource_attributes(identity: Identity) -> dict[str, AttributeValue]:
    """Identity as OTLP resource attributes (empty values left out)."""
    plain: dict[str, AttributeValue] = {
        SERVICE: identity.service_name,
        HOST: identity.host,
        PID: identity.pid,
        JOB: identity.job,
        ATTEMPT: identity.attempt,
        RANK: identity.rank,
        LOCAL_RANK: identity.local_rank,
        WORLD_SIZE: identity.world_size,
        BACKEND: identity.backend,
        DEVICE: identity.device,
        **{MESH + axis: n for axis, n in identity.mesh.items()},
        **identity.extra,
    }
    return {k: v for k, v in plain.items() if v != ""}


def _any(value: AttributeValue) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(string_value=str(value))


def _put(target: Any, attributes: Mapping[str, AttributeValue]) -> None:
    target.extend(KeyValue(key=k, value=_any(v)) for k, v in attributes.items())


def _stamp(event: Event) -> dict[str, AttributeValue]:
    stamp: dict[str, AttributeValue] = {
        SEQUENCE: event.sequence,
        LAMPORT: event.lamport,
        MONOTONIC: event.monotonic_ns,
    }
    if event.step != NO_STEP:
        stamp[STEP] = event.step
    return stamp


def trace_id(job: str, attempt: int, step: int) -> bytes:
    """16 bytes shared by all ranks of one step, so that a trace viewer shows the step across ranks."""
    return hashlib.blake2b(f"{job}/{attempt}/{step}".encode(), digest_size=16).digest()


def span_id(rank: int, sequence: int) -> bytes:
    """8 bytes, unique within a trace: rank and sequence."""
    return struct.pack(">iI", rank, sequence & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The three OTLP requests of one batch of one rank; a field is None where it would be empty."""

    traces: ExportTraceServiceRequest | None
    metrics: ExportMetricsServiceRequest | None
    logs: ExportLogsServiceRequest | None


def encode(identity: Identity, events: Iterable[Event]) -> Encoded:
    """Encode one rank's events. Metrics are grouped by name; order within a signal is kept."""
    resource = Resource()
    _put(resource.attributes, resource_attributes(identity))
    traces, metrics, logs = ExportTraceServiceRequest(), ExportMetricsServiceRequest(), ExportLogsServiceRequest()
    spans = traces.resource_spans.add(resource=resource, schema_url=SCHEMA_URL).scope_spans.add()
    series = metrics.resource_metrics.add(resource=resource, schema_url=SCHEMA_URL).scope_metrics.add()
    records = logs.resource_logs.add(resource=resource, schema_url=SCHEMA_URL).scope_logs.add()
    for part in (spans, series, records):
        part.scope.name = SCOPE
    by_name: dict[str, Any] = {}
    for event in events:
        if event.kind is Kind.METRIC:
            gauge = by_name.get(event.name)
            if gauge is None:
                metric = series.metrics.add(name=event.name, unit=UNITS.get(event.name, ""))
                gauge = by_name[event.name] = metric.gauge
            point = gauge.data_points.add(time_unix_nano=event.unix_ns, as_double=event.value or 0.0)
            _put(point.attributes, {**_stamp(event), **event.attributes})
        elif event.kind is Kind.EVENT:
            record = records.log_records.add(
                time_unix_nano=event.unix_ns, observed_time_unix_nano=event.unix_ns, severity_number=9
            )
            record.event_name = event.name
            record.body.string_value = event.body
            _put(record.attributes, {EVENT_NAME: event.name, **_stamp(event), **event.attributes})
        else:
            span = spans.spans.add(
                name=event.kind.value,
                trace_id=trace_id(identity.job, identity.attempt, event.step),
                span_id=span_id(identity.rank, event.sequence),
                start_time_unix_nano=event.unix_ns,
                end_time_unix_nano=event.unix_ns + event.duration_ns,
            )
            _put(span.attributes, {NAME: event.name, **_stamp(event), **event.attributes})
    return Encoded(
        traces=traces if spans.spans else None,
        metrics=metrics if by_name else None,
        logs=logs if records.log_records else None,
    )


# --- decoding ------------------------------------------------------------------------------------

_TYPED = frozenset({STEP, SEQUENCE, LAMPORT, MONOTONIC, NAME, GROUP, GROUP_SEQUENCE, BYTES, DTYPE, LABEL, EVENT_NAME})


def plain(value: AnyValue, depth: int = 0) -> Any:
    """An OTLP AnyValue as Python; deeper than ``limits.NESTING_MAX`` becomes the text ``…``."""
    which = value.WhichOneof("value")
    if which == "int_value":
        return value.int_value
    if which == "string_value":
        return value.string_value
    if which is None:
        return None
    if which == "array_value":
        if depth >= limits.NESTING_MAX:
            return "…"
        return [plain(v, depth + 1) for v in value.array_value.values]
    if which == "kvlist_value":
        if depth >= limits.NESTING_MAX:
            return "…"
        return {kv.key: plain(kv.value, depth + 1) for kv in value.kvlist_value.values}
    if which == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, which)


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """OTLP attributes as Python; the last of a key's values counts."""
    return {kv.key: plain(kv.value) for kv in pairs}


_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:-]")


def identity_of(attributes: Mapping[str, Any]) -> Identity:
    """Identity from resource attributes; a foreign source gets its service name, made an id, as job and no rank."""

    def number(key: str, default: int) -> int:
        value = attributes.get(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    service = str(attributes.get(SERVICE, "unknown_service"))
    return Identity(
        job=str(attributes[JOB]) if JOB in attributes else _NOT_IN_IDS.sub("_", service)[:128] or "unknown_service",
        attempt=number(ATTEMPT, 0),
        rank=number(RANK, NO_RANK),
        local_rank=number(LOCAL_RANK, NO_RANK),
        world_size=number(WORLD_SIZE, 0),
        host=str(attributes.get(HOST, "")),
        pid=number(PID, 0),
        backend=str(attributes.get(BACKEND, "")),
        service_name=service,
        device=str(attributes.get(DEVICE, "")),
        mesh={axis: number(MESH + axis, 0) for axis in MESH_AXES if MESH + axis in attributes},
    )


class Source(NamedTuple):
    """Who sent a block of records, and what each of its rows is told of the resource."""

    identity: Identity
    rest: Mapping[str, str]


def source_of(resource: Resource) -> Source:
    """The source of a block. A foreign resource has all its attributes told, as ``resource.*``."""
    found = attributes_of(resource.attributes)
    rest = {} if JOB in found else {f"resource.{k}": _text(v) for k, v in found.items() if k not in {SERVICE, HOST}}
    return Source(identity_of(found), rest)


Columns = dict[str, list[Any]]


def empty(names: Iterable[str]) -> Columns:
    """Columns of a table with no rows."""
    return {name: [] for name in names}


def _text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _turned(names: tuple[str, ...], rows: list[dict[str, Any]]) -> Columns:
    """Rows as columns of the given names."""
    take = itemgetter(*names)
    columns = [list(c) for c in zip(*map(take, rows), strict=True)] if rows else [[] for _ in names]
    return dict(zip(names, columns, strict=True))


def _common(source: Source, found: Mapping[str, Any]) -> dict[str, Any]:
    identity = source.identity
    rest: dict[str, str] = {}
    if not found.keys() <= _TYPED:
        rest = {k: _text(v) for k, v in found.items() if k not in _TYPED and v is not None}
    rest |= source.rest
    return {
        "job": identity.job,
        "attempt": identity.attempt,
        "rank": identity.rank,
        "sequence": found.get(SEQUENCE, -1),
        "lamport": found.get(LAMPORT, -1),
        "step": found.get(STEP, NO_STEP),
        "monotonic_ns": found.get(MONOTONIC, 0),
        "host": identity.host,
        "service": identity.service_name,
        "attributes": rest,
    }


def _sources(blocks: Iterable[Any]) -> Iterable[Source]:
    return (source_of(block.resource) for block in blocks)


def decode_traces(request: ExportTraceServiceRequest, sources: Iterable[Source] | None = None) -> Columns:
    """Spans of a request, ours and foreign, as columns; ``sources`` (one a block) where they are known already."""
    rows: list[dict[str, Any]] = []
    told = _sources(request.resource_spans) if sources is None else sources
    for block, source in zip(request.resource_spans, told, strict=True):
        for scope in block.scope_spans:
            for span in scope.spans:
                found = attributes_of(span.attributes)
                row = _common(source, found) | {
                    "kind": span.name,
                    "name": str(found.get(NAME, span.name)),
                    "start_ns": span.start_time_unix_nano,
                    "end_ns": span.end_time_unix_nano,
                    "group_name": str(found.get(GROUP, "")),
                    "group_sequence": found.get(GROUP_SEQUENCE, -1),
                    "bytes": found.get(BYTES, 0),
                    "dtype": str(found.get(DTYPE, "")),
                    "trace_id": span.trace_id,
                    "span_id": span.span_id,
                }
                rows.append(row)
    return _turned(SPAN_COLUMNS, rows)


def _point_value(point: NumberDataPoint) -> float:
    return float(point.as_int) if point.WhichOneof("value") == "as_int" else point.as_double


def _points(metric: Any) -> Iterable[tuple[str, int, float, Any]]:
    """(suffix, time_ns, value, attributes) of every number in a metric of any OTLP type."""
    which = metric.WhichOneof("data")
    if which in {"gauge", "sum"}:
        for p in getattr(metric, which).data_points:
            yield "", p.time_unix_nano, _point_value(p), p.attributes
    elif which in {"histogram", "exponential_histogram", "summary"}:
        for p in getattr(metric, which).data_points:
            yield ".count", p.time_unix_nano, float(p.count), p.attributes
            yield ".sum", p.time_unix_nano, float(p.sum), p.attributes
            if which == "summary":
                for q in p.quantile_values:
                    yield f".p{q.quantile * 100:g}", p.time_unix_nano, q.value, p.attributes
            else:
                if p.HasField("min"):
                    yield ".min", p.time_unix_nano, p.min, p.attributes
                if p.HasField("max"):
                    yield ".max", p.time_unix_nano, p.max, p.attributes


def decode_metrics(request: ExportMetricsServiceRequest, sources: Iterable[Source] | None = None) -> Columns:
    """Metric points as columns; a histogram gives ``.count``, ``.sum``, ``.min`` and ``.max`` points."""
    rows: list[dict[str, Any]] = []
    told = _sources(request.resource_metrics) if sources is None else sources
    for block, source in zip(request.resource_metrics, told, strict=True):
        for scope in block.scope_metrics:
            for metric in scope.metrics:
                for suffix, time_ns, value, attributes in _points(metric):
                    found = attributes_of(attributes)
                    row = _common(source, found) | {
                        "name": metric.name + suffix,
                        "time_ns": time_ns,
                        "value": value,
                        "unit": metric.unit,
                        "label": str(found.get(LABEL, "")),
                    }
                    rows.append(row)
    return _turned(POINT_COLUMNS, rows)


def decode_logs(request: ExportLogsServiceRequest, sources: Iterable[Source] | None = None) -> Columns:
    """Log records and events as columns; a body that is not text is stored as JSON."""
    rows: list[dict[str, Any]] = []
    told = _sources(request.resource_logs) if sources is None else sources
    for block, source in zip(request.resource_logs, told, strict=True):
        for scope in block.scope_logs:
            for record in scope.log_records:
                found = attributes_of(record.attributes)
                body = plain(record.body)
                row = _common(source, found) | {
                    "name": str(record.event_name or found.get(EVENT_NAME, "")),
                    "time_ns": record.time_unix_nano or record.observed_time_unix_nano,
                    "severity": record.severity_number,
                    "body": "" if body is None else _text(body),
                }
                rows.append(row)
    return _turned(LOG_COLUMNS, rows)
