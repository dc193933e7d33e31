"""Curves over steps or time: loss, gradient norm, learning rate, throughput, and what else a job logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.dashboard import theme
from lanterne.dashboard.figures.heat import nothing, step_marks
from lanterne.dashboard.words import moment, safe

LABELS: Mapping[str, str] = {
    "training.loss": "loss",
    "training.grad_norm": "gradient norm",
    "training.loss_spikeness": "loss spikeness",
    "training.lr": "learning rate",
    "training.lr_drift": "learning rate drift",
    "training.loss_scale": "loss scale",
    "training.throughput": "throughput",
    "step_ms": "step time",
    "process.memory.usage": "host memory",
    "hw.gpu.memory.usage": "GPU memory",
    "hw.gpu.memory.reserved": "GPU memory reserved",
    "hw.gpu.utilization": "GPU utilization",
    "hw.gpu.clock": "GPU clock",
    "hw.gpu.throttle": "GPU throttled",
    "hw.temperature": "temperature",
    "hw.power": "power",
    "system.cpu.utilization": "CPU utilization",
    "training.grad_norm_local": "gradient norm of each rank",
    "training.lr_planned": "learning rate planned",
    "training.tokens": "tokens",
    "training.mfu": "model FLOPs utilization",
}
LEVELS: Mapping[str, Sequence[tuple[float, str]]] = {"training.loss_spikeness": ((5.0, "spike"),)}
"""Lines drawn across a curve; the spikeness level is the detector's default."""
HEIGHT = 200


def label(name: str) -> str:
    """A metric's name as the page shows it."""
    return LABELS.get(name, name)


def curve(
    answer: Mapping[str, Any],
    *,
    raw: Mapping[str, Any] | None = None,
    axis: str = "step",
    log: bool = False,
    marks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The curve of ``GET jobs/{id}/metrics?name=``. ``raw`` is drawn as a faint shadow behind a smoothed one."""
    name = str(answer.get("name", ""))
    series = [s for s in answer.get("series") or () if s.get("value")]
    if not series:
        return nothing(f"no {label(name)} was logged here", HEIGHT)
    shadow = [
        {**_line(s, axis, theme.GREY, name), "opacity": 0.35, "hoverinfo": "skip", "showlegend": False}
        for s in ((raw or {}).get("series") or ())
        if s.get("value")
    ]
    lines = [_line(s, axis, theme.LINES[i % len(theme.LINES)], name) for i, s in enumerate(series)]
    several = len(lines) > 1
    for line in lines:
        line["showlegend"] = several
    steps = [x for s in series for x in (s["step"][0], s["step"][-1])]
    drawn = step_marks(marks, min(steps), max(steps), named=False) if axis == "step" else {}
    unit = str(answer.get("unit") or "")
    levels = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": _level_line()}
        for at, _ in LEVELS.get(name, ())
    ]
    drawn["shapes"] = [*drawn.get("shapes", []), *levels]
    figure_layout = theme.layout(
        height=HEIGHT,
        margin={"l": 56, "r": 14, "t": 10, "b": 30},
        xaxis={"type": "date" if axis == "time" else "linear"},
        yaxis={
            **_scale(series, log),
            "title": {"text": _unit(unit), "standoff": 6},
            "exponentformat": "SI",
        },
        uirevision=safe(f"{name}/{axis}"),
        hovermode="x unified" if several else "closest",
        **drawn,
    )
    return {"data": [*shadow, *lines], "layout": figure_layout}


def overlay(
    name: str, named: Sequence[tuple[str, Mapping[str, Any]]], *, axis: str = "step", log: bool = False
) -> dict[str, Any]:
    """One metric of several runs on one plot; with ``axis`` "time" each run counts seconds from its own first point."""
    found = [(text, s) for text, answer in named for s in (answer.get("series") or ())[:1] if s.get("value")]
    if not found:
        return nothing(f"no {label(name)} was logged in any of them", HEIGHT)
    traces = []
    for text, series in found:
        number = [at for at, _ in named].index(text)
        line = _line(series, "step", theme.LINES[number % len(theme.LINES)], name)
        x = _elapsed(series["time"]) if axis == "time" else series["step"]
        shown = safe(text, 40)
        hover = f"%{{x}}<br><b>%{{y:.5~g}}</b><extra>{shown}</extra>"
        traces.append({**line, "x": x, "name": shown, "hovertemplate": hover, "showlegend": False})
    unit = str(next((answer.get("unit") for _, answer in named if answer.get("unit")), ""))
    series_found = [s for _, s in found]
    return {
        "data": traces,
        "layout": theme.layout(
            height=HEIGHT,
            margin={"l": 56, "r": 14, "t": 10, "b": 36},
            xaxis={"title": {"text": "seconds since its first step" if axis == "time" else "step", "standoff": 6}},
            yaxis={**_scale(series_found, log), "title": {"text": _unit(unit), "standoff": 6}, "exponentformat": "SI"},
            uirevision=safe(f"{name}/{axis}"),
        ),
    }


def _elapsed(times: Sequence[Any]) -> list[float | None]:
    found = [moment(t) for t in times]
    first = next((t for t in found if t is not None), None)
    return [None if t is None or first is None else (t - first).total_seconds() for t in found]


def _scale(series: Sequence[Mapping[str, Any]], log: bool) -> dict[str, Any]:
    """The vertical axis; a flat line gets room around it instead of a zoom into its rounding."""
    known = [v for s in series for v in s["value"] if v is not None]
    flat = known and max(known) - min(known) <= 1e-6 * abs(max(known))
    if flat and not log and known[0]:
        ends = sorted((known[0] * 0.9, known[0] * 1.1))
        return {"type": "linear", "range": ends}
    return {"type": "log" if log else "linear"}


def _unit(unit: str) -> str:
    if unit == "By":
        return "bytes"
    if unit == "Cel":
        return "°C"
    return "" if unit in {"", "1"} else safe(unit.replace("{", "").replace("}", ""), 24)


def _level_line() -> dict[str, Any]:
    return {"color": theme.ORANGE, "width": 1, "dash": "dash"}


def _line(series: Mapping[str, Any], axis: str, colour: str, name: str) -> dict[str, Any]:
    rank, tag = series.get("rank"), series.get("label")
    who = " ".join(
        safe(part, 40) for part in (None if rank in (None, -1) else f"rank {rank}", tag or None) if part is not None
    )
    return {
        "type": "scatter",
        "mode": "lines" if len(series["value"]) > 1 else "markers",
        "x": series["time"] if axis == "time" else series["step"],
        "y": series["value"],
        "name": who or safe(label(name)),
        "line": {"width": 1.5, "color": colour},
        "connectgaps": False,
        "hovertemplate": f"%{{x}}<br><b>%{{y:.5~g}}</b><extra>{who}</extra>",
    }
