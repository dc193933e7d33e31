"""The door in front of API, OTLP and page: default deny, one list of rules, the same headers on every answer.

In order: request id, Host, method, rule of the path, cross-origin check, who it is, what they may, how often,
how large. What matches no rule belongs to the page and needs ``read``.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from lanterne import limits
from lanterne.backend.api.problems import MEDIA, problem_body
from lanterne.backend.store.access import KEY, LOCAL, Principal
from lanterne.backend.store.control import ControlStore
from lanterne.clock import Clock
from lanterne.errors import LanterneError, UsageError
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "lanterne_token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = SAFE | {"POST", "PUT", "DELETE", "PATCH"}
JSON_BYTES_MAX = 1 << 20
_VERIFIED_NS = 1_000_000_000
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_JOB_PATH = re.compile(r"^/api/v1/jobs/([^/]+)")
_CSP = (
    b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _CSP),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may: any of ``scopes``; none = everybody."""

    methods: frozenset[str]
    path: re.Pattern[str]
    scopes: tuple[str, ...]


def _rule(methods: str, path: str, *scopes: str) -> Rule:
    names = SAFE if methods == "read" else METHODS - SAFE if methods == "write" else frozenset(methods.split())
    return Rule(names, re.compile(path), scopes)


RULES: Sequence[Rule] = (
    _rule("read", r"^/(healthz|readyz)$"),
    _rule("GET HEAD POST", r"^/login$"),
    _rule("POST", r"^/v1/", "ingest"),
    _rule("read", r"^/v1/", "ingest"),
    _rule("read", r"^/api/v1/clock$", "ingest", "read"),
    _rule("read", r"^/api/v1/jobs/[^/]+/(key|commands)$", "ingest", "read"),
    _rule("read", r"^/api/v1/(tokens|audit)(/|$)", "admin"),
    _rule("write", r"^/api/v1/(tokens|query|alerts)(/|$)", "admin"),
    _rule("write", r"^/api/v1/diagnose$", "read"),
    _rule("write", r"^/api/v1/", "operate"),
    _rule("read", r"^/api/v1/", "read"),
    _rule("read", r"^/(metrics|docs|openapi\.json)$", "read"),
)
PAGE = Rule(METHODS, re.compile(r"^/"), ("read",))


def rule_of(method: str, path: str) -> Rule:
    """The first rule that fits; the page's when none does."""
    for rule in RULES:
        if method in rule.methods and rule.path.match(path):
            return rule
    return PAGE


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback addresses."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_bind(settings: ServerSettings) -> None:
    """Raises :class:`UsageError` when the server would be open to others without a token."""
    if not is_loopback(settings.host) and len(settings.token) < 16:
        have = "the token is shorter than 16 characters" if settings.token else "no token is set"
        raise UsageError(
            f"host: {settings.host} can be reached by others and {have}; set LANTERNE_TOKEN (or LANTERNE_TOKEN_FILE) "
            "to a random text such as `python -c 'import secrets; print(secrets.token_urlsafe(32))'`, or bind 127.0.0.1"
        )


class Denied(Exception):
    """An answer of the guard itself."""

    def __init__(self, status: int, detail: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(detail)
        self.status, self.headers = status, list(headers)


class Rate:
    """Token buckets by name: ``burst`` at once, then ``per_s``. Holds at most 10,000 names."""

    def __init__(self, clock: Clock, per_s: float, burst: float) -> None:
        self._clock, self._per_s, self._burst = clock, per_s, burst
        self._buckets: dict[str, tuple[float, int]] = {}

    def take(self, name: str, cost: float = 1.0) -> bool:
        """True when there was room."""
        now = self._clock.monotonic_ns()
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + (now - at) / 1e9 * self._per_s)
        if len(self._buckets) > 10_000:
            self._buckets.clear()
        fits = left >= cost
        self._buckets[name] = (left - cost if fits else left, now)
        return fits


