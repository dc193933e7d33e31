"""Health, the service's own Prometheus metrics, sign-in by cookie, and the API's page of documentation."""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Form, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from lanterne.backend.api.context import Context, Ctx
from lanterne.backend.api.problems import Problem
from lanterne.errors import LanterneError

router = APIRouter(tags=["system"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok", "version": version("lanterne")}


@router.get("/readyz")
def readyz(context: Ctx) -> Response:
    """200 when both stores take and answer; else 503 with the reason. A recovery from a damaged log is told here."""
    why = context.store.trouble
    if not why:
        try:
            context.control.count_jobs()
        except LanterneError as error:
            why = str(error)
    body = {"status": "unavailable" if why else "ready", "reason": why, "recovered": context.store.recovered}
    return JSONResponse(body, status_code=503 if why else 200)


class _Collector:
    """Reads the store's counters when scraped; per job nothing is shown, so the number of series is bounded."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        store = self._context.store
        rows = CounterMetricFamily("lanterne_rows_stored", "Rows committed", labels=["signal"])
        for signal, n in store.counters.rows.items():
            rows.add_metric([signal], n)
        yield rows
        yield CounterMetricFamily("lanterne_commits", "Transactions of the writer", value=store.counters.commits)
        yield CounterMetricFamily(
            "lanterne_commit_seconds", "Seconds spent in transactions", value=store.counters.commit_seconds
        )
        yield CounterMetricFamily("lanterne_store_failures", "Errors of the database", value=store.counters.failures)
        yield GaugeMetricFamily("lanterne_queue_bytes", "Bytes waiting for the writer", value=store.queued_bytes)
        yield GaugeMetricFamily("lanterne_ready", "1 when the store takes rows", value=float(store.ready))
        yield GaugeMetricFamily("lanterne_streams", "Open event streams", value=self._context.hub.listeners)
        counts = CounterMetricFamily("lanterne_quality", "Counted loss; see docs/wire.md", labels=["counter"])
        for name, n in store.quality.counts().items():
            counts.add_metric([name], n)
        yield counts


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(context: Ctx) -> Response:
    """The service's own metrics for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(context))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Lanterne</title>
<body style="font-family:system-ui;max-width:24rem;margin:20vh auto">
<h1>Lanterne</h1><p>{says}</p><form method="post" action="/login">
<label>Token <input name="token" type="password" autocomplete="current-password" required style="width:100%"></label>
<p><button>Sign in</button></p></form></body></html>"""


@router.get("/login", response_class=HTMLResponse, include_in_schema=False)
async def login_page() -> str:
    return _LOGIN.format(says="Paste a token with scope read (made by <code>lanterne token</code>).")


@router.post("/login", include_in_schema=False)
async def login(request: Request, token: Annotated[str, Form(max_length=512)]) -> Response:
    """Keep the token in a cookie that scripts cannot read and other sites do not send."""
    client = request.client.host if request.client else ""
    found = await request.app.state.guard.verify(token, client)
    if found is None:
        return HTMLResponse(_LOGIN.format(says="That token is wrong, revoked or expired."), status_code=401)
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(
        "lanterne_token", token, httponly=True, samesite="lax", secure=request.url.scheme == "https", max_age=43_200
    )
    return answer


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs(request: Request) -> str:
    """The API as a plain page made of its own OpenAPI document: nothing is fetched from elsewhere."""
    app: FastAPI = request.app
    return _page(app.openapi())


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"], include_in_schema=False)
async def nothing(rest: str) -> Response:
    raise Problem(404, f"there is no /{rest[:100]}")


def _page(document: dict[str, Any]) -> str:
    rows: list[str] = []
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            names = ", ".join(p["name"] + ("" if p.get("required") else "?") for p in told.get("parameters", ()))
            says = told.get("description") or told.get("summary", "")
            rows.append(
                f"<tr><td><b>{html.escape(method.upper())}</b></td><td><code>{html.escape(path)}</code></td>"
                f"<td>{html.escape(says)}</td><td><code>{html.escape(names)}</code></td></tr>"
            )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Lanterne API</title>'
        '<body style="font-family:system-ui;margin:2rem"><h1>Lanterne API</h1>'
        '<p>Machine form: <a href="/openapi.json">openapi.json</a>. '
        "Errors are <code>application/problem+json</code>; lists page by <code>cursor</code>.</p>"
        '<table cellpadding="6"><tr><th>Method<th>Path<th>Says<th>Parameters</tr>'
        f"{''.join(rows)}</table></body></html>"
    )
