"""Runs side by side: jobs, or attempts of one job (``job@1``). What differs in settings, numbers and curves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, theme, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.figures import curves, heat
from lanterne.dashboard.view import View, job_url, link

RUNS_MAX = 8
POINTS = 500
STEPS = 100
OFFERED = 24
CURVES = ("training.loss", "training.grad_norm", "step_ms", "training.throughput", "training.lr", "training.loss_scale")


@dataclass(frozen=True, slots=True)
class Run:
    """A job, or one attempt of it."""

    job: str
    attempt: int | None = None

    @property
    def text(self) -> str:
        """As it stands in the URL."""
        return self.job if self.attempt is None else f"{self.job}@{self.attempt}"


def runs(text: str) -> list[Run]:
    """``a,b@1`` as runs, each once, at most ``RUNS_MAX``; what is no run is left out."""
    found: list[Run] = []
    for part in text.split(","):
        job, _, attempt = part.strip().partition("@")
        if job and (not attempt or attempt.isdecimal()):
            run = Run(job, int(attempt) if attempt else None)
            if run not in found:
                found.append(run)
    return found[:RUNS_MAX]


def address(found: Sequence[Run], view: View) -> str:
    """The page's address with these runs."""
    return link("/compare", replace(view, jobs=",".join(r.text for r in found)))


