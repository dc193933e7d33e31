"""One incident: what happened, why we think so, what it costs, what to do, and what was done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import dash_cytoscape as cyto
from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.figures import causal
from lanterne.dashboard.pages import changes, remedy
from lanterne.dashboard.pages.proof import anchor, first_cause, plot_of, plots, proof
from lanterne.dashboard.view import View, incident_url, job_url

Incident = Mapping[str, Any]

LEDGER = ("onset", "detected", "diagnosed", "decided", "acted", "verified")


def fingerprint(incident: Incident) -> str:
    """Changes whenever something on the page would: status, ledger, commands, causes, notes."""
    commands = [(c.get("id"), c.get("state")) for c in incident.get("commands") or ()]
    causes = [
        (c.get("category"), c.get("confidence"), len(c.get("evidence") or ())) for c in incident.get("causes") or ()
    ]
    ledger = sorted((incident.get("ledger") or {}).items())
    return repr((incident.get("status"), ledger, commands, causes, len(incident.get("notes") or ())))


def head(incident: Incident) -> parts.Node:
    """Verdict and price."""
    cause = first_cause(incident)
    cost = cause.get("cost") or {}
    saving = cost.get("saving_ms_per_step")
    found = cause.get("subject") or {}
    slow = cost.get("slowdown")
    tiles = [
        parts.tile(
            "Culprit",
            html.Span(words.subject(found), id="culprit"),
            words.plain(str(cause.get("category") or "")),
            "bad",
        ),
        parts.tile(
            "Since step",
            words.number(cause.get("since_step")),
            f"found at step {words.number(incident.get('opened_step'))}",
        ),
        parts.tile("Confidence", words.percent(cause.get("confidence"), 0), _runner_up(incident)),
        parts.tile(
            "Slowdown",
            f"{words.number(slow)}×" if slow else words.NONE,
            f"{words.milliseconds(saving)} a step to win" if saving else "",
        ),
        parts.tile(
            "Lost so far",
            words.gpu_hours(cost.get("gpu_hours")),
            "",
        ),
    ]
    return html.Div(
        [
            html.Div(
                [
                    html.H1(words.headline(incident), id="headline"),
                    parts.severity_chip(str(incident.get("severity"))),
                    parts.status_chip(str(incident.get("status"))),
                ],
                className="title-row",
            ),
            parts.tiles(tiles),
        ],
        className="stack",
    )


def _runner_up(incident: Incident) -> str:
    causes: Sequence[Mapping[str, Any]] = incident.get("causes") or ()
    if len(causes) < 2:
        return "no other cause fits"
    return f"next: {words.plain(str(causes[1].get('category')))} {words.percent(causes[1].get('confidence'), 0)}"


def bars(value: Any, baseline: Any) -> parts.Node:
    """A value beside its baseline as two bars on one scale."""
    numbers = [float(v) for v in (value, baseline) if isinstance(v, int | float)]
    if len(numbers) < 2 or max(numbers) <= 0:
        return ""
    most = max(numbers)
    seen, usual = (max(2.0, 100.0 * max(n, 0.0) / most) for n in numbers)
    return html.Div(
        [
            html.Div(className="bar seen", style={"width": f"{seen:.1f}%"}),
            html.Div(className="bar usual", style={"width": f"{usual:.1f}%"}),
        ],
        className="bars",
        **parts.aria(hidden="true"),
    )


def _source(ref: str, shown: Sequence[str]) -> parts.Node:
    found = plot_of(ref)
    if found in shown and found is not None:
        return html.A([html.Code(ref), " ↓"], href=f"#{anchor(found)}", className="ref", title="the plot behind it")
    return html.Code(ref, className="ref")


def evidence(cause: Mapping[str, Any], shown: Sequence[str] = ()) -> parts.Node:
    """The evidence of one cause: sentence, value, baseline, and where it comes from; ``shown`` are the plots below."""
    found = cause.get("evidence") or ()
    if not found:
        needs = cause.get("needs") or ()
        return html.Div(
            [html.P("No evidence yet."), html.Ul([html.Li(str(n)) for n in needs]) if needs else ""], className="dim"
        )
    rows = []
    for one in found:
        unit = str(one.get("unit") or "")
        rows.append(
            [
                html.Span(str(one.get("says", "")), className="says"),
                words.with_unit(one.get("value"), unit),
                words.with_unit(one.get("baseline"), unit),
                bars(one.get("value"), one.get("baseline")),
                _source(str(one.get("ref") or ""), shown),
            ]
        )
    return parts.table(["What was seen", "Value", "Baseline", "", "From"], rows, numeric=(1, 2), says="Evidence")


def ledger(incident: Incident) -> parts.Node:
    """Onset to verified as a time line with the time between."""
    found: Mapping[str, Any] = incident.get("ledger") or {}
    steps: list[parts.Node] = []
    before: Any = None
    for name in LEDGER:
        at = found.get(name)
        gap = f"+{words.between(before, at)}" if at and before else ""
        steps.append(
            html.Li(
                [
                    html.Span(name, className="what"),
                    html.Time(words.clock(at), dateTime=str(at or ""), title=words.day_and_clock(at))
                    if at
                    else html.Span("not yet", className="dim"),
                    html.Span(gap, className="gap"),
                ],
                className="done" if at else "waiting",
            )
        )
        before = at or before
    last = next((found[n] for n in reversed(LEDGER) if found.get(n)), None)
    whole = words.between(found.get("onset"), last)
    return html.Div(
        [html.Ol(steps, className="ledger"), html.P(f"{whole} from onset so far; times in UTC", className="note")]
    )


def symptoms(incident: Incident) -> parts.Node:
    """What follows from the cause: the victims."""
    found = incident.get("symptoms") or ()
    if not found:
        return html.P("None recorded.", className="dim")
    rows = [html.Li(_symptom(s)) for s in found[:40]]
    more = [html.Li(f"and {len(found) - 40:,} more", className="dim")] if len(found) > 40 else []
    return html.Ul([*rows, *more], className="plain")


def _symptom(symptom: Mapping[str, Any]) -> list[parts.Node]:
    says = str(symptom.get("says") or words.plain(str(symptom.get("kind"))))
    rank = (symptom.get("subject") or {}).get("rank")
    if rank is None or says.startswith(f"rank {rank} "):
        return [says]
    return [html.Strong(f"rank {rank} "), says]


def others(incident: Incident) -> parts.Node:
    """The causes that fit less, each with its own evidence."""
    causes = (incident.get("causes") or ())[1:]
    if not causes:
        return html.P("No other cause fits the evidence.", className="dim")
    return html.Div(
        [
            html.Details(
                [
                    html.Summary(
                        [
                            html.Strong(words.plain(str(c.get("category")))),
                            f" · {words.subject(c.get('subject'))} · {words.percent(c.get('confidence'), 0)}",
                        ]
                    ),
                    evidence(c),
                ]
            )
            for c in causes
        ]
    )


def graph_panel(answer: Mapping[str, Any]) -> parts.Node:
    """The causal graph, and the same as a table for keyboard and screen reader."""
    if not answer.get("nodes"):
        return parts.panel("Why", html.P("There is no causal graph for this incident yet.", className="dim"))
    drawn = causal.elements(answer)
    height = max(190, 84 * _tallest(drawn) + 40)
    picture = cyto.Cytoscape(
        id="graph",
        elements=drawn,
        stylesheet=causal.stylesheet(),
        layout={"name": "preset", "fit": True, "padding": 16},
        style={"height": f"{min(height, 420)}px", "width": "100%"},
        userZoomingEnabled=False,
        minZoom=0.3,
        maxZoom=1.6,
        responsive=True,
        boxSelectionEnabled=False,
    )
    legend = [
        html.Span([html.I(className=f"dot role-{k}"), word], className="key") for k, (_, word) in causal.ROLES.items()
    ]
    names = {str(n["id"]): str(n.get("label") or n["id"]) for n in answer["nodes"]}
    rows = [
        [names.get(str(e["source"]), ""), "→", names.get(str(e["target"]), ""), *edge_cells(e)]
        for e in answer.get("edges") or ()
    ]
    head = ["From", "", "To", "Why", "Lag", "Statistic", "p", "Samples"]
    body = [
        html.Div(picture, role="img", **parts.aria(label="Causal graph; the table below holds the same edges")),
        html.Div("Click an arrow for what it rests on.", id="edge-says", className="note", **parts.aria(live="polite")),
        html.Details(
            [
                html.Summary(f"All {len(rows)} edges as a table"),
                parts.table(head, rows, numeric=(4, 5, 6, 7), says="Edges"),
            ]
        ),
    ]
    return parts.panel("Why: from the cause to what you saw", body, tools=legend)


def _tallest(drawn: Sequence[Mapping[str, Any]]) -> int:
    columns: dict[float, int] = {}
    for one in drawn:
        if "position" in one:
            columns[one["position"]["x"]] = columns.get(one["position"]["x"], 0) + 1
    return max(columns.values(), default=1)


def edge_cells(edge: Mapping[str, Any]) -> list[parts.Node]:
    """What an edge rests on: sentence, lag, statistic, p-value, sample."""
    says = str(edge.get("says") or words.plain(str(edge.get("kind") or "")))
    if edge.get("refused"):
        says = f"{says} (ruled out{'' if edge['refused'] is True else ': ' + str(edge['refused'])})"
    lag = edge.get("lag")
    return [
        says,
        words.NONE if lag is None else f"{words.number(lag)} steps",
        words.number(edge.get("statistic")),
        words.number(edge.get("p_value")),
        words.number(edge.get("samples")),
    ]


def edge_sentence(edge: Mapping[str, Any]) -> str:
    """An edge in one line."""
    says, lag, statistic, p_value, samples = edge_cells(edge)
    found = {
        "lag": lag,
        "statistic": statistic,
        "p": p_value,
        "samples": samples,
        "weight": words.number(edge.get("weight")),
    }
    return " · ".join([str(says), *(f"{k} {v}" for k, v in found.items() if v != words.NONE)])


async def load(api: Api, key: str) -> Incident:
    """The incident."""
    found: Incident = await api.get("incidents", key)
    return found


async def similar(api: Api, incident: Incident) -> parts.Node:
    """Incidents of the same cause or subject, newest first."""
    found = await api.items("incidents", most=500)
    cause = first_cause(incident)
    same = [
        i
        for i in found
        if i.get("id") != incident.get("id")
        and first_cause(i).get("category") == cause.get("category")
        and cause.get("category")
    ]
    if not same:
        return html.P("None: this cause is new here.", className="dim")
    rows = [
        html.Li(
            [
                dcc.Link(words.headline(i), href=incident_url(str(i["id"]))),
                html.Span(f" {words.day_and_clock(i.get('opened_at'))}", className="dim"),
                parts.status_chip(str(i.get("status"))),
            ]
        )
        for i in sorted(same, key=lambda i: str(i.get("opened_at")), reverse=True)[:8]
    ]
    return html.Ul(rows, className="plain")


async def live(api: Api, incident: Incident) -> list[parts.Node]:
    """All that changes while an incident lives."""
    graph, proofs, past, changed = await asyncio.gather(
        _graph(api, incident), proof(api, incident), similar(api, incident), changes.panel(api, incident)
    )
    left = [
        parts.panel("Evidence", evidence(first_cause(incident), plots(incident))),
        graph_panel(graph),
        proofs,
        changed,
        parts.panel("Other causes considered", others(incident)),
    ]
    right = [
        remedy.panel(incident),
        parts.panel("Ledger", ledger(incident)),
        parts.panel("Who suffers", symptoms(incident)),
        parts.panel("Seen before", past),
    ]
    return [
        head(incident),
        html.Div([html.Div(left, className="wide"), html.Div(right, className="narrow")], className="columns"),
    ]


async def _graph(api: Api, incident: Incident) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = await api.get("incidents", incident.get("id"), "graph")
    except ApiError:
        return {}
    return found


def notes(incident: Incident) -> parts.Node:
    """Notes on the incident, newest last."""
    found = incident.get("notes") or ()
    rows = []
    for one in found:
        text = one if isinstance(one, str) else str(one.get("note") or one.get("says") or one.get("text") or "")
        at = "" if isinstance(one, str) else words.day_and_clock(one.get("at"))
        rows.append(html.Li([text, html.Span(f" {at}" if at != words.NONE else "", className="dim")]))
    return html.Ul(rows, className="plain") if rows else html.P("No notes.", className="dim")


async def page(api: Api, key: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    incident = await load(api, key)
    job = str(incident.get("job") or "")
    tools = [
        parts.button("Copy link", "copy-link"),
        parts.button("Markdown", {"type": "export", "as": "md"}, title="download the incident as Markdown"),
        parts.button("JSON", {"type": "export", "as": "json"}, title="download the incident as JSON"),
    ]
    closing = html.Div(
        [
            html.Label(
                [
                    html.Span("Note", className="unseen"),
                    dcc.Input(
                        id="note", type="text", placeholder="what you know (kept with the incident)", maxLength=500
                    ),
                ],
                className="grow",
            ),
            parts.button("Silence for 4 h", "silence", title="announce no alert about this finding for four hours"),
            parts.button("Resolve", {"type": "close", "as": "resolved"}),
            parts.button("Wrong verdict: dismiss", {"type": "close", "as": "dismissed"}),
        ],
        className="tools",
    )
    return [
        html.Div(
            [
                parts.crumbs(("Fleet", "/"), (job, job_url(job)), (f"incident {key}", "")),
                html.Div(tools, className="tools"),
            ],
            className="crumb-row",
        ),
        html.Div(id="done", **parts.aria(live="polite")),
        html.Div(await live(api, incident), id="incident-live"),
        dcc.Store(id="incident-mark", data=fingerprint(incident)),
        parts.panel("Notes and closing", [html.Div(notes(incident), id="notes"), closing]),
    ]
