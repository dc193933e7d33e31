"""One step: what every rank did on the job's clock, who waited for whom, and the critical path."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.figures import lanes
from lanterne.dashboard.pages.job import tabs
from lanterne.dashboard.view import View, job_url

CALLS_SHOWN = 24


def waits(answer: Mapping[str, Any]) -> list[list[parts.Node]]:
    """Rows of the waits in this step, the longest first: who, for whom, how long, where."""
    found = [
        (float(s.get("wait_ms") or 0.0), lane["rank"], s)
        for lane in answer.get("lanes") or ()
        for s in lane["spans"]
        if s["kind"] == lanes.COLLECTIVE and (s.get("wait_ms") or 0.0) > 0
    ]
    found.sort(key=lambda one: (-one[0], one[1]))
    return [
        [
            html.Span(f"rank {rank}", className="ref"),
            words.NONE if span.get("waited_for") is None else html.Span(f"rank {span['waited_for']}", className="ref"),
            words.milliseconds(wait),
            str(span.get("name") or ""),
            html.Span(words.group(span.get("group")), className="ref", title=str(span.get("group") or "")),
            words.number(span.get("sequence")),
            words.size(span.get("bytes")),
        ]
        for wait, rank, span in found[:CALLS_SHOWN]
    ]


def path(answer: Mapping[str, Any]) -> parts.Node:
    """The critical path in words, one part after the other."""
    found = answer.get("critical_path") or []
    if not found:
        return html.P("No critical path: this step has no spans that hang together.", className="dim")
    whole = sum(float(p["duration_ms"]) for p in found) or 1.0
    rows = [
        html.Li(
            [
                html.Strong(f"rank {p['rank']} "),
                words.plain(str(p["name"])),
                html.Span(
                    f" {words.milliseconds(p['duration_ms'])}, {words.percent(float(p['duration_ms']) / whole, 0)}",
                    className="dim",
                ),
            ]
        )
        for p in found[:40]
    ]
    return html.Ol(rows, className="plain")


async def page(api: Api, name: str, number: int, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    answer = await api.get("jobs", name, "steps", number)
    figure = lanes.swim_lanes(answer)
    shown, whole = len(figure["layout"].get("yaxis", {}).get("categoryarray", ())), len(answer.get("lanes") or ())
    note = f"{whole:,} ranks" if shown == whole else f"{shown} of {whole:,} ranks: critical, latest, median, earliest"
    if answer.get("truncated"):
        note += "; not all spans of this step are shown"
    before = job_url(name, "steps", max(0, number - 1))
    tools = [
        dcc.Link("← step before", href=before, className="button", id="step-before"),
        dcc.Link("step after →", href=job_url(name, "steps", number + 1), className="button", id="step-after"),
        parts.button(
            "Perfetto trace", "trace", title="download Chrome trace JSON; open it in ui.perfetto.dev or your own copy"
        ),
    ]
    rows = waits(answer)
    table = (
        parts.table(
            ["Who", "Waited for", "How long", "Collective", "Group", "Number", "Size"],
            rows,
            numeric=(2, 5, 6),
            says="Waits",
        )
        if rows
        else html.P("Nobody waited for anybody in this step.", className="dim")
    )
    says = f"Swim lanes of {shown} ranks in step {number}; the waits stand in the table below"
    return [
        html.Div(
            [
                parts.crumbs(("Fleet", "/"), (name, job_url(name)), (f"step {number:,}", "")),
                html.Div(tools, className="tools"),
            ],
            className="crumb-row",
        ),
        tabs(name, ""),
        html.H1(f"Step {number:,}"),
        parts.panel("What every rank did", parts.graph("lanes", figure, says), note=note),
        html.Div(
            [
                html.Div([parts.panel("Who waited for whom", table)], className="wide"),
                html.Div([parts.panel("Critical path", path(answer))], className="narrow"),
            ],
            className="columns",
        ),
    ]
