"""From encoded batches to the backend: standard OTLP/HTTP, bounded in every direction.

opentelemetry-sdk's ``Resource`` gives the resource attributes (OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME)
and opentelemetry-exporter-otlp-proto-http's own exporters decide address, headers, TLS, compression and
time-out (all OTEL_EXPORTER_OTLP_* variables, each signal's own ones included). Their ``export`` would
encode anew and drop what it could not send within ten seconds, so it is asked once, over a session that
only takes notes, what it would do; the bytes of the spool then go out the same way, the same ones each time.
"""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import requests
import zstandard
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource

from lanterne import limits, wire
from lanterne.collector.spool import Part, Place, Spool
from lanterne.nouns import Event, Identity
from lanterne.quality import Quality
from lanterne.settings import DEFAULT_ENDPOINT, CollectorSettings

SIGNALS = ("traces", "metrics", "logs")
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0
RETRY_AFTER_MAX_S = 300.0
_FOR_GOOD = frozenset({400, 405, 411, 413, 414, 415, 422, 431})
"""Answers that the same bytes would get again: the part is counted as rejected and left."""
_RESPONSES: Mapping[str, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
}


# --- what the standard exporters would do --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how one signal goes. ``timeout_s`` bounds one request from first byte to last."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    verify: bool | str = True
    cert: Any = None
    encoding: str = "gzip"


class _NoteTaker(requests.Session):
    """A session that sends nothing and remembers what it was asked to send."""

    seen: dict[str, Any]

    def request(self, method: Any, url: Any, **arguments: Any) -> requests.Response:  # type: ignore[override]
        self.seen = {"url": str(url), **arguments}
        answer = requests.Response()
        answer.status_code = 200
        answer._content = b""
        return answer


def _standard_exporter(signal: str, session: requests.Session, endpoint: str | None, gzipped: bool | None) -> None:
    """Build the standard exporter of a signal over ``session`` and let it export nothing, once."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import MetricsData

    compression = None if gzipped is None else (Compression.Gzip if gzipped else Compression.NoCompression)
    if signal == "traces":
        OTLPSpanExporter(endpoint=endpoint, session=session, compression=compression).export([])
    elif signal == "metrics":
        metrics = OTLPMetricExporter(endpoint=endpoint, session=session, compression=compression)
        metrics.export(MetricsData(resource_metrics=[]))
    else:
        OTLPLogExporter(endpoint=endpoint, session=session, compression=compression).export([])


def resolve(settings: CollectorSettings, signal: str, environ: Mapping[str, str]) -> Target:
    """Where a signal goes: ``LANTERNE_*`` first, then the standard exporter's own reading of OTEL_*.

    ``environ`` is only asked which variables are set; the exporter reads the process's environment.
    """
    own = settings.endpoint not in {DEFAULT_ENDPOINT, environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")}
    per_signal = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    endpoint = None if per_signal and not own else f"{settings.endpoint.rstrip('/')}/v1/{signal}"
    wanted = settings.compression
    by_standard = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_COMPRESSION") or environ.get(
        "OTEL_EXPORTER_OTLP_COMPRESSION"
    )
    gzipped = None if by_standard and not wanted else wanted in {"", "gzip"}
    session = _NoteTaker()
    _standard_exporter(signal, session, endpoint, gzipped)
    headers = {str(k).lower(): str(v) for k, v in {**session.headers, **(session.seen.get("headers") or {})}.items()}
    encoding = "zstd" if wanted == "zstd" else headers.get("content-encoding", "none")
    for name in ("content-encoding", "connection", "accept"):
        headers.pop(name, None)
    headers |= {"accept-encoding": "identity", "content-type": "application/x-protobuf"}
    if settings.token:
        headers["authorization"] = f"Bearer {settings.token}"
    return Target(
        url=session.seen["url"],
        headers=headers,
        timeout_s=round(float(session.seen.get("timeout") or 10.0), 2),
        verify=session.seen.get("verify", session.verify) or False,
        cert=session.seen.get("cert", session.cert),
        encoding=encoding if encoding in {"gzip", "zstd"} else "none",
    )


def full_identity(identity: Identity) -> Identity:
    """Identity with what opentelemetry-sdk's Resource adds from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    found = dict(Resource.create().attributes)
    name = str(found.pop(wire.SERVICE, ""))
    own = set(wire.resource_attributes(replace(identity, extra={})))
    extra = {k: v for k, v in found.items() if isinstance(v, (str, int, float, bool)) and k not in own}
    keep = name if name and not name.startswith("unknown_service") else identity.service_name
    return replace(identity, service_name=keep, extra={**extra, **identity.extra})


