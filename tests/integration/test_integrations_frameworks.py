"""Each framework integration on a real tiny run of the real package: what its black box shows."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lanterne.blackbox import BlackBox
from lanterne.nouns import Event, Kind

RUNS = Path(__file__).with_name("framework_runs.py")
STEPS = 20
HEAVY = pytest.mark.heavy  # DeepSpeed compiles an operator at its first run: minutes


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(name: str, tmp_path: Path) -> list[Event]:
    if importlib.util.find_spec("transformers" if name == "huggingface" else name) is None:
        pytest.skip(f"{name} is not installed; pip install 'lanterne[integrations]'")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    environ |= {
        "LANTERNE_DIR": str(tmp_path / "boxes"), "LANTERNE_JOB": name, "LANTERNE_SHIPPER": "none",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if name == "deepspeed":
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environ["MASTER_PORT"] = free_port()
    command = [sys.executable, str(RUNS), name, str(STEPS), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    box = BlackBox(tmp_path / "boxes" / name / "0", 0)
    events: list[Event] = []
    while found := box.drain():
        events += found
    return events


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        pytest.param("huggingface", {"eval", "checkpoint"}, marks=pytest.mark.slow),
        pytest.param("lightning", {"eval"}, marks=pytest.mark.slow),
        pytest.param("accelerate", {"checkpoint"}, marks=pytest.mark.slow),
        pytest.param("deepspeed", set(), marks=HEAVY),
    ],
)
def test_the_black_box_shows_phases_loss_rate_and_norm(name: str, phases: set[str], tmp_path: Path) -> None:
    events = run(name, tmp_path)
    steps = [e.step for e in events if e.kind is Kind.STEP]
    assert steps == list(range(STEPS))
    seen = {e.name for e in events if e.kind is Kind.PHASE}
    assert {"data_wait", "forward", "backward", "optimizer"} | phases <= seen
    for metric in ("training.loss", "training.lr"):
        assert sorted({e.step for e in events if e.name == metric}) == steps
    norms = [e for e in events if e.name == "training.grad_norm" and not e.attributes]
    assert norms
    assert all(e.value and e.value > 0 for e in norms)
    losses = [e.value or 0.0 for e in events if e.name == "training.loss"]
    assert sum(losses[-5:]) < sum(losses[:5])
