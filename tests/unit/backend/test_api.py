"""The REST API and OTLP over real HTTP."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from backend_rows import PROTOBUF, bodies, events, identity, send, serving
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lanterne.backend.api import reduce

API = "/api/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Four ranks of twelve steps."""
    with serving(tmp_path_factory.mktemp("api")) as client:
        for rank in range(4):
            send(client, identity(rank), events(12, rank=rank))
        yield client


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(API + path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_job_is_told_with_its_ranks(server: httpx.Client) -> None:
    (job,) = (j for j in get(server, "/jobs")["items"] if j["id"] == "demo")
    assert (job["id"], job["state"], job["ranks_seen"], job["world_size"], job["host_count"]) == (
        "demo",
        "running",
        4,
        4,
        2,
    )
    assert (job["step"], job["step_ms"]) == (11, 100.0)
    assert get(server, "/jobs/demo")["attached"] == {"seed": "7"}
    first = get(server, "/jobs/demo/ranks", limit=3)
    second = get(server, "/jobs/demo/ranks", limit=3, cursor=first["next"])
    assert [r["rank"] for r in first["items"] + second["items"]] == [0, 1, 2, 3]
    assert second["next"] is None


def test_metrics_steps_and_heat_map(server: httpx.Client) -> None:
    names = {m["name"] for m in get(server, "/jobs/demo/metrics")["names"]}
    assert {"training.loss", "step_ms", "forward_ms"} <= names
    found = get(server, "/jobs/demo/metrics", name="training.loss", rank=2)
    assert [s["rank"] for s in found["series"]] == [2]
    assert found["series"][0]["value"] == [1.0 / (1 + n) for n in range(12)]
    assert len(get(server, "/jobs/demo/metrics", name="training.loss", aggregate="median")["series"]) == 1
    heat = get(server, "/jobs/demo/heatmap", metric="step_ms", width=4, height=2)
    assert (heat["ranks"], heat["steps"]) == ([0, 2], [0, 3, 6, 9])
    assert heat["values"] == [[100.0] * 4] * 2
    bare = get(server, "/jobs/demo/heatmap", metric="step_ms", width=4, height=2, encoding="f4")
    assert bare["values"]["shape"] == "2,4"
    assert base64.b64decode(bare["values"]["bdata"]) == struct.pack("<8f", *[100.0] * 8)
    steps = get(server, "/jobs/demo/steps", from_step=3, limit=2)
    assert [s["step"] for s in steps["items"]] == [3, 4]
    assert steps["items"][0]["phases"] == {"forward": 30.0, "backward": 60.0}
    following = get(server, "/jobs/demo/steps", from_step=3, limit=2, cursor=steps["next"])
    assert [s["step"] for s in following["items"]] == [5, 6]


def test_lanes_and_chrome_trace_of_a_step(server: httpx.Client) -> None:
    step = get(server, "/jobs/demo/steps/4")
    assert [lane["rank"] for lane in step["lanes"]] == [0, 1, 2, 3]
    call = next(s for s in step["lanes"][0]["spans"] if s["kind"] == "training.collective")
    assert (call["group"], call["sequence"], call["bytes"]) == ("0-3", 4, 1 << 20)
    path = step["critical_path"]
    assert {"rank", "name", "start_ms", "duration_ms", "group", "sequence"} == set(path[0])
    assert sum(s["duration_ms"] for s in path) == pytest.approx(step["what_if"]["step_ms"], abs=0.2)
    assert step["what_if"]["all_normal_ms"] <= step["what_if"]["step_ms"]
    assert all(w["wait_ms"] > 0 and w["rank"] != w["waited_for"] for w in step["waits"])
    trace = get(server, "/jobs/demo/timeline", step=4)
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 16
    assert server.get(f"{API}/jobs/demo/steps/999").status_code == 404


def test_report_has_an_etag(server: httpx.Client) -> None:
    answer = server.get(f"{API}/jobs/demo/report")
    assert answer.json()["schema"] == "lanterne.report/1"
    again = server.get(f"{API}/jobs/demo/report", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_commands_are_polled_as_signed_orders_and_cancelled_once(server: httpx.Client) -> None:
    made = server.post(f"{API}/jobs/demo/commands", json={"action": "pause", "parameters": {"max_s": 5}})
    assert made.status_code == 201
    (order,) = get(server, "/jobs/demo/commands", state="pending", attempt=0)["items"]
    assert set(order) == {
        "id", "job", "attempt", "action", "parameters", "ranks", "issued_ns", "expires_ns", "counter", "signature",
    }  # fmt: skip
    path = f"{API}/commands/{order['id']}/cancel"
    assert [server.post(path).status_code for _ in range(2)] == [200, 409]
    assert server.post(f"{API}/jobs/demo/commands", json={"action": "rm"}).status_code == 409
    assert any(a["action"] == "http.post" for a in get(server, "/audit")["items"])


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv"])
def test_rows_leave_in_three_forms(server: httpx.Client, form: str) -> None:
    answer = server.get(f"{API}/jobs/demo/export/spans", params={"format": form, "from_step": 11})
    assert answer.status_code == 200
    if form == "csv":
        assert len(answer.text.splitlines()) == 1 + 16


def test_errors_are_problems_everywhere(server: httpx.Client) -> None:
    for path, status in (
        ("/api/v1/jobs/none", 404), ("/api/v1/none", 404), ("/nothing", 404), ("/api/v1/jobs?cursor=x", 400),
        ("/api/v1/jobs?limit=0", 422), ("/api/v1/jobs/demo/steps/-1", 422), ("/api/v1/jobs/a%2Fb", 404),
        ("/api/v1/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404), ("/api/v1/jobs/%252e%252e", 422),
    ):  # fmt: skip
        answer = server.get(path)
        assert answer.status_code == status, path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status


def test_the_service_tells_about_itself(server: httpx.Client) -> None:
    assert server.get("/healthz").json()["status"] == "ok"
    assert server.get("/readyz").json()["status"] == "ready"
    assert 'lanterne_rows_stored_total{signal="spans"}' in server.get("/metrics").text
    page = server.get("/docs").text
    assert "/api/v1/jobs/{job}/heatmap" in page
    assert "http://" not in page
    assert "https://" not in page
    clock = get(server, "/clock")
    assert clock["received_ns"] <= clock["sent_ns"]


# --- OTLP ----------------------------------------------------------------------------------------


def spans_of(client: httpx.Client, job: str) -> int:
    answer = client.post(f"{API}/query", json={"sql": f"SELECT count(*) AS n FROM spans WHERE job = '{job}'"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["rows"][0][0])


@pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd"])
def test_encodings(server: httpx.Client, encoding: str) -> None:
    plain = bodies(identity(job=f"enc-{encoding}"), events(3))["traces"]
    packed = {"identity": lambda b: b, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}
    headers = PROTOBUF | {"content-encoding": encoding}
    answer = server.post("/v1/traces", content=packed[encoding](plain), headers=headers)
    assert answer.status_code == 200
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert spans_of(server, f"enc-{encoding}") == 12


def test_otlp_json_has_hex_ids_and_unknown_fields(server: httpx.Client) -> None:
    span = {
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "I'm a server span",
        "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661000000000", "kind": 2, "extra": 1,
        "attributes": [{"key": "my.span.attr", "value": {"stringValue": "some value"}}],
    }  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "my service"}}]}
    body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}
    answer = server.post("/v1/traces", json=body)
    assert (answer.status_code, answer.json()) == (200, {})
    sql = "SELECT trace_id, name, attributes FROM spans WHERE job = 'my_service'"
    (row,) = server.post(f"{API}/query", json={"sql": sql}).json()["rows"]
    assert row[0] == "5b8efff798038103d269b633813fc60c"
    assert row[2]["my.span.attr"] == "some value"


