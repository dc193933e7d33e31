"""One OTLP body to one admitted batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import limits, wire
from lanterne.backend.ingest import otlp_json
from lanterne.backend.ingest.admit import Admitted, admit
from lanterne.backend.ingest.body import BodyRefused
from lanterne.nouns import Identity


@dataclass(frozen=True, slots=True)
class Signal:
    """How one OTLP signal is read. ``table`` is the store's name for it."""

    table: str
    request: Callable[[], Any]
    columns: Callable[[Any], wire.Columns]
    blocks: Callable[[Any], Iterable[Any]]
    records: Callable[[Any], int]


def _count_spans(request: Any) -> int:
    return sum(len(s.spans) for b in request.resource_spans for s in b.scope_spans)


def _count_points(request: Any) -> int:
    total = 0
    for block in request.resource_metrics:
        for scope in block.scope_metrics:
            for metric in scope.metrics:
                which = metric.WhichOneof("data")
                if which is not None:
                    total += len(getattr(metric, which).data_points)
    return total


def _count_logs(request: Any) -> int:
    return sum(len(s.log_records) for b in request.resource_logs for s in b.scope_logs)


SIGNALS: Mapping[str, Signal] = {
    "traces": Signal("spans", ExportTraceServiceRequest, wire.decode_traces, lambda r: r.resource_spans, _count_spans),
    "metrics": Signal(
        "points", ExportMetricsServiceRequest, wire.decode_metrics, lambda r: r.resource_metrics, _count_points
    ),
    "logs": Signal("logs", ExportLogsServiceRequest, wire.decode_logs, lambda r: r.resource_logs, _count_logs),
}


def decode(signal: str, body: bytes, *, is_json: bool = False) -> Admitted:
    """Decode and check an inflated body of ``traces``, ``metrics`` or ``logs``.

    Raises :class:`BodyRefused`: 400 when it is not OTLP, 413 with more than ``limits.RECORDS_PER_BODY_MAX`` records.
    """
    how = SIGNALS[signal]
    request = how.request()
    if is_json:
        otlp_json.parse(body, request)
    else:
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise BodyRefused(400, f"the body is not an OTLP protobuf request for {signal}") from None
    records = how.records(request)
    if records > limits.RECORDS_PER_BODY_MAX:
        raise BodyRefused(413, f"{records} records in one body; at most {limits.RECORDS_PER_BODY_MAX} are taken")
    return admit(how.table, how.columns(request), _identities(how.blocks(request)))


def _identities(blocks: Iterable[Any]) -> list[Identity]:
    found: dict[tuple[str, int, int], Identity] = {}
    for block in blocks:
        identity = wire.identity_of({kv.key: wire.plain(kv.value) for kv in block.resource.attributes})
        found[identity.job, identity.attempt, identity.rank] = identity
    return list(found.values())
