"""`lanterne agent` as a process beside a real server: what it finds on a host is a cause of the job that runs there.

The host's files are a stand-in tree, so that the quota and the neighbour are the same on every machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lanterne import wire
from lanterne.nouns import Event, Identity, Kind

pytestmark = pytest.mark.slow
STAT = "nr_periods {p}\nnr_throttled {t}\nthrottled_usec {us}\n"
CPU = "cpu  {user} 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\nprocs_running 9\n"


@contextlib.contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    found = subprocess.Popen([sys.executable, "-m", "lanterne", *arguments], env={**os.environ, **environment})
    try:
        yield found
    finally:
        found.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            found.wait(20)
        found.kill()
        found.wait()


def until(what: Callable[[], Any], seconds: float = 150.0) -> Any:
    """What ``what`` gives as soon as it is something; fails when it never is."""
    for _ in range(int(seconds / 0.2)):
        with contextlib.suppress(httpx.HTTPError):
            if found := what():
                return found
        time.sleep(0.2)
    raise AssertionError("it never came")


class Tree(threading.Thread):
    """/proc and /sys of a host whose one group is throttled and whose cores a neighbour takes; it goes on by itself."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root, self.done, self.n = root, threading.Event(), 0
        self.write()

    def put(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)

    def write(self) -> None:
        n = self.n = self.n + 1
        self.put("sys/fs/cgroup/cgroup.controllers", "cpu memory io")
        self.put("sys/fs/cgroup/pods/train/cpu.stat", STAT.format(p=100 * n, t=80 * n, us=200_000 * n))
        self.put("proc/stat", CPU.format(user=40 * n))
        self.put("proc/90/stat", f"90 (intruder) R 1 1 1 0 -1 0 0 0 0 0 {40 * n} 0 0 0\n")

    def run(self) -> None:
        while not self.done.wait(0.2):
            self.write()


def job(base: str, host: str) -> None:
    """A healthy job of two ranks on ``host``: sixty steps that end now."""
    now = time.time_ns()
    for rank in range(2):
        who = Identity(job="trained", rank=rank, local_rank=rank, world_size=2, host=host, pid=10 + rank)
        events = []
        for step in range(60):
            at = now + (step - 60) * 100_000_000
            events.append(
                Event(
                    kind=Kind.STEP, name="step", step=step, unix_ns=at, monotonic_ns=at, duration_ns=99_000_000,
                    sequence=step, lamport=step,
                )
            )  # fmt: skip
        body = wire.encode(who, events).traces
        assert body is not None
        headers = {"content-type": "application/x-protobuf"}
        assert httpx.post(f"{base}/v1/traces", content=body.SerializeToString(), headers=headers).status_code == 200


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    with contextlib.suppress(OSError):
        (folder / "fill").write_bytes(bytes(2 << 20))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_what_the_agent_finds_on_a_host_is_a_cause_of_the_job_there(tmp_path: Path, full_disk: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base, host = f"http://127.0.0.1:{port}", "node7"
    tree = Tree(tmp_path / "host")
    tree.start()
    quiet = {"LANTERNE_DASHBOARD": "0", "LANTERNE_DIR": str(tmp_path / "box")}
    serve = ("serve", "--port", str(port), "--grpc-port", "0", "--data", str(tmp_path / "data"))
    watch = ("agent", "--interval", "0.5", "--endpoint", base, "--root", str(tree.root), "--path", str(full_disk))
    with process(*serve, **quiet):
        until(lambda: httpx.get(f"{base}/readyz", timeout=1).status_code == 200)
        with process(*watch, **quiet, LANTERNE_NODE=host):
            told = until(lambda: rows(base, "host_finding", 3))
            job(base, host)
            causes = until(lambda: of_job(base, 2))
            absent = rows(base, "source_absent", 1)
    tree.done.set()
    assert {(r["category"], r["source"]) for r in told if r["host"] == host} == {
        ("host_contention", "cgroup"), ("host_contention", "neighbours"), ("storage_slow", "disk_space"),
    }  # fmt: skip
    assert {(c["category"], c["subject"]["host"]) for c in causes} == {
        ("host_contention", host), ("storage_slow", host),
    }  # fmt: skip
    says = " ".join(e["says"] for c in causes for e in c["evidence"])
    assert "/pods/train" in says or "intruder" in says
    assert str(full_disk) in says
    remedies = " ".join(c["remedy"]["says"] for c in causes)
    assert f"Free space on {full_disk} of {host}" in remedies
    assert "Raise or remove the CPU limit of /pods/train" in remedies or "Move intruder" in remedies
    assert {r["source"] for r in absent} >= {"psi", "infiniband", "kernel_log", "gpu"}
    assert all(r["reason"] for r in absent)


def rows(base: str, name: str, least: int) -> list[dict[str, str]]:
    sql = f"SELECT attributes FROM logs WHERE name = '{name}'"
    answer = httpx.post(f"{base}/api/v1/query", json={"sql": sql, "job": "nodes"}, timeout=30).json()
    found = [dict(r[0]) for r in answer.get("rows", [])]
    return found if len(found) >= least else []


def of_job(base: str, least: int) -> list[dict[str, Any]]:
    answer = httpx.get(f"{base}/api/v1/jobs/trained/incidents", timeout=30).json()
    found = [cause for incident in answer.get("items", []) for cause in incident["causes"]]
    return found if len(found) >= least else []
