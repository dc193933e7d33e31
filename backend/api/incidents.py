"""Incidents, their graphs, the report of a job, and the service levels."""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from lanterne import limits
from lanterne.backend import pipeline
from lanterne.backend.api.commands import show_command
from lanterne.backend.api.context import (
    Context,
    Ctx,
    Cursor,
    Limit,
    OfJob,
    Who,
    decode_cursor,
    encode_cursor,
    page,
)
from lanterne.backend.api.problems import Problem
from lanterne.backend.detect.base import levels_of
from lanterne.backend.store.access import Principal
from lanterne.backend.store.records import IncidentRecord, rfc3339
from lanterne.nouns import IncidentStatus, to_json

router = APIRouter(tags=["incidents"])
IncidentId = Annotated[str, Path(pattern=limits.ID_PATTERN)]
Status = Annotated[
    Literal["open", "diagnosed", "acting", "verifying", "resolved", "dismissed"] | None, Query(description="Only these")
]


class StatusChange(BaseModel):
    status: Literal["dismissed", "resolved"]
    note: str = Field(default="", max_length=4_000)


class Note(BaseModel):
    says: str = Field(min_length=1, max_length=4_000)


def show_incident(record: IncidentRecord) -> dict[str, Any]:
    """The report's form plus where it belongs."""
    found: dict[str, Any] = to_json(record.incident)
    return found | {
        "job": record.job,
        "attempt": record.attempt,
        "fingerprint": record.fingerprint,
        "verdict": record.verdict,
        "updated_at": rfc3339(record.updated_ns),
    }


def _list(
    context: Context, job: str | None, attempt: int | None, status: str | None, limit: int, cursor: str | None
) -> dict[str, Any]:
    before = decode_cursor(cursor, int, str)
    rows = context.control.incidents(
        job, attempt=attempt, status=status, before=(before[0], before[1]) if before else None, limit=limit + 1
    )
    return page(rows, limit, show_incident, lambda r: encode_cursor(r.opened_ns, r.incident.id))


@router.get("/incidents")
def all_incidents(
    context: Ctx, who: Who, status: Status = None, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None
) -> dict[str, Any]:
    """Incidents of all jobs, the newest first."""
    return _list(context, who.job or None, None, status, limit, cursor)


@router.get("/jobs/{job}/incidents")
def job_incidents(
    context: Ctx, at: OfJob, status: Status = None, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None
) -> dict[str, Any]:
    """Incidents of all attempts of a job, the newest first."""
    return _list(context, at.job.id, None, status, limit, cursor)


def known_incident(context: Context, who: Principal, incident: str) -> IncidentRecord:
    """The incident, if this caller may see it. Raises :class:`Problem` (404)."""
    record = context.control.incident(incident)
    if record is None or not who.sees(record.job):
        raise Problem(404, f"there is no incident {incident}")
    return record


@router.get("/incidents/{incident}")
def one_incident(context: Ctx, who: Who, incident: IncidentId) -> dict[str, Any]:
    """The incident with the decision, the commands and the notes about it."""
    record = known_incident(context, who, incident)
    decisions = [to_json(d) | {"at": rfc3339(d.at_ns)} for d in context.control.decisions(incident)]
    return show_incident(record) | {
        "decision": decisions[-1] if decisions else None,
        "decisions": decisions,
        "commands": [show_command(c) for c in context.control.commands(incident=incident, limit=100)],
        "notes": [
            {"author": n.author, "says": n.says, "at": rfc3339(n.at_ns)} for n in context.control.notes(incident)
        ],
    }


@router.get("/incidents/{incident}/graph")
def graph(context: Ctx, who: Who, incident: IncidentId) -> dict[str, Any]:
    """Nodes and edges behind the diagnosis; empty lists where none was kept."""
    known_incident(context, who, incident)
    return context.control.graph(incident) or {"nodes": [], "edges": []}


@router.post("/incidents/{incident}/status")
def set_status(context: Ctx, who: Who, incident: IncidentId, change: StatusChange) -> dict[str, Any]:
    """Dismiss or resolve; the note is kept with it."""
    known_incident(context, who, incident)
    record = context.control.set_incident_status(incident, IncidentStatus(change.status))
    if record is None:
        raise Problem(404, f"there is no incident {incident}")
    if change.note:
        context.control.add_note(incident, who.actor, change.note)
    context.hub.publish("incident", record.job, {"id": incident, "status": change.status})
    return show_incident(record)


@router.post("/incidents/{incident}/notes", status_code=201)
def add_note(context: Ctx, who: Who, incident: IncidentId, note: Note) -> dict[str, Any]:
    """Keep a note with the incident."""
    known_incident(context, who, incident)
    context.control.add_note(incident, who.actor, note.says)
    return {"author": who.actor, "says": note.says}


@router.get("/jobs/{job}/report")
def report(context: Ctx, at: OfJob, request: Request) -> Response:
    """The report (schema lanterne.report/1). Answers 304 to a matching ``If-None-Match``."""
    levels = levels_of(context.settings.levels)
    found = to_json(
        pipeline.report(context.store, context.control, at.job.id, at.attempt, clock=context.clock, levels=levels)
    )
    answer = JSONResponse(found)
    tag = '"' + base64.urlsafe_b64encode(hashlib.blake2b(bytes(answer.body), digest_size=12).digest()).decode() + '"'
    answer.headers["etag"] = tag
    if tag in [t.strip() for t in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers={"etag": tag})
    return answer