def test_partial_success_counts_what_was_refused(server: httpx.Client) -> None:
    request = ExportTraceServiceRequest.FromString(bodies(identity(job="partial"), events(2))["traces"])
    request.resource_spans[0].scope_spans[0].spans[0].end_time_unix_nano = 1
    answer = server.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (answer.status_code, partial.rejected_spans) == (200, 1)
    assert "ends before it starts" in partial.error_message
    assert spans_of(server, "partial") == 7


@pytest.mark.parametrize(
    ("status", "path", "headers", "body"),
    [
        (400, "/v1/traces", PROTOBUF, b"\xff\xff\xff"),
        (400, "/v1/traces", {"content-type": "application/json"}, b"[1]"),
        (400, "/v1/traces", {"content-type": "application/json"}, b"[" * 100_000),
        (400, "/v1/traces", PROTOBUF | {"content-encoding": "gzip"}, gzip.compress(b"x" * 100)[:-9]),
        (400, "/v1/traces", PROTOBUF | {"content-encoding": "gzip"}, gzip.compress(b"") * 2),
        (400, "/v1/traces", PROTOBUF | {"content-encoding": "zstd"}, b"no zstd"),
        (413, "/v1/traces", PROTOBUF | {"content-encoding": "gzip"}, gzip.compress(bytes(70 << 20))),
        (413, "/v1/traces", PROTOBUF | {"content-encoding": "zstd"}, zstandard.compress(bytes(70 << 20))),
        (413, "/v1/traces", PROTOBUF, bytes((16 << 20) + 1)),
        (413, "/v1/traces", PROTOBUF, b"\x0a\x06\x12\x04\x12\x00\x12\x00" * 150_000),
        (415, "/v1/traces", {"content-type": "text/plain"}, b""),
        (415, "/v1/traces", PROTOBUF | {"content-encoding": "br"}, b"x"),
        (404, "/v1/profiles", PROTOBUF, b""),
    ],
)
def test_bodies_that_will_never_do(
    server: httpx.Client, status: int, path: str, headers: dict[str, str], body: bytes
) -> None:
    answer = server.post(path, content=body, headers=headers)
    assert answer.status_code == status
    if "json" in headers.get("content-type", ""):
        assert "message" in json.loads(answer.content)
    elif answer.headers["content-type"] == "application/x-protobuf":
        assert Status.FromString(answer.content).message


