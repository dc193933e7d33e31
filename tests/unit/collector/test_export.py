"""What the exporter decides without a network: targets by the standard's rules, batches within bounds, patience."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import zstandard
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import limits, wire
from lanterne.collector.export import (
    BACKOFF_MAX_S,
    RETRY_AFTER_MAX_S,
    Exporter,
    _rejected,
    _retry_after,
    batches,
    full_identity,
    resolve,
)
from lanterne.collector.spool import Part, Spool
from lanterne.nouns import Event, Identity, Kind
from lanterne.quality import Quality
from lanterne.settings import CollectorSettings, load

NONE = {"traces": "none", "metrics": "none", "logs": "none"}
DECODERS: dict[str, tuple[Any, Callable[[Any], wire.Columns]]] = {
    "traces": (ExportTraceServiceRequest, wire.decode_traces),
    "metrics": (ExportMetricsServiceRequest, wire.decode_metrics),
    "logs": (ExportLogsServiceRequest, wire.decode_logs),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "LANTERNE_")):
            monkeypatch.delenv(name)


def event(n: int, kind: Kind = Kind.STEP, **given: Any) -> Event:
    return Event(
        kind=kind, name=given.pop("name", "step"), sequence=n, lamport=n, unix_ns=10**18 + n, monotonic_ns=n, **given
    )


def identity(rank: int) -> Identity:
    return Identity(job="j", rank=rank, host="h", pid=1)


def decoded(parts: list[Part]) -> list[tuple[int, int]]:
    """(rank, sequence) of everything in the parts, in order."""
    out: list[tuple[int, int]] = []
    for part in parts:
        kind, decode = DECODERS[part.signal]
        columns = decode(kind.FromString(part.body))
        out += zip(columns["rank"], columns["sequence"], strict=True)
    return out


def test_one_body_carries_all_ranks_of_the_node() -> None:
    parts = batches([(identity(r), [event(n) for n in range(5)]) for r in range(8)], NONE, Quality())
    assert [(p.signal, p.events) for p in parts] == [("traces", 40)]
    assert decoded(parts) == [(r, n) for r in range(8) for n in range(5)]


def test_signals_are_parted_and_nothing_is_lost() -> None:
    events = [event(0), event(1, Kind.METRIC, name="training.loss", value=1.0), event(2, Kind.EVENT, name="closed")]
    parts = batches([(identity(0), events)], NONE, Quality())
    assert [p.signal for p in parts] == ["traces", "metrics", "logs"]
    assert sorted(decoded(parts)) == [(0, 0), (0, 1), (0, 2)]


def test_bodies_stay_within_both_bounds() -> None:
    many = [event(n) for n in range(3 * limits.EXPORT_BATCH_EVENTS + 1)]
    parts = batches([(identity(0), many)], NONE, Quality())
    assert max(p.events for p in parts) <= limits.EXPORT_BATCH_EVENTS
    assert decoded(parts) == [(0, e.sequence) for e in many]
    heavy = [(identity(r), [event(0, Kind.EVENT, name="stall", body="x" * 100_000)]) for r in range(64)]
    parts = batches(heavy, NONE, Quality())
    assert max(len(p.body) for p in parts) <= limits.EXPORT_BATCH_BYTES
    assert [rank for rank, _ in decoded(parts)] == list(range(64))


def test_an_event_that_cannot_be_encoded_is_counted_and_its_neighbours_go() -> None:
    quality = Quality()
    events = [event(0), event(1, attributes={"big": 1 << 70}), event(2)]
    parts = batches([(identity(0), events)], NONE, quality)
    assert decoded(parts) == [(0, 0), (0, 2)]
    assert quality.counts() == {"export_rejected": 1}


@pytest.mark.parametrize(
    ("encoding", "inflate"),
    [("gzip", gzip.decompress), ("zstd", zstandard.ZstdDecompressor().decompress), ("none", bytes)],
)
def test_compressed_bodies_inflate_to_the_same(encoding: str, inflate: Callable[[bytes], bytes]) -> None:
    (plain,) = batches([(identity(0), [event(0)])], NONE, Quality())
    (packed,) = batches([(identity(0), [event(0)])], {"traces": encoding}, Quality())
    assert inflate(packed.body) == plain.body


# --- targets -------------------------------------------------------------------------------------


def test_the_default_target_is_the_local_backend_with_gzip() -> None:
    found = resolve(load(CollectorSettings), "metrics", os.environ)
    assert found.url == "http://127.0.0.1:4318/v1/metrics"
    assert found.encoding == "gzip"
    assert "authorization" not in found.headers


def test_standard_variables_count_for_each_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4318/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:1/in")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k%20y,other=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "3")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/ca.pem")
    targets = {signal: resolve(load(CollectorSettings), signal, os.environ) for signal in DECODERS}
    assert targets["traces"].url == "https://traces:1/in"
    assert targets["metrics"].url == "http://all:4318/v1/metrics"
    assert targets["traces"].verify == "/ca.pem"
    assert targets["logs"].timeout_s == pytest.approx(3.0, abs=0.1)
    assert {t.encoding for t in targets.values()} == {"none"}
    assert {t.headers["api-key"] for t in targets.values()} == {"k y"}


def test_our_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:1/in")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    settings = load(CollectorSettings, endpoint="http://ours:4318", compression="zstd", token="t")
    found = resolve(settings, "traces", os.environ)
    assert (found.url, found.encoding) == ("http://ours:4318/v1/traces", "zstd")
    assert found.headers["authorization"] == "Bearer t"


def test_resource_attributes_come_from_the_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=nlp,lanterne.rank=99")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "bert")
    found = wire.resource_attributes(full_identity(identity(3)))
    assert found["team"] == "nlp"
    assert found["service.name"] == "bert"
    assert found["lanterne.rank"] == 3


# --- patience ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-5", 0.0), ("1e9", RETRY_AFTER_MAX_S), ("soon", -1.0), ("", -1.0), ("nan", -1.0)],
)
def test_retry_after_in_seconds(text: str, seconds: float) -> None:
    assert _retry_after(text) == seconds


def test_retry_after_as_a_date() -> None:
    assert _retry_after(formatdate(0, usegmt=True)) == 0.0
    assert _retry_after(formatdate(4e9, usegmt=True)) == RETRY_AFTER_MAX_S


def test_only_an_otlp_answer_counts_as_taken() -> None:
    assert _rejected("traces", "", b"") == 0
    assert _rejected("traces", "text/html", b"<html>") is None
    assert _rejected("traces", "application/x-protobuf", b"\xff\xff\xff") is None
    assert _rejected("logs", "application/x-protobuf", bytes([10, 2, 8, 5])) == 5


def test_back_off_grows_to_its_ceiling(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    spool.append([Part("logs", "none", b"", 1)], {})
    settings = load(CollectorSettings, endpoint="http://127.0.0.1:9")  # discard: nobody listens
    quality = Quality()
    exporter = Exporter(spool, settings, os.environ, quality=quality, jitter=lambda _low, high: high)
    waits = [exporter.send_one() for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]
    assert not exporter.reachable()
    assert quality.counts() == {"export_retried": 9}
    assert spool.unsent_events() == 1
