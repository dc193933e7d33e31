"""Settings: tokens and silences, made and ended here through the API; how to attach; where the rest stands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.view import View

SCOPES: Mapping[str, str] = {
    "ingest": "send events",
    "read": "read",
    "operate": "read and order remedies",
    "admin": "do everything",
}
DAYS = 90
FORMS: Mapping[str, str] = {
    "slack": "a Slack channel",
    "alertmanager": "whatever takes Alertmanager's webhook",
    "generic": "anything else: JSON, signed with the secret",
}


def token_row(token: Mapping[str, Any], now: datetime) -> list[parts.Node]:
    """One token; its text is not known here."""
    over = bool(token.get("revoked_at"))
    key = str(token.get("id"))
    end = html.Details(
        [
            html.Summary("Revoke…", className="button"),
            html.Div(
                [
                    html.P("Whoever uses it is refused within a second. This cannot be taken back."),
                    parts.button("Revoke now", {"type": "revoke", "id": key}, tone="primary"),
                ],
                className="confirm",
            ),
        ]
    )
    return [
        html.Code(key),
        str(token.get("label") or words.NONE),
        ", ".join(token.get("scopes") or ()),
        str(token.get("job") or "all jobs"),
        words.day_and_clock(token.get("expires_at")) if token.get("expires_at") else "never",
        words.age(token.get("used_at"), now) if token.get("used_at") else "never",
        parts.chip("revoked", "calm", "–") if over else parts.chip("valid", "good", "✓"),
        "" if over else end,
    ]


async def tokens(api: Api, now: datetime) -> parts.Node:
    """All tokens, those still valid first."""
    try:
        found = await api.items("tokens")
    except ApiError as error:
        return html.P(f"Tokens are for admins: {error.detail or error.title}", className="dim")
    if not found:
        return html.P("No tokens yet.", className="dim")
    shown = sorted(found, key=lambda t: bool(t.get("revoked_at")))[:100]
    head = ["Id", "Label", "Scopes", "Job", "Expires", "Used", "State", ""]
    return parts.table(head, [token_row(t, now) for t in shown], says="Tokens")


def token_form() -> parts.Node:
    """A new token: who for, what it may do, for which job, how long."""
    makers = [
        parts.button(f"{scope} token", {"type": "token", "scope": scope}, title=f"make a token that may {does}")
        for scope, does in SCOPES.items()
    ]
    return html.Div(
        [
            _entry("Label", dcc.Input(id="token-label", type="text", maxLength=128, placeholder="whose it is")),
            _entry("Job", dcc.Input(id="token-job", type="text", maxLength=128, placeholder="all jobs")),
            _entry("Days", dcc.Input(id="token-days", type="number", min=1, max=3650, value=DAYS)),
            html.Span("make a", className="note"),
            *makers,
        ],
        className="tools form",
    )


def _entry(says: str, entry: Any) -> parts.Node:
    return html.Label([html.Span(says, className="label"), entry], className="field")


async def make_token(api: Api, label: str, scope: str, job: str, days: float) -> parts.Node:
    """The new token's text, which is shown this once."""
    body = {"scopes": [scope], "job": job.strip(), "label": label, "days": days}
    made = await api.post("tokens", body=body)
    return html.Div(
        [
            html.Strong("Copy it now; it is shown this once."),
            html.Pre(html.Code(str(made.get("token")), id="token-text")),
        ],
        className="alert tone-good",
        role="status",
    )


async def silences(api: Api, now: datetime) -> parts.Node:
    """Findings of which no alert is announced."""
    found = await api.items("silences")
    if not found:
        return html.P("Nothing is silenced. An incident's page can silence its finding.", className="dim")
    rows = [
        [
            str(s.get("job")),
            html.Code(str(s.get("fingerprint"))),
            words.day_and_clock(s.get("until")),
            str(s.get("author") or words.NONE),
            str(s.get("says") or ""),
            parts.button("End now", {"type": "unsilence", "id": s.get("id")}),
        ]
        for s in found[:200]
    ]
    return parts.table(["Job", "Finding", "Until", "By", "Why", ""], rows, says="Silences")


async def silence(api: Api, incident: Mapping[str, Any], hours: float, says: str) -> str:
    """Keep an incident's finding quiet; returns what was done."""
    made = await api.post("incidents", incident.get("id"), "silence", body={"hours": hours, "says": says})
    return f"No alert about this finding until {words.day_and_clock(made.get('until'))}; the settings can end it."


async def alerts(api: Api) -> parts.Node:
    """Where alerts go and how they fared."""
    try:
        found = await api.get("alerts")
    except ApiError as error:
        return html.P(error.detail or error.title, className="dim")
    targets = found.get("targets") or ()
    if not targets:
        return html.P("No webhook is set: incidents are told on this page only.", className="dim")
    rows = [
        [
            str(t.get("format")),
            str(t.get("host")),
            ", ".join(t.get("severities") or ()),
            parts.button("End now", {"type": "end-webhook", "id": t["id"]})
            if t.get("id")
            else html.Span("from the server's settings", className="dim"),
        ]
        for t in targets
    ]
    counts = ", ".join(f"{words.number(found.get(n))} {n}" for n in ("sent", "failed", "silenced", "dropped"))
    errors = [html.P(str(e), className="note") for e in (found.get("errors") or ())[-3:]]
    return html.Div([parts.table(["Form", "Host", "For", ""], rows, says="Webhooks"), html.P(counts), *errors])


def alert_form() -> parts.Node:
    """A new target: its address, and what it understands."""
    makers = [
        parts.button(name, {"type": "webhook", "format": name}, title=f"tell {says}") for name, says in FORMS.items()
    ]
    secret = dcc.Input(id="webhook-secret", type="password", maxLength=256, placeholder="for generic")
    return html.Div(
        [
            _entry("Address", dcc.Input(id="webhook-url", type="url", maxLength=2_000, placeholder="https://…")),
            _entry("Secret", secret),
            html.Span("tell incidents of P0 and P1 as", className="note"),
            *makers,
        ],
        className="tools form",
    )


async def add_webhook(api: Api, form: str, url: str, secret: str) -> str:
    """Tell alerts to an address too; returns what was done."""
    made = await api.post("alerts", "targets", body={"format": form, "url": url.strip(), "secret": secret})
    return f"Incidents of {', '.join(made.get('severities') or ())} are told to {made.get('host')} from now on."


async def page(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    signing = html.P(
        ["A server beyond this machine asks for one: ", html.A("sign in with a token", href="/login"), "."]
    )
    links = html.Ul(
        [
            html.Li([html.A("API documentation", href="/docs"), " with every route of this page"]),
            html.Li([html.A("Prometheus metrics", href="/metrics"), " of this server"]),
            html.Li([html.A("Readiness", href="/readyz"), " of the stores"]),
        ],
        className="plain",
    )
    left = [
        parts.panel("Tokens", [html.Div(await tokens(api, now), id="tokens-live"), token_form()]),
        parts.panel("Silences", html.Div(await silences(api, now), id="silences-live")),
        parts.panel("Webhooks", [html.Div(await alerts(api), id="webhooks-live"), alert_form()], key="webhooks"),
        parts.panel("Attach a job", parts.attach_help(base)),
    ]
    right = [parts.panel("Sign in", signing), parts.panel("This server", links)]
    return [
        html.H1("Settings"),
        html.Div(id="settings-done", **parts.aria(live="polite")),
        html.Div([html.Div(left, className="wide"), html.Div(right, className="narrow")], className="columns"),
    ]
