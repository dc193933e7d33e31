"""The host agent against a real busy neighbour, a really full file system and a really throttled cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SPIN = "import time\nend=time.monotonic()+40\nwhile time.monotonic()<end: pass"
CPU_V1 = Path("/sys/fs/cgroup/cpu")


def look(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "lanterne", "agent", "--once", "--json", *arguments]
    env = {**os.environ, "LANTERNE_NODE": "node7", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return done.returncode, found


@contextmanager
def spinning(n: int) -> Iterator[list[int]]:
    hogs = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        yield [p.pid for p in hogs]
    finally:
        for p in hogs:
            p.kill()
            p.wait()


def named(found: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    return {(f["category"], f["host"], f["source"], f["what"]) for f in found["findings"]}


def test_each_source_works_or_says_why_not(tmp_path: Path) -> None:
    _, found = look(LANTERNE_DIR=str(tmp_path))
    assert {s["source"] for s in found["sources"]} >= {
        "cpu",
        "psi",
        "cgroup",
        "disk_space",
        "kernel_log",
        "gpu",
        "ebpf",
    }
    assert all((s["state"] == "works") == (s["reason"] == "") for s in found["sources"])


def test_a_busy_neighbour_is_host_contention(tmp_path: Path) -> None:
    with spinning(3 * (os.cpu_count() or 1)):
        code, found = look(LANTERNE_DIR=str(tmp_path))
    neighbours = [f for f in found["findings"] if f["source"] == "neighbours"]
    assert code == 1
    assert [(f["category"], f["host"]) for f in neighbours] == [("host_contention", "node7")]
    assert neighbours[0]["evidence"][0]["value"] > 1
    assert neighbours[0]["evidence"][0]["unit"] == "{cpu}"


def test_a_full_file_system_is_slow_storage(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        _, before = look(LANTERNE_DIR=str(tmp_path / "a"))
        with pytest.raises(OSError, match="No space"):
            (folder / "fill").write_bytes(bytes(2 << 20))
        code, found = look(LANTERNE_DIR=str(tmp_path / "a"))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    finding = ("storage_slow", "node7", "disk_space", str(folder))
    assert finding not in named(before)
    assert finding in named(found)
    remedy = next(f["remedy"] for f in found["findings"] if f["what"] == str(folder))
    assert f"Free space on {folder} of node7" in remedy
    assert code == 1


def test_a_throttled_cgroup_is_host_contention(tmp_path: Path) -> None:
    group = CPU_V1 / f"lanterne-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("10000")
    except OSError as error:
        pytest.skip(f"no cgroup v1 CPU controller to write to: {error}")
    try:
        with spinning(1) as hogs:
            (group / "cgroup.procs").write_text(str(hogs[0]))
            code, found = look(LANTERNE_DIR=str(tmp_path))
    finally:
        group.rmdir()
    assert ("host_contention", "node7", "cgroup", f"/{group.name}") in named(found)
    assert code == 1
