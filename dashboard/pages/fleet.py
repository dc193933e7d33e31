"""The fleet: which jobs burn GPU-hours now. Worst first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.view import View, job_url, link

Job = Mapping[str, Any]
SHOWN_MAX = 300
TROUBLE = {"hung": 0, "failed": 1, "silent": 2}


def _trouble(job: Job) -> tuple[int, float, str]:
    rank = TROUBLE.get(str(job.get("state")), 3 if job.get("open_incidents") else 4)
    if rank == 4 and job.get("state") == "finished":
        rank = 5
    return rank, -float(job.get("gpu_hours_lost") or 0.0), str(job.get("id"))


def _value(name: str) -> Callable[[Job], tuple[bool, Any]]:
    def key(job: Job) -> tuple[bool, Any]:
        value = job.get(name)
        return value is None, str(value) if isinstance(value, str) else value or 0

    return key


SORTS: Mapping[str, str] = {
    "id": "Job",
    "state": "State",
    "world_size": "Ranks",
    "step": "Step",
    "step_ms": "Step time",
    "throughput": "Throughput",
    "loss": "Loss",
    "ettr": "ETTR",
    "gpu_hours_lost": "Lost",
}


def choose(jobs: Sequence[Job], view: View) -> list[Job]:
    """The jobs that the filters leave, sorted as asked; without a wish, the worst first."""
    text = view.find.lower()
    kept = [
        j
        for j in jobs
        if (not text or text in f"{j.get('id')} {j.get('verdict')}".lower())
        and (not view.state or j.get("state") == view.state)
    ]
    name = view.sort.lstrip("-")
    if name not in SORTS:
        return sorted(kept, key=_trouble)
    known = [j for j in kept if j.get(name) is not None]
    missing = [j for j in kept if j.get(name) is None]
    return sorted(known, key=_value(name), reverse=view.sort.startswith("-")) + missing


def _heading(name: str, text: str, view: View) -> parts.Node:
    down = view.sort == f"-{name}"
    up = view.sort == name
    sign = " ↓" if down else " ↑" if up else ""
    wish = name if down else f"-{name}"
    return dcc.Link(text + sign, href=link("/", replace(view, sort=wish)), title=f"sort by {text.lower()}")


def row(job: Job, now: datetime) -> list[parts.Node]:
    """One job's cells."""
    seen, size = job.get("ranks_seen"), job.get("world_size")
    ranks = words.number(size) if seen == size or not size else f"{words.number(seen)} of {words.number(size)}"
    name = str(job.get("id", ""))
    lost = job.get("gpu_hours_lost")
    return [
        html.Span(
            [
                dcc.Link(name, href=job_url(name), className="strong"),
                html.Small(["seen ", parts.ago(job.get("last_seen"))]),
            ],
            className="stacked",
        ),
        parts.state_chip(str(job.get("state") or "")),
        ranks,
        words.number(job.get("step")),
        words.milliseconds(job.get("step_ms")),
        words.number(job.get("throughput")),
        words.number(job.get("loss"), 4),
        words.percent(job.get("ettr")),
        words.NONE if not lost else words.gpu_hours(lost),
        html.Span(_verdict(job), className="verdict-cell" if job.get("open_incidents") else "dim"),
    ]


def _verdict(job: Job) -> parts.Node:
    if job.get("verdict"):
        return str(job["verdict"])
    if job.get("state") == "silent":
        return ["nothing heard for ", parts.ago(job.get("last_seen"), since=True)]
    return "healthy so far"


def tiles(jobs: Sequence[Job]) -> parts.Node:
    """The fleet in four numbers."""
    running = [j for j in jobs if j.get("state") == "running"]
    trouble = [j for j in jobs if _trouble(j)[0] < 4]
    lost = sum(float(j.get("gpu_hours_lost") or 0.0) for j in jobs)
    shares = [float(j["ettr"]) for j in jobs if j.get("ettr") is not None]
    kinds = {s: sum(1 for j in trouble if j.get("state") == s) for s in TROUBLE}
    noted = [f"{n} {s}" for s, n in kinds.items() if n]
    suspicious = len(trouble) - sum(kinds.values())
    noted += [f"{suspicious} with open incidents"] if suspicious else []
    ranks = sum(int(j.get("world_size") or 0) for j in running)
    return parts.tiles(
        [
            parts.tile("Running", words.number(len(running)), f"{words.number(ranks)} ranks"),
            parts.tile(
                "Need a look",
                words.number(len(trouble)),
                ", ".join(noted) or "nothing open",
                "bad" if trouble else "good",
            ),
            parts.tile("Lost so far", words.gpu_hours(lost), "priced by all findings", "warn" if lost else ""),
            parts.tile(
                "Effective training time",
                words.percent(sum(shares) / len(shares)) if shares else words.NONE,
                f"mean of {len(shares)} jobs" if shares else "not known yet",
            ),
        ]
    )


async def live(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """Tiles and table; asked again at every tick."""
    jobs = await api.items("jobs")
    if not jobs:
        return [parts.empty("No job has reported yet", parts.attach_help(base))]
    shown = choose(jobs, view)
    head = [_heading(k, v, view) for k, v in SORTS.items()] + ["Verdict"]
    rows = [row(j, now) for j in shown[:SHOWN_MAX]]
    note = f"{len(shown)} of {len(jobs)}" + (f", the first {SHOWN_MAX} shown" if len(shown) > SHOWN_MAX else "")
    body = (
        parts.table(head, rows, numeric=range(2, 9), says="Jobs, worst first")
        if shown
        else html.P(["No job matches. ", dcc.Link("Clear the filters", href="/")], className="dim")
    )
    return [tiles(jobs), parts.panel("Jobs", body, note=note)]


async def page(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    states = [("", "all"), ("running", "running"), ("hung", "hung"), ("failed", "failed"), ("finished", "finished")]
    return [
        html.Div(
            [
                html.H1("Fleet"),
                html.Div(
                    [
                        dcc.Link("Compare", href="/compare", className="button"),
                        parts.field("find", view.find, "Find", kind="search", placeholder="job or verdict"),
                        parts.control("state", "", states, view.state if view.state in dict(states) else "", "State"),
                    ],
                    className="tools",
                ),
            ],
            className="title-row",
        ),
        html.Div(await live(api, view, now, base), id="fleet-live"),
        dcc.Store(id="fleet-told"),
    ]