def test_a_plain_opentelemetry_program_is_heard(server: httpx.Client) -> None:
    """The real SDK and its exporter, which know nothing of Lanterne."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "checkout"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{server.base_url}/v1/traces")))
    with provider.get_tracer("shop").start_as_current_span("pay", attributes={"amount": 12}):
        pass
    provider.shutdown()
    sql = "SELECT name, attributes, rank, sequence FROM spans WHERE job = 'checkout'"
    (row,) = server.post(f"{API}/query", json={"sql": sql}).json()["rows"]
    assert (row[0], row[1]["amount"], row[2], row[3]) == ("pay", "12", -1, -1)
    assert any(job["id"] == "checkout" for job in get(server, "/jobs")["items"])


# --- reduction -----------------------------------------------------------------------------------


def test_reduction_keeps_extremes_and_bounds() -> None:
    value = np.sin(np.arange(10_000) / 50)
    value[1234], value[8765] = 50.0, -50.0
    chosen = reduce.minmax(value, 200)
    assert len(chosen) <= 200
    assert {0, 1234, 8765, 9999} <= set(chosen.tolist())
    shape = reduce.lttb(np.arange(10_000.0), value, 200)
    assert len(shape) == 200
    assert (np.diff(shape) > 0).all()
    assert {1234, 8765} <= set(shape.tolist())
    gap = np.full(1_000, np.nan)
    assert len(reduce.minmax(gap, 10)) <= 10


def test_smoothing_is_unbiased_at_the_start() -> None:
    assert np.allclose(reduce.smooth(np.full(50, 3.0), 0.99), 3.0)


def test_the_store_outlives_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        send(client, identity(), events(3))
    with serving(tmp_path) as client:
        assert spans_of(client, "demo") == 12
        send(client, identity(), events(3, now_ns=10**18))
        assert spans_of(client, "demo") == 12
