"""Steps, lanes of one step, collectives and what the links do."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import JSONResponse

from lanterne import limits
from lanterne.backend.api import lines, shapes
from lanterne.backend.api.context import (
    At,
    Context,
    Ctx,
    Cursor,
    Limit,
    OfJob,
    Step,
    decode_cursor,
    encode_cursor,
    page,
)
from lanterne.backend.api.lanes import chrome_trace, lanes
from lanterne.backend.api.problems import Problem
from lanterne.backend.api.queries import finite
from lanterne.backend.detect.bandwidth import bus_factor
from lanterne.backend.store.records import rfc3339
from lanterne.nouns import group_ranks

router = APIRouter(tags=["steps"])
StepNumber = Annotated[int, Path(ge=0, le=limits.STEP_MAX)]
_PHASES = """
SELECT DISTINCT metric FROM rank_steps
WHERE job = ? AND attempt = ? AND step BETWEEN ? AND ?
  AND metric NOT IN ('step_ms', 'wait_ms', 'lateness_ms', 'transfer_ms')
"""


def bus_bandwidth(op: str, size: int, members: int, transfer_ms: float | None) -> float | None:
    """GB/s on the busiest link, from payload bytes; None where the transfer time is not known."""
    if not transfer_ms or transfer_ms <= 0 or size <= 0 or members < 2:
        return None
    return (bus_factor(op, members) or 1.0) * size / (transfer_ms * 1e6)


@router.get("/jobs/{job}/steps", response_model=shapes.Page[shapes.StepRow])
def steps(
    context: Ctx,
    at: OfJob,
    from_step: Step = None,
    to_step: Step = None,
    limit: Limit = limits.PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Steps in order: longest duration, slowest rank, longest wait, median time of each phase."""
    after = decode_cursor(cursor, int)
    low = max(from_step or 0, after[0] + 1 if after else 0)
    high = limits.STEP_MAX if to_step is None else to_step
    # A step has rows of every rank and phase: bound the range before grouping.
    found = context.store.rows(
        "SELECT DISTINCT step FROM rank_steps WHERE job = ? AND attempt = ? AND metric = 'step_ms'"
        " AND step BETWEEN ? AND ? ORDER BY step LIMIT ?",
        [*at.key, low, high, limit + 1],
    )
    rows = [row["step"] for row in found]
    shown = _step_rows(context, at, rows[:limit]) if rows else {}
    return page(rows, limit, lambda step: shown[step], encode_cursor)


def _step_rows(context: Context, at: At, numbers: list[int]) -> dict[int, dict[str, Any]]:
    """The rows of :func:`steps` by number of the step."""
    low, high = numbers[0], numbers[-1]
    names = [row["metric"] for row in context.store.rows(_PHASES, [*at.key, low, high])]

    def by_step(metric: str, how: str) -> dict[int, float]:
        grid = context.grids.part(*at.here, metric, low, high)
        return dict(enumerate(np.round(grid.over(how), lines.DECIMALS).tolist(), grid.first))

    whole = context.grids.part(*at.here, "step_ms", low, high)
    longest, waits = by_step("step_ms", "max"), by_step("wait_ms", "max")
    phases = {name.removesuffix("_ms"): by_step(name, "median") for name in sorted(names)}

    def show(step: int) -> dict[str, Any]:
        row = step - whole.first
        own = {name: finite(found[step]) for name, found in phases.items() if finite(found.get(step)) is not None}
        return {
            "step": step,
            "start": rfc3339(int(whole.time_ns[row])),
            "duration_ms": finite(longest.get(step)),
            "slowest_rank": int(np.nanargmax(whole.values[row])),
            "wait_ms": finite(waits.get(step)),
            "phases": own,
        }

    return {step: show(step) for step in numbers}


@router.get("/jobs/{job}/steps/{number}")
def one_step(context: Ctx, at: OfJob, number: StepNumber) -> dict[str, Any]:
    """Lanes of all ranks on the job clock, each with its clock error; the critical path, who waited for whom, and
    what the step had taken with a rank, a pipeline stage or a phase as fast as its peers."""
    found = _lanes(context, at, number)
    if found is None:
        raise Problem(404, f"nothing is stored of step {number} of job {at.job.id}")
    return found


def _lanes(context: Context, at: At, step: int) -> dict[str, Any] | None:
    mesh = {r.identity.rank: r.identity.mesh.get("pp", 0) for r in context.control.ranks(at.job.id, at.attempt)}
    return lanes(context.store, at.job.id, at.attempt, step, mesh)


