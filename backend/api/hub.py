"""Fan-out of live news to server-sent-event streams: bounded queues, the slow listener loses the oldest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_WAITING_MAX = 256
LISTENERS_MAX = 200


@dataclass(eq=False, slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    job: str
    news: asyncio.Queue[tuple[str, dict[str, Any]]] = field(default_factory=lambda: asyncio.Queue(_WAITING_MAX))


class Hub:
    """``publish`` may be called on any thread; ``listen`` belongs to the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[_Listener] = []
        self._closed = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def publish(self, kind: str, job: str, body: Mapping[str, Any]) -> None:
        """Tell all listeners of ``job`` (and of all jobs): ``kind`` is step, incident or command."""
        with self._lock:
            found = [x for x in self._listeners if x.job in ("", job)]
        for listener in found:
            try:
                listener.loop.call_soon_threadsafe(_put, listener.news, (kind, {"job": job, **body}))
            except RuntimeError:
                continue  # its loop has ended; it leaves the list by itself

    async def listen(self, job: str = "", *, beat_s: float = 15.0) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """News as (kind, body); ``("beat", {})`` when nothing came for ``beat_s``. Ends when the hub closes."""
        listener = _Listener(asyncio.get_running_loop(), job)
        with self._lock:
            self._listeners.append(listener)
        try:
            while not self._closed:
                try:
                    kind, body = await asyncio.wait_for(listener.news.get(), beat_s)
                except TimeoutError:
                    kind, body = "beat", {}
                if kind == "closed":
                    return
                yield kind, body
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            found = list(self._listeners)
        for listener in found:
            try:
                listener.loop.call_soon_threadsafe(_put, listener.news, ("closed", {}))
            except RuntimeError:
                continue


def _put(news: asyncio.Queue[tuple[str, dict[str, Any]]], item: tuple[str, dict[str, Any]]) -> None:
    if news.full():
        news.get_nowait()
    news.put_nowait(item)
