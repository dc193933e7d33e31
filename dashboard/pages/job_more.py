"""The other pages of one job: communication, service levels, events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dash import html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.figures import bars, matrix
from lanterne.dashboard.pages.job import tabs
from lanterne.dashboard.pages.rank import events_list
from lanterne.dashboard.view import View, job_url

LOW_SHARE = 0.7
"""Below this share of the best bandwidth seen a group is marked; the detector's default."""


def _head(name: str, at: str) -> list[parts.Node]:
    return [parts.crumbs(("Fleet", "/"), (name, job_url(name)), (at, "")), tabs(name, at), html.H1(at)]


def group_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[parts.Node]]:
    """Rows of the fits; a group far below its own best is marked in words, not by colour alone."""
    rows = []
    for one in groups:
        best, last = one.get("best_bus_gbps"), one.get("last_bus_gbps")
        share = last / best if best and last is not None else None
        state: parts.Node = words.NONE
        if share is not None:
            state = parts.chip(
                f"{words.percent(share, 0)} of best",
                "bad" if share < LOW_SHARE else "good",
                "▼" if share < LOW_SHARE else "✓",
            )
        alpha = one.get("alpha_us")
        rows.append(
            [
                html.Code(words.group(one.get("group")), title=str(one.get("group"))),
                str(one.get("op") or words.NONE),
                words.NONE if alpha is None else words.milliseconds(alpha / 1e3),
                _gbps(one.get("beta_gbps")),
                _gbps(best),
                _gbps(last),
                state,
                words.number(one.get("samples")),
            ]
        )
    return rows


def _gbps(value: Any) -> str:
    text = words.number(value)
    return text if text == words.NONE else f"{text} GB/s"


