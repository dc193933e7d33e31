"""Runs side by side, what changed at an onset, ranks by ranks, and the administration's forms."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import numpy as np
import plotly.utils
import pytest

from lanterne.dashboard import words
from lanterne.dashboard.client import Api
from lanterne.dashboard.figures import curves, heat, lanes, matrix
from lanterne.dashboard.pages import changes, compare, policies, rank, ranks, settings, step
from lanterne.dashboard.view import parse

NOW = datetime(2026, 11, 29, 12, 10, tzinfo=UTC)


def text_of(node: Any) -> str:
    return json.dumps(node, cls=plotly.utils.PlotlyJSONEncoder)


def test_runs_are_read_once_each_and_nonsense_is_left_out() -> None:
    found = compare.runs("a,b@1,a, b@x ,,b@2," + ",".join(f"j{n}" for n in range(20)))
    assert [r.text for r in found[:3]] == ["a", "b@1", "b@2"]
    assert len(found) == compare.RUNS_MAX


def test_two_runs_stand_side_by_side(api: Api) -> None:
    found = text_of(asyncio.run(compare.live(api, parse("?jobs=llama,job-1"))))
    assert "Numbers of the runs" in found
    assert "leave out job-1" in found
    assert "Not here" not in found
    assert "Not here: nobody." in text_of(asyncio.run(compare.live(api, parse("?jobs=llama,job-1,nobody"))))


def test_only_settings_that_differ_are_rows() -> None:
    rows = compare.differences([("a", {"lr": "1", "seed": "7"}), ("b", {"lr": "2", "seed": "7", "new": "x"})])
    assert [row[0] for row in rows] == ["lr", "new"]


def test_runs_in_time_count_from_their_own_start() -> None:
    def answer(start: str, end: str) -> dict[str, Any]:
        return {"unit": "1", "series": [{"step": [4, 5], "time": [start, end], "value": [1.0, 2.0]}]}

    named = [
        ("a", answer("2026-11-29T12:00:00Z", "2026-11-29T12:00:02Z")),
        ("b<i>", answer("2026-11-30T08:00:00Z", "2026-11-30T08:00:03Z")),
    ]
    figure = curves.overlay("training.loss", named, axis="time")
    assert [line["x"] for line in figure["data"]] == [[0.0, 2.0], [0.0, 3.0]]
    assert figure["data"][1]["name"] == "b&lt;i&gt;"
    assert [line["x"] for line in curves.overlay("training.loss", named)["data"]] == [[4, 5]] * 2


def test_what_changed_names_the_phase_that_grew(api: Api, double: ModuleType) -> None:
    rows = changes.change_rows({"forward": 40.0, "backward": 60.0}, {"forward": 60.0, "backward": 60.5, "eval": 9.0})
    assert [row[0] for row in rows] == ["forward", "eval"]
    assert rows[0][3] == "+50%"
    assert rows[1][3] == "new"
    found = text_of(asyncio.run(changes.panel(api, double.incident())))
    assert "forward" in found
    assert "no healthy run" in found


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("0-7", "0-7"),
        (",".join(str(n) for n in range(0, 64, 2)), "32 ranks, 0 to 62 by 2"),
        ("0-511,600-1023", "0-511,600-1023"),
        ("0-511,600-1023,2000", "937 ranks, 0 to 2000"),
        ("0-99999999999999999999", "0-99999999999999999999"),
        ("<b>no rank set at all</b>", "<b>no rank set at all</b>"),
    ],
)
def test_a_group_is_named_shortly(name: str, short: str) -> None:
    assert words.group(name) == short


def test_a_link_shows_the_smallest_group_that_holds_both() -> None:
    groups = [
        {"group": "0-3", "last_bus_gbps": 10.0}, {"group": "0-1", "last_bus_gbps": 2.0},
        {"group": "0-1", "last_bus_gbps": 3.0}, {"group": "0-999999999999", "last_bus_gbps": 1.0},
    ]  # fmt: skip
    figure = matrix.links(groups)
    cells = heat.matrix({"values": figure["data"][0]["z"]})
    assert cells.shape == (4, 4)
    assert np.isnan(np.diag(cells)).all()
    assert cells[0, 1] == cells[1, 0] == 2.0
    assert cells[0, 2] == cells[2, 3] == 10.0
    assert matrix.links([])["data"] == []
    big = matrix.links([{"group": "0-1023", "last_bus_gbps": 5.0}])
    assert heat.matrix({"values": big["data"][0]["z"]}).shape == (128, 128)


def test_ranks_are_filtered_and_counted(api: Api) -> None:
    every = [{"rank": n, "state": "running" if n != 5 else "hung", "host": f"n{n}"} for n in range(8)]
    assert [r["rank"] for r in ranks.in_order(every)][:2] == [5, 0]
    assert ranks.counts(every) == "8 ranks: 7 running, 1 hung"
    body = text_of(asyncio.run(ranks.page(api, "llama", parse("?find=rank 3"), NOW, "")))
    assert "1 rank: 1 running" in body


def test_forms_and_replays_render(api: Api, double: ModuleType) -> None:
    replayed = text_of(asyncio.run(policies.replayed(api, "lr")))
    assert "1 incident, 1 acted on" in replayed
    assert "Revoke now" in text_of(asyncio.run(settings.tokens(api, NOW)))
    assert "End now" in text_of(asyncio.run(settings.silences(api, NOW)))


def test_what_a_repair_is_worth_stands_on_the_step(double: ModuleType) -> None:
    found = text_of(step.what_if(double.step()))
    assert "It took 126 ms; with everything normal it takes 88 ms." in found
    assert "38 ms" in found
    assert "cannot be replayed" in text_of(step.what_if({"what_if": None}))
    assert step.waits(double.step())[0][3] == "1"


def test_kernels_have_a_line_of_their_own(double: ModuleType) -> None:
    kernel = {"kind": "cuda.kernel", "name": "gemm<i>", "start_ms": 2.0, "duration_ms": 0.5}
    answer = double.step()
    answer["lanes"][0]["spans"] += [kernel] * (lanes.KERNELS_MAX + 5)
    drawn = [t for t in lanes.swim_lanes(answer)["data"] if t["name"].startswith("kernel")]
    assert len(drawn) == 1
    assert len(drawn[0]["x"]) == lanes.KERNELS_MAX
    assert "2,005" in drawn[0]["name"]
    assert "gemm&lt;i&gt;" in drawn[0]["customdata"][0]


def test_steady_growth_is_told_with_its_end() -> None:
    growing = {"series": [{"step": list(range(40)), "value": [0.5 + 0.005 * n for n in range(40)]}]}
    assert rank.steps_until(growing, 1.0) in range(59, 63)
    noise = {"series": [{"step": list(range(40)), "value": [0.5 + 0.1 * (n % 2) for n in range(40)]}]}
    assert rank.steps_until(noise, 1.0) is None
    assert rank.memory_forecast({"series": [{"step": [1], "value": [1.0]}]}, None) == ""
