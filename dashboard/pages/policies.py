"""Policies: what may be done by itself, what was chosen, and what one would have chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.view import View, incident_url

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
        html.Span([parts.chip(mode, MODES.get(mode, "calm")), switch, breaker], className="chips one-line"),
        words.percent(policy.get("confidence"), 0),
        f"{words.number(state.get('used'))} of {words.number(policy.get('budget'))} in "
        f"{words.seconds(policy.get('budget_s'))}, {words.seconds(policy.get('cool_down_s'))} apart",
        words.day_and_clock(state.get("last")) if state.get("last") else "never",
        html.Span(
            [
                parts.button("Replay", {"type": "replay", "name": key["name"]}, title="judge the past incidents again"),
                parts.button("Disable" if enabled else "Enable", key),
            ],
            className="pair",
        ),
    ]


async def page(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    return [
        html.Div(
            [html.H1("Policies"), html.Span("what may be done, by whom, how often", className="dim")],
            className="title-row",
        ),
        html.Div(id="policy-done", **parts.aria(live="polite")),
        html.Div(await history(api), id="policies-history"),
        html.Div(await listed(api), id="policies-live"),
    ]


async def history(api: Api) -> parts.Node:
    """What was chosen about the last incidents."""
    found = await api.items("decisions", most=50, limit=50)
    body = chosen_table(found) if found else html.P("No policy has had anything to decide yet.", className="dim")
    return parts.panel("What was chosen", body, note=f"the last {len(found)}" if found else "")


def chosen_table(found: Sequence[Mapping[str, Any]]) -> parts.Node:
    """Choices as rows; ``why`` or ``says`` is the reason."""
    rows = [
        [
            words.day_and_clock(one.get("at")) if one.get("at") else words.NONE,
            dcc.Link(str(one.get("incident")), href=incident_url(str(one.get("incident")))),
            str(one.get("job") or words.NONE),
            words.plain(str(one.get("category") or "")) or words.NONE,
            str(one.get("policy") or words.NONE),
            html.Strong(words.plain(str(one.get("chose") or one.get("choice") or "hold"))),
            html.Span(str(one.get("says") or one.get("why") or ""), className="says"),
        ]
        for one in found
    ]
    return parts.table(["When", "Incident", "Job", "Cause", "Policy", "Chose", "Why"], rows, says="Choices")


async def replayed(api: Api, name: str) -> parts.Node:
    """What one policy would have chosen about the incidents kept here."""
    found = (await api.get("policies", name, "replay")).get("items") or []
    acts = sum(1 for one in found if one.get("choice") != "hold")
    note = f"{words.counted(len(found), 'incident')}, {acts} acted on; nothing was ordered"
    body = chosen_table(found) if found else html.P("There is no diagnosed incident to replay.", className="dim")
    return parts.panel(f"Replay of {name}", body, note=note)


async def listed(api: Api) -> list[parts.Node]:
    """The policies as a table."""
    found = await api.items("policies")
    if not found:
        return [html.P("No policy is in force.", className="dim")]
    head = ["Policy", "For", "Does", "Mode", "Confidence", "Used", "Last", ""]
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
