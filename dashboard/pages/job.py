"""One job: the verdict on top, then the proof."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.figures import bars, curves, heat
from lanterne.dashboard.view import View, incident_url, job_url, link

FIRST = (
    "training.loss",
    "training.grad_norm",
    "step_ms",
    "training.throughput",
    "training.loss_spikeness",
    "training.lr",
)
"""Curves that every job page shows."""
MORE = ("training.lr_drift", "training.loss_scale", "hw.gpu.memory.usage", "process.memory.usage")
"""Curves shown where the job logs them."""
POINTS = 1_000
WIDTH, HEIGHT = 500, 256
PHASE_STEPS = 100
OPEN = {"open", "diagnosed", "acting", "verifying"}
THIN_ROWS = 128
"""More rows than this are less than four pixels high each."""
RANKS_SHOWN = 32
"""Curves of single ranks on one plot: those that stray furthest from the median."""

TABS = (
    ("Overview", ()),
    ("Ranks", ("ranks",)),
    ("Communication", ("communication",)),
    ("SLA", ("sla",)),
    ("Events", ("events",)),
)


def tabs(job: str, at: str) -> parts.Node:
    """The pages of one job."""
    links = [
        dcc.Link(text, href=job_url(job, *rest), className="sub here" if text == at else "sub") for text, rest in TABS
    ]
    return html.Nav(links, className="subs", **parts.aria(label="pages of this job"))


def strip(incidents: Sequence[Mapping[str, Any]], job: Mapping[str, Any]) -> parts.Node:
    """The verdict in one glance: which rank, since when, why, what it costs, what to do."""
    open_ones = [i for i in incidents if i.get("status") in OPEN]
    if not open_ones:
        past = len(incidents)
        ground = f"{words.number(job.get('ranks_seen'))} of {words.number(job.get('world_size'))} ranks report"
        history = f", {past} past incident{'s' if past > 1 else ''}" if past else ""
        state = str(job.get("state") or "")
        good = state in {"running", "finished"} and job.get("ranks_seen") == job.get("world_size")
        title: parts.Node = "Nothing is wrong" if good else str(job.get("verdict") or "No open incident")
        if state == "silent":
            title = ["Nothing was heard of it for ", parts.ago(job.get("last_seen"), since=True)]
            ground = "It ended without a word, or its way to this server is cut"
        return html.Section(
            [html.H2(title), html.P(f"{ground}{history}.")],
            className=f"verdict edge-{'good' if good else 'warn'}",
            **parts.aria(label="verdict"),
        )
    worst = sorted(open_ones, key=lambda i: str(i.get("severity")))[0]
    cause = (worst.get("causes") or [{}])[0]
    cost = cause.get("cost") or {}
    lines: list[parts.Node] = [html.H2(dcc.Link(words.headline(worst), href=incident_url(str(worst["id"]))))]
    evidence = cause.get("evidence") or []
    if evidence:
        lines.append(html.P(str(evidence[0].get("says", ""))))
    facts = []
    if cause.get("confidence"):
        facts.append(f"confidence {words.percent(cause['confidence'], 0)}")
    if cost.get("slowdown"):
        facts.append(f"{words.number(cost['slowdown'])}× slower")
    if cost.get("gpu_hours"):
        facts.append(f"{words.gpu_hours(cost['gpu_hours'])} lost")
    if (cause.get("remedy") or {}).get("says"):
        facts.append(f"remedy: {cause['remedy']['says']}")
    if len(open_ones) > 1:
        facts.append(f"{len(open_ones) - 1} more open")
    return html.Section(
        [
            html.Div(
                [parts.severity_chip(str(worst.get("severity"))), parts.status_chip(str(worst.get("status")))],
                className="chips",
            ),
            *lines,
            html.P(" · ".join(facts), className="dim"),
        ],
        className=f"verdict edge-{parts.SEVERITIES.get(str(worst.get('severity')), 'warn')}",
        **parts.aria(label="verdict"),
    )


def head_tiles(job: Mapping[str, Any], now: datetime) -> parts.Node:
    """The job in six numbers."""
    good = job.get("goodput")
    return parts.tiles(
        [
            parts.tile("Step", words.number(job.get("step")), ["seen ", parts.ago(job.get("last_seen"))]),
            parts.tile("Step time", words.milliseconds(job.get("step_ms")), "median of the last steps"),
            parts.tile("Throughput", words.number(job.get("throughput")), "samples a second"),
            parts.tile("Loss", words.number(job.get("loss"), 4), "last"),
            parts.tile("Goodput", words.percent(good), f"ETTR {words.percent(job.get('ettr'))}"),
            parts.tile(
                "Lost",
                words.gpu_hours(job.get("gpu_hours_lost") or 0.0),
                words.counted(int(job.get("open_incidents") or 0), "open incident"),
                "warn" if job.get("gpu_hours_lost") else "",
            ),
        ]
    )


def incident_rows(incidents: Sequence[Mapping[str, Any]]) -> parts.Node:
    """The incidents of a job as a table."""
    rows = []
    for one in incidents:
        cause = (one.get("causes") or [{}])[0]
        hours = (cause.get("cost") or {}).get("gpu_hours")
        rows.append(
            [
                parts.severity_chip(str(one.get("severity"))),
                dcc.Link(words.headline(one), href=incident_url(str(one["id"])), className="strong"),
                parts.status_chip(str(one.get("status"))),
                words.number(one.get("opened_step")),
                words.day_and_clock(one.get("opened_at")),
                words.percent(cause.get("confidence"), 0),
                words.gpu_hours(hours),
            ]
        )
    head = ["", "Verdict", "Status", "Opened at step", "Opened", "Confidence", "Lost"]
    return parts.table(head, rows, numeric=(3, 5, 6), says="Incidents")


async def live(api: Api, name: str, now: datetime) -> tuple[list[parts.Node], str, list[Mapping[str, Any]]]:
    """Verdict and numbers, a fingerprint of what the plots stand on, and the incidents."""
    job, incidents = await asyncio.gather(api.get("jobs", name), api.items("jobs", name, "incidents", most=100))
    mark = f"{job.get('attempt')}/{job.get('step')}/{job.get('state')}/{len(incidents)}"
    head = html.Div(
        [
            html.H1(name),
            parts.state_chip(str(job.get("state") or "")),
            html.Span(_where(job), className="dim"),
            html.Div(dcc.Link(*_beside(name, job), className="button"), className="tools"),
        ],
        className="title-row",
    )
    found = [head, strip(incidents, job), head_tiles(job, now)]
    if incidents:
        found.append(parts.panel("Incidents", incident_rows(incidents), note=str(len(incidents)), key="incidents"))
    return found, mark, incidents


def _beside(name: str, job: Mapping[str, Any]) -> tuple[str, str]:
    """Text and address of the comparison that lies at hand: this job's attempts, else this job with others."""
    attempts = int(job.get("attempts") or 1)
    if attempts > 1:
        first = max(0, attempts - 4)
        runs = ",".join(f"{name}@{n}" for n in range(first, attempts))
        return "Attempts side by side", link("/compare", View(jobs=runs))
    return "Compare", link("/compare", View(jobs=name))


