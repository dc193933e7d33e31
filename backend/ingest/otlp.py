"""OTLP/HTTP as a plain ASGI application: POST /v1/traces, /v1/metrics, /v1/logs.

200 only after the commit; 400, 413, 415 are final; 429 and 503 carry ``Retry-After``. Errors are
``google.rpc.Status`` in the encoding of the request, as the OTLP specification asks.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lanterne import limits
from lanterne.backend.ingest.body import BodyRefused, inflate
from lanterne.backend.ingest.intake import Intake, Taken
from lanterne.backend.store.access import KEY, Principal
from lanterne.backend.store.events import QueueFull
from lanterne.errors import LanterneError, StoreUnavailable

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 60.0
PROTOBUF, JSON = "application/x-protobuf", "application/json"
_REJECTED = {
    "traces": (ExportTraceServiceResponse, "rejected_spans", "rejectedSpans"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points", "rejectedDataPoints"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records", "rejectedLogRecords"),
}
_CODES = {400: 3, 403: 7, 405: 12, 408: 4, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}  # HTTP -> google.rpc.Code


class Otlp:
    """The three routes. The guard before it has put the principal into the scope."""

    def __init__(self, intake: Intake, *, workers: int = 2) -> None:
        self._intake = intake
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="lanterne-decode")

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        is_json = headers.get("content-type", "").split(";")[0].strip().lower() == JSON
        try:
            status, body, extra = 200, await self._answer(scope, receive, headers, is_json), []
        except BodyRefused as refused:
            status, body = refused.status, _status(refused.status, str(refused), is_json)
            extra = [(b"retry-after", b"10")] if status == 429 else []
        except (QueueFull, StoreUnavailable) as error:
            wait = b"1" if isinstance(error, QueueFull) else b"5"
            status, body, extra = 503, _status(503, str(error), is_json), [(b"retry-after", wait)]
        except LanterneError as error:
            status, body, extra = 400, _status(400, str(error), is_json), []
        kind = JSON if is_json else PROTOBUF
        start = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *extra]
        await send({"type": "http.response.start", "status": status, "headers": start})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive, headers: dict[str, str], is_json: bool) -> bytes:
        signal = scope["path"].removeprefix("/v1/").rstrip("/")
        if signal not in _REJECTED:
            raise BodyRefused(
                404, f"there is no {scope['path'][:80]}; the routes are /v1/traces, /v1/metrics, /v1/logs"
            )
        if scope["method"] != "POST":
            raise BodyRefused(405, f"{scope['method']} is not allowed here; use POST")
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind not in (PROTOBUF, JSON):
            raise BodyRefused(415, f"Content-Type {kind[:80]!r} is not one of {PROTOBUF}, {JSON}")
        body = await read_body(receive, headers, limits.BODY_WIRE_BYTES_MAX)
        principal: Principal = scope[KEY]
        encoding = headers.get("content-encoding", "")
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._pool, self._take, signal, body, encoding, principal, is_json)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(taken.stored)), COMMIT_TIMEOUT_S)
        except TimeoutError:
            raise StoreUnavailable(f"not committed within {COMMIT_TIMEOUT_S:g} s") from None
        return _success(signal, taken, is_json)

    def _take(self, signal: str, body: bytes, encoding: str, principal: Principal, is_json: bool) -> Taken:
        return self._intake.take(signal, inflate(body, encoding), principal, is_json=is_json)


async def read_body(receive: Receive, headers: dict[str, str], bound: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body of at most ``bound`` bytes. Raises :class:`BodyRefused`: 413, or 408 when it comes too slowly."""
    told = headers.get("content-length", "")
    if told.isdigit() and int(told) > bound:
        raise BodyRefused(413, f"the body is larger than {bound} bytes; send smaller batches")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BodyRefused(400, "the sender went away")
                part = message.get("body", b"")
                size += len(part)
                if size > bound:
                    raise BodyRefused(413, f"the body is larger than {bound} bytes; send smaller batches")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BodyRefused(408, f"the body did not arrive within {timeout_s:g} s") from None


def _success(signal: str, taken: Taken, is_json: bool) -> bytes:
    message, field, json_field = _REJECTED[signal]
    says = taken.reasons[:1024]
    if is_json:
        partial = {json_field: str(taken.refused), "errorMessage": says} if taken.refused else None
        return json.dumps({"partialSuccess": partial} if partial else {}).encode()
    answer: Any = message()
    if taken.refused:
        setattr(answer.partial_success, field, taken.refused)
        answer.partial_success.error_message = says
    encoded: bytes = answer.SerializeToString()
    return encoded


def _status(status: int, says: str, is_json: bool) -> bytes:
    code = _CODES.get(status, 2)
    if is_json:
        return json.dumps({"code": code, "message": says}).encode()
    encoded: bytes = Status(code=code, message=says).SerializeToString()
    return encoded
