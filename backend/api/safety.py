"""Breakers and service rules of a job; alerts and what silences them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from lanterne.backend.alerts import Target, checked_address
from lanterne.backend.align.facts import build_facts
from lanterne.backend.api.context import Context, Ctx, OfJob, Step, Who
from lanterne.backend.api.incidents import IncidentId, known_incident
from lanterne.backend.api.problems import Problem
from lanterne.backend.detect import anomaly, safety
from lanterne.backend.detect.safety import Safety
from lanterne.backend.store.records import rfc3339
from lanterne.errors import LanterneError
from lanterne.nouns import to_json

router = APIRouter(tags=["safety"])
TARGETS_MAX = 32
Score = Literal["robust_z", "detrended_z", "learned"]


class Silence(BaseModel):
    hours: float = Field(default=8.0, gt=0, le=24 * 90)
    says: str = Field(default="", max_length=4_000)


def _safety(context: Context, job: str, attempt: int) -> Safety:
    """What the live runner holds; of a job that it does not watch, judged from its last steps."""
    held = context.safety(job, attempt)
    if held is not None:
        return held
    return context.kept(
        (job, attempt),
        "safety",
        lambda: safety.look(build_facts(context.store, job, attempt, now_ns=context.clock.unix_ns())),
        rests=True,
    )


@router.get("/jobs/{job}/breakers")
def breakers(context: Ctx, at: OfJob) -> dict[str, Any]:
    """The circuit breaker of each process group, their moves, the service rules with what they measured, and how each
    rank stands to its memory limits with the chance that it reaches them soon."""
    found = _safety(context, at.job.id, at.attempt)
    return {
        "items": to_json(found.board.states()),
        "changes": [
            to_json(change) | {"at": rfc3339(int(change.at_s * 1e9))} for change in reversed(found.board.changes)
        ],
        "rules": to_json(found.rules),
        "memory": to_json(found.memory),
    }


@router.get("/jobs/{job}/anomalies")
def anomalies(
    context: Ctx,
    at: OfJob,
    step: Step = None,
    score: Annotated[
        Literal["robust_z", "detrended_z", "learned"], Query(description="Without a step")
    ] = "detrended_z",
) -> dict[str, Any]:
    """The series that left their own past most, at a step or anywhere in the last steps, ranked; no alarms."""
    facts = context.cached(
        ("facts", at.job.id, at.attempt),
        lambda: build_facts(context.store, at.job.id, at.attempt, now_ns=context.clock.unix_ns()),
    )
    found = anomaly.candidates(facts, step, top=20, score=score)
    return {"items": [to_json(c) | {"says": c.says} for c in found], "next": None}


class Webhook(BaseModel):
    """A target of alerts. ``secret`` signs the generic form."""

    format: Literal["alertmanager", "slack", "generic"]
    url: str = Field(max_length=2_000)
    secret: str = Field(default="", max_length=256)
    severities: list[Literal["P0", "P1", "P2"]] = Field(default=["P0", "P1"], min_length=1, max_length=3)


def _show_target(target: Target) -> dict[str, Any]:
    return {
        "id": target.number or None, "format": target.format, "host": target.host,
        "severities": sorted(target.severities),
    }  # fmt: skip


@router.post("/alerts/targets", status_code=201)
def add_target(context: Ctx, who: Who, body: Webhook) -> dict[str, Any]:
    """Tell alerts to this address too. It must lead to public addresses, unless the server's settings allow others."""
    alerter = context.alerter
    try:
        target = Target(url=body.url, format=body.format, allow_private=alerter.allow_private)
        checked_address(target.url, allow_private=target.allow_private)
    except (LanterneError, ValueError) as error:
        raise Problem(400, str(error)) from None
    if len(alerter.targets) >= TARGETS_MAX:
        raise Problem(409, f"there are {len(alerter.targets)} targets already; end one first")
    made = context.control.add_webhook(
        body.format, body.url, severities=body.severities, secret=body.secret, author=who.actor
    )
    context.control.audit(who.actor, "webhook.add", target.host, {"format": body.format})
    alerter.reload()
    return _show_target(next(t for t in alerter.targets if t.number == made.id))


@router.delete("/alerts/targets/{number}", status_code=204)
def end_target(context: Ctx, who: Who, number: Annotated[int, Path(ge=1, lt=1 << 31)]) -> Response:
    """Tell this address no more."""
    if not context.control.end_webhook(number):
        raise Problem(404, f"there is no target {number} that was set here; those of the settings end there")
    context.control.audit(who.actor, "webhook.end", str(number), {})
    context.alerter.reload()
    return Response(status_code=204)


@router.get("/alerts")
def alerts(context: Ctx, who: Who) -> dict[str, Any]:
    """How alerts fared since the server started, and their targets without what is secret in the address."""
    del who
    counts = context.alerter.counts
    return {
        "targets": [_show_target(t) for t in context.alerter.targets],
        "sent": counts.sent, "failed": counts.failed, "silenced": counts.silenced, "dropped": counts.dropped,
        "errors": list(counts.errors),
    }  # fmt: skip


@router.post("/incidents/{incident}/silence", status_code=201)
def silence(context: Ctx, who: Who, incident: IncidentId, body: Silence) -> dict[str, Any]:
    """Tell no alerts about this trouble (its fingerprint, in every attempt of the job) for so many hours."""
    record = known_incident(context, who, incident)
    until = context.clock.unix_ns() + int(body.hours * 3600e9)
    context.control.add_silence(record.job, record.fingerprint, until, author=who.actor, says=body.says)
    return {"job": record.job, "fingerprint": record.fingerprint, "until": rfc3339(until)}
