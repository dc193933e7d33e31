"""All incidents, grouped by cause and subject: one problem is one row, however often it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api
from lanterne.dashboard.pages.job import OPEN
from lanterne.dashboard.view import View, incident_url, job_url

Incident = Mapping[str, Any]


def group(incidents: Sequence[Incident]) -> list[list[Incident]]:
    """Incidents of one job, kind, cause and subject together, newest first; groups with an open one first."""
    found: dict[tuple[str, ...], list[Incident]] = {}
    for one in sorted(incidents, key=lambda i: str(i.get("opened_at")), reverse=True):
        cause = (one.get("causes") or [{}])[0]
        key = (
            str(one.get("job")),
            str(one.get("kind")),
            str(cause.get("category")),
            words.subject(cause.get("subject")),
        )
        found.setdefault(key, []).append(one)

    def order(members: list[Incident]) -> tuple[bool, str]:
        return any(i.get("status") in OPEN for i in members), str(members[0].get("opened_at"))

    return sorted(found.values(), key=order, reverse=True)


async def live(api: Api, view: View) -> list[parts.Node]:
    """The table; asked again at every tick."""
    found = await api.items("incidents", most=2_000)
    text = view.find.lower()
    kept = [
        i
        for i in found
        if (not view.state or (i.get("status") in OPEN) == (view.state == "open"))
        and (not text or text in f"{words.headline(i)} {i.get('job')}".lower())
    ]
    if not kept:
        return [html.P("No incident." if not found else "No incident matches.", className="dim")]
    rows = []
    for members in group(kept)[:300]:
        newest = members[0]
        hours = sum(float(((i.get("causes") or [{}])[0].get("cost") or {}).get("gpu_hours") or 0.0) for i in members)
        job = str(newest.get("job") or "")
        rows.append(
            [
                parts.severity_chip(str(newest.get("severity"))),
                dcc.Link(words.headline(newest), href=incident_url(str(newest["id"])), className="strong"),
                dcc.Link(job, href=job_url(job)),
                parts.status_chip(str(newest.get("status"))),
                words.number(len(members)),
                words.day_and_clock(members[-1].get("opened_at")),
                words.day_and_clock(newest.get("opened_at")),
                words.gpu_hours(hours) if hours else words.NONE,
            ]
        )
    head = ["", "Verdict", "Job", "Status", "Times", "First", "Last", "Lost"]
    return [
        parts.panel(
            "Incidents",
            parts.table(head, rows, numeric=(4, 7), says="Incidents"),
            note=f"{len(kept):,} in {len(rows)} groups",
        )
    ]


async def page(api: Api, view: View, now: datetime, base: str) -> list[parts.Node]:
    """The whole page."""
    states = [("", "all"), ("open", "open"), ("closed", "closed")]
    return [
        html.Div(
            [
                html.H1("Incidents"),
                html.Div(
                    [
                        parts.field("find", view.find, "Find", kind="search", placeholder="rank, cause or job"),
                        parts.control("state", "", states, view.state if view.state in dict(states) else "", "Which"),
                    ],
                    className="tools",
                ),
            ],
            className="title-row",
        ),
        html.Div(await live(api, view), id="incidents-live"),
    ]
