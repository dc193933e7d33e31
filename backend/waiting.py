"""A server whose disk cannot be written: up, not ready, with the reason, until its stores can be opened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

from lanterne.backend.api.problems import MEDIA, problem_body
from lanterne.backend.guard import App, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

RETRY_S = 2.0


class Waiting:
    """The application that ``build`` gives, as soon as it does; till then 503, but for ``/healthz``."""

    def __init__(self, build: Callable[[], App], why: str) -> None:
        self._build, self._why = build, why
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, send)
        else:
            await send({"type": "websocket.close", "code": 1013})

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        leaving = asyncio.Event()
        task = asyncio.create_task(self._live(scope, leaving))
        await receive()
        leaving.set()
        await task
        await send({"type": "lifespan.shutdown.complete"})

    async def _live(self, scope: Scope, leaving: asyncio.Event) -> None:
        while not leaving.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), RETRY_S)
                return
            try:
                app = await asyncio.to_thread(self._build)
            except Exception as error:  # told at /readyz; the next try may be better
                self._why = str(error)
                continue
            async with lifespan_of(app, scope, end_s=180):
                log.warning("the stores are open: %s", self._why)
                self._app = app
                await leaving.wait()

    async def _answer(self, scope: Scope, send: Send) -> None:
        path, kind, status = scope["path"], b"application/json", 503
        if path == "/healthz":
            status, body = 200, json.dumps({"status": "ok"}).encode()
        elif path == "/readyz":
            body = json.dumps({"status": "unavailable", "reason": self._why, "recovered": ""}).encode()
        else:
            kind, body = MEDIA.encode(), problem_body(503, "the stores cannot be opened now; see /readyz")
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"retry-after", b"5")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def lifespan_of(app: App | None, scope: Scope, *, end_s: float = 5) -> AsyncIterator[None]:
    """Run an application's own startup and shutdown around ours; one without a lifespan is left alone."""
    if app is None:
        yield
        return
    asked: asyncio.Queue[Message] = asyncio.Queue()
    told: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    async def life() -> None:
        try:
            await app(dict(scope), asked.get, told.put)
        except Exception as error:
            await told.put({"type": "lifespan.startup.failed", "message": str(error)})

    task = asyncio.create_task(life())
    await asked.put({"type": "lifespan.startup"})
    answer = await told.get()
    if answer["type"] == "lifespan.startup.failed":
        log.warning("an application has no lifespan or failed to start: %s", answer.get("message", ""))
    try:
        yield
    finally:
        await asked.put({"type": "lifespan.shutdown"})
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(task, end_s)