# --- batches -------------------------------------------------------------------------------------


def compress(body: bytes, encoding: str) -> bytes:
    """``body`` as the Content-Encoding says (gzip, zstd or none)."""
    if encoding == "gzip":
        return gzip.compress(body, compresslevel=6, mtime=0)
    if encoding == "zstd":
        return zstandard.ZstdCompressor(level=3).compress(body)
    return body


def _encode(identity: Identity, events: Sequence[Event], quality: Quality) -> wire.Encoded:
    """Encode; an event that protobuf refuses (an integer beyond 64 bits, say) is left out and counted."""
    try:
        return wire.encode(identity, events)
    except (ValueError, TypeError):
        sound = []
        for event in events:
            try:
                wire.encode(identity, [event])
                sound.append(event)
            except (ValueError, TypeError):
                quality.add("export_rejected")
        return wire.encode(identity, sound)


def batches(
    drained: Iterable[tuple[Identity, Sequence[Event]]], encodings: Mapping[str, str], quality: Quality
) -> list[Part]:
    """Encode the events of all local ranks into as few parts as the bounds allow, in order.

    OTLP requests may be concatenated (their only field repeats), so one body carries all ranks of the
    node. A body is cut at ``limits.EXPORT_BATCH_EVENTS`` events or ``limits.EXPORT_BATCH_BYTES`` bytes
    before compression.
    """
    parts: list[Part] = []
    bodies: dict[str, list[bytes]] = {signal: [] for signal in SIGNALS}
    counts = dict.fromkeys(SIGNALS, 0)

    def cut(signal: str) -> None:
        if bodies[signal]:
            encoding = encodings.get(signal, "none")
            parts.append(Part(signal, encoding, compress(b"".join(bodies[signal]), encoding), counts[signal]))
        bodies[signal], counts[signal] = [], 0

    for identity, events in drained:
        for start in range(0, len(events), limits.EXPORT_BATCH_EVENTS):
            encoded = _encode(identity, events[start : start + limits.EXPORT_BATCH_EVENTS], quality)
            for signal in SIGNALS:
                request = getattr(encoded, signal)
                if request is None:
                    continue
                body, n = request.SerializeToString(), _events_of(signal, request)
                full = sum(map(len, bodies[signal])) + len(body) > limits.EXPORT_BATCH_BYTES
                if full or counts[signal] + n > limits.EXPORT_BATCH_EVENTS:
                    cut(signal)
                bodies[signal].append(body)
                counts[signal] += n
    for signal in SIGNALS:
        cut(signal)
    return parts


def _events_of(signal: str, request: Any) -> int:
    if signal == "traces":
        return sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
    if signal == "logs":
        return sum(len(s.log_records) for r in request.resource_logs for s in r.scope_logs)
    return sum(len(m.gauge.data_points) for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics)