def _where(job: Mapping[str, Any]) -> str:
    found = [f"{words.number(job.get('world_size'))} ranks"]
    if job.get("host_count"):
        found.append(f"{words.number(job['host_count'])} host{'s' if job['host_count'] != 1 else ''}")
    mesh = {k: v for k, v in (job.get("mesh") or {}).items() if isinstance(v, int) and v > 1}
    if mesh:
        found.append(" × ".join(f"{k} {v}" for k, v in mesh.items()))
    if (job.get("attempts") or 1) > 1 or job.get("attempt"):
        found.append(f"attempt {job.get('attempt')}")
    return " · ".join(found)


def _heat_panel(view: View) -> parts.Node:
    options = [(k, heat.TITLES[k]) for k in heat.TITLES]
    return parts.panel(
        "Where the time goes",
        [
            parts.graph("heat", None, "Heat map of ranks by steps; the same data stands in the ranks table", 220),
            html.Div(
                "Drag a box to see it sharper. Click a cell for its rank and step. Grey = no data.",
                id="picked",
                className="note",
                **parts.aria(live="polite"),
            ),
        ],
        tools=[
            parts.control("heat", "lateness_ms", options, view.heat, "What the heat map shows"),
            parts.button("CSV", {"type": "csv", "of": "heat"}, title="download the cells shown"),
        ],
        key="heat-panel",
    )


