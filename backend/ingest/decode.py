"""One OTLP body to one admitted batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import limits, wire
from lanterne.backend.ingest import otlp_json, walker
from lanterne.backend.ingest.admit import Admitted, admit
from lanterne.backend.ingest.body import BodyRefused


@dataclass(frozen=True, slots=True)
class Signal:
    """How one OTLP signal is read. ``table`` is the store's name for it; ``records`` counts those of one block."""

    table: str
    request: Callable[[], Any]
    columns: Callable[[Any, Sequence[wire.Source]], wire.Columns]
    blocks: Callable[[Any], Sequence[Any]]
    records: Callable[[Any], int]


def _count_points(block: Any) -> int:
    total = 0
    for scope in block.scope_metrics:
        for metric in scope.metrics:
            which = metric.WhichOneof("data")
            if which is not None:
                total += len(getattr(metric, which).data_points)
    return total


SIGNALS: Mapping[str, Signal] = {
    "traces": Signal(
        "spans", ExportTraceServiceRequest, wire.decode_traces, lambda r: r.resource_spans,
        lambda block: sum(len(s.spans) for s in block.scope_spans),
    ),
    "metrics": Signal(
        "points", ExportMetricsServiceRequest, wire.decode_metrics, lambda r: r.resource_metrics, _count_points,
    ),
    "logs": Signal(
        "logs", ExportLogsServiceRequest, wire.decode_logs, lambda r: r.resource_logs,
        lambda block: sum(len(s.log_records) for s in block.scope_logs),
    ),
}  # fmt: skip


def decode(signal: str, body: bytes, *, is_json: bool = False) -> Admitted:
    """Decode and check an inflated body of ``traces``, ``metrics`` or ``logs``.

    Raises :class:`BodyRefused`: 400 when it is not OTLP, 413 with more than ``limits.RECORDS_PER_BODY_MAX`` records,
    or with a resource whose attributes, told on each of its records, exceed ``limits.MAP_BYTES_PER_BODY_MAX``.
    """
    if not is_json:
        admitted = walker.admitted(SIGNALS[signal].table, body)
        if admitted is not None:
            return admitted
    return decode_long(signal, body, is_json=is_json)


def decode_long(signal: str, body: bytes, *, is_json: bool = False) -> Admitted:
    """:func:`decode` by the protobuf library alone: slower, for every body, and the rule for the compiled way."""
    how = SIGNALS[signal]
    request = how.request()
    if is_json:
        otlp_json.parse(body, request)
    else:
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise BodyRefused(400, f"the body is not an OTLP protobuf request for {signal}") from None
    blocks = how.blocks(request)
    counts = [how.records(block) for block in blocks]
    if sum(counts) > limits.RECORDS_PER_BODY_MAX:
        raise BodyRefused(413, f"{sum(counts)} records in one body; at most {limits.RECORDS_PER_BODY_MAX} are taken")
    sources = [wire.source_of(block.resource) for block in blocks]
    told = sum(
        count * sum(len(k) + len(v) for k, v in source.rest.items())
        for count, source in zip(counts, sources, strict=True)
    )
    if told > limits.MAP_BYTES_PER_BODY_MAX:
        raise BodyRefused(413, "the resource's attributes are too long for so many records; send smaller batches")
    last = {(s.identity.job, s.identity.attempt, s.identity.rank): s.identity for s in sources}
    return admit(how.table, how.columns(request, sources), list(last.values()))
