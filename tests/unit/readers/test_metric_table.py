"""``lanterne causes``: tables of any shape become ranked causes, or one sentence about what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from lanterne.backend.readers.metric_table import rank_table
from lanterne.cli import app
from lanterne.errors import UsageError

ROWS, ONSET = 200, 120


def columns(mark: str = "|") -> dict[str, object]:
    rng = np.random.default_rng(0)
    table: dict[str, object] = {"time": np.datetime64("2026-03-01T10:00", "ns") + np.arange(ROWS) * 60_000_000_000}
    for entity in ("web", "cart", "db", "pay"):
        late = {"db": 0, "cart": 1, "web": 1}.get(entity, ROWS)
        table[f"{entity}{mark}latency"] = 100 + rng.normal(0, 5, ROWS) + 80 * (np.arange(ROWS) >= ONSET + late)
        table[f"{entity}{mark}cpu"] = 40 + rng.normal(0, 2, ROWS)
    table["note"] = ["x"] * ROWS
    return table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arrow_csv.write_csv(arrow.table(columns()), tmp_path / "metrics.csv")
    parquet.write_table(arrow.table(columns("_")), tmp_path / "metrics.parquet")
    (tmp_path / "calls.csv").write_text("cause,effect\ndb,cart\ncart,web\npay,web\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "mark", "onset"),
    [("metrics.csv", "|", ""), ("metrics.csv", "|", "2026-03-01T12:00:00Z"), ("metrics.parquet", "_", "1.7723664e18")],
)
def test_the_callee_whose_loss_explains_the_symptom_comes_first(folder, name, mark, onset):
    found = rank_table(folder / name, onset=onset, graph=folder / "calls.csv", symptom="web|latency", mark=mark)
    assert found["causes"][0]["entity"] == "db"
    assert found["causes"][0]["path"] == ["db", "cart", "web"]
    assert abs(found["onset_row"] - ONSET) <= 1
    assert found["left_out"] == ["note"]


def test_a_table_without_time_counts_rows(folder):
    table = {k: v for k, v in columns().items() if k != "time"}
    arrow_csv.write_csv(arrow.table(table), folder / "plain.csv")
    assert rank_table(folder / "plain.csv", onset="120")["onset_row"] == 120


BAD = {
    "ragged.csv": ("a,b\n1\n2,3\n", {}, "cannot be read as a csv table"),
    "words.csv": ("a,b\nx,y\nz,w\n", {}, "no column of numbers"),
    "empty.csv": ("", {}, "cannot be read"),
    "short.csv": ("a,b\n1,2\n3,4\n", {}, "at least four are needed"),
    "twice.csv": ("a,a\n1,2\n3,4\n", {}, "occurs twice"),
    "table.xlsx": ("a", {}, "ends in .csv, .tsv or .parquet"),
    "symptom.csv": ("web,db\n" + "1,2\n" * 9, {"symptom": "wep"}, "did you mean 'web'"),
    "early.csv": ("web,db\n" + "1,2\n" * 9, {"onset": "1"}, "two rows before it"),
    "word.csv": ("web,db\n" + "1,2\n" * 9, {"onset": "soon"}, "neither a number nor a date"),
    "date.csv": ("web,db\n" + "1,2\n" * 9, {"onset": "2026-01-01"}, "has no time column"),
    "back.csv": ("time,db\n" + "".join(f"{9 - i},2\n" for i in range(9)), {"onset": "3"}, "do not rise"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_told_with_the_way_out(tmp_path, name):
    text, options, says = BAD[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says):
        rank_table(tmp_path / name, **options)


@pytest.mark.parametrize(("text", "says"), [("a,b,c\n", "two a line"), ("x,y\n", "no edge joins")])
def test_a_bad_graph_is_told(folder, text, says):
    (folder / "graph.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says):
        rank_table(folder / "metrics.csv", graph=folder / "graph.csv")


def test_the_command_prints_json_alone(folder):
    done = CliRunner().invoke(
        app, ["causes", str(folder / "metrics.csv"), "--symptom", "web", "--first", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["schema"], len(found["causes"])) == ("lanterne.ranked/1", 2)
