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

from lanterne.collector.sources.probe import ProbeSource, totals
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.abi import Activity

SCRIPT = """
import ctypes, json, sys
from lanterne.collector.sources.probe import ProbeSource
class Host:
    told = []
    def put_event(self, name, /, body="", attributes=None): self.told.append([str(name), body, attributes])
source = ProbeSource(Host(), every=3, library=sys.argv[1])
standin = ctypes.CDLL(sys.argv[2])
standin.standin_emit.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int]
for step in range(7):
    source.boundary(step)
    if source._open_step >= 0: standin.standin_emit(10, 100, 4)
    if step == 4: source.trigger()
source.close()
print(json.dumps({"told": Host.told, "passed": source.passed_over, "absent": source.absent}))
"""


class Host:
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def put_event(self, name: str, /, body: str = "", attributes: Any = None) -> None:
        self.told.append((str(name), attributes))


def drive(tmp_path: Path, **environment: str) -> dict[str, Any]:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    result = builder.build(tests=True, device=False)
    assert result.built, result.reason
    for name in ("libcupti.so.13", "libcuda.so.1"):
        (tmp_path / name).symlink_to(Path(result.library).parent / builder.STANDIN)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), **environment}
    command = [sys.executable, "-c", SCRIPT, result.library, str(tmp_path / "libcupti.so.13")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_every_third_step_and_a_triggered_one_are_told(tmp_path: Path) -> None:
    found = drive(tmp_path)
    assert [(name, a["step"], a["kernels"]) for name, _, a in found["told"]] == [
        ("kernels", 0, 100), ("kernels", 3, 100), ("kernels", 5, 100), ("kernels", 6, 100),
    ]  # fmt: skip
    assert found["told"][0][2]["device_ms"] == pytest.approx(0.1)
    assert "25x  gemm_kernel_0<float>" in found["told"][0][1]


def test_it_steps_aside_while_another_tool_holds_cupti(tmp_path: Path) -> None:
    found = drive(tmp_path, STANDIN_BUSY="Kineto")
    assert (found["told"], found["passed"], found["absent"]) == ([], 4, "")


def test_without_a_device_it_says_so_once(tmp_path: Path) -> None:
    found = drive(tmp_path, STANDIN_CUINIT="100")
    assert [(name, a["source"]) for name, _, a in found["told"]] == [("source_absent", "cupti")]
    assert found["absent"].startswith("no-device")


def test_a_probe_that_is_not_built_is_absent_with_the_way_out(tmp_path: Path) -> None:
    host = Host()
    source = ProbeSource(host, library=tmp_path / "none.so")
    for step in range(3):
        source.boundary(step)
    assert host.told == [
        ("source_absent", {"source": "cupti", "reason": "not compiled yet; run: lanterne probe build"})
    ]


def test_totals_are_by_name_longest_first() -> None:
    one = Activity("kernel", "a", 0, 10**6, 0, 0, 0, 0, 0)
    two = Activity("kernel", "b", 0, 3 * 10**6, 0, 0, 0, 0, 0)
    assert totals([one, two, one]) == [("b", 1, 3.0), ("a", 2, 2.0)]
