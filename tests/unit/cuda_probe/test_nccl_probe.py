"""The NCCL profiler plugin, driven as NCCL drives it, for each plugin version that it exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lanterne.cuda_probe import builder

pytestmark = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
)

DRIVER = """
import ctypes, json, sys
from lanterne.cuda_probe.nccl import NcclRing
plugin, standin, *numbers = sys.argv[1:]
mask = ctypes.CDLL(standin).standin_nccl(plugin.encode(), *map(int, numbers))
ring = NcclRing(plugin)
rows = ring.drain()
first = rows[0]
print(json.dumps({
    "mask": mask, "abi": ring.abi_version, "rows": len(rows), "lost": ring.lost, "counters": ring.counters(),
    "name": ring.communicator_name(first.communicator), "done": sum(r.done for r in rows),
    "first": [first.function, first.algorithm, first.protocol, first.bytes, first.rank, first.ranks, first.peer],
    "gpu": sorted({r.gpu_last_ns - r.gpu_first_ns for r in rows}),
    "sequences": {str(c): [r.sequence for r in rows if r.communicator == c] for c in {r.communicator for r in rows}},
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault("LANTERNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    result = builder.build(tests=True, device=False)
    assert result.built, result.reason
    return Path(result.library).parent


def drive(
    folder: Path, version: int, communicators: int, calls: int, channels: int, kernel_ns: int = 500
) -> dict[str, Any]:
    numbers = [str(n) for n in (version, communicators, calls, channels, kernel_ns)]
    command = [sys.executable, "-c", DRIVER, str(folder / builder.NCCL_LIBRARY), str(folder / builder.STANDIN_NCCL)]
    done = subprocess.run([*command, *numbers], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("version", [4, 5, 6])
def test_each_plugin_version_gives_host_and_gpu_times(folder: Path, version: int) -> None:
    out = drive(folder, version, communicators=1, calls=100, channels=4)
    assert (out["abi"], out["mask"], out["rows"], out["done"]) == (version, 2 | 4 | 64, 100, 100)
    assert out["first"] == ["AllReduce", "RING", "LL128", 4096, 3, 16, -1]
    assert out["gpu"] == [3 + 500]
    assert out["name"] == "default_pg"


def test_communicators_on_several_threads_keep_their_order(folder: Path) -> None:
    out = drive(folder, 6, communicators=8, calls=500, channels=2)
    assert out["rows"] == 4000
    assert out["counters"]["overwritten"] == 0
    assert all(seen == list(range(500)) for seen in out["sequences"].values())
    assert len(out["sequences"]) == 8


def test_the_ring_is_bounded(folder: Path) -> None:
    out = drive(folder, 5, communicators=1, calls=10_000, channels=1)
    assert out["rows"] == 8192
    assert out["lost"] == 10_000 - 8192
