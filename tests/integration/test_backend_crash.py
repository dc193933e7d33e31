"""A real `lanterne serve` is killed under load, or told to end: what it acknowledged is there, exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import httpx
import pytest

from lanterne import wire
from lanterne.nouns import Event, Identity, Kind

PROTOBUF = {"content-type": "application/x-protobuf"}
ROWS = 40
RANKS = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(data: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(port), "--grpc-port", "0", "--data", str(data)]
    env = {**os.environ, "LANTERNE_DASHBOARD": "0", "LANTERNE_MEMORY_LIMIT": "1GB", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended before it was ready"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{base}/readyz", timeout=1).status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("the server did not come up")
        yield process, base
    finally:
        process.kill()
        process.wait()


class Sender(threading.Thread):
    """One rank that sends span batches until the server is gone; repeats what was not acknowledged before."""

    def __init__(self, base: str, rank: int, first: int, acknowledged: set[int]) -> None:
        super().__init__(daemon=True)
        self.base, self.rank, self.next, self.acknowledged = base, rank, first, acknowledged
        self.gone = False

    def run(self) -> None:
        who = Identity(job="crash", rank=self.rank, world_size=RANKS, host="h")
        with httpx.Client(base_url=self.base, timeout=20) as client:
            while not self.gone:
                numbers = range(self.next, self.next + ROWS)
                request = wire.encode(who, [span(n) for n in numbers]).traces
                assert request is not None
                try:
                    answer = client.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
                except httpx.HTTPError:
                    return
                if answer.status_code != 200:
                    self.gone = answer.status_code != 503
                    continue
                assert answer.content == b""
                self.acknowledged.update(numbers)
                self.next += ROWS


def span(n: int) -> Event:
    return Event(
        kind=Kind.PHASE, name="forward", unix_ns=10**18 + n, duration_ns=5, monotonic_ns=n + 1, lamport=n, sequence=n,
        step=n // 4,
    )  # fmt: skip


def stored(data: Path) -> dict[int, list[int]]:
    """Sequences in the file by rank, in order, repeats kept."""
    with duckdb.connect(str(next(data.glob("*.duckdb"))), read_only=False) as file:
        rows = file.execute("SELECT rank, sequence FROM spans WHERE job = 'crash' ORDER BY ALL").fetchall()
    found: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
    for rank, sequence in rows:
        found[rank].append(sequence)
    return found


def load_and_end(data: Path, sent: dict[int, set[int]], after_s: float, how: signal.Signals) -> int:
    """Serve, send from all ranks, end the server in the middle; its exit code."""
    with serve(data) as (process, base):
        senders = [Sender(base, r, len(sent[r]), sent[r]) for r in range(RANKS)]
        for sender in senders:
            sender.start()
        goal = sum(map(len, sent.values())) + RANKS * ROWS  # under load: something was acknowledged in this life
        until = time.monotonic() + 60
        while sum(map(len, sent.values())) < goal and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(after_s)
        process.send_signal(how)
        code = process.wait(60)
        for sender in senders:
            sender.gone = True
            sender.join(60)
    assert sum(map(len, sent.values())) >= goal
    return code


def check(data: Path, sent: dict[int, set[int]]) -> None:
    for rank, found in stored(data).items():
        assert len(found) == len(set(found)), f"rank {rank}: stored twice"
        assert sent[rank] <= set(found), f"rank {rank}: acknowledged and lost"


def crashes(data: Path, times: int) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    chance = random.Random(20)
    for _ in range(times):
        assert load_and_end(data, sent, chance.uniform(0, 0.5), signal.SIGKILL) == -signal.SIGKILL
        check(data, sent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_20_every_acknowledged_event_is_there_once(tmp_path: Path) -> None:
    crashes(tmp_path, 3)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_20_a_hundred_times(tmp_path: Path) -> None:
    crashes(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_24_sigterm_in_mid_batch_loses_nothing_acknowledged(tmp_path: Path) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    assert load_and_end(tmp_path, sent, 0.2, signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not list(tmp_path.glob("*.wal")), "the log was not folded into the file"
    check(tmp_path, sent)
