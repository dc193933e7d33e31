"""Kernel windows at step boundaries, with a stand-in driver behind the real probe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lanterne import limits
from lanterne.blackbox import BlackBox
from lanterne.collector.ring import Ring
from lanterne.collector.sources.probe import ProbeSource
from lanterne.cuda_probe import builder

SCRIPT = """
import ctypes, json, sys
from pathlib import Path
from lanterne.blackbox import BlackBox
from lanterne.collector.ring import Ring
from lanterne.collector.sources.probe import ProbeSource
folder = Path(sys.argv[3])
source = ProbeSource(Ring(folder, 0), every=3, library=sys.argv[1], cupti=sys.argv[2])
standin = ctypes.CDLL(sys.argv[2])
standin.standin_emit.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int]
standin.standin_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
for step in range(7):
    source.boundary(step)
    standin.standin_emit(10, 399, 4)
    standin.standin_kernel(b"_Z4gemmIfEvPT_", 1_000_000)
    if step == 4: source.trigger()
source.close()
told = [[e.kind, e.name, e.step, e.duration_ns, e.body, dict(e.attributes)] for e in BlackBox(folder, 0).drain()]
print(json.dumps({"told": told, "passed": source.passed_over, "absent": source.absent}))
"""


def drive(tmp_path: Path, **environment: str) -> dict[str, Any]:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    result = builder.build(tests=True, device=False)
    assert result.built, result.reason
    for name in ("libcupti.so.13", "libcuda.so.1"):
        (tmp_path / name).symlink_to(Path(result.library).parent / builder.STANDIN)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), **environment}
    command = [sys.executable, "-c", SCRIPT, result.library, str(tmp_path / "libcupti.so.13"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_every_third_step_and_a_triggered_one_are_told(tmp_path: Path) -> None:
    found = drive(tmp_path)
    windows = [(step, a) for kind, name, step, _, _, a in found["told"] if name == "kernels"]
    assert [(step, a["kernels"], a["shown"], a["lost"]) for step, a in windows] == [
        (0, 400, 256, 0), (3, 400, 256, 0), (5, 400, 256, 0), (6, 400, 256, 0),
    ]  # fmt: skip
    assert windows[0][1]["kernel_ms"] == pytest.approx(1.399)
    assert (windows[0][1]["longest"], windows[0][1]["longest_ms"]) == ("void gemm<float>(float*)", 1.0)
    assert windows[0][1]["device_ms"] <= windows[0][1]["kernel_ms"]
    body = next(body for _, name, _, _, body, _ in found["told"] if name == "kernels")
    assert "100x  gemm_kernel_0<float>" in body


def test_the_longest_kernels_are_spans_of_their_step(tmp_path: Path) -> None:
    found = drive(tmp_path)
    spans = [row for row in found["told"] if row[0] == "cuda.kernel" and row[2] == 3]
    assert len(spans) == limits.KERNEL_SPANS_MAX
    long = [row for row in spans if row[1] == "void gemm<float>(float*)"]
    assert [(row[3], row[5]["activity"], row[5]["stream"]) for row in long] == [(1_000_000, "kernel", 7)]


def test_it_steps_aside_while_another_tool_holds_cupti(tmp_path: Path) -> None:
    found = drive(tmp_path, STANDIN_BUSY="Kineto")
    assert (found["told"], found["passed"], found["absent"]) == ([], 4, "")


def test_without_a_device_it_says_so_once(tmp_path: Path) -> None:
    found = drive(tmp_path, STANDIN_CUINIT="100")
    assert [(row[1], row[5]["source"]) for row in found["told"]] == [("source_absent", "cupti")]
    assert found["absent"].startswith("no-device")


def test_a_probe_that_is_not_built_is_absent_with_the_way_out(tmp_path: Path) -> None:
    source = ProbeSource(Ring(tmp_path, 0), library=tmp_path / "none.so")
    source.trigger()
    for step in range(3):
        source.boundary(step)
    told = BlackBox(tmp_path, 0).drain()
    assert [(e.name, e.attributes["reason"]) for e in told] == [
        ("source_absent", "not compiled yet; run: lanterne probe build")
    ]


def test_a_run_without_a_device_is_told_nothing(tmp_path: Path) -> None:
    source = ProbeSource(Ring(tmp_path, 0), every=1, library=tmp_path / "none.so")
    for step in range(200):
        source.boundary(step)
    assert not source.absent
    assert BlackBox(tmp_path, 0).drain() == []
