"""A page as plain HTML: what the index already holds when it arrives, before any script has run.

The verdict can be read, and its links work, as soon as the document is there; the live page takes its place when its
own first answer is drawn (``assets/lanterne.js``). The same components make both.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lanterne.dashboard.callbacks import render
from lanterne.dashboard.client import Api, reader

log = logging.getLogger(__name__)

PLACE = "<!-- first -->"
PATIENCE_S = 2.0
"""A page that takes longer comes by itself, without a first picture."""
_HTML, _CORE = "dash_html_components", "dash_core_components"
_NAMES = {"className": "class", "htmlFor": "for", "tabIndex": "tabindex", "dateTime": "datetime", "colSpan": "colspan"}
_KEPT = {"id", "title", "role", "scope", "type", "lang", "open", "placeholder", "value", "min", "max", "step"}
_EMPTY = {"input", "br", "hr", "img"}
_UNSEEN = {"Store", "Interval", "Location", "Download"}
_AT_ONCE = ("theme", "live", "help")
"""Buttons that the browser's own script answers."""
_ADDRESS = re.compile(r"(/(?!/)|#|https?://)")


def html_of(node: Any) -> str:
    """Components as HTML; text is escaped, addresses that are none of ours are left out."""
    if node is None or node is False:
        return ""
    if isinstance(node, list | tuple):
        return "".join(html_of(part) for part in node)
    if not hasattr(node, "to_plotly_json"):
        return escape(str(node), quote=False)
    found = node.to_plotly_json()
    props, kind = found["props"], str(found["type"])
    if kind == "Button" and props.get("id") not in _AT_ONCE:
        props = {**props, "disabled": True}  # its callback is not there yet
    if found["namespace"] == _HTML:
        return _element(kind.lower(), props)
    if found["namespace"] == _CORE and kind == "Link":
        return _element("a", props)
    if found["namespace"] == _CORE and kind == "Input":
        return _element("input", props | {"disabled": True})
    if kind in _UNSEEN:
        return ""
    return _element("div", {"className": props.get("className"), "style": props.get("style")})


def _element(tag: str, props: Mapping[str, Any]) -> str:
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in props.items())}>"
    return opening if tag in _EMPTY else f"{opening}{html_of(props.get('children'))}</{tag}>"


def _attribute(name: str, value: Any) -> str:
    if name == "href":
        return f' href="{escape(str(value))}"' if _ADDRESS.match(str(value)) else ""
    if name == "style":
        value = ";".join(f"{re.sub('[A-Z]', lambda m: '-' + m[0].lower(), k)}:{v}" for k, v in (value or {}).items())
    elif not (name in _KEPT or name in _NAMES or name == "disabled" or name.startswith(("aria-", "data-"))):
        return ""
    if value is None or value is False or value == "":
        return ""
    name = _NAMES.get(name, name)
    if isinstance(value, dict):
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


class First:
    """The ASGI app of the index with the asked page drawn in it; everything else goes to ``inner``."""

    def __init__(self, inner: ASGIApp, api: Api, shell: Any) -> None:
        self.inner, self.api, self.shell = inner, api, shell
        self._index: tuple[bytes, bytes] | None = None
        self._drawing: set[asyncio.Future[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != "/":
            await self.inner(scope, receive, send)
            return
        before, after = await self._halves(scope, receive)
        picture = await self._picture(scope)
        body = before + picture.encode() + after
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"cache-control", b"private, no-cache"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _halves(self, scope: Scope, receive: Receive) -> tuple[bytes, bytes]:
        """The index of Dash, the same for every page, before and after the place of the picture."""
        if self._index is None:
            body = bytearray()

            async def catch(message: Any) -> None:
                body.extend(message.get("body", b""))

            await self.inner(scope, receive, catch)
            before, _, after = bytes(body).partition(PLACE.encode())
            self._index = (before, after)
        return self._index

    async def _picture(self, scope: Scope) -> str:
        asked = scope.get("asked", scope["path"])
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        search = scope.get("query_string", b"").decode("latin-1")
        base = f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        with reader(headers):
            task = asyncio.ensure_future(render(self.api, asked, f"?{search}", base + asked))
        # Not cancelled when it takes too long: what it reads is kept for the live page, which asks for the same.
        self._drawing.add(task)
        task.add_done_callback(self._drawing.discard)
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not task.done():
            return ""
        error = task.exception()
        if error is not None:  # the index has to arrive whatever became of its picture; the live page tells the error
            log.error("no first picture of %s", asked, exc_info=error)
            return ""
        return f'<div id="first">{html_of(self.shell(task.result()[0]))}</div>'
