"""Service levels of a job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from lanterne.backend import sla
from lanterne.backend.api.context import Ctx, OfJob
from lanterne.backend.api.problems import Problem
from lanterne.nouns import to_json

router = APIRouter(tags=["service levels"])
Time = Annotated[str | None, Query(max_length=40, description="RFC 3339 or Unix seconds")]


def time_ns(text: str | None) -> int | None:
    """RFC 3339 or Unix seconds as Unix ns. Raises :class:`Problem` (400)."""
    if text is None:
        return None
    try:
        stamp = float(text) if text.replace(".", "", 1).isdigit() else _parsed(text)
        if not 0 <= stamp < 1 << 33:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise Problem(400, f"{text[:40]!r} is not a time: use RFC 3339 or Unix seconds") from None
    return int(stamp * 1e9)


def _parsed(text: str) -> float:
    stamp = datetime.fromisoformat(text)
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


@router.get("/jobs/{job}/sla")
def service_levels(
    context: Ctx,
    at: OfJob,
    since: Annotated[Time, Query(alias="from")] = None,
    until: Annotated[Time, Query(alias="to")] = None,
) -> Any:
    """Objectives with error budgets, good and lost time by cause, MTBF, MTTR and ETTR."""
    return to_json(sla.report(context.store, context.control, at.job.id, from_ns=time_ns(since), to_ns=time_ns(until)))
