"""OTLP JSON files (one request, or one a line): foreign and our own signals as facts and series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import wire
from lanterne.backend.readers import metric_names
from lanterne.backend.readers.gather import Gather
from lanterne.errors import UnreadableInput

_KEYS: dict[str, Any] = {
    "resourceSpans": ExportTraceServiceRequest,
    "resourceMetrics": ExportMetricsServiceRequest,
    "resourceLogs": ExportLogsServiceRequest,
}


def is_otlp(value: Mapping[str, Any]) -> bool:
    """True for an export request in OTLP's JSON form."""
    return any(key in value for key in _KEYS)


def _attributes(items: Any) -> dict[str, Any]:
    return {kv.key: wire.plain(kv.value) for kv in items}


def add(value: Mapping[str, Any], gather: Gather, where: str) -> int:
    """Add one request; the answer is its number of records. Raises UnreadableInput on a malformed one."""
    count = 0
    for key, kind in _KEYS.items():
        if key not in value:
            continue
        try:
            request = ParseDict({key: _hex_ids(value[key])}, kind(), ignore_unknown_fields=True)
        except (ParseError, ValueError, TypeError, RecursionError) as error:
            raise UnreadableInput(where, f"not OTLP JSON: {error}") from error
        count += _spans(request, gather) if key == "resourceSpans" else 0
        count += _points(request, gather) if key == "resourceMetrics" else 0
        count += _logs(request, gather, where) if key == "resourceLogs" else 0
    gather.sources.add("otlp")
    return count


def _hex_ids(value: Any, depth: int = 0) -> Any:
    """OTLP JSON writes ids as hex, protobuf JSON wants base64: they are dropped, nothing here needs them."""
    if depth > 32:
        return None
    if isinstance(value, dict):
        return {k: _hex_ids(v, depth + 1) for k, v in value.items() if k not in {"traceId", "spanId", "parentSpanId"}}
    if isinstance(value, list):
        return [_hex_ids(v, depth + 1) for v in value]
    return value


def _who(resource: Any, gather: Gather) -> int:
    attributes = _attributes(resource.attributes)
    rank = attributes.get(wire.RANK, -1)
    rank = rank if isinstance(rank, int) else -1
    if rank >= 0:
        gather.ranks.add(rank)
        gather.place(rank, host=str(attributes.get(wire.HOST, "")), device=str(attributes.get(wire.DEVICE, "")))
    size = attributes.get(wire.WORLD_SIZE)
    if isinstance(size, int) and 0 < size <= 131_072:
        gather.expected = max(gather.expected, size)
    if isinstance(attributes.get(wire.JOB), str):
        gather.job = str(attributes[wire.JOB])
    return rank


def _spans(request: Any, gather: Gather) -> int:
    count = 0
    for block in request.resource_spans:
        rank = _who(block.resource, gather)
        for scope in block.scope_spans:
            for span in scope.spans:
                count += 1
                own = _attributes(span.attributes)
                step, ms = own.get(wire.STEP, -1), (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                name = str(own.get(wire.NAME, ""))
                if isinstance(step, int) and step >= 0 and rank >= 0 and ms >= 0:
                    if span.name == "training.step":
                        gather.sample("step_ms", step, rank, ms)
                    elif span.name == "training.phase" and metric_names.key_of(f"{name}_ms") in metric_names.ALIASES:
                        gather.sample(f"{name}_ms", step, rank, ms)
    return count


def _points(request: Any, gather: Gather) -> int:
    count = 0
    for block in request.resource_metrics:
        rank = _who(block.resource, gather)
        for scope in block.scope_metrics:
            for metric in scope.metrics:
                which = metric.WhichOneof("data")
                points = getattr(metric, which).data_points if which in {"gauge", "sum"} else ()
                alias = metric_names.ALIASES.get(metric_names.key_of(metric.name))
                for point in points:
                    count += 1
                    step = _attributes(point.attributes).get(wire.STEP, -1)
                    value = point.as_double if point.WhichOneof("value") == "as_double" else float(point.as_int)
                    if alias and isinstance(step, int) and step >= 0:
                        gather.sample(alias[0], step, rank, value * alias[1])
                count += 0 if points else 1
    return count


def _logs(request: Any, gather: Gather, where: str) -> int:
    count = 0
    for block in request.resource_logs:
        rank = _who(block.resource, gather)
        for scope in block.scope_logs:
            for record in scope.log_records:
                count += 1
                own = _attributes(record.attributes)
                name = record.event_name or own.pop(wire.EVENT_NAME, "")
                if not name or rank < 0:
                    continue
                step = own.get(wire.STEP, -1)
                plain = {
                    k: v
                    for k, v in own.items()
                    if isinstance(v, (str, int, float, bool))
                    and k not in {"name", "rank", "step", "host", "body", "ref"}
                }
                gather.event(
                    str(name),
                    rank=rank,
                    step=step if isinstance(step, int) else -1,
                    at_ns=record.time_unix_nano,
                    body=str(wire.plain(record.body) or "")[:4000],
                    ref=where,
                    extra=plain,
                )
    return count
