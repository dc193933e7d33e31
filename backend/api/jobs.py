"""Jobs and their ranks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from lanterne import limits
from lanterne.backend import sla
from lanterne.backend.api import queries, shapes
from lanterne.backend.api.context import (
    Context,
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
from lanterne.backend.api.problems import Problem
from lanterne.backend.api.states import Signs, job_state, rank_state, signs
from lanterne.backend.store.records import JobRecord, rfc3339
from lanterne.nouns import to_json

router = APIRouter(tags=["jobs"])


@router.get("/jobs", response_model=shapes.Page[shapes.Job])
def jobs(context: Ctx, who: Who, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> dict[str, Any]:
    """Jobs, the last seen first."""
    before = decode_cursor(cursor, int, str)
    only = who.job or None
    found = context.control.jobs(only=only, before=(before[0], before[1]) if before else None, limit=limit + 1)
    summary = context.control.incident_summary([job.id for job in found])
    return page(
        found,
        limit,
        lambda job: _overview(context, job, summary[job.id]),
        lambda job: encode_cursor(job.last_seen_ns, job.id),
    )


@router.get("/jobs/{job}", response_model=shapes.JobDetail)
def one_job(context: Ctx, at: OfJob) -> dict[str, Any]:
    """One job with its attached settings, mesh and hosts."""
    job = at.job
    found = _overview(context, job, context.control.incident_summary([job.id])[job.id])
    rows = context.store.rows(
        "SELECT attributes FROM logs WHERE job = ? AND attempt = ? AND name = 'attached' ORDER BY rank LIMIT 1", at.key
    )
    ranks = context.control.ranks(job.id, at.attempt)
    axes = sorted({axis for r in ranks for axis in r.identity.mesh})
    return found | {
        "attached": dict(rows[0]["attributes"] or ()) if rows else {},
        "mesh": {axis: 1 + max(r.identity.mesh.get(axis, 0) for r in ranks) for axis in axes},
        "hosts": sorted({r.identity.host for r in ranks if r.identity.host}),
    }


def _signs(context: Context, job: str, attempt: int) -> dict[int, Signs]:
    """Last signs of all ranks seen, heartbeats and registered times included."""
    now = context.clock.unix_ns()
    found = signs(queries.sign_rows(context.store, job, attempt))
    beats = queries.beats(context.store, job, attempt, now)
    for record in context.control.ranks(job, attempt):
        rank = record.identity.rank
        old = found.get(rank, Signs(rank=rank))
        seen = max(old.last_seen_ns, record.last_seen_ns, int(beats.get(rank, {}).get("received_ns") or 0))
        found[rank] = Signs(
            rank=rank,
            ended=old.ended,
            closed=old.closed,
            exit_code=old.exit_code,
            signal=old.signal,
            stalled=old.stalled,
            last_seen_ns=seen,
        )
    return found


def _overview(context: Context, job: JobRecord, summary: tuple[int, float, str]) -> dict[str, Any]:
    newest = job.attempt
    attempt = newest.attempt if newest else 0
    found = _signs(context, job.id, attempt)
    step, step_ms = queries.pace(context.store, job.id, attempt)
    values = queries.last_values(context.store, job.id, attempt, step) if step is not None else {}
    hang = any(r.incident.kind == "hang" for r in context.control.incidents(job.id, open_only=True, limit=20))
    open_incidents, lost, verdict = summary
    return {
        "id": job.id,
        "state": job_state(list(found.values()), context.clock.unix_ns(), hang_open=hang),
        "attempt": attempt,
        "attempts": len(job.attempts),
        "world_size": newest.world_size if newest else 0,
        "ranks_seen": len(found),
        "host_count": len({r.identity.host for r in context.control.ranks(job.id, attempt)}),
        "first_seen": rfc3339(job.first_seen_ns),
        "last_seen": rfc3339(job.last_seen_ns),
        "step": step,
        "step_ms": queries.finite(step_ms),
        "throughput": queries.finite(values.get("training.throughput")),
        "loss": queries.finite(values.get("training.loss")),
        **context.cached(("goodput", job.id, attempt), lambda: _goodput(context, job)),
        "open_incidents": open_incidents,
        "gpu_hours_lost": queries.finite(lost) or 0.0,
        "verdict": verdict,
    }


def _goodput(context: Context, job: JobRecord) -> dict[str, Any]:
    report = to_json(sla.report(context.store, context.control, job.id))
    goodput = report.get("goodput") or {}
    productive = float(goodput.get("productive_s") or 0.0)
    total = productive + sum(float(v or 0.0) for v in (goodput.get("badput") or {}).values())
    return {
        "goodput": queries.finite(productive / total) if total else None,
        "ettr": queries.finite(report.get("ettr")),
    }


@router.get("/jobs/{job}/ranks", response_model=shapes.Page[shapes.Rank])
def ranks(context: Ctx, at: OfJob, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> dict[str, Any]:
    """Ranks of an attempt in rank order, with their last signs and clock offsets."""
    after = decode_cursor(cursor, int)
    first = after[0] + 1 if after else 0
    store, key, now = context.store, at.key, context.clock.unix_ns()
    found = _signs(context, at.job.id, at.attempt)
    progress = {r["rank"]: r for r in store.rows("SELECT * FROM rank_progress WHERE job = ? AND attempt = ?", key)}
    clocks = {r["rank"]: r for r in store.rows("SELECT * FROM rank_clocks WHERE job = ? AND attempt = ?", key)}
    beats = queries.beats(store, at.job.id, at.attempt, now)
    dropped = queries.dropped(store, at.job.id, at.attempt)

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
            "step": progress.get(rank, {}).get("step", beat.get("step", -1)),
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
