"""The page as an ASGI app: Dash on its own FastAPI app, fed by the REST API only.

``serve`` puts it behind a path dispatcher beside the API. The page keeps no state and no right of its own: it
asks the API with the reader's credentials, and every view stands in the URL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from dash import Dash, dcc, html
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lanterne.dashboard import administration, callbacks, charts, orders, parts
from lanterne.dashboard.client import Api
from lanterne.dashboard.first import First
from lanterne.dashboard.packing import Packed

ASSETS = Path(__file__).with_name("assets")
PULSE_MS = 2_000
PASSED = ("/_dash", "/assets/", "/_favicon", "/_reload")
BODY_BYTES_MAX = 1 << 20

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="color-scheme" content="light dark">
<title>Lanterne</title>
<link rel="icon" href="/assets/lamp.svg" type="image/svg+xml">
<script src="/assets/early.js"></script>
<script src="/assets/lanterne.js"></script>
{%css%}
</head>
<body>
<!-- first -->
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""
KEYS = (
    ("g f", "fleet"),
    ("g i", "incidents"),
    ("g p", "policies"),
    ("/", "find"),
    ("[ and ]", "step before, step after"),
    ("t", "light or dark"),
    ("l", "live or paused"),
    ("?", "this list"),
)


def _bar() -> html.Header:
    links = [
        dcc.Link(text, href=href, className="nav", id=f"nav-{text.lower()}")
        for text, href in (
            ("Fleet", "/"),
            ("Incidents", "/incidents"),
            ("Policies", "/policies"),
            ("Settings", "/settings"),
        )
    ]
    return html.Header(
        [
            html.A("Skip to content", href="#page", className="skip"),
            dcc.Link(
                [html.Span(className="lamp small", **parts.aria(hidden="true")), "Lanterne"],
                href="/",
                className="brand",
            ),
            html.Nav(links, **parts.aria(label="main")),
            html.Span(className="grow"),
            html.Span("", id="heard", className="note", role="status"),
            html.Button(
                "Live",
                id="live",
                type="button",
                className="button",
                **parts.aria(pressed="true"),
                title="pause or go on (l)",
            ),
            html.Button(
                "Theme", id="theme", type="button", className="button", title="light, dark or the system's (t)"
            ),
            html.Button(
                "?",
                id="help",
                type="button",
                className="button",
                title="keyboard (?)",
                **parts.aria(label="keyboard help"),
            ),
        ],
        className="bar",
    )


def _help() -> html.Dialog:
    rows = [html.Div([html.Dt(html.Kbd(key)), html.Dd(says)]) for key, says in KEYS]
    return html.Dialog(
        [html.H2("Keyboard"), html.Dl(rows, className="facts"), html.P("Esc closes.", className="note")], id="keys"
    )


def shell(page: parts.Node) -> list[Any]:
    """The bar and the main region with a page in it."""
    return [_bar(), html.Main(page, id="page", tabIndex=-1)]


def layout() -> html.Div:
    """The shell around every page, and what the browser keeps."""
    waiting = html.Div([html.Div(className="lamp pulse"), html.P("Loading…")], className="empty")
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="pulse", interval=PULSE_MS),
            dcc.Store(id="tick"),
            dcc.Store(id="title"),
            dcc.Store(id="shown"),
            dcc.Download(id="download"),
            *shell(waiting),
            _help(),
        ],
        id="shell",
    )


def policy(hashes: list[str]) -> bytes:
    """The Content-Security-Policy: nothing from elsewhere, no inline script but Dash's own two."""
    scripts = " ".join(["'self'", *hashes])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-ancestors 'none'; "
        "form-action 'none'; base-uri 'none'"
    ).encode()


class Page:
    """The ASGI app: every address that is not one of Dash's own is the index; no WebSocket; headers on all answers."""

    def __init__(self, dash: Dash, api: Api) -> None:
        self.dash = dash
        self.inner: ASGIApp = Packed(First(dash.server, api, shell))
        self.headers = [
            (b"content-security-policy", policy(list(dash.csp_hashes()))),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"referrer-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["method"] in {"GET", "HEAD"} and not scope["path"].startswith(PASSED):
            scope = {**scope, "path": "/", "raw_path": b"/", "asked": scope["path"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {k for k, _ in self.headers}
                kept = [(k, v) for k, v in message.get("headers", []) if k.lower() not in names]
                message = {**message, "headers": [*kept, *self.headers]}
            await send(message)

        await self.inner(scope, receive, guarded)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _trim(app: Any) -> None:
    """Let the index tell nobody which Python runs here, know no address of a version check, and open no WebSocket."""
    inner = app.interpolate_index

    def trimmed(config: str = "", **more: Any) -> Any:
        opening, rest = config.split(">", 1)
        body, closing = rest.rsplit("<", 1)
        found = json.loads(body)
        for name in ("python_version", "dash_version", "dash_version_url", "websocket"):
            found.pop(name, None)
        plain = json.dumps(found | {"disable_version_check": True}).replace("<", "\\u003c")
        return inner(config=f"{opening}>{plain}<{closing}", **more)

    app.interpolate_index = trimmed


def create_dash(api: Api) -> Dash:
    """The Dash app with all its callbacks."""
    behaviour = f"/assets/lanterne.js?m={(ASSETS / 'lanterne.js').stat().st_mtime}"
    server: Any = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app = Dash(
        __name__,
        server=server,
        assets_folder=str(ASSETS),
        assets_ignore=r"(early|lanterne)\.js",
        index_string=INDEX.replace("/assets/lanterne.js", behaviour),
        suppress_callback_exceptions=True,
        serve_locally=True,
        title="Lanterne",
        update_title="",
        add_log_handler=False,
    )
    app.layout = layout()
    _trim(app)
    for section in (callbacks, charts, orders, administration):
        section.register(app, api)
    return app


def create_page(api_base: str, transport: httpx.AsyncBaseTransport | None = None) -> Any:
    """The page as an ASGI app. ``api_base`` is the backend's base URL; ``transport`` reaches it without a socket."""
    api = Api(api_base, transport)
    return Page(create_dash(api), api)
