"""What policies chose, what one would have chosen, and which findings are kept quiet."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from lanterne import limits
from lanterne.backend import policy
from lanterne.backend.api.context import Ctx, Cursor, Limit, Who, decode_cursor, encode_cursor, page
from lanterne.backend.api.problems import Problem
from lanterne.backend.store.records import DecisionRecord, SilenceRecord, rfc3339

router = APIRouter(tags=["history"])
REPLAY_INCIDENTS_MAX = 100


def _show_decision(found: DecisionRecord) -> dict[str, Any]:
    return {
        "incident": found.incident,
        "job": found.job,
        "policy": found.policy or None,
        "chose": found.chose,
        "says": found.says,
        "at": rfc3339(found.at_ns),
    }


def _show_silence(found: SilenceRecord) -> dict[str, Any]:
    return {
        "id": found.id,
        "job": found.job,
        "fingerprint": found.fingerprint,
        "until": rfc3339(found.until_ns),
        "author": found.author,
        "says": found.says,
    }


@router.get("/decisions")
def decisions(
    context: Ctx,
    who: Who,
    name: Annotated[str | None, Query(max_length=128, alias="policy", description="Only this policy")] = None,
    limit: Limit = limits.PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """What policies chose about incidents, ``hold`` included, the newest first."""
    before = decode_cursor(cursor, int)
    rows = context.control.recent_decisions(
        job=who.job or None, policy=name, before=before[0] if before else None, limit=limit + 1
    )
    return page(rows, limit, lambda row: _show_decision(row[1]), lambda row: encode_cursor(row[0]))


@router.get("/policies/{name}/replay")
async def replay(
    context: Ctx, who: Who, name: Annotated[str, Path(pattern=limits.ID_PATTERN)]
) -> dict[str, list[dict[str, Any]]]:
    """What this policy alone, enabled, would have chosen about the last 100 diagnosed incidents; nothing is ordered.

    Budget, cool-down and breaker run along. Conditions over series are judged as not met.
    """
    found = next((p for p in policy.policies(context.control) if p.name == name), None)
    if found is None:
        raise Problem(404, f"there is no policy {name}")
    records = [r for r in context.control.incidents(limit=REPLAY_INCIDENTS_MAX) if who.sees(r.job)]
    rule = policy.parse(policy.body_of(found) | {"enabled": True})
    async with context.heavy:
        return {"items": await asyncio.to_thread(policy.replay_rules, [rule], records)}


@router.get("/silences")
def silences(context: Ctx, who: Who) -> dict[str, Any]:
    """Silences of all jobs that are not over, those that end first at the top."""
    found = context.control.all_silences(who.job or None)
    return {"items": [_show_silence(s) for s in found], "next": None}


@router.delete("/silences/{number}", status_code=204)
def end_silence(context: Ctx, who: Who, number: Annotated[int, Path(ge=1, lt=1 << 62)]) -> Response:
    """End a silence now."""
    found = next((s for s in context.control.all_silences() if s.id == number and who.sees(s.job)), None)
    if found is None:
        raise Problem(404, f"there is no silence {number}")
    context.control.end_silence(number)
    context.control.audit(who.actor, "silence.end", found.job, {"fingerprint": found.fingerprint})
    return Response(status_code=204)
