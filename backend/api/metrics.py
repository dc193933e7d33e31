"""Metrics over steps, the heat map of ranks by steps, and event rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Query, Response

from lanterne import limits, wire
from lanterne.backend.api import cells, lines, queries, reduce, shapes
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
from lanterne.backend.store.records import rfc3339

router = APIRouter(tags=["metrics"])
_SERIES_MAX = 2_048
_NAME = Query(max_length=256)


@router.get("/jobs/{job}/metrics", response_model=shapes.Metrics, response_model_exclude_none=False)
def metrics(
    context: Ctx,
    at: OfJob,
    name: Annotated[str | None, _NAME] = None,
    rank: Annotated[int | None, Query(ge=-1, lt=limits.RANKS_MAX)] = None,
    label: Annotated[str | None, Query(max_length=256)] = None,
    from_step: Step = None,
    to_step: Step = None,
    points: Annotated[int, Query(ge=4, le=limits.PLOT_POINTS_MAX)] = 1_000,
    reduce_by: Annotated[Literal["minmax", "lttb"], Query(alias="reduce")] = "minmax",
    aggregate: Literal["none", "median", "max"] = "none",
    smooth: Annotated[float, Query(ge=0, lt=1)] = 0.0,
    most: Annotated[int, Query(ge=1, le=_SERIES_MAX)] = _SERIES_MAX,
) -> dict[str, Any]:
    """One metric as series of at most ``points`` numbers (spikes stay); without ``name`` the list of names.

    Of more than ``most`` series those stay that stray furthest from the median of their step.
    """
    if name is None:
        return {"names": context.kept(at.here, "names", lambda: _names(context, at), rests=True)}
    unit = wire.UNITS.get(name, "ms" if name.endswith("_ms") else "")
    if rank is None and label is None:
        kept = lines.of(context.grids, at.here, name, aggregate, from_step, to_step, most)
        if kept is not None:
            series = [
                _shown(line.step, line.time_ns, line.value, points, reduce_by, smooth)
                | {"rank": line.rank, "label": ""}
                for line in kept
            ]
            return {"name": name, "unit": unit, "series": series}
    table = _points(context, at, name, rank, label, from_step, to_step, aggregate)
    series = [
        _series(part, points, reduce_by, smooth) | {"rank": r, "label": text}
        for (r, text), part in _split(table)[:most]
    ]
    return {"name": name, "unit": unit, "series": series}


def _names(context: Context, at: At) -> list[dict[str, Any]]:
    rows = context.store.rows(
        "SELECT name, unit, ranks, points FROM metric_names WHERE job = ? AND attempt = ? ORDER BY name", at.key
    )
    steps = context.store.rows(
        "SELECT metric AS name, count(DISTINCT rank) AS ranks, count(*) AS points FROM rank_steps"
        " WHERE job = ? AND attempt = ? GROUP BY metric ORDER BY metric",
        at.key,
    )
    return [*rows, *({"unit": "ms", **row} for row in steps)]


def _points(
    context: Context,
    at: At,
    name: str,
    rank: int | None,
    label: str | None,
    from_step: int | None,
    to_step: int | None,
    aggregate: str,
) -> pa.Table:
    if name == "step_ms":  # one row a rank and step
        inner = (
            "SELECT rank, '' AS label, step, start_ns AS time_ns, value FROM rank_steps"
            " WHERE job = $job AND attempt = $attempt AND metric = $name AND ($rank IS NULL OR rank = $rank)"
            " AND step BETWEEN $low AND $high AND $label IS NOT DISTINCT FROM $label"
        )
    elif name.endswith("_ms"):
        inner = (
            "SELECT rank, '' AS label, step, max(start_ns) AS time_ns, sum(value) AS value FROM rank_steps"
            " WHERE job = $job AND attempt = $attempt AND metric = $name AND ($rank IS NULL OR rank = $rank)"
            " AND step BETWEEN $low AND $high AND $label IS NOT DISTINCT FROM $label GROUP BY rank, step"
        )
    else:
        inner = (
            "SELECT rank, label, step, time_ns, value FROM points"
            " WHERE job = $job AND attempt = $attempt AND name = $name AND ($rank IS NULL OR rank = $rank)"
            " AND ($label IS NULL OR label = $label)"
            " AND (step BETWEEN $low AND $high OR ($all AND step < 0))"
        )
    values: dict[str, Any] = {
        "job": at.job.id,
        "attempt": at.attempt,
        "name": name,
        "rank": rank,
        "label": label,
        "low": 0 if from_step is None else from_step,
        "high": limits.STEP_MAX if to_step is None else to_step,
    }
    if "$all" in inner:
        values["all"] = from_step is None and to_step is None
    if aggregate != "none":
        inner = (
            f"SELECT -1 AS rank, label, step, min(time_ns) AS time_ns, {aggregate}(value) AS value"
            f" FROM ({inner}) GROUP BY label, step, CASE WHEN step < 0 THEN time_ns END"
        )
    return context.store.query(f"SELECT * FROM ({inner}) ORDER BY rank, label, step, time_ns", values)


def _split(table: pa.Table) -> list[tuple[tuple[int, str], pa.Table]]:
    """The sorted rows by (rank, label)."""
    if not table.num_rows:
        return []
    ranks = table.column("rank").to_numpy()
    labels = np.array(table.column("label").to_pylist(), dtype=object)
    cuts = np.flatnonzero((ranks[1:] != ranks[:-1]) | (labels[1:] != labels[:-1])) + 1
    edges = [0, *cuts.tolist(), table.num_rows]
    return [((int(ranks[low]), str(labels[low])), table.slice(low, high - low)) for low, high in pairwise(edges)]


def _series(part: pa.Table, points: int, reduce_by: str, weight: float) -> dict[str, Any]:
    value = part.column("value").to_numpy(zero_copy_only=False).astype(np.float64)
    step, time = (part.column(name).to_numpy() for name in ("step", "time_ns"))
    return _shown(step, time, value, points, reduce_by, weight)


def _shown(step: Any, time: Any, value: Any, points: int, reduce_by: str, weight: float) -> dict[str, Any]:
    """Smoothed on all numbers, then reduced."""
    value = reduce.smooth(value, weight)
    axis = (step if (step >= 0).any() else time).astype(np.float64)
    chosen = reduce.minmax(value, points) if reduce_by == "minmax" else reduce.lttb(axis, value, points)
    return {
        "step": step[chosen].tolist(),
        "time": [rfc3339(t) for t in time[chosen].tolist()],
        "value": [queries.finite(v) for v in value[chosen]],
    }


@router.get("/jobs/{job}/heatmap", response_model=shapes.HeatMap)
def heatmap(
    context: Ctx,
    at: OfJob,
    metric: Annotated[str, _NAME] = "step_ms",
    from_step: Step = None,
    to_step: Step = None,
    from_rank: Annotated[int, Query(ge=0, lt=limits.RANKS_MAX)] = 0,
    to_rank: Annotated[int | None, Query(ge=0, lt=limits.RANKS_MAX)] = None,
    width: Annotated[int, Query(ge=1, le=2_000)] = 500,
    height: Annotated[int, Query(ge=1, le=1_024)] = 256,
    encoding: Literal["json", "f4"] = "json",
) -> Response:
    """Ranks by steps, pooled by max so that one rank in a thousand stays a line; null = nothing was sent.

    Values carry four decimals. The cells go from the array to JSON without a model in between: a quarter of a
    million of them pass a model at a second's cost. With ``encoding=f4``, ``values`` is
    ``{dtype, bdata, shape}``: base64 of little-endian float32, rows first, NaN = nothing was sent.
    """
    low, high = from_step, to_step
    if low is None or high is None or to_rank is None:
        first, last, top = lines.bounds(context, at.here)
        low = first if low is None else low
        high = last if high is None else high
        to_rank = top if to_rank is None else to_rank
    unit = "ms" if metric.endswith("_ms") else wire.UNITS.get(metric, "")
    empty = {"metric": metric, "unit": unit, "ranks": [], "steps": [], "values": [], "pooled_by": "max"}
    if high < low or to_rank < from_rank:
        return _json(empty)
    width = min(width, limits.HEATMAP_CELLS_MAX // height) or 1
    step_width = -(-(high - low + 1) // width)
    rank_width = -(-(to_rank - from_rank + 1) // height)
    window = cells.Window(ranks=(from_rank, to_rank), steps=(low, high), rank_width=rank_width, step_width=step_width)
    found = cells.pooled(context.store, context.grids, at.job.id, at.attempt, metric, window)
    return _json(
        empty
        | {
            "ranks": list(range(from_rank, to_rank + 1, rank_width)),
            "steps": list(range(low, high + 1, step_width)),
            "values": cells.typed(found) if encoding == "f4" else np.round(found, 4).tolist(),
        }
    )


def _json(body: dict[str, Any]) -> Response:
    """JSON in which NaN and infinities are null, as msgspec writes them."""
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get("/jobs/{job}/events", response_model=shapes.Page[shapes.Event])
def events(
    context: Ctx,
    at: OfJob,
    name: Annotated[str | None, _NAME] = None,
    rank: Annotated[int | None, Query(ge=-1, lt=limits.RANKS_MAX)] = None,
    limit: Limit = limits.PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Log rows, the newest first; heartbeats only when asked for by name."""
    before = decode_cursor(cursor, int, int, int)
    values: dict[str, Any] = {"job": at.job.id, "attempt": at.attempt, "name": name, "rank": rank, "n": limit + 1}
    condition = ""
    if before:
        condition = "AND (time_ns, rank, sequence) < ($t, $r, $s)"
        values |= {"t": before[0], "r": before[1], "s": before[2]}
    rows = context.store.rows(
        "SELECT rank, name, step, time_ns, severity, body, host, attributes, sequence, lamport FROM logs"
        " WHERE job = $job AND attempt = $attempt AND ($rank IS NULL OR rank = $rank)"
        " AND (name = $name OR ($name IS NULL AND name NOT IN ('heartbeat', 'clock_snapshot')))"
        f" {condition} ORDER BY time_ns DESC, rank DESC, sequence DESC LIMIT $n",
        values,
    )
    return page(
        rows,
        limit,
        lambda row: queries.plain_row(row) | {"time": rfc3339(row["time_ns"])},
        lambda row: encode_cursor(row["time_ns"], row["rank"], row["sequence"]),
    )
