"""The closed loop on real 4-rank gloo jobs: each fault is mended without a human, or only told under ``observe``."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.collector.sim.inject import RIGHT_CAUSE
from lanterne.demo import REMEDIED
from lanterne.settings import ServerSettings

ACTION = {
    "lr-jump": "set_lr",
    "bad-batch": "rollback",
    "nan": "rollback",
    "overflow": "set_loss_scale",
    "gc": "tune_gc",
    "replica-divergence": "rollback",
    "hang": "restart",
    "crash": "restart",
    "oom": "restart",
    "leak": "save_checkpoint",
    "checkpoint-corrupt": "save_checkpoint",
}
STAMPS = ("onset", "detected", "diagnosed", "decided", "acted", "verified")


def demo(data: Path, fault: str, policy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report of ``lanterne demo`` and the commands that its server wrote."""
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", fault, "--rank", "2", "--ranks", "4",
        "--policy", policy, "--data", str(data), "--exit", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 1, done.stderr
    with sqlite3.connect(data / "control.sqlite") as control:
        control.row_factory = sqlite3.Row
        rows = [dict(row) for row in control.execute("SELECT * FROM commands ORDER BY counter")]
    return json.loads(done.stdout), rows


def incident(report: dict[str, Any], fault: str) -> dict[str, Any]:
    found = [i for i in report["incidents"] if i["causes"] and i["causes"][0]["category"] == RIGHT_CAUSE[fault]]
    assert found, report["verdict"]
    first: dict[str, Any] = found[0]
    assert first["causes"][0]["subject"]["rank"] == (None if fault == "lr-jump" else 2)
    return first


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", sorted(REMEDIED))
def test_the_fault_is_mended_and_verified(tmp_path: Path, fault: str) -> None:
    report, commands = demo(tmp_path / "data", fault, "auto")
    found = incident(report, fault)
    stamps = [found["ledger"][name] for name in STAMPS]
    assert stamps == sorted(stamps)
    assert found["status"] == "resolved"
    assert found["causes"][0]["remedy"]["action"] == ACTION[fault]
    order = next(c for c in commands if c["action"] == ACTION[fault])
    said = [r for r in json.loads(order["results"]) if r["phase"] == "applied"]
    assert order["state"] == "applied"
    if ACTION[fault] == "restart":
        assert [(r["rank"], r["before"], r["after"]) for r in said] == [(-1, '{"attempt": 0}', '{"attempt": 1}')]
    else:
        assert sorted(r["rank"] for r in said) == [0, 1, 2, 3]
        assert len({int(r["step"]) for r in said}) == 1
        assert not [c for c in commands if c["action"] == "undo"]
    if fault == "lr-jump":
        before, after = (json.loads(said[0][key])["lr"] for key in ("before", "after"))
        assert before == pytest.approx(12 * after, rel=0.01)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", sorted(REMEDIED))
def test_with_observe_nothing_is_touched_and_the_report_says_what_would_have_been_done(
    tmp_path: Path, fault: str
) -> None:
    report, commands = demo(tmp_path / "data", fault, "observe")
    found = incident(report, fault)
    assert not commands
    assert found["causes"][0]["remedy"]["action"]
    assert "decided" in found["ledger"]
    assert "acted" not in found["ledger"]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_remedy_that_cannot_help_is_undone_tried_twice_and_told(tmp_path: Path) -> None:
    settings = ServerSettings(data=str(tmp_path / "data"))
    migrate.upgrade(settings)
    control = ControlStore.open(settings)
    useless = {
        "causes": ["lr_misconfigured"], "mode": "auto", "action": "clip_grad_norm", "parameters": {"max_norm": 500.0},
        "cool_down_s": 0.0, "priority": 5,
        "verify": {
            "metric": "lr", "want": "near", "level": "=lr.planned", "by": 0.1, "settle": 3, "within_steps": 20,
        },
    }  # fmt: skip
    control.put_policy("lr-back-to-plan", useless, author="a test")
    control.close()
    report, commands = demo(tmp_path / "data", "lr-jump", "auto")
    tried = [c for c in commands if c["action"] == "clip_grad_norm"]
    assert [c["state"] for c in tried] == ["undone", "undone"]
    assert [json.loads(c["parameters"])["of"] for c in commands if c["action"] == "undo"] == [c["id"] for c in tried]
    found = incident(report, "lr-jump")
    assert "verified" not in found["ledger"]
    assert "was tried 2 times, 2 without success; left to a person" in found["causes"][0]["remedy"]["says"]
