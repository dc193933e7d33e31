"""Doors of the server that other tests leave shut: gRPC, uploads, live news, followed orders, the typed client."""

from __future__ import annotations

import io
import json
import resource
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from backend_rows import bodies, events, free_port, identity, send, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import wire
from lanterne.client import Client, Refused

pytestmark = pytest.mark.slow
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    port = free_port()
    with serving(tmp_path_factory.mktemp("smoke"), grpc_port=port) as client:
        yield client, port


def eventually(ask: Any, seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (found := ask()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def count(client: httpx.Client, job: str) -> int:
    answer = client.post("/api/v1/query", json={"sql": "SELECT count(*) FROM spans", "job": job})
    return int(answer.json()["rows"][0][0])


def test_a_raw_grpc_call_is_stored_and_a_broken_one_refused(place: tuple[httpx.Client, int]) -> None:
    client, port = place
    body = bodies(identity(job="grpc"), events(3))["traces"]
    spans = wire.decode_traces(ExportTraceServiceRequest.FromString(body))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        export = channel.unary_unary(EXPORT)
        assert export(body, timeout=30) == b""
        assert count(client, "grpc") == len(spans["job"])
        with pytest.raises(grpc.RpcError) as refused:
            export(b"\xff\xff", timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_exporter_of_opentelemetry_speaks_grpc(place: tuple[httpx.Client, int]) -> None:
    exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    client, port = place
    provider = TracerProvider(resource=Resource.create({"service.name": "sdk-grpc"}))
    exporter = exporters.OTLPSpanExporter(endpoint=f"127.0.0.1:{port}", insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    for n in range(20):
        with provider.get_tracer("t").start_as_current_span("work", attributes={"n": n}):
            pass
    assert provider.force_flush(30_000)
    provider.shutdown()
    assert count(client, "sdk-grpc") == 20


def test_an_uploaded_log_is_diagnosed_under_a_hostile_name(place: tuple[httpx.Client, int]) -> None:
    client, _ = place
    log = b"[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity"
    for name in ("rank3.log", "../../../etc/rank3\n\u202e.log"):
        answer = client.post("/api/v1/diagnose", files={"files": (name, log)}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert "out_of_memory" in answer.text
        assert "/tmp/" not in answer.text
        assert answer.json()["schema"] == "lanterne.report/1"


def test_12_archives_are_never_unpacked(place: tuple[httpx.Client, int], tmp_path: Path) -> None:
    """Names that climb out of a folder, and 256 MiB in 256 KiB: both are read by the directory of the archive."""
    client, _ = place
    packed = io.BytesIO()
    target = tmp_path / "escaped.log"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (f"../../../../../..{target}", str(target), "archive/data.pkl"):
            archive.writestr(name, b"os\nsystem\n(S'touch escaped'\ntR.")
        with archive.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(256):
                entry.write(bytes(1 << 20))
    assert len(packed.getvalue()) < 2 << 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = client.post("/api/v1/diagnose", files={"files": ("step-9.pt", packed.getvalue())}, timeout=120)
    assert answer.status_code in (200, 400, 422), answer.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 192 << 10  # KiB
    assert not target.exists()


def test_steps_are_told_to_listeners(place: tuple[httpx.Client, int]) -> None:
    client, _ = place
    heard: list[tuple[str, dict[str, Any]]] = []
    connected = threading.Event()

    def listen() -> None:
        with client.stream("GET", "/api/v1/events/stream", params={"job": "told"}, timeout=60) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in answer.iter_lines():
                connected.set()
                kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
                if line.startswith("data: "):
                    heard.append((kind, json.loads(line.removeprefix("data: "))))
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert connected.wait(30)
    sent = 0
    while listener.is_alive() and sent < 200:
        send(client, identity(job="other"), events(1, first_sequence=sent * 10))
        send(client, identity(job="told"), events(1, first_step=sent, first_sequence=sent * 10))
        sent += 1
        listener.join(0.5)
    assert heard[0][0] == "step"
    assert heard[0][1]["job"] == "told"


def test_collectives_tell_their_operation(place: tuple[httpx.Client, int]) -> None:
    client, _ = place
    for rank in range(4):
        send(client, identity(rank, job="ops"), events(12, rank=rank))
    found = eventually(lambda: client.get("/api/v1/jobs/ops/collectives").json()["items"])
    assert {call["op"] for call in found} == {"all_reduce"}
    links = client.get("/api/v1/jobs/ops/communication").json()["groups"]
    assert [(link["group"], link["op"]) for link in links] == [("0-3", "all_reduce")]


def test_orders_of_a_job_without_incidents_are_followed(place: tuple[httpx.Client, int]) -> None:
    from lanterne.nouns import Event, EventName, Kind

    client, _ = place
    send(client, identity(job="orders", world_size=1), events(2))
    made = client.post("/api/v1/jobs/orders/commands", json={"action": "save_checkpoint"}).json()
    said = [
        Event(
            kind=Kind.EVENT, name=str(EventName.COMMAND), unix_ns=time.time_ns(), monotonic_ns=n, lamport=n,
            sequence=100 + n, step=3, attributes={"id": made["id"], "phase": phase},
        )
        for n, phase in enumerate(("received", "committed", "applied"))
    ]  # fmt: skip
    send(client, identity(job="orders", world_size=1), said)

    def state() -> Any:
        found = client.get(f"/api/v1/commands/{made['id']}").json()["state"]
        return found if found == "applied" else None

    assert eventually(state) == "applied"


def test_the_client_reads_what_was_sent(place: tuple[httpx.Client, int]) -> None:
    http, _ = place
    for rank in range(4):
        send(http, identity(rank, job="typed"), events(12, rank=rank))
    with Client(str(http.base_url)) as client:
        job = client.job("typed")
        assert (job["id"], job["ranks_seen"], job["step"]) == ("typed", 4, 11)
        assert "typed" in [j["id"] for j in client.jobs()]
        assert [r["rank"] for r in client.ranks("typed", page=3)] == [0, 1, 2, 3]
        loss = client.metric("typed", "training.loss", rank=1)
        assert loss["series"][0]["value"] == [1.0 / (1 + n) for n in range(12)]
        assert client.report("typed")["schema"] == "lanterne.report/1"
        assert client.query("SELECT max(step) AS last FROM spans", job="typed") == [{"last": 11}]
        assert client.export("typed", "spans", "csv").startswith(b'"job"')
        with pytest.raises(Refused, match="none") as refused:
            client.job("none")
    assert refused.value.status == 404
