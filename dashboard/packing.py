"""Compression: component bundles are compressed once and kept, everything else as it comes."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUNDLES = ("/_dash-component-suites/",)
SMALL = 1_400
KEPT_MAX = 512


@dataclass(frozen=True, slots=True)
class _Kept:
    data: bytes
    kind: bytes


async def _whole(app: ASGIApp, scope: Scope, receive: Receive) -> tuple[Message, bytes]:
    start: Message = {"type": "http.response.start", "status": 500, "headers": []}
    body = bytearray()

    async def catch(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await app(scope, receive, catch)
    return start, bytes(body)


def _accepts_gzip(scope: Scope) -> bool:
    return any(k == b"accept-encoding" and b"gzip" in v for k, v in scope["headers"])


class Packed:
    """ASGI middleware. Bundles carry their version in the name, so a browser may keep them for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.kept: dict[str, _Kept] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _accepts_gzip(scope):
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        bundle = scope["method"] == "GET" and any(part in path for part in BUNDLES)
        if bundle and path in self.kept:
            kept = self.kept[path]
            await self._send(send, 200, [(b"content-type", kept.kind)], kept.data, for_ever=True)
            return
        plain = {**scope, "headers": [(k, v) for k, v in scope["headers"] if k != b"if-none-match" or not bundle]}
        start, body = await _whole(self.app, plain, receive)
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        if start["status"] != 200 or len(body) < SMALL or any(k.lower() == b"content-encoding" for k, _ in headers):
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        packed = await asyncio.to_thread(gzip.compress, body, 6 if bundle else 2)
        kind = next((v for k, v in headers if k.lower() == b"content-type"), b"application/octet-stream")
        if bundle and len(self.kept) < KEPT_MAX:
            self.kept[path] = _Kept(packed, kind)
        await self._send(send, 200, [(b"content-type", kind)] if bundle else headers, packed, for_ever=bundle)

    async def _send(
        self, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, for_ever: bool
    ) -> None:
        more = [
            (b"content-encoding", b"gzip"),
            (b"vary", b"accept-encoding"),
            (b"content-length", str(len(body)).encode()),
        ]
        if for_ever:
            more.append((b"cache-control", b"public, max-age=31536000, immutable"))
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
        await send({"type": "http.response.body", "body": body})
