"""Ranks by ranks: who waits for whom, and how fast the slowest link between two is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.dashboard import theme
from lanterne.dashboard.figures.heat import matrix, nothing, typed
from lanterne.dashboard.words import members, safe

SIZE = 128
HEIGHT = 380


def waits(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The matrix of ``GET jobs/{id}/waits``: row waits for column, ms a step."""
    ranks = answer.get("ranks") or []
    if not ranks:
        return nothing("nobody waited for anybody here", HEIGHT)
    return _square(matrix(answer), ranks, "ms a step", "rank %{y} waits for rank %{x}<br><b>%{z:.3~g} ms</b> a step")


def links(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bus bandwidth now between any two ranks, GB/s: of the smallest group that holds both, its slowest collective.

    A group of two is a link; of a larger one only the whole is known, so all its pairs show the same value.
    """
    found: list[tuple[int, float, tuple[int, ...]]] = []
    for one in groups:
        ranks = members(str(one.get("group")))
        if one.get("last_bus_gbps") is not None and len(ranks) > 1:
            found.append((len(ranks), float(one["last_bus_gbps"]), ranks))
    if not found:
        return nothing("no group's bandwidth is known yet", HEIGHT)
    many = max(ranks[-1] for _, _, ranks in found) + 1
    width = -(-many // SIZE)
    cells: npt.NDArray[np.float64] = np.full((-(-many // width),) * 2, np.nan)
    size = np.full(cells.shape, np.inf)
    for count, speed, ranks in found:
        at = np.unique(np.array(ranks) // width)
        block = np.ix_(at, at)
        nearer, same = count < size[block], count == size[block]
        cells[block] = np.where(nearer, speed, np.where(same, np.fmin(cells[block], speed), cells[block]))
        size[block] = np.minimum(size[block], count)
    if width == 1:
        np.fill_diagonal(cells, np.nan)
    says = "rank %{y} and rank %{x}<br><b>%{z:.3~g} GB/s</b>"
    return _square(cells.astype(np.float32), list(range(0, many, width)), "GB/s", says, reverse=True)


def _square(
    values: npt.NDArray[np.float32], ranks: Sequence[int], unit: str, says: str, *, reverse: bool = False
) -> dict[str, Any]:
    stops = [list(stop) for stop in theme.HEAT]
    scale = [[1.0 - at, colour] for at, colour in reversed(theme.HEAT)] if reverse else stops
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low = min(low, 0.0)
    trace = {
        "type": "heatmap",
        "x": list(ranks),
        "y": list(ranks),
        "z": typed(values),
        "zmin": low,
        "zmax": high if high > low else low + max(abs(low), 1.0) * 0.1,
        "colorscale": scale,
        "colorbar": {"title": {"text": safe(unit), "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"{says}<extra></extra>",
        "hoverongaps": False,
    }
    return {
        "data": [trace],
        "layout": theme.layout(
            height=HEIGHT,
            margin={"l": 56, "r": 8, "t": 8, "b": 44},
            xaxis={"title": {"text": "rank", "standoff": 8}, "showgrid": False},
            yaxis={"title": {"text": "rank", "standoff": 8}, "showgrid": False, "autorange": "reversed"},
            plot_bgcolor="rgba(128,138,152,0.16)",
        ),
    }
