"""Colours and the one Plotly configuration of the page.

Figures do not know whether the page is light or dark: they are drawn on a transparent ground in mid tones, and
``assets/style.css`` paints their text and grid from the theme's variables, so a switch of theme fetches nothing.
Hues are those of Okabe and Ito (distinguishable with every common colour blindness); the heat scale rises in
luminance only, so it also reads in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CONFIG: Mapping[str, Any] = {
    # plotly.js 4 uploads a chart to its vendor when "Share chart" is pressed; the button is on by default
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "scrollZoom": False,
    "responsive": True,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    "toImageButtonOptions": {"format": "png", "scale": 2, "filename": "lanterne"},
}
"""Given to every ``dcc.Graph``; a test walks all pages and refuses a graph without it."""

INK = "#76808f"
GRID = "rgba(128,138,152,0.22)"
MARK = "#d1433a"
BLUE, SKY, GREEN, ORANGE, RED, PINK, GREY = "#3b8fd6", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8d99a8"

LINES: Sequence[str] = (BLUE, ORANGE, GREEN, PINK, SKY, RED, "#a08b00", GREY)
"""Colours of series, in order."""

PHASES: Mapping[str, str] = {
    "data_wait": PINK,
    "h2d": "#e3a9c7",
    "forward": SKY,
    "backward": "#2b78bd",
    "optimizer": GREY,
    "checkpoint": "#a08b00",
    "eval": "#6bbfa3",
    "compile": "#c8b560",
    "other": "#b6bdc8",
    "wait": ORANGE,
    "transfer": GREEN,
    "kernel": "#7a5ea8",
}
"""A lane's colours: the phases, then waiting in a collective, its transfer, and kernels."""

HEAT: Sequence[tuple[float, str]] = (
    (0.0, "#101c3d"),
    (0.22, "#21406f"),
    (0.45, "#566b7f"),
    (0.65, "#a88a5a"),
    (0.83, "#efb54a"),
    (1.0, "#fff2b0"),
)
"""Colour scale of the heat map, dark to light."""


def layout(**more: Any) -> dict[str, Any]:
    """A Plotly layout with the house's defaults; a dict argument is merged over the default of its key."""
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": GRID,
        "automargin": True,
        "title": {"standoff": 8},
        "tickfont": {"size": 11},
    }
    base: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 12, "family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"},
        "margin": {"l": 56, "r": 14, "t": 12, "b": 36},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
        "hoverlabel": {"font": {"size": 12}, "align": "left"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": BLUE},
        "dragmode": "zoom",
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base
