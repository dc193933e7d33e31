"""The closed loop on a real 4-rank gloo job: a rate that jumped is set back on all ranks at one step, and verified."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def demo(data: Path, policy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report of ``lanterne demo --fault lr-jump`` and the commands that its server wrote."""
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", "lr-jump", "--rank", "2", "--ranks", "4",
        "--steps", "300", "--policy", policy, "--data", str(data), "--exit", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 1, done.stderr
    with sqlite3.connect(data / "control.sqlite") as control:
        control.row_factory = sqlite3.Row
        rows = [dict(row) for row in control.execute("SELECT * FROM commands ORDER BY counter")]
    return json.loads(done.stdout), rows


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_jumped_rate_is_set_back_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    report, commands = demo(tmp_path / "data", "auto")
    found = next(i for i in report["incidents"] if i["causes"][0]["category"] == "lr_misconfigured")
    stamps = [found["ledger"][name] for name in ("onset", "detected", "diagnosed", "decided", "acted", "verified")]
    assert stamps == sorted(stamps)
    order = next(c for c in commands if c["action"] == "set_lr")
    applied = [r for r in json.loads(order["results"]) if r["phase"] == "applied"]
    assert order["state"] == "applied"
    assert sorted(r["rank"] for r in applied) == [0, 1, 2, 3]
    assert len({(int(r["step"]), r["before"], r["after"]) for r in applied}) == 1
    before, after = (json.loads(applied[0][key])["lr"] for key in ("before", "after"))
    assert before == pytest.approx(12 * after, rel=0.01)
    assert not [c for c in commands if c["action"] == "undo"]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_with_observe_nothing_is_touched_and_the_report_says_what_would_have_been_done(tmp_path: Path) -> None:
    report, commands = demo(tmp_path / "data", "observe")
    found = next(i for i in report["incidents"] if i["causes"][0]["category"] == "lr_misconfigured")
    assert not commands
    assert found["causes"][0]["remedy"]["action"] == "set_lr"
    assert "acted" not in found["ledger"]
