"""Jobs and their ranks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from lanterne import limits
from lanterne.backend.api import queries, shapes
from lanterne.backend.api.context import (
    Ctx,
    Cursor,
    JobId,
    Limit,
    OfJob,
    Who,
    decode_cursor,
    encode_cursor,
    page,
)
from lanterne.backend.api.overview import overviews, seen
from lanterne.backend.api.problems import Problem
from lanterne.backend.api.states import rank_state
from lanterne.backend.store.records import rfc3339

router = APIRouter(tags=["jobs"])
_ATTACHED = "SELECT attributes FROM logs WHERE job = ? AND attempt = ? AND name = 'attached' ORDER BY rank LIMIT 1"


@router.get("/jobs", response_model=shapes.Page[shapes.Job])
def jobs(context: Ctx, who: Who, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> dict[str, Any]:
    """Jobs, the last seen first."""
    before = decode_cursor(cursor, int, str)
    only = who.job or None
    found = context.control.jobs(only=only, before=(before[0], before[1]) if before else None, limit=limit + 1)
    shown = {row["id"]: row for row in overviews(context, found[:limit])}
    return page(found, limit, lambda job: shown[job.id], lambda job: encode_cursor(job.last_seen_ns, job.id))


@router.get("/jobs/{job}", response_model=shapes.JobDetail)
def one_job(context: Ctx, at: OfJob) -> dict[str, Any]:
    """One job with its attached settings, mesh and hosts."""
    job = at.job
    found = overviews(context, [job])[0]
    rows = context.kept(at.here, "attached", lambda: context.store.rows(_ATTACHED, at.key))
    ranks = context.control.ranks(job.id, at.attempt)
    axes = sorted({axis for r in ranks for axis in r.identity.mesh})
    return found | {
        "attached": dict(rows[0]["attributes"] or ()) if rows else {},
        "mesh": {axis: 1 + max(r.identity.mesh.get(axis, 0) for r in ranks) for axis in axes},
        "hosts": sorted({r.identity.host for r in ranks if r.identity.host}),
    }


@router.get("/jobs/{job}/ranks", response_model=shapes.Page[shapes.Rank])
def ranks(context: Ctx, at: OfJob, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> dict[str, Any]:
    """Ranks of an attempt in rank order, with their last signs and clock offsets."""
    after = decode_cursor(cursor, int)
    first = after[0] + 1 if after else 0
    store, key, now = context.store, at.key, context.clock.unix_ns()
    found = seen(context, at.job, at.attempt).signs
    progress = context.kept(at.here, "progress", lambda: queries.last_steps(store, at.here), rests=True)
    clocks = {r["rank"]: r for r in store.rows("SELECT * FROM rank_clocks WHERE job = ? AND attempt = ?", key)}
    beats = queries.beats(store, at.here, now)
    dropped = context.kept(at.here, "dropped", lambda: queries.dropped(store, at.job.id, at.attempt), rests=True)

    def show(record: Any) -> dict[str, Any]:
        identity, rank = record.identity, record.identity.rank
        sign, clock, beat = found[rank], clocks.get(rank), beats.get(rank, {})
        return {
            "rank": rank,
            "local_rank": identity.local_rank,
            "host": identity.host,
            "device": identity.device,
            "pid": identity.pid,
            "mesh": dict(identity.mesh),
            "state": rank_state(sign, now),
            "step": progress.get(rank, beat.get("step", -1)),
            "phase": beat.get("phase"),
            "last_seen": rfc3339(sign.last_seen_ns),
            "clock": {"offset_ns": clock["offset_ns"], "error_ns": clock["error_ns"]} if clock else None,
            "exit_code": -sign.signal if sign.signal else sign.exit_code,
            "dropped": dropped.get(rank, 0),
        }

    records = [r for r in context.control.ranks(at.job.id, at.attempt) if r.identity.rank >= first]
    return page(records[: limit + 1], limit, show, lambda record: encode_cursor(record.identity.rank))


@router.get("/jobs/{job}/key", response_model=shapes.Key)
def key(context: Ctx, who: Who, job: JobId) -> dict[str, Any]:
    """The public half (hex) of the pair that signs the job's commands; also before the job's first event."""
    if not who.sees(job):
        raise Problem(404, f"there is no job {job}")
    return {"job": job, "algorithm": "ed25519", "key": context.control.job_key(job)[1].hex()}
