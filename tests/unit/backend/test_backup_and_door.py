"""Back-up and the way back; the doors for OTLP: TLS for gRPC, and bodies that come too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import duckdb
import grpc
import pytest
from backend_rows import bodies, events, free_port, identity, serving
from certificates import self_signed
from test_store_events import count, open_store, spans

from lanterne.backend.ingest.body import BodyRefused
from lanterne.backend.ingest.otlp import read_body
from lanterne.backend.store import backup, migrate
from lanterne.backend.store.control import ControlStore
from lanterne.errors import UnreadableInput, UsageError
from lanterne.settings import ServerSettings

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def test_25_a_back_up_is_restored_with_events_jobs_and_without_secrets(tmp_path: Path) -> None:
    old, new = (ServerSettings(data=str(tmp_path / name), memory_limit="1GB") for name in ("old", "new"))
    store = open_store(tmp_path / "old")
    store.accept(spans(events(5))).result()
    clock = {"job": "demo", "attempt": 0, "rank": 0, "at_ns": 1, "offset_ns": 2, "error_ns": 3, "drift_ppm": 0.5}
    store.append_clocks({name: [value] for name, value in clock.items()})
    store.close()
    migrate.upgrade(old, branch="control")
    control = ControlStore.open(old)
    control.touch([identity(0)])
    token, _ = control.create_token(["read"])
    control.job_key("demo")
    control.close()
    assert backup.export(old, tmp_path / "out") > 20
    assert token.encode() not in b"".join(f.read_bytes() for f in (tmp_path / "out").iterdir())
    with pytest.raises(UsageError, match="not empty"):
        backup.export(old, tmp_path / "out")
    backup.restore(new, tmp_path / "out")
    with pytest.raises(UsageError, match="restore into a new data folder"):
        backup.restore(new, tmp_path / "out")
    with pytest.raises(UnreadableInput):
        backup.restore(new, tmp_path / "old")
    store = open_store(tmp_path / "new")
    assert count(store) == 20
    assert store.rows("SELECT offset_ns FROM clocks") == [{"offset_ns": 2}]
    assert store.submit(spans(events(5))).result().duplicates == 20
    store.close()
    control = ControlStore.open(new)
    assert [job.id for job in control.jobs()] == ["demo"]
    assert control.verify_token(token) is None
    control.close()


@pytest.mark.slow
def test_grpc_speaks_tls_and_asks_for_a_token(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    port, token = free_port(), "a-token-long-enough-for-the-server"
    body = bodies(identity(job="tls"), events(3))["traces"]
    tls = {"tls_certificate": str(certificate), "tls_key": str(certificate)}
    with serving(tmp_path / "data", grpc_port=port, token=token, **tls) as client:
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            export = channel.unary_unary(EXPORT)
            with pytest.raises(grpc.RpcError) as refused:
                export(body, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert export(body, timeout=30, metadata=[("authorization", f"Bearer {token}")]) == b""
        for stranger in (
            grpc.insecure_channel(f"127.0.0.1:{port}"),
            grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials()),
        ):
            with stranger, pytest.raises(grpc.RpcError) as failed:
                stranger.unary_unary(EXPORT)(body, timeout=5)
            assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        answer = client.post("/api/v1/query", json={"sql": "SELECT count(*) FROM spans", "job": "tls"})
        assert answer.json()["rows"] == [[12]]


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"type": "http.request", "body": b"a", "more_body": True}], 408),
        ([{"type": "http.request", "body": b"a" * 9, "more_body": True}], 413),
        ([{"type": "http.disconnect"}], 400),
    ],
)
def test_9_bodies_that_drip_never_end_or_are_left_are_refused(messages: list[Any], status: int) -> None:
    left = list(messages)

    async def receive() -> MutableMapping[str, Any]:
        if not left:
            await asyncio.sleep(60)
        found: MutableMapping[str, Any] = left.pop(0)
        return found

    with pytest.raises(BodyRefused) as refused:
        asyncio.run(read_body(receive, {}, 8, timeout_s=0.1))
    assert refused.value.status == status


def test_tables_of_the_newest_schema_are_those_of_the_back_up(tmp_path: Path) -> None:
    settings = ServerSettings(data=str(tmp_path))
    migrate.upgrade(settings, branch="events")
    with duckdb.connect(str(migrate.events_file(settings))) as connection:
        names = {row[0] for row in connection.execute("SHOW TABLES").fetchall()}
    assert names - {"schema_version", "journal_stored"} == set(backup.EVENT_TABLES)
