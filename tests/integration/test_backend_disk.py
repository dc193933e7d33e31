"""The disk under a real `lanterne serve` fills up or cannot be written: it says so, loses nothing, and goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from backend_server import PROTOBUF, RANKS, body, check, serve

from lanterne.backend.store import migrate
from lanterne.backend.store.events import EventStore
from lanterne.errors import StoreUnavailable
from lanterne.settings import ServerSettings

ROWS = 500


def send_until(base: str, sent: dict[int, set[int]], status: int, bodies_max: int) -> httpx.Response:
    """Send bodies of rank 0 until one is answered with ``status``; a body that is refused is sent again."""
    answer = httpx.Response(0)
    with httpx.Client(base_url=base, timeout=60) as client:
        for _ in range(bodies_max):
            numbers = range(len(sent[0]), len(sent[0]) + ROWS)
            answer = client.post("/v1/traces", content=body(0, numbers), headers=PROTOBUF)
            if answer.status_code == 200:
                sent[0].update(numbers)
            if answer.status_code == status:
                return answer
            if answer.status_code == 503:
                time.sleep(0.2)
    raise AssertionError(f"no answer {status}; the last was {answer.status_code} {answer.content[:200]!r}")


@pytest.mark.slow
def test_21_a_full_disk_is_told_and_the_server_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """The bound on the size of files stands for the full disk: no right to mount one is needed."""
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    with serve(tmp_path) as (process, base):
        send_until(base, sent, 200, 1)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        refused = send_until(base, sent, 503, 60)
        assert refused.headers["retry-after"].isdigit()
        assert b"event store" in refused.content
        assert httpx.get(f"{base}/healthz").status_code == 200
        assert httpx.get(f"{base}/readyz").status_code == 503
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        send_until(base, sent, 200, 50)
        assert httpx.get(f"{base}/readyz").json()["status"] == "ready"
        assert len(sent[0]) >= 2 * ROWS
    check(tmp_path, sent)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=False)
    if done.returncode:
        pytest.skip("a small file system cannot be mounted here: it needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.heavy
def test_21_a_small_file_system_fills_up_and_gets_room_again(tmp_path: Path) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    with small_disk(tmp_path / "disk", "24m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"\1" * (14 << 20))
        data = disk / "data"
        with serve(data) as (_process, base):
            send_until(base, sent, 503, 400)
            assert httpx.get(f"{base}/healthz").status_code == 200
            ballast.unlink()
            send_until(base, sent, 200, 50)
        check(data, sent)


def told_and_waiting(base: str, why: str) -> None:
    """Up, not ready, with the reason; senders are told to come again."""
    assert httpx.get(f"{base}/healthz", timeout=20).status_code == 200
    told = httpx.get(f"{base}/readyz", timeout=20)
    assert (told.status_code, told.json()["status"]) == (503, "unavailable")
    assert why in told.json()["reason"]
    refused = httpx.post(f"{base}/v1/traces", content=body(0, range(ROWS)), headers=PROTOBUF, timeout=20)
    assert refused.status_code == 503
    assert refused.headers["retry-after"].isdigit()
    assert httpx.get(f"{base}/api/v1/jobs", timeout=20).status_code == 503


@pytest.mark.slow
def test_21_a_server_that_starts_where_nothing_can_be_written_waits_for_the_disk(tmp_path: Path) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    hard = resource.RLIM_INFINITY
    nothing = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, hard))
    with serve(tmp_path, until="/healthz", before=nothing) as (process, base):
        told_and_waiting(base, "File too large")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        send_until(base, sent, 200, 60)
        assert httpx.get(f"{base}/readyz", timeout=20).json()["status"] == "ready"
        process.terminate()
        assert process.wait(60) in (0, -15)
    check(tmp_path, sent)


@pytest.mark.heavy
def test_21_a_read_only_disk_is_told_and_left_when_it_can_be_written_again(tmp_path: Path) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    with small_disk(tmp_path / "disk", "64m") as disk:
        data = disk / "data"
        with serve(data) as (_process, base):
            send_until(base, sent, 200, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with serve(data, until="/healthz") as (_process, base):
            told_and_waiting(base, "Read-only file system")
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            send_until(base, sent, 200, 60)
        check(data, sent)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="/sys, where nobody can make folders, is Linux's")
def test_21_a_folder_that_cannot_be_made_is_told_with_the_way_out() -> None:
    settings = ServerSettings(data="/sys/kernel/lanterne")
    for use in (lambda: migrate.upgrade(settings), lambda: EventStore.open(settings)):
        with pytest.raises(StoreUnavailable, match="--data"):
            use()
    assert not os.path.exists(settings.data)