class Hosts:
    """Which Host headers are ours: what a page of another name says (DNS rebinding) is refused."""

    def __init__(self, settings: ServerSettings) -> None:
        named = {h.strip().lower() for h in settings.allowed_hosts.split(",") if h.strip()}
        self._any = "*" in named
        self._open = not is_loopback(settings.host)
        self._names = named | {settings.host.lower(), socket.gethostname().lower()}

    def allows(self, header: str) -> bool:
        """On loopback: loopback names. Else also addresses and single-label names, which no foreign page can bear."""
        name = urlsplit(f"//{header}").hostname or ""
        if self._any or name in self._names or is_loopback(name):
            return True
        if not self._open or not name:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return "." not in name
        return True


class Guard:
    """ASGI middleware around the whole server."""

    def __init__(self, app: App, control: ControlStore, settings: ServerSettings, clock: Clock) -> None:
        self._app, self._control, self._settings, self._clock = app, control, settings, clock
        self._hosts = Hosts(settings)
        self._verified: dict[str, tuple[Principal | None, int]] = {}
        self._requests = Rate(clock, per_s=200, burst=1_000)
        self._failures = Rate(clock, per_s=0.2, burst=20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        given = headers.get("x-request-id", "")
        scope["lanterne.request_id"] = given if _REQUEST_ID.match(given) else secrets.token_hex(8)
        scope["lanterne.received_ns"] = self._clock.unix_ns()
        answer = _with_headers(scope, send)
        try:
            await self._check(scope, headers)
            bound = self._bound(scope["path"])
            _check_length(headers, bound)
        except Denied as denied:
            await _deny(scope, answer, denied)
            return
        status = _Status()
        body = _Body(receive, bound)
        try:
            if scope["type"] == "websocket" or scope["path"].startswith("/v1/"):
                await self._app(scope, receive, status.watch(answer))
            else:
                await self._app(scope, body.receive, body.watch(status.watch(answer)))
        except _TooLong:
            pass
        finally:
            if body.exceeded and not status.code:
                status.code = 413
                await _deny(scope, answer, Denied(413, f"the body is larger than {bound} bytes"))
            await self._audit(scope, status.code)

    async def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        method = scope.get("method", "GET")
        path = scope["path"]
        if not self._hosts.allows(headers.get("host", "")):
            raise Denied(421, "this server does not answer under that Host; see LANTERNE_ALLOWED_HOSTS")
        if method not in METHODS:
            raise Denied(405, f"{method[:20]} is not a method of this server")
        if len(path) > 2_048 or "\x00" in path:
            raise Denied(404, "there is nothing here")
        rule = rule_of(method, path)
        if method not in SAFE or scope["type"] == "websocket":
            _same_origin(headers)
        if not rule.scopes:
            scope[KEY] = Principal("anonymous", frozenset())
            return
        principal = await self._who(scope, headers)
        if not any(principal.may(s) for s in rule.scopes):
            raise Denied(403, f"this needs the scope {' or '.join(rule.scopes)}")
        job = _JOB_PATH.match(path)
        if job is not None and not principal.sees(job.group(1)):
            raise Denied(403, f"this token is bound to job {principal.job}")
        if not path.startswith("/v1/") and not self._requests.take(principal.actor):
            raise Denied(429, "too many requests; slow down", [(b"retry-after", b"1")])
        scope[KEY] = principal

    async def _who(self, scope: Scope, headers: dict[str, str]) -> Principal:
        token = _bearer(headers) or _cookie(headers)
        if not token:
            if not self._settings.token and is_loopback(self._settings.host):
                return LOCAL
            raise Denied(401, "a token is needed: Authorization: Bearer …", [(b"www-authenticate", b"Bearer")])
        client = str((scope.get("client") or ("", 0))[0])
        found = await self.verify(token, client)
        if found is None:
            raise Denied(401, "the token is wrong, revoked or expired", [(b"www-authenticate", b"Bearer")])
        return found

    async def verify(self, token: str, client: str) -> Principal | None:
        """The principal of a token; a client that fails often is told to wait (429)."""
        admin = self._settings.token
        if admin and hmac.compare_digest(admin.encode(), token.encode()):
            return Principal("admin", frozenset({"admin"}))
        now = self._clock.monotonic_ns()
        known = self._verified.get(token)
        if known is None or now >= known[1]:
            try:
                record = await asyncio.to_thread(self._control.verify_token, token)
            except LanterneError as error:
                raise Denied(503, str(error), [(b"retry-after", b"5")]) from None
            principal = Principal(f"token {record.id}", record.scopes, record.job) if record else None
            if len(self._verified) > 1_000:
                self._verified.clear()
            known = self._verified[token] = (principal, now + _VERIFIED_NS)
        if known[0] is None and not self._failures.take(client):
            raise Denied(429, "too many wrong tokens; wait a minute", [(b"retry-after", b"60")])
        return known[0]

    def _bound(self, path: str) -> int:
        if path == "/api/v1/diagnose":
            return limits.UPLOAD_BYTES_MAX
        return limits.BODY_WIRE_BYTES_MAX if path.startswith("/v1/") else JSON_BYTES_MAX

    async def _audit(self, scope: Scope, status: int) -> None:
        """Every order to the API leaves a line, refused ones too."""
        if scope.get("method") in SAFE or not scope["path"].startswith("/api/v1/") or scope["type"] != "http":
            return
        principal: Principal = scope[KEY]
        detail = {"status": status}
        try:
            await asyncio.to_thread(
                self._control.audit, principal.actor, f"http.{scope['method'].lower()}", scope["path"], detail,
                request_id=scope["lanterne.request_id"],
            )  # fmt: skip
        except LanterneError as error:
            log.error("the audit trail could not be written: %s", error)


def _bearer(headers: dict[str, str]) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: dict[str, str]) -> str:
    if "cookie" not in headers:
        return ""
    try:
        found = SimpleCookie(headers["cookie"]).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _same_origin(headers: dict[str, str]) -> None:
    """A browser says where a request comes from; other programs say nothing and have to bring a token or be local."""
    site = headers.get("sec-fetch-site", "")
    if site and site not in ("same-origin", "none"):
        raise Denied(403, "requests from other sites are refused")
    origin = headers.get("origin", "")
    if origin and urlsplit(origin).netloc != headers.get("host", ""):
        raise Denied(403, "requests from other origins are refused")


