"""Callbacks that change something, through the API and with the reader's own rights; and the exports."""

from __future__ import annotations

import json
from typing import Any

from dash import ALL, Dash, Input, Output, State, html, no_update

from lanterne.dashboard import export
from lanterne.dashboard.callbacks import route, triggered
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.pages import incident, settings

SILENCE_HOURS = 4.0


def register(app: Dash, api: Api) -> None:
    """Hang the ordering callbacks on the app."""
    _register_orders(app, api)
    _register_export(app, api)


def _incident_of(pathname: str | None) -> str | None:
    at = route(pathname)
    return at[1] if len(at) == 2 and at[0] == "incidents" else None


def said(text: str, tone: str = "good") -> html.Div:
    """What came of a button, announced to screen readers by the live region it is put in."""
    return html.Div(text, className=f"alert tone-{tone}", role="status")


def refused(error: ApiError) -> html.Div:
    """Why the API refused, in its words."""
    return said(f"{error.title}. {error.detail}".strip(), "bad")


async def command(api: Api, key: str, pressed: dict[str, str]) -> str:
    """Approve, cancel or take back one order; returns what was done."""
    if pressed["do"] in {"approve", "cancel"}:
        await api.post("commands", pressed["id"], pressed["do"])
        return "Approved: the ranks are asked to vote." if pressed["do"] == "approve" else "Cancelled."
    found = await incident.load(api, key)
    body = {"action": "undo", "parameters": {"of": pressed["id"]}, "incident": key, "reason": "undone by hand"}
    await api.post("jobs", found.get("job"), "commands", body=body)
    return "Undo ordered: the ranks are asked to vote."


async def issue(api: Api, key: str, pressed: dict[str, str]) -> str:
    """Order the remedy's action for the job of an incident; the server's ceiling may make it a proposal."""
    found = await incident.load(api, key)
    body = {**json.loads(pressed["order"]), "incident": key, "reason": "ordered from the incident page"}
    made = await api.post("jobs", found.get("job"), "commands", body=body)
    waits = made.get("state") == "proposed"
    return "Proposed: it waits for approval below." if waits else "Ordered: the ranks are asked to vote."


def _register_orders(app: Dash, api: Api) -> None:
    @app.callback(
        Output("done", "children"),
        Output("note", "value"),
        Input({"type": "order", "do": ALL, "id": ALL}, "n_clicks"),
        Input({"type": "issue", "order": ALL}, "n_clicks"),
        Input({"type": "close", "as": ALL}, "n_clicks"),
        Input("silence", "n_clicks"),
        State("note", "value"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def act(_a: list[int], _b: list[int], _c: list[int], _d: int, note: str | None, pathname: str | None) -> Any:
        pressed, key = triggered(), _incident_of(pathname)
        if pressed is None or key is None:
            return no_update, no_update
        try:
            if pressed == "silence":
                found = await incident.load(api, key)
                return said(await settings.silence(api, found, SILENCE_HOURS, note or "")), ""
            if pressed["type"] == "order":
                return said(await command(api, key, pressed)), no_update
            if pressed["type"] == "issue":
                return said(await issue(api, key, pressed)), no_update
            await api.post("incidents", key, "status", body={"status": pressed["as"], "note": note or ""})
            return said(f"The incident is {pressed['as']}."), ""
        except ApiError as error:
            return refused(error), no_update


def _register_export(app: Dash, api: Api) -> None:
    @app.callback(
        Output("download", "data", allow_duplicate=True),
        Input({"type": "export", "as": ALL}, "n_clicks"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def save(_clicks: list[int], pathname: str | None) -> Any:
        pressed, key = triggered(), _incident_of(pathname)
        if pressed is None or key is None:
            return no_update
        try:
            found = await incident.load(api, key)
        except ApiError:
            return no_update
        if pressed["as"] == "md":
            return {"content": export.markdown(found), "filename": f"incident-{key}.md", "type": "text/markdown"}
        text = json.dumps(found, indent=2, ensure_ascii=False)
        return {"content": text, "filename": f"incident-{key}.json", "type": "application/json"}