async def communication(api: Api, name: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """Alpha-beta fits and bandwidth by group, and the calls behind them."""
    fits, waited = await asyncio.gather(
        api.get("jobs", name, "communication"), api.get("jobs", name, "waits", **view.window())
    )
    first, last = waited.get("steps") or (0, -1)  # the same steps for both, the latest unless asked otherwise
    calls = await api.items(
        "jobs", name, "collectives", most=2_000, limit=1_000, from_step=max(first, 0), to_step=max(last, 0)
    )
    groups = fits.get("groups") or []
    head = ["Group", "Collective", "Latency (α)", "Bandwidth (β)", "Best bus", "Now", "State", "Calls"]
    table = (
        parts.table(head, group_rows(groups), numeric=(2, 3, 4, 5, 7), says="Groups")
        if groups
        else html.P("No collective was recorded.", className="dim")
    )
    late: dict[int, int] = {}
    for call in calls:
        if call.get("last_rank") is not None:
            late[call["last_rank"]] = late.get(call["last_rank"], 0) + 1
    rows = [
        [f"rank {r}", words.number(n), words.percent(n / len(calls))]
        for r, n in sorted(late.items(), key=lambda kv: -kv[1])[:16]
    ]
    steps = " to ".join(words.number(s) for s in waited.get("steps") or ())
    return [
        *_head(name, "Communication"),
        parts.panel("Groups", table, note="time = α + bytes / β, fitted per group and collective"),
        html.Div(
            [
                parts.panel(
                    "Who waits for whom",
                    parts.graph("waits", matrix.waits(waited), "Waits, rank by rank", matrix.HEIGHT),
                    note=f"row waits for column, steps {steps}" if waited.get("ranks") else "",
                ),
                parts.panel(
                    "Links",
                    parts.graph("links", matrix.links(groups), "Bus bandwidth between ranks", matrix.HEIGHT),
                    note="bus bandwidth now, of the smallest group that holds both; bright = slow",
                ),
            ],
            className="halves",
        ),
        html.Div([_worst(waited), _last(rows, len(calls))], className="halves"),
        parts.panel(
            "Transfer time by size",
            parts.graph("bandwidth", bars.bandwidth(calls, groups), "Transfer time over bytes by group"),
        ),
    ]


def _last(rows: list[list[parts.Node]], calls: int) -> parts.Node:
    table = parts.table(["Rank", "Calls", "Share"], rows, numeric=(1, 2), says="Last to enter")
    return parts.panel("Who enters last", table, note=f"of {calls:,} calls")


def _worst(waited: Mapping[str, Any]) -> parts.Node:
    rows = [
        [f"rank {p['rank']}", f"rank {p['for']}", words.milliseconds(p["ms"]), words.number(p["calls"])]
        for p in (waited.get("pairs") or ())[:16]
    ]
    head = ["Who", "Waits for", "Each step", "Calls"]
    body = (
        parts.table(head, rows, numeric=(2, 3), says="The longest waits")
        if rows
        else html.P("No waits here.", className="dim")
    )
    return parts.panel("The longest waits", body)


async def sla(api: Api, name: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """Objectives with burn rates, goodput and badput by cause."""
    found, safety = await asyncio.gather(api.get("jobs", name, "sla"), api.get("jobs", name, "breakers"))
    rows = [
        [
            words.plain(str(o.get("name"))),
            str(o.get("level") or words.NONE),
            words.percent(o.get("target"), 2),
            words.percent(o.get("value"), 2),
            words.percent(o.get("error_budget")),
            words.NONE if o.get("burn_rate") is None else f"{words.number(o['burn_rate'])}×",
            _met(o.get("met")),
        ]
        for o in found.get("objectives") or ()
    ]
    head = ["Objective", "Level", "Target", "Value", "Budget left", "Burn rate", "Met"]
    table = (
        parts.table(head, rows, numeric=(2, 3, 4, 5), says="Objectives")
        if rows
        else html.P("No objective is set.", className="dim")
    )
    badput = sorted(((found.get("goodput") or {}).get("badput") or {}).items(), key=lambda kv: -float(kv[1] or 0))
    lost = [[words.plain(str(k)), words.milliseconds(float(v) * 1e3)] for k, v in badput if v]
    return [
        *_head(name, "SLA"),
        parts.tiles(
            [
                parts.tile("Effective training time", words.percent(found.get("ettr")), "ETTR"),
                parts.tile("Between failures", words.seconds(found.get("mtbf_s")), "MTBF"),
                parts.tile("To recover", words.seconds(found.get("mttr_s")), "MTTR"),
            ]
        ),
        parts.panel(
            "Where the time went", parts.graph("goodput", bars.goodput(found), "Goodput and lost time by cause", 120)
        ),
        parts.panel("Objectives", table),
        parts.panel("Breakers", breakers(safety), note="one a process group: open = its collectives fail or drag"),
        parts.panel(
            "Lost time by cause",
            parts.table(["Cause", "Time"], lost, numeric=(1,), says="Lost time")
            if lost
            else html.P("Nothing lost.", className="dim"),
        ),
    ]


BREAKERS: Mapping[str, tuple[str, str]] = {
    "closed": ("good", "✓"), "half_open": ("warn", "◔"), "open": ("bad", "✕"),
}  # fmt: skip


def breakers(found: Mapping[str, Any]) -> parts.Node:
    """Circuit breakers of the process groups, those not closed first."""
    rows = [
        [
            html.Code(words.group(one.get("group")), title=str(one.get("group"))),
            parts.chip(words.plain(str(one.get("state"))), *BREAKERS.get(str(one.get("state")), ("calm", "·"))),
            words.number(one.get("since_step")),
            words.number(one.get("opened_times")),
            str(one.get("why") or ""),
        ]
        for one in (found.get("items") or ())[:100]
    ]
    if not rows:
        return html.P("No collective has been seen, so no breaker stands.", className="dim")
    return parts.table(["Group", "State", "Since step", "Opened", "Why"], rows, numeric=(2, 3), says="Breakers")


def _met(met: Any) -> parts.Node:
    if met is None:
        return parts.chip("not known", "calm", "·")
    return parts.chip("met", "good", "✓") if met else parts.chip("missed", "bad", "✕")


async def events(api: Api, name: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The job's events, newest first."""
    found = await api.items("jobs", name, "events", most=200, limit=200, name=view.find or None)
    find = parts.field("find", view.find, "Name", kind="search", placeholder="stall, checkpoint_saved, …")
    return [
        *_head(name, "Events"),
        parts.panel("Events", events_list(found), tools=find, note=f"the last {len(found)}"),
    ]