# --- sending -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request came to. ``status`` 0 = no answer; ``retry_after_s`` -1 = not said."""

    status: int
    accepted: bool
    for_good: bool = False
    retry_after_s: float = -1.0
    rejected: int = 0
    says: str = ""


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _keep_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An ``auth`` that changes nothing: without one, requests would read ~/.netrc over our token."""
    return request


class Transport:
    """HTTP with bounds: no redirects, replies read to ``limits.REPLY_BYTES_MAX``, one deadline a request."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._session = requests.Session()
        self._session.auth = _keep_headers
        self._session.headers.clear()
        self._session.verify = target.verify
        self._session.cert = target.cert
        if _is_loopback(target.url):
            self._session.trust_env = False  # a proxy of the site cannot reach our loopback

    def request(
        self, method: str, url: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body). Raises OSError (requests' errors are) on anything but a whole answer in time."""
        deadline = time.monotonic() + self.target.timeout_s
        with self._session.request(
            method,
            url,
            data=data,
            headers={**self.target.headers, **(headers or {})},
            timeout=self.target.timeout_s,
            allow_redirects=False,
            stream=True,
            verify=self.target.verify,
        ) as answer:
            body = bytearray()
            while len(body) <= limits.REPLY_BYTES_MAX:
                if time.monotonic() > deadline:
                    raise requests.Timeout(f"{url}: the answer took more than {self.target.timeout_s} s")
                try:
                    chunk = answer.raw.read1(8 << 10, decode_content=False)  # what is there now, not a whole block
                except Exception as error:  # urllib3's own errors are not OSErrors
                    raise requests.ConnectionError(str(error)) from error
                if not chunk:
                    return answer.status_code, answer.headers, bytes(body)
                body += chunk
            return answer.status_code, answer.headers, bytes(body[: limits.REPLY_BYTES_MAX])

    def post(self, signal: str, part: Part) -> Reply:
        """Send one part. Never raises: what went wrong stands in the reply."""
        headers = {} if part.encoding == "none" else {"content-encoding": part.encoding}
        try:
            status, answer, body = self.request("POST", self.target.url, data=part.body, headers=headers)
        except Exception as error:  # a foreign server and library must not end the sender
            return Reply(0, False, says=f"{type(error).__name__}: {error}"[:300])
        if 200 <= status < 300:
            rejected = _rejected(signal, answer.get("content-type", ""), body)
            if rejected is None:
                return Reply(status, False, says="the answer is not an OTLP response; is this address a backend?")
            return Reply(status, True, rejected=rejected)
        says = body[:200].decode("utf-8", "replace")
        return Reply(status, False, status in _FOR_GOOD, _retry_after(answer.get("retry-after", "")), says=says)

    def close(self) -> None:
        self._session.close()


def _rejected(signal: str, content_type: str, body: bytes) -> int | None:
    """Records that an OTLP answer refuses; None where it is no OTLP answer (a portal's login page, say)."""
    kind, field = _RESPONSES[signal]
    if not body:
        return 0
    if "json" in content_type:
        return 0
    if "protobuf" not in content_type and "octet-stream" not in content_type:
        return None
    try:
        return int(getattr(kind.FromString(body).partial_success, field))
    except Exception:  # protobuf's DecodeError; nothing else is told by a foreign body
        return None


def _retry_after(text: str) -> float:
    """Retry-After in seconds (RFC 9110: a number or a date), at most ``RETRY_AFTER_MAX_S``; -1 = not said."""
    if not text:
        return -1.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return -1.0
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S) if seconds == seconds else -1.0


class Exporter:
    """Sends the spool in order, one part at a time; ``run`` is the body of its own thread."""

    def __init__(
        self,
        spool: Spool,
        settings: CollectorSettings,
        environ: Mapping[str, str],
        *,
        quality: Quality,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        targets = {signal: resolve(settings, signal, environ) for signal in SIGNALS}
        self.encodings = {signal: target.encoding for signal, target in targets.items()}
        self._transports = {signal: Transport(target) for signal, target in targets.items()}
        self._spool, self._quality, self._jitter = spool, quality, jitter
        self._failures = 0
        self.last = Reply(0, False, says="nothing sent yet")
        self.sent_parts = self.sent_bytes = 0

    def send_one(self) -> float:
        """Send the oldest part. Returns seconds to wait before the next try: 0 = go on, -1 = nothing to send."""
        found = self._spool.next()
        if found is None:
            return -1.0
        place, part = found
        reply = self.last = self._transports[part.signal].post(part.signal, part)
        if reply.accepted or reply.for_good:
            return self._leave(place, part, reply)
        self._failures += 1
        self._quality.add("export_retried")
        if reply.retry_after_s >= 0:
            return max(reply.retry_after_s, 0.05) * self._jitter(1.0, 1.1)
        return self.backoff_s()

    def _leave(self, place: Place, part: Part, reply: Reply) -> float:
        self._spool.acknowledge(place)
        self._failures = 0
        lost = part.events if reply.for_good else reply.rejected
        if lost:
            self._quality.add("export_rejected", lost)
        self.sent_parts += 1
        self.sent_bytes += len(part.body)
        return 0.0

    def reachable(self) -> bool:
        """Whether the last request was taken, or none was made yet."""
        return self._failures == 0

    def backoff_s(self) -> float:
        """Exponential from ``BACKOFF_FIRST_S`` to ``BACKOFF_MAX_S``, times a random 0.5 to 1."""
        ceiling: float = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 16))
        return ceiling * self._jitter(0.5, 1.0)

    def run(self, stop: threading.Event, wake: threading.Event) -> None:
        """Send until ``stop``; ``wake`` says that something new lies in the spool."""
        while not stop.is_set():
            wait = self.send_one()
            if wait < 0:
                wake.wait(0.5)
                wake.clear()
            elif wait > 0:
                stop.wait(wait)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