def _check_length(headers: dict[str, str], bound: int) -> None:
    told = headers.get("content-length", "")
    if told.isdigit() and int(told) > bound:
        raise Denied(413, f"the body is larger than {bound} bytes")


class _TooLong(Exception):
    """A body without a length went on for too long."""


class _Body:
    """A body of at most ``bound`` bytes; beyond it whatever the application answers is not sent."""

    def __init__(self, receive: Receive, bound: int) -> None:
        self._receive, self._left = receive, bound
        self.exceeded = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.exceeded = True
                raise _TooLong
        return message

    def watch(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if not self.exceeded:
                await send(message)

        return sent


class _Status:
    """Remembers the status that was sent."""

    def __init__(self) -> None:
        self.code = 0

    def watch(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.code = message["status"]
            await send(message)

        return sent


def _with_headers(scope: Scope, send: Send) -> Send:
    request_id = scope["lanterne.request_id"].encode()

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {bytes(k).lower() for k, _ in given}
            given += [(k, v) for k, v in HEADERS if k not in names]
            if b"cache-control" not in names:
                given.append((b"cache-control", b"no-cache"))
            message = {**message, "headers": [*given, (b"x-request-id", request_id)]}
        await send(message)

    return sent


async def _deny(scope: Scope, send: Send, denied: Denied) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = problem_body(denied.status, str(denied), request_id=scope["lanterne.request_id"])
    headers = [
        (b"content-type", MEDIA.encode()), (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"), *denied.headers,
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": denied.status, "headers": headers})
    await send({"type": "http.response.body", "body": body if scope.get("method") != "HEAD" else b""})