def _time_panel() -> parts.Node:
    return parts.panel(
        "What the time was used for",
        [
            parts.graph("time", None, "Goodput and lost time by cause; the same numbers stand on the SLA page", 120),
            parts.graph("phases", None, "Median time of each phase over steps", 230),
        ],
        note="above the whole job, below the phases of each step, median over ranks",
        key="time-panel",
    )


def _curves_panel(view: View, names: Sequence[str]) -> parts.Node:
    plots = [
        html.Div(
            [
                html.Header(
                    [
                        html.H3(curves.label(n)),
                        parts.button("CSV", {"type": "csv", "of": n}, title=f"download {curves.label(n)}"),
                    ]
                ),
                parts.graph({"type": "curve", "name": n}, None, f"{curves.label(n)} over steps", curves.HEIGHT),
                dcc.Store(id={"type": "curve-view", "name": n}),
            ],
            className="cell",
        )
        for n in names
    ]
    tools = [
        parts.control(
            "series",
            "median",
            [("median", "median"), ("max", "max"), ("ranks", "each rank")],
            view.series,
            "Which ranks",
        ),
        parts.control("axis", "step", [("step", "steps"), ("time", "time")], view.axis, "Horizontal axis"),
        parts.control("log", "0", [("0", "linear"), ("1", "log")], "1" if view.log else "0", "Vertical axis"),
        parts.field("smooth", view.smooth, "Smooth", kind="range", default="0", min=0, max=0.95, step=0.05),
        parts.button("Reset zoom", "reset-zoom", title="show all steps (double click a plot)"),
    ]
    return parts.panel("Training", html.Div(plots, className="grid"), tools=tools, key="training")


