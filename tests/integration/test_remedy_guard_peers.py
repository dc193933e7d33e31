"""The guards that need peers, on two real gloo ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("remedy_guards.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("guards")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda r: int(r["rank"]))


def test_a_sick_network_is_waited_out_without_a_lost_gradient(ranks: list[dict[str, Any]]) -> None:
    first, second = (r["breaker"] for r in ranks)
    assert first == second  # the same states and steps at the same time, and the same parameters to the last bit
    states = first["states"]
    assert (states[0], states[25], states[-1]) == ("closed", "open", "closed")
    assert "trial" in states
    assert set(range(20)) <= set(first["stepped"])
    assert len(first["stepped"]) < len(states)
    assert first["sum"] == pytest.approx(ranks[0]["alone"], rel=1e-4)


def test_replicas_update_together_or_not_at_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["updates"] == ranks[1]["updates"]
    said = ranks[0]["updates"]
    assert (said[0], said[3]) == ("committed", "committed")
    assert "replicas hold different gradients" in said[1]
    assert "not finite" in said[2]
    assert said[4] == str([-0.5, -1.0, -1.5])


def test_a_checkpoint_that_one_rank_cannot_read_is_used_by_none(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["checkpoint"] == {"step": 20, "rank": rank, "left": [10, 20], "value": 20.0}
