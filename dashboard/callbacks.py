"""Routing, live regions and the browser's own callbacks. Every server callback is async: a sync one blocks the loop."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, no_update

from lanterne.dashboard import parts
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.pages import (
    compare,
    fleet,
    incident,
    incidents,
    job,
    job_more,
    policies,
    rank,
    ranks,
    settings,
    step,
)
from lanterne.dashboard.view import View, parse

Answer = list[Any]


def route(pathname: str | None) -> tuple[str, ...]:
    """The parts of an address, each decoded once."""
    return tuple(unquote(part) for part in (pathname or "/").strip("/").split("/") if part)


def now() -> datetime:
    """The time that ages on the page are counted from."""
    return datetime.now(UTC)


def base_of(href: str | None) -> str:
    """Scheme, host and port of the page's address."""
    found = urlsplit(href or "")
    return f"{found.scheme}://{found.netloc}" if found.scheme in {"http", "https"} else ""


def _page(api: Api, at: tuple[str, ...], view: View, base: str) -> tuple[str, Awaitable[Answer]] | None:
    """The title and the page of an address; None for an address that no page has."""
    match at:
        case ():
            return "Fleet", fleet.page(api, view, now(), base)
        case ("incidents",):
            return "Incidents", incidents.page(api, view, now(), base)
        case ("incidents", key):
            return f"Incident {key}", incident.page(api, key, view, now(), base)
        case ("policies",):
            return "Policies", policies.page(api, view, now(), base)
        case ("settings",):
            return "Settings", settings.page(api, view, now(), base)
        case ("compare",):
            return "Compare", compare.page(api, view, now(), base)
        case ("jobs", name, *below):
            return _job_page(api, name, tuple(below), view, base)
        case _:
            return None


def _job_page(api: Api, name: str, at: tuple[str, ...], view: View, base: str) -> tuple[str, Awaitable[Answer]] | None:
    match at:
        case ():
            return name, job.page(api, name, view, now(), base)
        case ("steps", number) if number.isdecimal():
            return f"{name}, step {number}", step.page(api, name, int(number), view, now(), base)
        case ("ranks", number) if number.isdecimal():
            return f"{name}, rank {number}", rank.page(api, name, int(number), view, now(), base)
        case ("ranks",):
            return f"{name}, ranks", ranks.page(api, name, view, now(), base)
        case ("communication",):
            return f"{name}, communication", job_more.communication(api, name, view, now(), base)
        case ("sla",):
            return f"{name}, SLA", job_more.sla(api, name, view, now(), base)
        case ("events",):
            return f"{name}, events", job_more.events(api, name, view, now(), base)
        case _:
            return None


async def render(api: Api, pathname: str | None, search: str | None, href: str | None) -> tuple[Answer, str]:
    """A page and its title; what went wrong is said on the page."""
    try:
        found = _page(api, route(pathname), parse(search), base_of(href))
        if found is None:
            raise ApiError(404, "no such page", f"{pathname} is not an address of this page")
        return await found[1], f"{found[0]} · Lanterne"
    except ApiError as error:
        return [parts.failure(error)], "Lanterne"


def register(app: Dash, api: Api) -> None:
    """Hang routing and live regions on the app."""
    _register_routing(app, api)
    _register_live(app, api)
    _register_browser(app)


def _register_routing(app: Dash, api: Api) -> None:
    @app.callback(
        Output("page", "children"),
        Output("title", "data"),
        Input("url", "pathname"),
        State("url", "search"),
        State("url", "href"),
    )
    async def show(pathname: str | None, search: str | None, href: str | None) -> tuple[Answer, str]:
        return await render(api, pathname, search, href)


