"""The backend dies in the middle of a run: training goes on, the spool fills, and every event is stored once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

STEPS = 160


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(port: int, data: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(port), "--grpc-port", "0", "--data", str(data)]
    process = subprocess.Popen(command)
    for _ in range(300):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=1).status_code == 200:
                return process
        except httpx.HTTPError:
            time.sleep(0.1)
    process.kill()
    raise AssertionError("the backend did not come up")


def get(port: int, path: str) -> Any:
    answer = httpx.get(f"http://127.0.0.1:{port}/api/v1{path}", timeout=20)
    return answer.json() if answer.status_code == 200 else {}


def train(port: int, folder: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "LANTERNE_ENDPOINT": f"http://127.0.0.1:{port}", "LANTERNE_JOB": "away",
        "LANTERNE_DIR": str(folder / "session"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "lanterne.collector.sim.train", f"--steps={STEPS}", f"--checkpoints={folder / 'checkpoints'}",
    ]  # fmt: skip
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_step(port: int, step: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (get(port, "/jobs/away").get("step") or -1) >= step:
            return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not seen in {seconds} s")


def steps_of(port: int, rank: int) -> list[int]:
    answer = get(port, f"/jobs/away/metrics?name=training.loss&rank={rank}&points=4000")
    series = [s for s in answer.get("series", []) if s["rank"] == rank]
    return [int(s) for s in series[0]["step"]] if series else []


@pytest.mark.slow
def test_training_goes_on_and_every_event_is_stored_once(tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    backend = serve(port, data)
    trainer = train(port, tmp_path)
    try:
        wait_for_step(port, 30, 90)
        backend.send_signal(signal.SIGKILL)
        backend.wait()
        assert trainer.wait(120) == 0
        spool = [p for p in (tmp_path / "session").rglob("spool/*") if p.is_file()]
        assert sum(p.stat().st_size for p in spool) > 0
        backend = serve(port, data)
        expected = list(range(STEPS))
        for _ in range(150):
            found = {rank: steps_of(port, rank) for rank in (0, 1)}
            if all(len(steps) >= STEPS for steps in found.values()):
                break
            time.sleep(0.3)
        assert found == {0: expected, 1: expected}, json.dumps({r: len(s) for r, s in found.items()})
    finally:
        trainer.kill()
        backend.terminate()
        backend.wait(30)
