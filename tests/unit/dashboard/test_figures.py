"""Figures are pure: API JSON in, a figure out, truthful about gaps and safe with hostile text."""

from __future__ import annotations

import base64
import json
from types import ModuleType
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from lanterne.dashboard.figures import bars, causal, curves, heat, lanes


def cells(figure: dict[str, Any]) -> Any:
    z = figure["data"][0]["z"]
    shape = tuple(int(n) for n in z["shape"].split(","))
    return np.frombuffer(base64.b64decode(z["bdata"]), dtype="<f4").reshape(shape)


def test_the_heat_map_holds_what_the_api_said(double: ModuleType) -> None:
    answer = double.heatmap()
    figure = heat.heatmap(answer)
    drawn = cells(figure)
    assert drawn.shape == (8, 200)
    assert np.isnan(drawn[1, 7])
    assert drawn[double.LATE, 100] == pytest.approx(answer["values"][double.LATE][100])
    assert list(figure["data"][0]["y"]) == answer["ranks"]
    assert list(figure["data"][0]["x"]) == answer["steps"]


def test_one_late_rank_in_a_thousand_is_at_the_bright_end() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, (1024, 400)).astype(np.float32)
    values[417, 200:] += 150
    low, high = heat.limits(values)
    assert values[417, 300] >= high > 8
    assert low < 0


def test_noise_stays_dark() -> None:
    values = np.random.default_rng(2).normal(100, 1, (64, 400)).astype(np.float32)
    low, high = heat.limits(values)
    bright = (values - low) / (high - low) > 0.6
    assert bright.mean() < 0.001


def test_what_all_ranks_share_does_not_stretch_the_scale() -> None:
    values = np.random.default_rng(3).normal(100, 1, (8, 200)).astype(np.float32)
    values[:, 99] += 1_000
    values[3, 60:] += 34
    assert heat.limits(values)[1] < 200


@pytest.mark.parametrize("values", [[], [[None, None]], [[5.0]], [[1.0, 1.0]]])
def test_the_scale_is_never_empty(values: list[list[float | None]]) -> None:
    low, high = heat.limits(heat.matrix({"values": values}))
    assert low < high


def test_an_empty_heat_map_says_so() -> None:
    blank = heat.heatmap({"metric": "wait_ms", "unit": "ms", "ranks": [0], "steps": [0], "values": [[None]]})
    assert blank["data"] == []
    assert "it takes collectives" in blank["layout"]["annotations"][0]["text"]
    figure = heat.heatmap({"metric": "x", "unit": "ms", "ranks": [], "steps": [], "values": []})
    assert figure["data"] == []
    assert "no x was measured yet" in figure["layout"]["annotations"][0]["text"]


def test_marks_outside_the_window_are_left_out() -> None:
    found = heat.step_marks([{"step": 5, "says": "in"}, {"step": 50, "says": "out"}, {"says": "nowhere"}], 0, 10)
    assert [s["x0"] for s in found["shapes"]] == [5]


def test_hostile_text_reaches_no_figure_as_markup(double: ModuleType) -> None:
    evil = double.EVIL
    answer = double.metric("training.loss") | {"unit": evil, "name": evil}
    answer["series"][0]["label"] = evil
    step = double.step()
    step["lanes"][0]["spans"][0]["name"] = evil
    step["lanes"][0]["spans"][2]["group"] = evil
    figures = [
        curves.curve(answer, marks=[{"step": 3, "says": evil}]),
        heat.heatmap(double.heatmap() | {"unit": evil}, [{"step": 3, "says": evil}]),
        lanes.swim_lanes(step),
        bars.goodput({"goodput": {"productive_s": 1.0, "badput": {evil: 2.0}}}),
        bars.bandwidth([{"group": evil, "op": evil, "bytes": 8, "transfer_ms": 1.0, "step": 0}], []),
        heat.nothing(evil),
    ]
    for figure in figures:
        text = json.dumps(figure)
        assert "<img" not in text
        assert "&lt;img" in text or "onerror" not in text


