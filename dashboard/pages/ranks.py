"""The ranks of a job: a few on the job's own page, all of them, filtered and in pages, on theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.pages.job import tabs
from lanterne.dashboard.view import View, job_url, link

FIRST = 12
PAGE_ROWS = 128
RANKS_MAX = 8_192
WELL = {"running", "finished"}
HEAD = ("Rank", "State", "Host", "Device", "Step", "Phase", "Seen", "Clock", "Exit", "Lost events")

Rank = Mapping[str, Any]


def in_order(ranks: Sequence[Rank]) -> list[Rank]:
    """Those in trouble first, then by number."""
    return sorted(ranks, key=lambda one: (one.get("state") in WELL, int(one.get("rank", 0))))


def counts(ranks: Sequence[Rank]) -> str:
    """How many ranks are in which state: ``1,024 ranks: 1,020 running, 4 silent``."""
    found: dict[str, int] = {}
    for one in ranks:
        state = str(one.get("state") or "unknown")
        found[state] = found.get(state, 0) + 1
    listed = ", ".join(f"{n:,} {state}" for state, n in sorted(found.items(), key=lambda kv: -kv[1]))
    return f"{words.counted(len(ranks), 'rank')}: {listed}"


def table(name: str, ranks: Sequence[Rank], now: datetime) -> parts.Node:
    """Ranks as rows."""
    rows = []
    for one in ranks:
        error = (one.get("clock") or {}).get("error_ns")
        rows.append(
            [
                dcc.Link(f"rank {one.get('rank')}", href=job_url(name, "ranks", one.get("rank"))),
                parts.state_chip(str(one.get("state") or "")),
                str(one.get("host") or words.NONE),
                str(one.get("device") or words.NONE),
                words.number(one.get("step")),
                words.plain(str(one.get("phase") or words.NONE)),
                words.age(one.get("last_seen"), now),
                words.NONE if error is None else f"±{words.milliseconds(error / 1e6)}",
                words.number(one.get("exit_code")),
                words.number(one.get("dropped")),
            ]
        )
    return parts.table(HEAD, rows, numeric=(4, 7, 8, 9), says="Ranks")


async def first(api: Api, name: str, now: datetime) -> parts.Node:
    """The first few, those in trouble first. Every row costs the browser on every change of the page."""
    ranks = await api.items("jobs", name, "ranks", most=RANKS_MAX, limit=1_000)
    if not ranks:
        return html.P("No rank has reported yet.", className="dim")
    shown = in_order(ranks)[:FIRST]
    more = "" if len(shown) == len(ranks) else f". The first {len(shown)}, those in trouble first."
    return html.Div([html.P(counts(ranks) + more, className="note"), table(name, shown, now)])


async def page(api: Api, name: str, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    find = parts.field("find", view.find, "Find", kind="search", placeholder="rank, host or state")
    return [
        parts.crumbs(("Fleet", "/"), (name, job_url(name)), ("ranks", "")),
        tabs(name, "Ranks"),
        html.Div([html.H1("Ranks"), html.Div(find, className="tools")], className="title-row"),
        html.Div(await live(api, name, view, now), id="all-ranks"),
    ]


async def live(api: Api, name: str, view: View, now: datetime) -> list[parts.Node]:
    """One page of the ranks that the filter leaves; ``from_rank`` counts the rows before it."""
    ranks = await api.items("jobs", name, "ranks", most=RANKS_MAX, limit=1_000)
    text = view.find.lower().strip()
    kept = [r for r in in_order(ranks) if not text or _matches(r, text)]
    first_row = min(view.from_rank or 0, max(0, len(kept) - 1)) // PAGE_ROWS * PAGE_ROWS
    shown = kept[first_row : first_row + PAGE_ROWS]
    if not shown:
        return [html.P("No rank matches." if ranks else "No rank has reported yet.", className="dim")]
    here = job_url(name, "ranks")
    pager: list[parts.Node] = [
        dcc.Link(text, href=link(here, replace(view, from_rank=at or None)), className="button")
        for text, at in (("← before", first_row - PAGE_ROWS), ("after →", first_row + PAGE_ROWS))
        if 0 <= at < len(kept)
    ]
    note = counts(kept)
    if len(shown) < len(kept):
        note += f"; {first_row + 1:,} to {first_row + len(shown):,} shown"
    return [parts.panel("Ranks, those in trouble first", table(name, shown, now), note=note, tools=pager)]


def _matches(one: Rank, text: str) -> bool:
    if text.removeprefix("rank ").isdecimal():
        return int(text.removeprefix("rank ")) == one.get("rank")
    return text in f"{one.get('host')} {one.get('state')} {one.get('device')} {one.get('phase')}".lower()
