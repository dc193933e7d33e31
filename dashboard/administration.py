"""Callbacks of policies and settings: switch and replay, tokens, silences; through the API with the reader's rights."""

from __future__ import annotations

from typing import Any

from dash import ALL, Dash, Input, Output, State, no_update

from lanterne.dashboard.callbacks import now, triggered
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.orders import refused, said
from lanterne.dashboard.pages import policies, settings


def register(app: Dash, api: Api) -> None:
    """Hang the administration's callbacks on the app."""
    _register_policies(app, api)
    _register_tokens(app, api)
    _register_silences(app, api)
    _register_webhooks(app, api)


def _register_policies(app: Dash, api: Api) -> None:
    @app.callback(
        Output("policy-done", "children"),
        Output("policies-live", "children"),
        Input({"type": "policy", "name": ALL}, "n_clicks"),
        Input({"type": "replay", "name": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )
    async def act(_switches: list[int], _replays: list[int]) -> Any:
        pressed = triggered()
        if pressed is None:
            return no_update, no_update
        try:
            if pressed["type"] == "replay":
                return await policies.replayed(api, str(pressed["name"])), no_update
            return said(await policies.toggle(api, str(pressed["name"]))), await policies.listed(api)
        except ApiError as error:
            return refused(error), no_update


def _register_tokens(app: Dash, api: Api) -> None:
    @app.callback(
        Output("settings-done", "children"),
        Output("tokens-live", "children"),
        Input({"type": "token", "scope": ALL}, "n_clicks"),
        Input({"type": "revoke", "id": ALL}, "n_clicks"),
        State("token-label", "value"),
        State("token-job", "value"),
        State("token-days", "value"),
        prevent_initial_call=True,
    )
    async def act(_make: list[int], _revoke: list[int], label: str | None, job: str | None, days: float | None) -> Any:
        pressed = triggered()
        if pressed is None:
            return no_update, no_update
        try:
            if pressed["type"] == "token":
                given = (label or "", str(pressed["scope"]), job or "", days or settings.DAYS)
                done: Any = await settings.make_token(api, *given)
            else:
                await api.delete("tokens", pressed["id"])
                done = said("Revoked.")
            return done, await settings.tokens(api, now())
        except ApiError as error:
            return refused(error), no_update


def _register_silences(app: Dash, api: Api) -> None:
    @app.callback(
        Output("settings-done", "children", allow_duplicate=True),
        Output("silences-live", "children"),
        Input({"type": "unsilence", "id": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )
    async def end(_clicks: list[int]) -> Any:
        pressed = triggered()
        if pressed is None:
            return no_update, no_update
        try:
            await api.delete("silences", pressed["id"])
            return said("The silence is over."), await settings.silences(api, now())
        except ApiError as error:
            return refused(error), no_update


def _register_webhooks(app: Dash, api: Api) -> None:
    @app.callback(
        Output("settings-done", "children", allow_duplicate=True),
        Output("webhooks-live", "children"),
        Output("webhook-url", "value"),
        Output("webhook-secret", "value"),
        Input({"type": "webhook", "format": ALL}, "n_clicks"),
        Input({"type": "end-webhook", "id": ALL}, "n_clicks"),
        State("webhook-url", "value"),
        State("webhook-secret", "value"),
        prevent_initial_call=True,
    )
    async def act(_add: list[int], _end: list[int], url: str | None, secret: str | None) -> Any:
        pressed = triggered()
        if pressed is None:
            return no_update, no_update, no_update, no_update
        try:
            if pressed["type"] == "webhook":
                done = await settings.add_webhook(api, str(pressed["format"]), url or "", secret or "")
                url = secret = ""
            else:
                await api.delete("alerts", "targets", pressed["id"])
                done = "This address is told no more."
            return said(done), await settings.alerts(api), url, secret
        except ApiError as error:
            return refused(error), no_update, no_update, no_update
