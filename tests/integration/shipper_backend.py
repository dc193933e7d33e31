"""A real OTLP/HTTP server for the shipper's tests that can behave as badly as servers do."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zstandard
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import wire

KINDS = {
    "traces": (ExportTraceServiceRequest, wire.decode_traces),
    "metrics": (ExportMetricsServiceRequest, wire.decode_metrics),
    "logs": (ExportLogsServiceRequest, wire.decode_logs),
}
Row = dict[str, Any]
Behaviour = Callable[["_Handler", str], bool]
"""Called before a body is taken; True = it has answered, the body does not count as stored."""


class Backend:
    """Listens on a free port of loopback. ``rows`` holds every record that was acknowledged, in order of arrival."""

    def __init__(self, behaviour: Behaviour | None = None, *, port: int = 0, tls: Path | None = None) -> None:
        self.rows: list[tuple[str, Row]] = []
        self.requests: list[tuple[str, dict[str, str], int]] = []
        self.commands: list[dict[str, Any]] = []
        self.behaviour = behaviour
        self.lock = threading.Lock()
        backend = self

        class Handler(_Handler):
            owner = backend

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what arrived -----------------------------------------------------------------------------

    def sequences(self, rank: int = 0) -> Counter[int]:
        """How often each sequence number of a rank was stored."""
        with self.lock:
            return Counter(row["sequence"] for _, row in self.rows if row["rank"] == rank)

    def events(self, name: str, rank: int | None = None) -> list[Row]:
        with self.lock:
            return [
                r
                for signal, r in self.rows
                if signal == "logs" and r["name"] == name and (rank is None or r["rank"] == rank)
            ]

    def steps(self, rank: int = 0) -> list[int]:
        with self.lock:
            return [
                r["step"] for s, r in self.rows if s == "traces" and r["kind"] == "training.step" and r["rank"] == rank
            ]

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.05)
        return bool(condition())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Backend

    def log_message(self, *_: object) -> None:
        return

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        received = time.time_ns()
        if self.path == "/api/v1/clock":
            plain: Any = {"received_ns": received, "sent_ns": time.time_ns()}
        elif self.path.endswith("/key"):
            plain = {"public_key": "ab" * 32}
        elif "/commands?" in self.path:
            plain = {"items": self.owner.commands, "next": None}
        else:
            self.answer(404)
            return
        self.answer(200, json.dumps(plain).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        signal = self.path.rpartition("/")[2]
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        with self.owner.lock:
            self.owner.requests.append((signal, dict(self.headers.items()), len(raw)))
        if self.owner.behaviour is not None and self.owner.behaviour(self, signal):
            return
        kind, decode = KINDS[signal]
        columns = decode(kind.FromString(inflate(raw, self.headers.get("Content-Encoding", ""))))
        names = list(columns)
        found = [(signal, dict(zip(names, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        with self.owner.lock:
            self.owner.rows.extend(found)
        self.answer(200, b"", Content_Type="application/x-protobuf")


def inflate(raw: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(raw)
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompress(raw, max_output_size=1 << 26)
    return raw


# --- behaviours ----------------------------------------------------------------------------------


def first(times: int, then: Callable[[_Handler], None]) -> Behaviour:
    """Behave badly for the first ``times`` requests, well afterwards."""
    left = [times]
    lock = threading.Lock()

    def behave(handler: _Handler, _signal: str) -> bool:
        with lock:
            left[0] -= 1
            bad = left[0] >= 0
        if bad:
            then(handler)
        return bad

    return behave


def fail_500(handler: _Handler) -> None:
    handler.answer(500, b"no")


def busy_503(handler: _Handler) -> None:
    handler.answer(503, b"", Retry_After="1")


def portal(handler: _Handler) -> None:
    """A captive portal: 200 and a page."""
    handler.answer(200, b"<html>please log in</html>", Content_Type="text/html")


def nonsense(handler: _Handler) -> None:
    handler.wfile.write(b"\x00\xff SSH-2.0 what? \r\n\r\n")
    handler.close_connection = True


def redirect(handler: _Handler) -> None:
    handler.answer(302, b"", Location="http://127.0.0.1:9/stolen")


def reset(handler: _Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def endless(handler: _Handler) -> None:
    """A reply without end, as fast as the client reads."""
    handler.send_response(500)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        handler.close_connection = True


def endless_drip(handler: _Handler) -> None:
    """A reply without end, a byte at a time."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.1)
    except OSError:
        handler.close_connection = True
