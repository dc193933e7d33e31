"""OTLP/gRPC on its own port: raw bytes into the same intake as HTTP. It costs 6 to 9 times the HTTP route a
request (research of 2026-11), so it is there for compatibility and our own collector uses HTTP."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lanterne import limits
from lanterne.backend.ingest.body import BodyRefused
from lanterne.backend.ingest.intake import Intake
from lanterne.backend.store.access import LOCAL, Principal
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import QueueFull
from lanterne.errors import LanterneError, StoreUnavailable
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

_COMMIT_TIMEOUT_S = 60.0
_SERVICES = {
    "opentelemetry.proto.collector.trace.v1.TraceService": ("traces", ExportTraceServiceResponse, "rejected_spans"),
    "opentelemetry.proto.collector.metrics.v1.MetricsService": (
        "metrics", ExportMetricsServiceResponse, "rejected_data_points",
    ),
    "opentelemetry.proto.collector.logs.v1.LogsService": ("logs", ExportLogsServiceResponse, "rejected_log_records"),
}  # fmt: skip
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 403: grpc.StatusCode.PERMISSION_DENIED,
    413: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip


class GrpcServer:
    """Serves the three export methods; TLS when the settings name a certificate and key."""

    def __init__(self, intake: Intake, control: ControlStore, settings: ServerSettings) -> None:
        self._intake, self._control, self._settings = intake, control, settings
        self.port = settings.grpc_port
        self._server: Any = None

    def start(self) -> None:
        """Bind and serve. A port that is taken is logged, not fatal: HTTP serves on."""
        options = [("grpc.max_receive_message_length", limits.BODY_INFLATED_BYTES_MAX), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(
            ThreadPoolExecutor(8, thread_name_prefix="lanterne-grpc"), options=options, maximum_concurrent_rpcs=256
        )
        self._server.add_generic_rpc_handlers([self._handlers(name) for name in _SERVICES])
        address = f"{self._settings.host}:{self._settings.grpc_port}"
        try:
            if self._settings.tls_certificate:
                self.port = self._server.add_secure_port(address, self._credentials())
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            log.error("OTLP/gRPC is off: %s cannot be bound (%s); set LANTERNE_GRPC_PORT", address, error)
            self._server = None
            return
        self._server.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(5).wait(6)
            self._server = None

    def _credentials(self) -> Any:
        key = Path(self._settings.tls_key).read_bytes()
        return grpc.ssl_server_credentials([(key, Path(self._settings.tls_certificate).read_bytes())])

    def _handlers(self, service: str) -> Any:
        signal, response, field = _SERVICES[service]

        def export(body: bytes, call: Any) -> bytes:
            return self._export(signal, response, field, body, call)

        return grpc.method_handlers_generic_handler(service, {"Export": grpc.unary_unary_rpc_method_handler(export)})

    def _export(self, signal: str, response: Any, field: str, body: bytes, call: Any) -> bytes:
        principal = self._who(call)
        answer = response()
        try:
            taken = self._intake.take(signal, body, principal)
            taken.stored.result(_COMMIT_TIMEOUT_S)
        except BodyRefused as refused:
            call.abort(_CODES.get(refused.status, grpc.StatusCode.INVALID_ARGUMENT), str(refused))
        except QueueFull as full:  # OTLP: retryable only with RetryInfo, or as UNAVAILABLE
            call.abort(grpc.StatusCode.UNAVAILABLE, str(full))
        except (StoreUnavailable, FutureTimeout) as error:
            call.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "not committed in time")
        except LanterneError as error:
            call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if taken.refused:
            setattr(answer.partial_success, field, taken.refused)
            answer.partial_success.error_message = taken.reasons[:1024]
        encoded: bytes = answer.SerializeToString()
        return encoded

    def _who(self, call: Any) -> Principal:
        """The same rules as the HTTP guard: a token, or nobody's on loopback without one."""
        import hmac
        import ipaddress

        given = {k: v for k, v in call.invocation_metadata() if isinstance(v, str)}
        kind, _, token = given.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and token.strip():
            secret = self._settings.token
            if secret and hmac.compare_digest(secret.encode(), token.strip().encode()):
                return Principal("admin", frozenset({"admin"}))
            record = self._control.verify_token(token.strip())
            if record is None:
                call.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong, revoked or expired")
            principal = Principal(f"token {record.id}", record.scopes, record.job) if record else LOCAL
            if not principal.may("ingest"):
                call.abort(grpc.StatusCode.PERMISSION_DENIED, "this needs the scope ingest")
            return principal
        host = self._settings.host
        loopback = host == "localhost" or (host.replace(".", "").isdigit() and ipaddress.ip_address(host).is_loopback)
        if self._settings.token or not (loopback or host == "::1"):
            call.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed: authorization: Bearer …")
        return LOCAL
