"""Whatever dies in the middle of the command protocol, no two ranks ever train with different values, and all end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("remedy_trials.py")


def run(trials: int, seed: int, seconds: int, who: str = "inner") -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--trials", str(trials), "--seed", str(seed), "--who", who],
        capture_output=True, text=True, timeout=seconds, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(trials: list[dict[str, Any]]) -> None:
    assert not [t for t in trials if t["different"] or t["hung"]]
    inner = [t for t in trials if t["victim"] not in ("launcher", "backend")]
    assert any(t["applied"] for t in inner)
    assert any(-9 in t["exits"].values() for t in inner)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_ten_crashes_leave_no_half_applied_state() -> None:
    trials = run(10, 0, 880)
    assert len(trials) == 10
    check(trials)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["launcher", "backend"])
def test_a_launcher_or_backend_that_is_killed_leaves_an_order_carried_out_once_or_not_at_all(victim: str) -> None:
    trials = run(6, 3000, 880, victim)
    assert {t["victim"] for t in trials} == {victim}
    assert len(trials) == 6
    assert not [t for t in trials if t["different"] or t["hung"]]
    assert {t["state"] for t in trials} <= {"applied", "refused", ""}


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_two_hundred_crashes_leave_no_half_applied_state() -> None:
    trials = run(200, 1000, 7100, "all")
    assert len(trials) == 200
    check(trials)
    assert {t["victim"] for t in trials} == {"coordinator", "rank", "store", "launcher", "backend"}