async def page(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    tools = [
        parts.control("axis", "step", [("step", "steps"), ("time", "time")], view.axis, "Horizontal axis"),
        parts.control("log", "0", [("0", "linear"), ("1", "log")], "1" if view.log else "0", "Vertical axis"),
        parts.field("smooth", view.smooth, "Smooth", kind="range", default="0", min=0, max=0.95, step=0.05),
    ]
    return [
        parts.crumbs(("Fleet", "/"), ("compare", "")),
        html.Div([html.H1("Compare"), html.Div(tools, className="tools")], className="title-row"),
        html.Div(await live(api, view), id="compare-live", className="stack"),
    ]


async def live(api: Api, view: View) -> list[parts.Node]:
    """Everything below the title."""
    chosen, jobs = runs(view.jobs), await api.items("jobs", most=500)
    told = await asyncio.gather(*(_told(api, run) for run in chosen))
    known = [(run, job) for run, job in zip(chosen, told, strict=True) if job is not None]
    missing = [run.text for run, job in zip(chosen, told, strict=True) if job is None]
    body: list[parts.Node] = [parts.panel("Runs", _picker([r for r, _ in known], jobs, view))]
    if missing:
        body.append(html.Div(f"Not here: {', '.join(missing)}.", className="alert tone-warn", role="status"))
    if len(known) < 2:
        return [*body, html.P("Choose two or more runs.", className="dim")]
    names = [r for r, _ in known]
    plots, phases = await asyncio.gather(_plots(api, names, view), _phases(api, names))
    return [*body, parts.panel("Numbers", _numbers(known)), plots, phases, parts.panel("Settings", _settings(known))]


async def _told(api: Api, run: Run) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = await api.get("jobs", run.job, attempt=run.attempt)
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    return found


def _key(number: int, text: str) -> parts.Node:
    colour = theme.LINES[number % len(theme.LINES)]
    return html.Span([html.I(className="dot", style={"background": colour}), text], className="key strong")


def _picker(chosen: Sequence[Run], jobs: Sequence[Mapping[str, Any]], view: View) -> parts.Node:
    here = [
        html.Span(
            [
                _key(n, run.text),
                dcc.Link(
                    [
                        html.Span("×", **parts.aria(hidden="true")),
                        html.Span(f"leave out {run.text}", className="unseen"),
                    ],
                    href=address([r for r in chosen if r != run], view),
                    className="close",
                ),
            ],
            className="chip tone-calm",
        )
        for n, run in enumerate(chosen)
    ]
    taken = {r.text for r in chosen}
    offered: list[parts.Node] = []
    for job in jobs:
        many = int(job.get("attempts") or 1)
        whole = [Run(str(job["id"]))] if many < 2 else [Run(str(job["id"]), n) for n in range(many)]
        offered += [
            dcc.Link(f"+ {r.text}", href=address([*chosen, r], view), className="chip tone-info")
            for r in whole
            if r.text not in taken
        ]
    full = len(chosen) >= RUNS_MAX
    more = [] if full else [html.Span("add", className="note"), *offered[:OFFERED]]
    return html.Div([*here, *more], className="chips")


NUMBERS = (
    ("state", "state", str),
    ("ranks", "world_size", words.number),
    ("last step", "step", words.number),
    ("step time", "step_ms", words.milliseconds),
    ("throughput", "throughput", words.number),
    ("loss", "loss", lambda v: words.number(v, 5)),
    ("goodput", "goodput", words.percent),
    ("ETTR", "ettr", words.percent),
    ("lost", "gpu_hours_lost", words.gpu_hours),
)


def _numbers(known: Sequence[tuple[Run, Mapping[str, Any]]]) -> parts.Node:
    head: list[parts.Node] = ["", *(_key(n, run.text) for n, (run, _) in enumerate(known))]
    rows: list[list[parts.Node]] = [
        [says, *(shown(job.get(field)) if job.get(field) is not None else words.NONE for _, job in known)]
        for says, field, shown in NUMBERS
    ]
    rows.append(["verdict", *(str(job.get("verdict") or "healthy so far") for _, job in known)])
    rows.append(["", *(dcc.Link("open", href=job_url(run.job)) for run, _ in known)])
    return parts.table(head, rows, says="Numbers of the runs")


def _settings(known: Sequence[tuple[Run, Mapping[str, Any]]]) -> parts.Node:
    rows = differences([(run.text, configuration(job)) for run, job in known])
    if not rows:
        return html.P("Their recorded settings, mesh and hosts are the same.", className="dim")
    return parts.table(["Setting", *(run.text for run, _ in known)], rows, says="Settings that differ")


def configuration(job: Mapping[str, Any]) -> dict[str, str]:
    """What a run was started with, flat: its attached settings, its mesh, world size and hosts."""
    found = {str(k): str(v) for k, v in (job.get("attached") or {}).items()}
    found |= {f"mesh {k}": str(v) for k, v in (job.get("mesh") or {}).items()}
    return found | {
        "world size": str(job.get("world_size")),
        "hosts": ", ".join(str(h) for h in (job.get("hosts") or ())[:16]),
    }


def differences(named: Sequence[tuple[str, Mapping[str, str]]]) -> list[list[parts.Node]]:
    """One row a setting that is not the same everywhere."""
    keys = sorted({k for _, found in named for k in found})
    rows: list[list[parts.Node]] = []
    for key in keys:
        values = [found.get(key) for _, found in named]
        if len(set(values)) > 1:
            rows.append([key, *(html.Code(words.NONE if v is None else v[:200]) for v in values)])
    return rows


async def _plots(api: Api, chosen: Sequence[Run], view: View) -> parts.Node:
    figures = await asyncio.gather(*(_figure(api, chosen, name, view) for name in CURVES))
    cells = [
        html.Div(
            [
                html.H3(curves.label(name)),
                parts.graph({"type": "compare", "name": name}, figure, f"{curves.label(name)} of the runs", 200),
            ],
            className="cell",
        )
        for name, figure in zip(CURVES, figures, strict=True)
        if figure["data"]
    ]
    keys = [_key(n, run.text) for n, run in enumerate(chosen)]
    return parts.panel("Curves", html.Div(cells, className="grid"), note="median over ranks", tools=keys)


async def _figure(api: Api, chosen: Sequence[Run], name: str, view: View) -> dict[str, Any]:
    def ask(run: Run) -> Any:
        return api.get(
            "jobs", run.job, "metrics", name=name, attempt=run.attempt, points=POINTS, aggregate="median",
            smooth=view.smooth or None, **view.window(),
        )  # fmt: skip

    try:
        answers = await asyncio.gather(*(ask(run) for run in chosen))
    except ApiError as error:
        return heat.nothing(error.detail or error.title)
    named = [(run.text, answer) for run, answer in zip(chosen, answers, strict=True)]
    return curves.overlay(name, named, axis=view.axis, log=view.log)


async def _phases(api: Api, chosen: Sequence[Run]) -> parts.Node:
    """Median time of each phase over the last steps of each run, and how it stands to the first run's."""
    found = await asyncio.gather(*(phase_medians(api, run) for run in chosen))
    names = [n for n in ("step", *theme.PHASES) if any(n in one for one in found)]
    rows: list[list[parts.Node]] = []
    for name in names:
        cells: list[parts.Node] = []
        for one in found:
            value, first = one.get(name), found[0].get(name)
            ratio = f" ({value / first:.2f}×)" if value and first and one is not found[0] else ""
            cells.append(words.milliseconds(value) + ratio)
        rows.append([words.plain(name), *cells])
    note = f"median of the last {STEPS} steps, beside the first run's"
    body = parts.table(["Phase", *(r.text for r in chosen)], rows, numeric=range(1, len(chosen) + 1), says="Phases")
    return parts.panel("Phases", body if rows else html.P("No steps.", className="dim"), note=note)


async def phase_medians(api: Api, run: Run, first: int | None = None, last: int | None = None) -> dict[str, float]:
    """Median ms of the step and of each phase over some steps; without bounds over the run's last ones."""
    if first is None:
        job = await api.get("jobs", run.job, attempt=run.attempt)
        first = max(0, int(job.get("step") or 0) + 1 - STEPS)
    rows = await api.items(
        "jobs", run.job, "steps", most=STEPS, limit=STEPS, attempt=run.attempt, from_step=first, to_step=last
    )
    return medians(rows)


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of rows of ``GET jobs/{id}/steps``; a step without a phase counts as 0 ms of it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in [("step", row.get("duration_ms")), *(row.get("phases") or {}).items()]:
            if value is not None:
                values.setdefault(str(name), []).append(float(value))
    filled = {name: [*found, *[0.0] * (len(rows) - len(found))] for name, found in values.items()}
    return {name: sorted(found)[len(found) // 2] for name, found in filled.items()}
