"""Who waits for whom: ranks by ranks."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query

from lanterne.backend.api import cells
from lanterne.backend.api.context import Ctx, OfJob, Step
from lanterne.backend.api.queries import finite

router = APIRouter(tags=["steps"])
STEPS_DEFAULT = 100
_LAST = "SELECT max(step) AS step, max(rank) AS rank FROM waits WHERE job = ? AND attempt = ?"
_PAIRS = """
SELECT w.rank AS waiter, c.culprit, sum(w.wait_ms) AS ms, count(*) AS calls
FROM waits w JOIN (
  SELECT group_name, group_sequence, arg_max(rank, lateness_ms) AS culprit
  FROM waits WHERE job = $job AND attempt = $attempt AND step BETWEEN $low AND $high
  GROUP BY group_name, group_sequence) c USING (group_name, group_sequence)
WHERE w.job = $job AND w.attempt = $attempt AND w.step BETWEEN $low AND $high AND w.wait_ms > 0 AND w.rank <> c.culprit
GROUP BY w.rank, c.culprit ORDER BY ms DESC
"""
PAIRS_SHOWN = 50


@router.get("/jobs/{job}/waits")
def waits(
    context: Ctx,
    at: OfJob,
    from_step: Step = None,
    to_step: Step = None,
    size: Annotated[int, Query(ge=1, le=256)] = 128,
) -> dict[str, Any]:
    """Milliseconds a step that each rank (row) waited for each other one (column), the last to enter a call being the
    one waited for; of the last 100 steps unless a window is given. With more than ``size`` ranks a cell holds the
    greatest of its pairs. ``pairs`` are the 50 worst, ``null`` = no wait."""
    last = context.store.rows(_LAST, at.key)[0]
    high = to_step if to_step is not None else -1 if last["step"] is None else int(last["step"])
    low = from_step if from_step is not None else max(0, high - STEPS_DEFAULT + 1)
    empty: dict[str, Any] = {"unit": "ms", "steps": [low, high], "ranks": [], "values": [], "pairs": []}
    if high < low:
        return empty
    values = {"job": at.job.id, "attempt": at.attempt, "low": low, "high": high}
    table = context.store.query(_PAIRS, values)
    if not table.num_rows:
        return empty
    steps = high - low + 1
    rows, columns = (table.column(c).to_numpy().astype(np.int64) for c in ("waiter", "culprit"))
    many = int(last["rank"]) + 1
    width = -(-many // size)
    found = np.full((-(-many // width),) * 2, np.nan)
    mean = table.column("ms").to_numpy(zero_copy_only=False) / steps
    np.fmax.at(found, (rows // width, columns // width), mean)
    worst = table.slice(0, PAIRS_SHOWN).to_pylist()
    return empty | {
        "ranks": list(range(0, many, width)),
        "values": cells.typed(found),
        "pairs": [
            {"rank": p["waiter"], "for": p["culprit"], "ms": finite(p["ms"] / steps), "calls": p["calls"]}
            for p in worst
        ],
    }
