"""The rank x step heat map: where in the job the time goes, one row a rank, one column a step."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.dashboard import theme
from lanterne.dashboard.words import safe

TITLES: Mapping[str, str] = {
    "lateness_ms": "late at the first collective",
    "busy_ms": "own work",
    "wait_ms": "waited for others",
    "step_ms": "step time",
    "data_wait_ms": "waited for data",
    "forward_ms": "forward",
    "backward_ms": "backward",
}
CLIP_SIGMA = 10.0
"""The scale ends no lower than the median plus this many robust deviations, so that noise stays dark."""
REACH_SIGMA = 60.0
"""It ends higher, up to this many, where one cell in a thousand lies beyond: a rank that is late for long."""
SAMPLE_CELLS = 32_768
"""The colour scale is read from every n-th step where there are more cells than this."""


def matrix(answer: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """The values as float32 ``[ranks, steps]``; missing cells are NaN."""
    rows = answer.get("values") or []
    if isinstance(rows, Mapping):
        shape = [int(n) for n in rows["shape"].split(",")]
        return np.frombuffer(base64.b64decode(rows["bdata"]), dtype="<f4").reshape(shape)
    if not rows:
        return np.zeros((0, 0), dtype=np.float32)
    return np.array(rows, dtype=np.float32)  # None becomes NaN


def limits(values: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Ends of the colour scale: first to 99.5th per cent, the upper end out of reach of mere noise.

    What all ranks share in a step (a checkpoint) does not stretch the scale: the upper end counts from each step's
    median. The deviation is 1.4826 x the median absolute deviation (equals sigma for a normal distribution).
    """
    sample = values[:, :: max(1, values.size // SAMPLE_CELLS)]
    if not np.isfinite(sample).any():
        sample = values
    finite = np.isfinite(sample)
    found = sample[finite]
    if not found.size:
        return 0.0, 1.0
    if finite.all():
        own = (sample - np.median(sample, axis=0)).ravel()
    else:
        filled = np.where(finite, sample, np.nan)[:, finite.any(axis=0)]
        own = filled - np.nanmedian(filled, axis=0)
        own = own[np.isfinite(own)]
    low, middle = (float(v) for v in np.percentile(found, (1.0, 50.0)))
    sigma = 1.4826 * float(np.median(np.abs(own)))
    many, few = (float(v) for v in np.percentile(own, (99.5, 99.9)))
    top = middle + max(many, CLIP_SIGMA * sigma, min(few, REACH_SIGMA * sigma))
    return low, top if top > low else low + 1.0


def typed(values: npt.NDArray[np.float32]) -> dict[str, str]:
    """An array as plotly.js reads it without parsing numbers: base64 of little-endian float32."""
    data = base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
    return {"dtype": "f4", "bdata": data, "shape": ",".join(str(n) for n in values.shape)}


def heatmap(answer: Mapping[str, Any], marks: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The heat map of ``GET jobs/{id}/heatmap``; ``marks`` are ``{step, says}`` of incidents.

    Cells are the maximum of what they stand for, so one bad rank in a thousand stays a line.
    """
    values = matrix(answer)
    if not np.isfinite(values).any():
        metric = str(answer.get("metric"))
        needs = "; it takes collectives" if metric in {"lateness_ms", "wait_ms"} else ""
        return nothing(f"no {TITLES.get(metric, metric)} was measured yet{needs}")
    steps, ranks = list(answer["steps"]), list(answer["ranks"])
    low, high = limits(values)
    unit = safe(answer.get("unit") or "ms", 16)
    few = len(ranks) <= 32
    trace = {
        "type": "heatmap",
        "x": steps,
        "y": ranks,
        "z": answer["values"] if isinstance(answer["values"], Mapping) else typed(values),
        "zmin": low,
        "zmax": high,
        "colorscale": [list(stop) for stop in theme.HEAT],
        "colorbar": {"title": {"text": unit, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 1.0},
        "hovertemplate": f"rank %{{y}} · step %{{x}}<br><b>%{{z:.3~g}} {unit}</b><extra></extra>",
        "hoverongaps": False,
        "xgap": 0,
        "ygap": 1 if few else 0,
    }
    yaxis: dict[str, Any] = {"title": {"text": "rank", "standoff": 8}, "showgrid": False, "autorange": "reversed"}
    if few:
        yaxis |= {"tickmode": "array", "tickvals": ranks, "ticktext": [str(r) for r in ranks]}
    return {
        "data": [trace],
        "layout": theme.layout(
            height=min(460, max(190, 90 + 22 * len(ranks))),
            xaxis={"title": {"text": "step", "standoff": 8}, "showgrid": False},
            yaxis=yaxis,
            margin={"l": 56, "r": 8, "t": 22, "b": 40},
            plot_bgcolor="rgba(128,138,152,0.16)",
            uirevision=safe(answer.get("metric")),
            **step_marks(marks, steps[0], steps[-1]),
        ),
    }


def step_marks(marks: Sequence[Mapping[str, Any]], first: float, last: float, *, named: bool = True) -> dict[str, Any]:
    """Dotted lines where incidents began, ``named`` with a short label on top; outside the window they are left out."""
    shown = [m for m in marks if m.get("step") is not None and first <= m["step"] <= last][:12]
    line = {"color": theme.MARK, "width": 1.5, "dash": "dot"}
    shapes = [
        {"type": "line", "x0": m["step"], "x1": m["step"], "yref": "paper", "y0": 0, "y1": 1, "line": line}
        for m in shown
    ]
    notes = [
        {
            "x": m["step"],
            "yref": "paper",
            "y": 1,
            "yanchor": "bottom",
            "xanchor": "left",
            "text": "▾ " + safe(m.get("says", ""), 32),
            "showarrow": False,
            "font": {"size": 11, "color": theme.MARK},
        }
        for m in (shown if named else ())
    ]
    return {"shapes": shapes, "annotations": notes}


def nothing(why: str, height: int = 190) -> dict[str, Any]:
    """An empty figure that says why it is empty."""
    note = {
        "text": safe(why),
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
        "font": {"size": 13},
    }
    hidden = {"visible": False, "fixedrange": True}
    return {"data": [], "layout": theme.layout(height=height, xaxis=hidden, yaxis=hidden, annotations=[note])}