@pytest.mark.parametrize("aggregate", ["median", "none"])
def test_curves_are_figures_that_plotly_takes(double: ModuleType, aggregate: str) -> None:
    answer = double.metric("training.loss", aggregate)
    figure = curves.curve(answer, raw=double.metric("training.loss"), log=True, axis="time")
    go.Figure(figure)
    assert len(figure["data"]) == len(answer["series"]) + 1
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert None in figure["data"][-1]["y"]
    assert figure["data"][-1]["connectgaps"] is False


def test_a_flat_line_is_not_blown_up() -> None:
    answer = {
        "name": "training.loss_scale",
        "unit": "1",
        "series": [{"step": [0, 1], "time": [], "value": [65536.0] * 2}],
    }
    low, high = curves.curve(answer)["layout"]["yaxis"]["range"]
    assert high - low > 10_000


def test_all_figures_are_taken_by_plotly(double: ModuleType) -> None:
    go.Figure(heat.heatmap(double.heatmap()))
    go.Figure(lanes.swim_lanes(double.step()))
    go.Figure(bars.goodput({"goodput": {"productive_s": 80.0, "badput": {"straggler": 20.0}}}))
    go.Figure(bars.phases([{"step": 1, "phases": {"forward": 3.0, "backward": None}}]))
    calls = [
        {"group": "0-3", "op": "all_reduce", "bytes": 10**k, "transfer_ms": 2.0**k, "step": k} for k in range(2, 8)
    ]
    fits = [{"group": "0-3", "op": "all_reduce", "alpha_us": 12.0, "beta_gbps": 4.0}]
    go.Figure(bars.bandwidth(calls, fits))


def test_lanes_split_a_collective_into_waiting_and_moving(double: ModuleType) -> None:
    figure = lanes.swim_lanes(double.step())
    by_name = {trace["name"]: trace for trace in figure["data"]}
    waits, moves = by_name["waits for another rank"], by_name["collective moves data"]
    assert "rank 3" not in waits["y"]
    assert waits["x"] == [pytest.approx(38.0)] * 7
    assert len(moves["y"]) == 8
    assert f"for rank {double.LATE}" in waits["customdata"][0]
    assert by_name["critical path"]["y"] == [f"rank {double.LATE}"] * 4
    assert "41 µs" in figure["layout"]["xaxis"]["title"]["text"]


def test_a_thousand_lanes_are_cut_to_those_worth_a_look(double: ModuleType) -> None:
    answer = double.step(ranks=1024)
    shown = lanes.swim_lanes(answer)["layout"]["yaxis"]["categoryarray"]
    assert len(shown) <= 24
    assert f"rank {double.LATE}" in shown


def test_the_graph_runs_from_cause_to_effect(double: ModuleType) -> None:
    found = causal.elements(double.GRAPH)
    at = {e["data"]["id"]: e["position"]["x"] for e in found if "position" in e}
    assert at["c"] < at["l"] < at["w"] < at["s"]
    assert {e["data"]["role"] for e in found if "position" in e} == {"cause", "link", "effect", "ruled_out"}
    refused = [e["data"]["source"] for e in found if e["data"].get("refused")]
    assert refused == ["n"]


def test_many_waiting_ranks_are_drawn_as_one() -> None:
    nodes = [{"id": "c", "role": "cause", "label": "c"}] + [
        {"id": f"w{r}", "role": "effect", "label": f"rank {r} waits", "rank": r, "metric": "wait"} for r in range(1023)
    ]
    edges = [{"source": "c", "target": f"w{r}", "says": "waits"} for r in range(1023)]
    drawn = causal.elements({"nodes": nodes, "edges": edges})
    labels = [e["data"]["label"] for e in drawn if "position" in e]
    assert len(labels) == 2
    assert "1023 ranks" in labels[1]


def test_a_cycle_in_the_graph_ends() -> None:
    depth = causal.layers(["a", "b", "c"], [("a", "b"), ("b", "c"), ("c", "a")])
    assert set(depth) == {"a", "b", "c"}