async def page(api: Api, name: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page; plots come by their own callbacks, so the verdict never waits for them."""
    (top, mark, incidents), index = await asyncio.gather(live(api, name, now), api.get("jobs", name, "metrics"))
    logged = {str(n.get("name")) for n in index.get("names") or ()}
    extra = [n for n in MORE if n in logged]
    own = [n for n in sorted(logged - set(FIRST) - set(MORE)) if n == view.metric]
    others = sorted(logged - set(FIRST) - set(extra))
    shown = [n for n in FIRST if n in logged or n == "step_ms"] + extra + own
    return [
        parts.crumbs(("Fleet", "/"), (name, "")),
        tabs(name, "Overview"),
        html.Div(top, id="job-live"),
        dcc.Store(id="job-told"),
        dcc.Store(id="heat-view"),
        dcc.Store(id="span-view"),
        dcc.Store(id="job-mark", data=mark),
        dcc.Store(id="job-events", data=marks(incidents)),
        _heat_panel(view),
        _time_panel(),
        _curves_panel(view, shown),
        _others(name, others),
        parts.panel(
            "Ranks",
            html.Div("…", id="ranks-live"),
            tools=dcc.Link("All ranks", href=job_url(name, "ranks"), className="button"),
            key="ranks",
        ),
    ]


def _others(name: str, names: Sequence[str]) -> parts.Node:
    if not names:
        return html.Div()
    links = [
        dcc.Link(curves.label(n), href=f"{job_url(name)}?metric={n}", className="chip tone-calm") for n in names[:200]
    ]
    more = f" and {len(names) - 200:,} more, through the API" if len(names) > 200 else ""
    return html.Details(
        [
            html.Summary(f"{len(names):,} more metrics"),
            html.Div([*links, html.Span(more, className="dim")], className="chips"),
        ],
        className="panel",
    )


# --- plots ---------------------------------------------------------------------------------------


def marks(incidents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where incidents began, for the plots."""
    return [
        {"step": i.get("opened_step"), "says": words.plain(_short(i))}
        for i in incidents[:50]
        if i.get("opened_step") is not None
    ]


def _short(incident: Mapping[str, Any]) -> str:
    cause = (incident.get("causes") or [{}])[0]
    rank = (cause.get("subject") or {}).get("rank")
    return f"{cause.get('category') or incident.get('kind')}" + (f" rank {rank}" if rank is not None else "")


async def heat_figure(api: Api, name: str, view: View, found: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The heat map of the view's window, with ``found`` of :func:`marks`."""
    figure = heat.heatmap(await heat_answer(api, name, view), found)
    window = (view.heat, view.from_step, view.to_step, view.from_rank, view.to_rank)
    figure["layout"]["uirevision"] = repr(window)  # a new window is a new picture; a live tick keeps the reader's
    return figure


async def phases_figure(api: Api, name: str, view: View, mark: str | None) -> dict[str, Any]:
    """The phases of up to ``PHASE_STEPS`` steps: the view's first, else the job's last."""
    step = (mark or "").split("/")[1:2]
    last = int(step[0]) if step and step[0].isdecimal() else 0
    first = max(0, last + 1 - PHASE_STEPS) if view.from_step is None else view.from_step
    found = await api.items(
        "jobs", name, "steps", most=PHASE_STEPS, limit=PHASE_STEPS, from_step=first, to_step=view.to_step
    )
    return bars.phases(found)


async def heat_answer(api: Api, name: str, view: View) -> Mapping[str, Any]:
    """The cells of the view's window."""
    answer: Mapping[str, Any] = await api.get(
        "jobs", name, "heatmap", metric=view.heat, width=WIDTH, height=HEIGHT,
        from_rank=view.from_rank, to_rank=view.to_rank, encoding="f4", **view.window(),
    )  # fmt: skip
    return answer


async def worst_in_cell(api: Api, name: str, view: View, rank: int, step: int) -> tuple[int, int, float] | None:
    """Rank, step and value of the worst within what a drawn cell stands for; None where there is nothing.

    Where rows are too thin to be hit, those beside the cell's count too.
    """
    drawn = await heat_answer(api, name, view)
    ranks, steps = list(drawn.get("ranks") or ()), list(drawn.get("steps") or ())
    if rank not in ranks or step not in steps:
        return None
    high = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    wide = steps[1] - steps[0] if len(steps) > 1 else 1
    beside = high if len(ranks) > THIN_ROWS else 0
    if high == wide == 1 and not beside:
        return None
    cell = replace(
        view, from_rank=max(0, rank - beside), to_rank=rank + high - 1 + beside, from_step=step,
        to_step=step + wide - 1,
    )  # fmt: skip
    found = await heat_answer(api, name, cell)
    values = heat.matrix(found)
    if not np.isfinite(values).any():
        return None
    y, x = divmod(int(np.nanargmax(values)), values.shape[1])
    return int(found["ranks"][y]), int(found["steps"][x]), float(values[y, x])


async def curve_answer(api: Api, name: str, metric: str, view: View, smooth: float) -> Mapping[str, Any]:
    """One curve's points in the view's window."""
    aggregate = "none" if view.series == "ranks" else "max" if metric == "step_ms" else view.series
    answer: Mapping[str, Any] = await api.get(
        "jobs", name, "metrics", name=metric, points=POINTS, reduce="minmax", aggregate=aggregate,
        smooth=smooth or None, most=RANKS_SHOWN, **view.window(),
    )  # fmt: skip
    return answer


async def curve_figure(
    api: Api, name: str, metric: str, view: View, marked: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """One curve with ``marked`` of :func:`marks`, smoothed as asked with the raw values as its shadow."""
    asked = [curve_answer(api, name, metric, view, view.smooth)]
    if view.smooth and view.series != "ranks":
        asked.append(curve_answer(api, name, metric, view, 0.0))
    found = await asyncio.gather(*asked)
    answer = dict(found[0])
    raw = found[1] if len(found) > 1 else None
    figure = curves.curve(answer, raw=raw, axis=view.axis, log=view.log, marks=marked)
    figure["layout"]["uirevision"] = repr((metric, view.axis, view.from_step, view.to_step))
    return figure
