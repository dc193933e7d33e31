"""Kernels on the job's time line, without a GPU: a stand-in CUPTI feeds a real DDP run, a real server tells of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lanterne.cuda_probe import builder

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("kernel_job.py")
TRACED, SLOW = 140, 1
"""A traced step (every 20th) after the onset at 40."""


@contextlib.contextmanager
def serve(data: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(port), "--grpc-port", "0", "--data", str(data)]
    process = subprocess.Popen(command, env={**os.environ, "LANTERNE_DASHBOARD": "0"})
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended before it was ready"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=1).status_code == 200:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def train(folder: Path, base: str) -> None:
    built, names = builder.build(tests=True, device=False), folder / "names"
    assert built.built, built.reason
    plain = builder.build(device=True)
    assert plain.built, plain.reason
    names.mkdir()
    for name in ("libcupti.so.13", "libcuda.so.1"):
        (names / name).symlink_to(Path(built.library).parent / builder.STANDIN)
    env = {
        **os.environ, "LD_LIBRARY_PATH": str(names), "LANTERNE_PROBE_CUPTI": str(names / "libcupti.so.13"),
        "LANTERNE_ENDPOINT": base, "LANTERNE_DIR": str(folder / "box"), "LANTERNE_JOB": "kernels",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(names / "libcupti.so.13")], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("kernels")
    with serve(folder / "data") as base:
        train(folder, base)
        for _ in range(150):
            answer = httpx.get(f"{base}/api/v1/jobs/kernels/steps/{TRACED}")
            if answer.status_code == 200 and any(k["kind"] == "cuda.kernel" for k in spans(answer.json(), SLOW)):
                break
            time.sleep(0.2)
        yield base, folder / "box" / "kernels" / "0"


def spans(answer: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [span for lane in answer["lanes"] if lane["rank"] == rank for span in lane["spans"]]


def test_kernels_lie_within_the_step_of_their_rank(run: tuple[str, Path]) -> None:
    found = spans(httpx.get(f"{run[0]}/api/v1/jobs/kernels/steps/{TRACED}").json(), SLOW)
    kernels = [s for s in found if s["kind"] == "cuda.kernel"]
    [step] = [s for s in found if s["kind"] == "training.step"]
    assert [k["name"] for k in kernels] == ["void attention<float>(float*)", "void gemm<float>(float*)"]
    assert [round(k["duration_ms"]) for k in kernels] == [4, 40]
    for kernel in kernels:
        assert step["start_ms"] <= kernel["start_ms"]
        assert kernel["start_ms"] + kernel["duration_ms"] <= step["start_ms"] + step["duration_ms"]
    untraced = httpx.get(f"{run[0]}/api/v1/jobs/kernels/steps/{TRACED + 1}").json()
    assert not [s for s in spans(untraced, SLOW) if s["kind"] == "cuda.kernel"]


def test_they_are_in_the_timeline_that_perfetto_opens(run: tuple[str, Path]) -> None:
    answer = httpx.get(f"{run[0]}/api/v1/jobs/kernels/timeline", params={"step": TRACED}).json()
    kernels = [e for e in answer["traceEvents"] if e.get("cat") == "cuda.kernel"]
    assert {e["pid"] for e in kernels} == {0, 1}
    assert max(e["dur"] for e in kernels) == pytest.approx(40_000, rel=0.05)


def test_diagnose_says_what_the_device_did(run: tuple[str, Path]) -> None:
    command = [sys.executable, "-m", "lanterne", "diagnose", "--json", str(run[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "its device worked" in done.stdout
    assert "void gemm<float>(float*) 40 ms" in done.stdout
