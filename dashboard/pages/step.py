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

WAITS_SHOWN = 24
REPAIRS_SHOWN = 8


def waits(answer: Mapping[str, Any]) -> list[list[parts.Node]]:
    """Rows of the waits in this step, the longest first: who, for whom, how long, in how many calls."""
    return [
        [
            html.Span(f"rank {one['rank']}", className="ref"),
            html.Span(f"rank {one['waited_for']}", className="ref"),
            words.milliseconds(one.get("wait_ms")),
            words.number(one.get("calls")),
        ]
        for one in (answer.get("waits") or ())[:WAITS_SHOWN]
    ]


def what_if(answer: Mapping[str, Any]) -> parts.Node:
    """What the step would take with one thing repaired, most worth first."""
    found = answer.get("what_if") or {}
    rows: list[tuple[float, list[parts.Node]]] = []
    for kind, name in (("ranks", "rank"), ("stages", "stage"), ("phases", "phase")):
        for one in found.get(kind) or ():
            saving = float(one.get("saving_ms") or 0.0)
            what = words.plain(str(one.get(name))) if name == "phase" else f"{name} {one.get(name)}"
            label = f"{what} on every rank" if name == "phase" else what
            rows.append((saving, [label, words.milliseconds(one.get("step_ms")), words.milliseconds(saving)]))
    if not rows:
        return html.P("This step cannot be replayed, or nothing in it is longer than normal.", className="dim")
    rows.sort(key=lambda one: -one[0])
    body = parts.table(
        ["Were this normal", "The step takes", "Saves"],
        [r for _, r in rows[:REPAIRS_SHOWN]],
        numeric=(1, 2),
        says="What if",
    )
    was, best = words.milliseconds(found.get("step_ms")), words.milliseconds(found.get("all_normal_ms"))
    return html.Div([html.P(f"It took {was}; with everything normal it takes {best}."), body])


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
        parts.table(["Who", "Was blocked by", "How long", "Calls"], rows, numeric=(2, 3), says="Waits")
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
                html.Div(
                    [parts.panel("What if", what_if(answer)), parts.panel("Critical path", path(answer))],
                    className="narrow",
                ),
            ],
            className="columns",
        ),
    ]
