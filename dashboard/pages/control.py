"""Policies and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dash import html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.view import View

MODES = {"observe": "calm", "suggest": "info", "approve": "warn", "auto": "good"}


def _actions(policy: Mapping[str, Any]) -> str:
    steps = policy.get("steps") or ([policy["action"]] if policy.get("action") else [])
    return (
        ", then ".join(words.plain(str(s.get("action") if isinstance(s, Mapping) else s)) for s in steps) or words.NONE
    )


def row(policy: Mapping[str, Any]) -> list[parts.Node]:
    """One policy: what for, what it does, what holds it back, how it stands now; the whole of it folds open."""
    state = policy.get("state") or {}
    mode, enabled = str(policy.get("mode") or ""), bool(policy.get("enabled"))
    whole = {k: v for k, v in policy.items() if k != "state"}
    breaker = parts.chip("breaker open", "bad", "✕") if state.get("breaker") == "open" else ""
    switch = parts.chip("on", "good", "✓") if enabled else parts.chip("off", "calm", "–")
    key = {"type": "policy", "name": str(policy.get("name"))}
    return [
        html.Details(
            [
                html.Summary([html.Strong(str(policy.get("name"))), html.Small(f" version {policy.get('version')}")]),
                html.P(str(policy.get("says") or "")),
                html.Pre(html.Code(json.dumps(whole, indent=2, ensure_ascii=False))),
            ]
        ),
        ", ".join(words.plain(str(c)) for c in policy.get("causes") or ()) or words.NONE,
        _actions(policy),
        html.Span([parts.chip(mode, MODES.get(mode, "calm")), switch, breaker], className="chips"),
        words.percent(policy.get("confidence"), 0),
        f"{words.number(state.get('used'))} of {words.number(policy.get('budget'))} in "
        f"{words.seconds(policy.get('budget_s'))}",
        words.seconds(policy.get("cool_down_s")),
        words.day_and_clock(state.get("last")) if state.get("last") else "never",
        parts.button("Disable" if enabled else "Enable", key),
    ]


async def policies(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """All policies in force."""
    return [
        html.Div(
            [html.H1("Policies"), html.Span("what may be done, by whom, how often", className="dim")],
            className="title-row",
        ),
        html.Div(id="policy-done", **parts.aria(live="polite")),
        html.Div(await listed(api), id="policies-live"),
    ]


async def listed(api: Api) -> list[parts.Node]:
    """The policies as a table."""
    found = await api.items("policies")
    if not found:
        return [html.P("No policy is in force.", className="dim")]
    head = ["Policy", "For", "Does", "Mode", "Confidence", "Budget used", "Cool-down", "Last", ""]
    table = parts.table(head, [row(p) for p in found], numeric=(4,), says="Policies")
    return [parts.panel("In force", table, note=f"{len(found)}")]


async def toggle(api: Api, name: str) -> str:
    """Switch a policy on or off by its next version; returns what was done."""
    found = next((p for p in await api.items("policies") if p.get("name") == name), None)
    if found is None:
        raise ApiError(404, "no such policy", name)
    body = {k: v for k, v in found.items() if k not in {"name", "version", "state"}} | {
        "enabled": not found.get("enabled")
    }
    made = await api.put("policies", name, body=body)
    return f"{name} is {'enabled' if made.get('enabled') else 'disabled'} (version {made.get('version')})."


async def settings(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """How to attach, tokens, and where the rest stands."""
    try:
        tokens = await api.items("tokens")
        rows = [
            [
                html.Code(str(t.get("id"))),
                str(t.get("label") or words.NONE),
                ", ".join(t.get("scopes") or ()),
                str(t.get("job") or "all jobs"),
                words.day_and_clock(t.get("expires_at")) if t.get("expires_at") else "never",
                words.age(t.get("used_at"), now) if t.get("used_at") else "never",
                parts.chip("revoked", "calm", "–") if t.get("revoked_at") else parts.chip("valid", "good", "✓"),
            ]
            for t in tokens
        ]
        body: parts.Node = (
            parts.table(["Id", "Label", "Scopes", "Job", "Expires", "Used", "State"], rows, says="Tokens")
            if rows
            else html.P(
                ["No tokens. ", html.Code("lanterne token"), " makes one; its text is shown once."], className="dim"
            )
        )
    except ApiError as error:
        body = html.P(f"Tokens are for admins: {error.detail or error.title}", className="dim")
    signing = html.P(["This server lets you in by its own form: ", html.A("sign in with a token", href="/login"), "."])
    links = html.Ul(
        [
            html.Li([html.A("API documentation", href="/docs"), " with every route of this page"]),
            html.Li([html.A("Prometheus metrics", href="/metrics"), " of this server"]),
            html.Li([html.A("Readiness", href="/readyz"), " of the stores"]),
        ],
        className="plain",
    )
    return [
        html.H1("Settings"),
        html.Div(
            [
                html.Div(
                    [parts.panel("Tokens", body), parts.panel("Attach a job", parts.attach_help(base))],
                    className="wide",
                ),
                html.Div([parts.panel("Sign in", signing), parts.panel("This server", links)], className="narrow"),
            ],
            className="columns",
        ),
    ]
