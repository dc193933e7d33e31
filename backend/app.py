"""The server: stores, intake, live runner and the ASGI application that joins OTLP, REST and the page.

``create_app`` opens everything (and applies migrations) so that a store that cannot be used is told at once;
the lifespan's end drains and closes it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI

from lanterne.backend.alerts import Alerter, targets_of
from lanterne.backend.api import (
    admin,
    commands,
    history,
    incidents,
    jobs,
    links,
    live,
    metrics,
    problems,
    safety,
    shapes,
    sla,
    steps,
    system,
)
from lanterne.backend.api.accounts import Accounts
from lanterne.backend.api.context import Context
from lanterne.backend.api.hub import Hub
from lanterne.backend.api.news import News
from lanterne.backend.dispatch import Tracker
from lanterne.backend.guard import App, Guard, check_bind
from lanterne.backend.ingest.grpc_server import GrpcServer
from lanterne.backend.ingest.intake import Intake
from lanterne.backend.ingest.otlp import Otlp
from lanterne.backend.pipeline import LiveRunner
from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.folders import disk_fault
from lanterne.backend.store.retention import Keeper
from lanterne.backend.store.shared import Shipping, shared
from lanterne.backend.waiting import Waiting, lifespan_of
from lanterne.clock import Clock, SystemClock
from lanterne.errors import StoreUnavailable
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""How long an evaluation may keep the interpreter while an answer waits; a request changes threads five times."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OUR_PATHS = ("/api/", "/v1/", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/login")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": shapes.Problem, "content": {problems.MEDIA: {}}}
    for status in (400, 401, 403, 404, 405, 409, 413, 421, 422, 429, 500, 503)
}


@dataclass(slots=True)
class Parts:
    """Everything that runs, in the order in which it is started."""

    context: Context
    intake: Intake
    otlp: Otlp
    news: News
    runner: LiveRunner
    tracker: Tracker
    keeper: Keeper
    shipping: Shipping
    grpc: GrpcServer | None
    alerter: Alerter

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.alerter.start()
        self.runner.start()
        self.tracker.start()
        self.keeper.start()
        self.shipping.start()
        if self.grpc is not None:
            self.grpc.start()

    def close(self) -> None:
        """Stop taking, drain what was taken, close the stores."""
        self.context.hub.close()
        if self.grpc is not None:
            self.grpc.close()
        self.otlp.close()
        self.intake.close()
        self.keeper.close()
        self.shipping.close()
        self.runner.stop()
        self.alerter.stop()
        self.tracker.stop()
        self.news.close()
        self.context.store.close()
        self.context.control.close()


def open_parts(settings: ServerSettings, clock: Clock) -> Parts:
    """Migrate and open the stores and build what works on them.

    Raises :class:`StoreUnavailable`, and :class:`UsageError` for an alert target that is none.
    """
    targets = targets_of(settings)
    migrate.upgrade(settings, branch="control")
    control = ControlStore.open(settings, clock=clock)
    alerter = Alerter(control, targets, link=settings.alert_link, clock=clock, allow_private=settings.alert_private)
    store = EventStore.open(settings, clock=clock)
    seen = shared(store)
    hub = Hub()
    runner = LiveRunner(store, control, settings, clock=clock, alerter=alerter)
    context = Context(
        store=seen, control=control, settings=settings, hub=hub, clock=clock, alerter=alerter, safety=runner.safety,
        accounts=Accounts(seen, control, clock),
    )  # fmt: skip
    intake = Intake(store, control)
    return Parts(
        context=context,
        intake=intake,
        otlp=Otlp(intake),
        news=News(store, control, hub),
        runner=runner,
        alerter=alerter,
        tracker=Tracker(store, control),
        keeper=Keeper(store, settings, clock),
        shipping=Shipping(store, settings, clock),
        grpc=GrpcServer(intake, control, settings) if settings.grpc_port else None,
    )


def rest_app(context: Context) -> FastAPI:
    """The REST API alone; the guard has to stand before it."""
    app = FastAPI(
        title="Lanterne",
        version=version("lanterne"),
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    api = APIRouter(prefix="/api/v1")
    for part in (jobs, metrics, steps, links, incidents, safety, commands, history, sla, live, admin):
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(system.router)
    problems.install(app)
    return app


class Server:
    """The path dispatcher behind the guard; the page's lifespan runs beside ours."""

    def __init__(self, parts: Parts, api: FastAPI, page: App | None) -> None:
        self.parts, self._api, self._page = parts, api, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        path = scope["path"]
        if path.startswith("/v1/"):
            await self.parts.otlp(scope, receive, send)
        elif self._page is None or path.startswith(OUR_PATHS):
            await self._api(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with lifespan_of(self._page, scope):
            await receive()
            self.parts.start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await asyncio.to_thread(self.parts.close)
        await send({"type": "lifespan.shutdown.complete"})


def create_app(settings: ServerSettings, page: App | None = None, *, clock: Clock | None = None) -> App:
    """The whole server as one ASGI application.

    Raises :class:`UsageError` for a bind that is open to others without a token and :class:`StoreUnavailable`
    when a store cannot be opened; where a full or read-only disk is to blame, the server comes up all the same, says
    so at ``/readyz``, and opens the stores when it can. Run it with its lifespan: that starts the live runner and
    closes the stores.
    """
    check_bind(settings)
    clock = clock or SystemClock()
    try:
        return _open_app(settings, page, clock)
    except StoreUnavailable:
        fault = disk_fault(Path(settings.data))
        if not fault:
            raise
        log.error("the stores cannot be opened: %s; waiting for the disk", fault)
        return Waiting(lambda: _open_app(settings, page, clock), fault)


def _open_app(settings: ServerSettings, page: App | None, clock: Clock) -> App:
    parts = open_parts(settings, clock)
    api = rest_app(parts.context)
    guard = Guard(Server(parts, api, page), parts.context.control, settings, clock)
    api.state.guard = guard
    return guard