@router.get("/jobs/{job}/timeline")
def timeline(context: Ctx, at: OfJob, step: Annotated[int, Query(ge=0, le=limits.STEP_MAX)]) -> Response:
    """One step as Chrome trace JSON: open it in Perfetto."""
    found = _lanes(context, at, step)
    if found is None:
        raise Problem(404, f"nothing is stored of step {step} of job {at.job.id}")
    name = f"{at.job.id}-step-{step}.trace.json".replace(":", "_")
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return JSONResponse(chrome_trace(at.job.id, found), headers=headers)


@router.get("/jobs/{job}/collectives", response_model=shapes.Page[shapes.CollectiveRow])
def collectives(
    context: Ctx,
    at: OfJob,
    group: Annotated[str | None, Query(max_length=512)] = None,
    rank: Annotated[int | None, Query(ge=0, lt=limits.RANKS_MAX)] = None,
    from_step: Step = None,
    to_step: Step = None,
    limit: Limit = limits.PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Aligned calls by step, group and order; ``rank`` keeps those in which that rank came last."""
    after = decode_cursor(cursor, int, str, int)
    values: dict[str, Any] = {
        "job": at.job.id, "attempt": at.attempt, "group": group, "rank": rank, "low": from_step or 0,
        "high": limits.STEP_MAX if to_step is None else to_step, "n": limit + 1,
    }  # fmt: skip
    condition = ""
    if after:
        condition = "AND (step, group_name, group_sequence) > ($s, $g, $q)"
        values |= {"s": after[0], "g": after[1], "q": after[2]}
    rows = context.store.rows(
        "SELECT * FROM collective_calls WHERE job = $job AND attempt = $attempt"
        " AND ($group IS NULL OR group_name = $group) AND ($rank IS NULL OR last_rank = $rank)"
        f" AND step BETWEEN $low AND $high {condition} ORDER BY step, group_name, group_sequence LIMIT $n",
        values,
    )

    def show(row: dict[str, Any]) -> dict[str, Any]:
        transfer = finite(row["transfer_ms"])
        return {
            "group": row["group_name"],
            "sequence": row["group_sequence"],
            "op": row["op"],
            "step": row["step"],
            "bytes": row["bytes"],
            "members": row["members"],
            "last_rank": row["last_rank"],
            "skew_ms": finite(row["skew_ms"]),
            "transfer_ms": transfer,
            "bus_bandwidth": bus_bandwidth(row["op"], row["bytes"], row["members"], transfer),
        }

    return page(rows, limit, show, lambda row: encode_cursor(row["step"], row["group_name"], row["group_sequence"]))


@router.get("/jobs/{job}/communication")
def communication(context: Ctx, at: OfJob) -> dict[str, Any]:
    """By group and op: time = alpha + bytes / beta fitted over the last 20,000 calls, best and last bandwidth."""
    return context.kept(at.here, "communication", lambda: _communication(context, at), rests=True)


def _communication(context: Context, at: At) -> dict[str, Any]:
    table = context.store.query(
        "SELECT group_name, op, bytes, members, transfer_ms FROM collective_calls"
        " WHERE job = ? AND attempt = ? AND transfer_ms > 0 AND bytes > 0 ORDER BY step DESC LIMIT 20000",
        at.key,
    )
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault((row["group_name"], row["op"]), []).append(row)
    return {"groups": [_link(group, op, rows) for (group, op), rows in sorted(found.items())]}


def _link(group: str, op: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    size = np.array([r["bytes"] for r in rows], dtype=np.float64)
    ms = np.array([r["transfer_ms"] for r in rows])
    alpha_us = beta_gbps = None
    if len(np.unique(size)) >= 3:
        slope, intercept = np.polyfit(size, ms, 1)
        if slope > 0:
            alpha_us, beta_gbps = max(0.0, float(intercept) * 1e3), 1.0 / (float(slope) * 1e6)
    try:
        members = len(group_ranks(group))
    except ValueError:
        members = int(rows[0]["members"])
    speeds = [bus_bandwidth(op, r["bytes"], members, r["transfer_ms"]) for r in rows]
    known = [s for s in speeds if s is not None]
    return {
        "group": group,
        "op": op,
        "alpha_us": alpha_us,
        "beta_gbps": beta_gbps,
        "samples": len(rows),
        "best_bus_gbps": float(np.percentile(known, 99)) if known else None,
        "last_bus_gbps": float(np.median(known[:50])) if known else None,
    }