def _register_live(app: Dash, api: Api) -> None:
    @app.callback(
        Output("fleet-live", "children"),
        Output("fleet-told", "data"),
        Input("tick", "data"),
        Input("url", "search"),
        State("url", "pathname"),
        State("url", "href"),
        State("fleet-told", "data"),
        prevent_initial_call=True,
    )
    async def fleet_live(_tick: int, search: str | None, pathname: str | None, href: str | None, told: Any) -> Any:
        if route(pathname):
            return no_update, None
        return _fresh(await _shown(fleet.live(api, parse(search), now(), base_of(href))), told)

    @app.callback(
        Output("job-live", "children"),
        Output("job-told", "data"),
        Output("job-mark", "data"),
        Output("job-events", "data"),
        Input("tick", "data"),
        State("url", "pathname"),
        State("job-mark", "data"),
        State("job-told", "data"),
        prevent_initial_call=True,
    )
    async def job_live(tick: int, pathname: str | None, mark: str | None, told: Any) -> Any:
        at = route(pathname)
        if len(at) != 2 or at[0] != "jobs":
            return no_update, None, no_update, no_update
        try:
            body, fresh, incidents = await job.live(api, at[1], now())
        except ApiError as error:
            return [parts.failure(error)], None, no_update, no_update
        if fresh == mark or tick % 3:
            return *_fresh(body, told), no_update, no_update
        return *_fresh(body, told), fresh, job.marks(incidents)

    _register_live_incidents(app, api)


def _register_live_incidents(app: Dash, api: Api) -> None:
    @app.callback(
        Output("incident-live", "children"),
        Output("notes", "children"),
        Output("incident-mark", "data"),
        Input("tick", "data"),
        Input("done", "children"),
        State("url", "pathname"),
        State("incident-mark", "data"),
        prevent_initial_call=True,
    )
    async def incident_live(_tick: int, _done: Any, pathname: str | None, mark: str | None) -> Any:
        at = route(pathname)
        if len(at) != 2 or at[0] != "incidents":
            return no_update, no_update, no_update
        try:
            found = await incident.load(api, at[1])
            fresh = incident.fingerprint(found)
            if fresh == mark:
                return no_update, no_update, no_update
            return await incident.live(api, found), incident.notes(found), fresh
        except ApiError:
            return no_update, no_update, no_update

    @app.callback(
        Output("incidents-live", "children"),
        Input("tick", "data"),
        Input("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def incidents_live(_tick: int, search: str | None, pathname: str | None) -> Any:
        if route(pathname) != ("incidents",):
            return no_update
        return await _shown(incidents.live(api, parse(search)))

    @app.callback(
        Output("compare-live", "children"),
        Input("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def compare_live(search: str | None, pathname: str | None) -> Any:
        if route(pathname) != ("compare",):
            return no_update
        return await _shown(compare.live(api, parse(search)))

    @app.callback(
        Output("all-ranks", "children"),
        Input("tick", "data"),
        Input("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def ranks_live(_tick: int, search: str | None, pathname: str | None) -> Any:
        at = route(pathname)
        if len(at) != 3 or at[0] != "jobs" or at[2] != "ranks":
            return no_update
        return await _shown(ranks.live(api, at[1], parse(search), now()))


def _fresh(body: Answer, told: Any) -> tuple[Any, Any]:
    """The region and its digest, or nothing where the reader has it already."""
    found = parts.digest(body)
    return (no_update, no_update) if found == told else (body, found)


async def _shown(found: Awaitable[Answer]) -> Answer:
    try:
        return await found
    except ApiError as error:
        return [parts.failure(error)]


def browser(app: Any, *wiring: Any, **more: Any) -> None:
    """Hang a callback on the app that runs in the browser."""
    app.clientside_callback(*wiring, **more)


def _register_browser(app: Dash) -> None:
    """Callbacks that run in the browser (assets/lanterne.js)."""

    def local(name: str) -> ClientsideFunction:
        return ClientsideFunction(namespace="lanterne", function_name=name)

    browser(app, local("pulse"), Output("tick", "data"), Input("pulse", "n_intervals"), State("tick", "data"))
    browser(app, local("title"), Output("shown", "data"), Input("title", "data"))
    browser(
        app,
        local("control"),
        Output("url", "search"),
        Input({"type": "control", "key": ALL, "default": ALL}, "value"),
        State({"type": "control", "key": ALL, "default": ALL}, "id"),
        State("url", "search"),
        prevent_initial_call=True,
    )


def triggered() -> Any:
    """The id of what was pressed, or None where the callback ran because its inputs were drawn anew."""
    pressed = ctx.triggered[0]["value"] if ctx.triggered else None
    return ctx.triggered_id if pressed else None
