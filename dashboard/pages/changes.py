"""What changed: this run before and after the onset, and its settings against the last healthy run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.pages.compare import Run, address, configuration, differences, phase_medians
from lanterne.dashboard.view import View

AROUND = 50
NOTICED = 0.05
"""Changes of less than this share are left out of the table."""

Incident = Mapping[str, Any]


async def panel(api: Api, incident: Incident) -> parts.Node:
    """Both comparisons; what cannot be known is said."""
    try:
        steps, run = await asyncio.gather(_steps(api, incident), _run(api, incident))
    except ApiError as error:
        return parts.panel("What changed", html.P(error.detail or error.title, className="dim"))
    return parts.panel("What changed", [html.H3("At the onset"), steps, html.H3("Since the last healthy run"), run])


async def _steps(api: Api, incident: Incident) -> parts.Node:
    cause = (incident.get("causes") or [{}])[0]
    since = cause.get("since_step")
    since = incident.get("opened_step") if since is None else since
    if not isinstance(since, int) or since < 1:
        return html.P("It was so from the first step.", className="dim")
    run = Run(str(incident.get("job")), incident.get("attempt"))
    before, after = await asyncio.gather(
        phase_medians(api, run, max(0, since - AROUND), since - 1), phase_medians(api, run, since, since + AROUND - 1)
    )
    rows = change_rows(before, after)
    if not rows:
        return html.P("No phase of the job's median rank changed by more than 5 %.", className="dim")
    head = ["Phase", "Before", "After", "Change"]
    return parts.table(head, rows, numeric=(1, 2, 3), says=f"Median over {AROUND} steps before and after the onset")


def change_rows(before: Mapping[str, float], after: Mapping[str, float]) -> list[list[parts.Node]]:
    """Phases that changed, the greatest change in ms first; "step" counts the slowest rank, phases the median rank."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, 0.0), after.get(name, 0.0)
        if abs(new - old) > NOTICED * max(old, new):
            ratio = f"{(new - old) / old:+.0%}" if old else "new"
            shown = [words.plain(name), words.milliseconds(old), words.milliseconds(new), ratio]
            found.append((-abs(new - old), shown))
    return [shown for _, shown in sorted(found, key=lambda one: one[0])]


async def _run(api: Api, incident: Incident) -> parts.Node:
    here = Run(str(incident.get("job")), incident.get("attempt"))
    healthy = await last_healthy(api, incident)
    if healthy is None:
        return html.P("There is no healthy run of this size to compare with.", className="dim")
    now, then = await asyncio.gather(
        api.get("jobs", here.job, attempt=here.attempt), api.get("jobs", healthy.job, attempt=healthy.attempt)
    )
    rows = differences([("then", configuration(then)), ("now", configuration(now))])
    compare = html.P(dcc.Link(f"Compare with {healthy.text}", href=address([healthy, here], View())))
    if not rows:
        return html.Div([html.P(f"No recorded setting differs from {healthy.text}."), compare])
    head = ["Setting", f"Then ({healthy.text})", "Now"]
    return html.Div([parts.table(head, rows[:40], says="Settings that differ"), compare])


async def last_healthy(api: Api, incident: Incident) -> Run | None:
    """The newest earlier attempt of this job without an incident, else the newest such other job of this size."""
    job, attempt = str(incident.get("job")), int(incident.get("attempt") or 0)
    jobs = await api.items("jobs", most=500)
    own, found = await asyncio.gather(api.get("jobs", job), api.items("jobs", job, "incidents", most=500))
    bad = {int(i.get("attempt") or 0) for i in found}
    for earlier in range(attempt - 1, -1, -1):
        if earlier not in bad:
            return Run(job, earlier)
    for other in jobs:
        if other.get("id") != job and not other.get("verdict") and other.get("world_size") == own.get("world_size"):
            return Run(str(other["id"]))
    return None
