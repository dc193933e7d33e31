"""Shares of time: goodput and its losses, phases of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.dashboard import theme
from lanterne.dashboard.figures.heat import nothing
from lanterne.dashboard.words import group as words_group
from lanterne.dashboard.words import milliseconds, percent, plain, safe, seconds

TALL = 3.0
"""A step this many times taller than nine in ten of the others does not set the axis."""


def goodput(answer: Mapping[str, Any]) -> dict[str, Any]:
    """One bar of the job's time: productive first, then what was lost by cause (``GET jobs/{id}/sla``)."""
    found = answer.get("goodput") or {}
    productive = float(found.get("productive_s") or 0.0)
    lost = sorted(((k, float(v)) for k, v in (found.get("badput") or {}).items() if v), key=lambda kv: -kv[1])
    whole = productive + sum(v for _, v in lost)
    if whole <= 0:
        return nothing("no time is accounted for yet", 110)
    colours = [theme.GREEN, theme.ORANGE, theme.RED, theme.PINK, theme.SKY, theme.GREY, "#a08b00"]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [value],
            "name": f"{safe(plain(name))} {percent(value / whole)}",
            "marker": {"color": colours[min(i, len(colours) - 1)], "line": {"width": 0}},
            "hovertemplate": f"{safe(plain(name))}<br><b>{seconds(value)}</b> of {seconds(whole)}<extra></extra>",
        }
        for i, (name, value) in enumerate([("productive", productive), *lost])
    ]
    hidden = {"visible": False, "fixedrange": True}
    return {
        "data": traces,
        "layout": theme.layout(
            height=120,
            barmode="stack",
            bargap=0.2,
            legend={"traceorder": "normal"},
            xaxis={**hidden, "range": [0, whole]},
            yaxis=hidden,
            margin={"l": 4, "r": 4, "t": 44, "b": 4},
        ),
    }


def phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median time of each phase over steps, stacked (``GET jobs/{id}/steps``)."""
    if not steps:
        return nothing("no steps here")
    names = [n for n in theme.PHASES if any((s.get("phases") or {}).get(n) for s in steps)]
    traces = [
        {
            "type": "bar",
            "name": plain(name),
            "x": [s["step"] for s in steps],
            "y": [(s.get("phases") or {}).get(name) for s in steps],
            "marker": {"color": theme.PHASES[name], "line": {"width": 0}},
            "hovertemplate": f"step %{{x}}<br>{plain(name)} <b>%{{y:.3~g}} ms</b><extra></extra>",
        }
        for name in names
    ]
    totals = sorted(sum(v for v in (s.get("phases") or {}).values() if v) for s in steps)
    most, usual = totals[-1], totals[int(0.9 * (len(totals) - 1))]
    top = 1.5 * usual if most > TALL * usual > 0 else most * 1.05 or 1.0
    return {
        "data": traces,
        "layout": theme.layout(
            height=230,
            barmode="stack",
            bargap=0.0,
            legend={"traceorder": "normal"},
            annotations=_cut(top, most),
            margin={"l": 56, "r": 14, "t": 40, "b": 36},
            xaxis={"title": {"text": "step", "standoff": 8}},
            yaxis={"title": {"text": "ms", "standoff": 6}, "range": [0, top]},
            uirevision="phases",
        ),
    }


def _cut(top: float, most: float) -> list[dict[str, Any]]:
    """A word where the axis ends below the tallest step, so that the others can be read."""
    if most <= top:
        return []
    text = f"taller steps are cut off; the tallest takes {milliseconds(most)}"
    return [
        {
            "text": text, "xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom",
            "showarrow": False, "font": {"size": 11},
        }
    ]  # fmt: skip


def bandwidth(calls: Sequence[Mapping[str, Any]], fits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Transfer time over bytes, a colour a group, with each group's fitted alpha + bytes / beta."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        if call.get("transfer_ms") and call.get("bytes"):
            groups.setdefault(str(call["group"]), []).append(call)
    if not groups:
        return nothing("no collective with bytes and a transfer time was recorded")
    data: list[dict[str, Any]] = []
    for i, (group, found) in enumerate(sorted(groups.items())[:12]):
        colour = theme.LINES[i % len(theme.LINES)]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": safe(words_group(group), 40),
                "x": [c["bytes"] for c in found],
                "y": [c["transfer_ms"] for c in found],
                "marker": {"color": colour, "size": 6, "opacity": 0.6},
                "customdata": [
                    f"step {c.get('step')} {safe(c.get('op'), 30)}, last to enter: rank {c.get('last_rank')}"
                    for c in found
                ],
                "hovertemplate": "%{customdata}<br>%{x:.3s}B in <b>%{y:.3~g} ms</b><extra></extra>",
            }
        )
        data += [_fit(f, found, colour) for f in fits if str(f.get("group")) == group and f.get("beta_gbps")]
    return {
        "data": data,
        "layout": theme.layout(
            height=330,
            margin={"l": 60, "r": 14, "t": 40, "b": 44},
            xaxis={"type": "log", "title": {"text": "bytes", "standoff": 8}, "exponentformat": "SI"},
            yaxis={"type": "log", "title": {"text": "transfer, ms", "standoff": 8}},
            uirevision="bandwidth",
        ),
    }


def _fit(fit: Mapping[str, Any], found: Sequence[Mapping[str, Any]], colour: str) -> dict[str, Any]:
    sizes = sorted({float(c["bytes"]) for c in found})
    ends = [sizes[0], sizes[-1]]
    alpha, beta = float(fit.get("alpha_us") or 0.0) / 1e3, float(fit["beta_gbps"]) * 1e6
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{milliseconds(alpha)} + bytes at {fit['beta_gbps']:.3g} GB/s",
        "x": ends,
        "y": [alpha + s / beta for s in ends],
        "line": {"color": colour, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }
