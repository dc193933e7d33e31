"""One rank: its state, its phases, its memory and hardware, its events and stacks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.figures import curves, heat
from lanterne.dashboard.pages.job import POINTS, tabs
from lanterne.dashboard.view import View, job_url

PHASES = ("data_wait_ms", "forward_ms", "backward_ms", "optimizer_ms", "wait_ms", "lateness_ms")
HEALTH = (
    "process.memory.usage", "hw.gpu.memory.usage", "hw.gpu.utilization", "hw.gpu.clock", "hw.temperature", "hw.power",
    "system.cpu.utilization",
)  # fmt: skip
STACK_EVENTS = frozenset({"stacks", "stall", "exception"})


async def one_curve(api: Api, name: str, rank: int, metric: str, view: View) -> dict[str, Any]:
    """One metric of one rank over a shadow of the job's median."""
    try:
        own, job = await asyncio.gather(
            api.get("jobs", name, "metrics", name=metric, rank=rank, points=POINTS, **view.window()),
            api.get("jobs", name, "metrics", name=metric, aggregate="median", points=POINTS, **view.window()),
        )
    except ApiError as error:
        return heat.nothing(error.detail or error.title)
    return curves.curve(own, raw=job, log=view.log)


def trend(answer: Mapping[str, Any]) -> tuple[float, float] | None:
    """(growth a step, last value) of a steadily growing series: least squares over the last half of the points.

    (0, last) where nothing grows steadily: no slope upwards, or the line explains less than 80 % of the variance.
    None where fewer than ten points are there.
    """
    series = (answer.get("series") or [{}])[0]
    pairs = [(s, v) for s, v in zip(series.get("step") or (), series.get("value") or (), strict=False) if v is not None]
    pairs = pairs[len(pairs) // 2 :]
    if len(pairs) < 10:
        return None
    n = len(pairs)
    mean_x, mean_y = sum(s for s, _ in pairs) / n, sum(v for _, v in pairs) / n
    spread = sum((s - mean_x) ** 2 for s, _ in pairs)
    slope = sum((s - mean_x) * (v - mean_y) for s, v in pairs) / spread if spread else 0.0
    rest = sum((v - mean_y - slope * (s - mean_x)) ** 2 for s, v in pairs)
    total = sum((v - mean_y) ** 2 for _, v in pairs)
    steady = total > 0 and 1 - rest / total >= 0.8 and slope > 0
    return (slope if steady else 0.0), pairs[-1][1]


def steps_until(answer: Mapping[str, Any], limit: float) -> int | None:
    """Steps until a steady growth meets ``limit``; None where it never does."""
    found = trend(answer)
    return None if found is None or found[0] <= 0 or found[1] >= limit else int((limit - found[1]) / found[0])


def memory_forecast(answer: Mapping[str, Any], limit: float | None) -> str:
    """Where a steady growth of memory meets its limit, in words."""
    found = trend(answer)
    if found is None:
        return ""
    if not found[0]:
        return "no steady growth"
    text = f"grows by {words.size(found[0])} a step"
    steps = None if limit is None else steps_until(answer, limit)
    return (
        text if steps is None else f"{text}; at this pace it meets {words.size(limit)} in {words.number(steps)} steps"
    )


def events_list(events: Sequence[Mapping[str, Any]]) -> parts.Node:
    """Events, newest first; stacks fold open."""
    if not events:
        return html.P("No events.", className="dim")
    rows = []
    for one in events:
        head = [
            html.Time(words.clock(one.get("time")), dateTime=str(one.get("time"))),
            html.Strong(f" {words.plain(str(one.get('name')))} "),
            html.Span(
                f"rank {one.get('rank')}" + (f", step {one['step']:,}" if (one.get("step") or -1) >= 0 else ""),
                className="dim",
            ),
        ]
        given = {k: v for k, v in (one.get("attributes") or {}).items() if v not in ("", None)}
        body = str(one.get("body") or "")
        inside: list[parts.Node] = [parts.facts(dict(list(given.items())[:30]))] if given else []
        if body:
            inside.append(html.Pre(html.Code(body[:20_000])))
        rows.append(
            html.Li(
                html.Details([html.Summary(head), *inside], open=str(one.get("name")) in STACK_EVENTS)
                if inside
                else head
            )
        )
    return html.Ul(rows, className="plain")


async def _named(api: Api, name: str, rank: int) -> Mapping[str, Any]:
    found = await api.items("jobs", name, "ranks", most=131_072, limit=1_000)
    for one in found:
        if one.get("rank") == rank:
            return one
    raise ApiError(404, "no such rank", f"job {name} has no rank {rank}")


def _facts(one: Mapping[str, Any], now: datetime) -> parts.Node:
    clock = one.get("clock") or {}
    offset = words.NONE
    if clock:
        offset = f"{words.milliseconds(clock['offset_ns'] / 1e6)} ± {words.milliseconds(clock['error_ns'] / 1e6)}"
    mesh = ", ".join(f"{k} {v}" for k, v in (one.get("mesh") or {}).items())
    return parts.facts(
        {
            "host": str(one.get("host") or words.NONE),
            "device": str(one.get("device") or words.NONE),
            "process": words.number(one.get("pid")),
            "mesh": mesh or words.NONE,
            "phase": words.plain(str(one.get("phase") or words.NONE)),
            "seen": words.age(one.get("last_seen"), now),
            "clock offset": offset,
            "exit code": words.number(one.get("exit_code")),
            "lost events": words.number(one.get("dropped")),
        }
    )


async def page(api: Api, name: str, rank: int, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    one, index, events = await asyncio.gather(
        _named(api, name, rank),
        api.get("jobs", name, "metrics"),
        api.items("jobs", name, "events", rank=rank, most=60, limit=60),
    )
    logged = {str(n.get("name")) for n in index.get("names") or ()}
    wanted = [n for n in (*PHASES, *HEALTH) if n in logged]
    figures = await asyncio.gather(*(one_curve(api, name, rank, n, view) for n in wanted))
    memory = await _forecast(api, name, rank, logged)
    cells = [
        html.Div(
            [
                html.H3(_title(n)),
                parts.graph({"type": "rank-curve", "name": n}, f, f"{_title(n)} of rank {rank}", curves.HEIGHT),
            ],
            className="cell",
        )
        for n, f in zip(wanted, figures, strict=True)
    ]
    return [
        parts.crumbs(("Fleet", "/"), (name, job_url(name)), (f"rank {rank}", "")),
        tabs(name, ""),
        html.Div(
            [
                html.H1(f"Rank {rank}"),
                parts.state_chip(str(one.get("state") or "")),
                html.Span(f"step {words.number(one.get('step'))}", className="dim"),
            ],
            className="title-row",
        ),
        html.Div(
            [
                html.Div(
                    [parts.panel("Over steps", html.Div(cells, className="grid"), note="grey: the job's median")],
                    className="wide",
                ),
                html.Div(
                    [
                        parts.panel("Identity", _facts(one, now)),
                        parts.panel("Memory", html.P(memory)),
                        parts.panel("Events", events_list(events)),
                        html.P(dcc.Link("All events of this job", href=job_url(name, "events"))),
                    ],
                    className="narrow",
                ),
            ],
            className="columns",
        ),
    ]


def _title(name: str) -> str:
    return heat.TITLES.get(name) or (
        words.plain(name.removesuffix("_ms")) if name.endswith("_ms") else curves.label(name)
    )


SHARE = "system.cgroup.memory_share"


async def _share(api: Api, name: str, rank: int) -> str:
    """How far the host's or container's memory is from its limit, and when it meets it at the present pace."""
    answer = await api.get("jobs", name, "metrics", name=SHARE, rank=rank, points=400)
    series = (answer.get("series") or [{}])[0]
    known = [v for v in series.get("value") or () if v is not None]
    if not known:
        return ""
    text = f"the container's limit: {words.percent(known[-1])} used"
    steps = steps_until(answer, 1.0)
    return text if steps is None else f"{text}, full in {words.number(steps)} steps at this pace"


async def _forecast(api: Api, name: str, rank: int, logged: set[str]) -> str:
    said = [await _share(api, name, rank)] if SHARE in logged else []
    for metric in ("hw.gpu.memory.usage", "process.memory.usage"):
        if metric in logged:
            answer = await api.get("jobs", name, "metrics", name=metric, rank=rank, points=400)
            text = memory_forecast(answer, None)
            said.append(f"{curves.label(metric)}: {text}" if text else "")
    return ". ".join(s for s in said if s) or "No memory was measured on this rank."
