"""``lanterne demo``: real torchrun, real faults, the verdict read from stdout as a user's script would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lanterne.collector.sim.inject import KINDS, RIGHT_CAUSE

ROOT = Path(__file__).resolve().parents[2]
CULPRIT = 2
EVERY_RUN = ("slow-rank", "slow-backward", "slow-data", "lr-jump", "nan", "hang")
"""The kinds that the default suite runs; the others are ``heavy``."""
JOB_WIDE = {"lr-jump"}


def demo(fault: str, *more: str, seed: int = 1234) -> tuple[int, dict[str, Any]]:
    """Run the demo; returns exit code and report."""
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", fault, "--rank", str(CULPRIT), "--ranks", "4",
        "--seed", str(seed), "--exit", "--json", *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ})
    assert done.returncode in {0, 1}, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return done.returncode, report


def first_cause(report: dict[str, Any]) -> dict[str, Any]:
    causes = [c for i in report["incidents"] for c in i["causes"]]
    assert causes, report["verdict"]
    found = causes[0]
    assert isinstance(found, dict)
    return found


def check(fault: str, report: dict[str, Any], code: int) -> None:
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, schema)
    assert code == 1
    assert report["healthy"] is False
    cause = first_cause(report)
    assert cause["category"] == RIGHT_CAUSE[fault], report["verdict"]
    assert cause["subject"]["rank"] == (None if fault in JOB_WIDE else CULPRIT), report["verdict"]
    assert cause["evidence"]
    assert all(e["says"] for e in cause["evidence"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", EVERY_RUN)
def test_the_injected_fault_is_named(fault: str) -> None:
    code, report = demo(fault)
    check(fault, report, code)
    if fault == "hang":
        incident = report["incidents"][0]
        onset, named = (datetime.fromisoformat(incident["ledger"][k]) for k in ("onset", "diagnosed"))
        assert (named - onset).total_seconds() < 10
        assert "threading.py" in json.dumps(first_cause(report)["evidence"])


@pytest.mark.slow
def test_a_healthy_run_raises_nothing() -> None:
    code, report = demo("none")
    assert (code, report["healthy"], report["incidents"]) == (0, True, [])
    assert (report["ranks_seen"], report["ranks_expected"]) == (4, 4)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_raise_nothing_five_times_out_of_five(seed: int) -> None:
    code, report = demo("none", seed=seed)
    assert (code, report["healthy"]) == (0, True), report["verdict"]


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fault", [k for k in KINDS if k != "none"])
def test_every_fault_is_named_with_every_seed(fault: str, seed: int) -> None:
    code, report = demo(fault, seed=seed)
    check(fault, report, code)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fault", "gremlins"], "choose one of"),
        (["--rank", "9"], "outside 0 to 3"),
        (["--ranks", "1"], "at least 2"),
        (["--onset", "500"], "outside 1 to"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "lanterne", "demo", "--exit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
