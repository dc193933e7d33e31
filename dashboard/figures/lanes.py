"""Swim lanes: what every rank did in one step, on the job's aligned clock, with its error shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.dashboard import theme
from lanterne.dashboard.figures.heat import nothing
from lanterne.dashboard.words import milliseconds, safe

LANES_MAX = 64
"""Above this many ranks the earliest, the median and the latest are shown; bars beyond it redraw slowly."""
KERNELS_MAX = 2_000
COLLECTIVE = "training.collective"
KERNEL = "cuda.kernel"
STEP = "training.step"
KERNEL_WIDTH = {"kernel": 0.14}
"""Kernels lie within the phases that launched them: a thin line, so that both are seen."""


def _end(lane: Mapping[str, Any]) -> float:
    """When the rank was done with its own work: its last arrival at a collective, else its last span's end."""
    arrivals = [s["start_ms"] for s in lane["spans"] if s["kind"] == COLLECTIVE]
    ends = [s["start_ms"] + s["duration_ms"] for s in lane["spans"] if s["kind"] != STEP]
    return max(arrivals) if arrivals else max(ends, default=0.0)


def choose(
    lanes: Sequence[Mapping[str, Any]], critical: Sequence[int], most: int = LANES_MAX
) -> list[Mapping[str, Any]]:
    """The lanes worth a look: all of them, or the critical ranks, the latest, the median and the earliest."""
    if len(lanes) <= most:
        return sorted(lanes, key=lambda lane: lane["rank"])
    late_first = sorted(lanes, key=lambda lane: (-_end(lane), lane["rank"]))
    wanted = [lane for lane in late_first if lane["rank"] in set(critical)][:8]
    wanted += [*late_first[:10], late_first[len(late_first) // 2], late_first[-1]]
    unique = {lane["rank"]: lane for lane in wanted}
    return list(unique.values())


def swim_lanes(answer: Mapping[str, Any], most: int = LANES_MAX) -> dict[str, Any]:
    """The lanes of ``GET jobs/{id}/steps/{n}``: phases below, collectives above them split into wait and transfer."""
    lanes = answer.get("lanes") or []
    path = answer.get("critical_path") or []
    shown = choose(lanes, [p["rank"] for p in path], most)
    if not shown:
        return nothing("this step has no spans")
    names = [f"rank {lane['rank']}" for lane in shown]
    data = [*_phases(shown), *_kernels(shown), *_collectives(shown), *_path(path, names)]
    errors = [lane["error_ns"] for lane in shown if lane.get("error_ns") is not None]
    clock = f" (job clock, ±{milliseconds(max(errors) / 1e6)})" if errors else ""
    return {
        "data": data,
        "layout": theme.layout(
            height=96 + _lane_px(len(names)) * len(names),
            barmode="overlay",
            bargap=0.28,
            margin={"l": 76, "r": 14, "t": 44, "b": 44},
            xaxis={"title": {"text": f"ms since the step began{clock}", "standoff": 8}},
            yaxis={
                "categoryorder": "array",
                "categoryarray": names[::-1],
                "showgrid": False,
                "tickfont": {"size": 11 if len(names) <= 32 else 9},
            },
            uirevision="lanes",
        ),
    }


def _lane_px(many: int) -> int:
    """Height of a lane: enough to read few of them, and all of many without scrolling for long."""
    return 34 if many <= 12 else 22 if many <= 32 else 14


def _bar(name: str, colour: str, rows: Sequence[tuple[str, Mapping[str, Any], str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": safe(name),
        "y": [lane for lane, _, _ in rows],
        "base": [span["start_ms"] for _, span, _ in rows],
        "x": [span["duration_ms"] for _, span, _ in rows],
        "marker": {"color": colour, "line": {"width": 0}},
        "customdata": [text for _, _, text in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        **more,
    }


def _phases(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, list[tuple[str, Mapping[str, Any], str]]] = {}
    for lane in shown:
        for span in lane["spans"]:
            if span["kind"] in {COLLECTIVE, STEP, KERNEL}:
                continue
            name = str(span["name"])
            says = f"rank {lane['rank']} · {safe(span['name'])}<br><b>{milliseconds(span['duration_ms'])}</b>"
            rows.setdefault(name, []).append((f"rank {lane['rank']}", span, says))
    order = [*theme.PHASES, *sorted(set(rows) - set(theme.PHASES))]
    return [
        _bar(name.replace("_", " "), theme.PHASES.get(name, theme.GREY), rows[name], width=KERNEL_WIDTH.get(name, 0.62))
        for name in order
        if name in rows
    ]


def _kernels(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kernels where they were probed, a narrow bar below the phases; the longest where there are too many to draw."""
    found = [(lane["rank"], span) for lane in shown for span in lane["spans"] if span["kind"] == KERNEL]
    found.sort(key=lambda one: -one[1]["duration_ms"])
    rows = [
        (
            f"rank {rank}",
            span,
            f"rank {rank} · {safe(span['name'], 80)}<br><b>{milliseconds(span['duration_ms'])}</b>",
        )
        for rank, span in found[:KERNELS_MAX]
    ]
    name = "kernel" if len(found) <= KERNELS_MAX else f"kernel (the longest {KERNELS_MAX:,} of {len(found):,})"
    return [_bar(name, theme.PHASES["kernel"], rows, width=0.15, offset=-0.48)] if rows else []


def _collectives(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    waits: list[tuple[str, Mapping[str, Any], str]] = []
    moves: list[tuple[str, Mapping[str, Any], str]] = []
    for lane in shown:
        for span in lane["spans"]:
            if span["kind"] != COLLECTIVE:
                continue
            wait = min(max(float(span.get("wait_ms") or 0.0), 0.0), span["duration_ms"])
            whom = span.get("waited_for")
            what = (
                f"rank {lane['rank']} · {safe(span['name'])} #{span.get('sequence')} in {safe(span.get('group'), 40)}"
            )
            reason = f"<br><b>waited {milliseconds(wait)}</b>" + ("" if whom is None else f" for rank {whom}")
            split = span["start_ms"] + wait
            if wait > 0:
                waits.append((f"rank {lane['rank']}", {**span, "duration_ms": wait}, what + reason))
            rest = {"start_ms": split, "duration_ms": span["duration_ms"] - wait}
            moves.append((f"rank {lane['rank']}", rest, f"{what}<br>transfer {milliseconds(rest['duration_ms'])}"))
    found = []
    if waits:
        found.append(_bar("waits for another rank", theme.PHASES["wait"], waits, width=0.26))
    if moves:
        found.append(_bar("collective moves data", theme.PHASES["transfer"], moves, width=0.26))
    return found


def _path(path: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    rows = [p for p in path if f"rank {p['rank']}" in set(names)]
    if not rows:
        return []
    xs: list[float | None] = []
    ys: list[str | None] = []
    for part in rows:
        xs += [part["start_ms"], part["start_ms"] + part["duration_ms"]]
        ys += [f"rank {part['rank']}"] * 2
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "critical path",
            "x": xs,
            "y": ys,
            "line": {"color": theme.MARK, "width": 2.5},
            "hoverinfo": "skip",
        }
    ]
