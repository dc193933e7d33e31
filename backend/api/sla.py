"""Service levels of a job and of the fleet."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query

from lanterne.backend import sla
from lanterne.backend.api.context import Ctx, JobId, OfJob, Who
from lanterne.backend.api.problems import Problem
from lanterne.errors import UsageError
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


@router.get("/sla")
def fleet_levels(
    context: Ctx,
    who: Who,
    since: Annotated[Time, Query(alias="from")] = None,
    until: Annotated[Time, Query(alias="to")] = None,
) -> Any:
    """The same over all jobs seen in the window; sums weigh by wall time. A token of one job sees that job alone."""
    return to_json(
        sla.fleet(context.store, context.control, from_ns=time_ns(since), to_ns=time_ns(until), only=who.job or None)
    )


@router.get("/efficiency")
def scaling(
    context: Ctx,
    who: Who,
    job: Annotated[list[JobId], Query(max_length=100, description="Jobs whose attempts are measured")] = [],  # noqa: B006
    rate: Annotated[list[str], Query(max_length=1_000, description="RANKS:PER_SECOND, measured elsewhere")] = [],  # noqa: B006
    flops_per_unit: Annotated[float | None, Query(gt=0, description="FLOP a sample or token")] = None,
    peak_flops: Annotated[float | None, Query(gt=0, description="FLOP/s of one device")] = None,
) -> Any:
    """Efficiency over world sizes, Amdahl's serial share and MFU: of jobs of this server, or of rates given."""
    rates: dict[int, float] = {}
    for text in rate:
        ranks, _, value = text.partition(":")
        try:
            rates[int(ranks)] = float(value)
        except ValueError:
            raise Problem(400, f"rate: {text[:40]!r} is not RANKS:PER_SECOND, for example 8:876.0") from None
    for name in job:
        found = context.control.job(name) if who.sees(name) else None
        if found is None:
            raise Problem(404, f"there is no job {name}")
        for attempt in found.attempts:
            measured = sla.throughput(context.store, name, attempt.attempt)
            if measured is not None and attempt.world_size:
                rates[attempt.world_size] = max(measured, rates.get(attempt.world_size, 0.0))
    try:
        return to_json(sla.efficiency(rates, flops_per_unit=flops_per_unit, peak_flops=peak_flops))
    except UsageError as error:
        raise Problem(400, str(error)) from None


@router.post("/schedulers/{source}")
def records(source: Literal["kubernetes", "slurm", "yarn"], body: Annotated[dict[str, Any], Body()]) -> Any:
    """A scheduler's JSON (``kubectl get pods|jobs -o json``, ``sacct --json`` or slurmrestd, YARN's ``cluster/apps``)
    as unified records in seconds and bytes, with the share of ended jobs that succeeded."""
    try:
        jobs = sla.READERS[source](body)
    except UsageError as error:
        raise Problem(400, str(error)) from None
    return {
        "items": [to_json(j) | {"queued_s": j.queued_s, "ran_s": j.ran_s} for j in jobs],
        "success_rate": sla.success_rate(jobs), "next": None,
    }  # fmt: skip
