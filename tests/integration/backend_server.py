"""A real `lanterne serve` in a process of its own, and spans to send to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import httpx

from lanterne import wire
from lanterne.backend.store.events import EventStore
from lanterne.nouns import Event, Identity, Kind
from lanterne.settings import ServerSettings

PROTOBUF = {"content-type": "application/x-protobuf"}
RANKS = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    data: Path, *, until: str = "/readyz", before: Callable[[], None] | None = None, **settings: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server and its base URL, when ``until`` answers 200; ``settings`` go to its environment.

    ``before`` runs in its process before it starts.
    """
    port = free_port()
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(port), "--grpc-port", "0", "--data", str(data)]
    env = {**os.environ, "LANTERNE_DASHBOARD": "0", "LANTERNE_MEMORY_LIMIT": "1GB", "OMP_NUM_THREADS": "1", **settings}
    output = subprocess.DEVNULL if before else None  # a bound on files would hold for captured output, too
    process = subprocess.Popen(command, env=env, preexec_fn=before, stdout=output, stderr=output)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended before it was ready"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{base}{until}", timeout=1).status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("the server did not come up")
        yield process, base
    finally:
        process.kill()
        process.wait()


def span(n: int) -> Event:
    return Event(
        kind=Kind.PHASE, name="forward", unix_ns=10**18 + n, duration_ns=5, monotonic_ns=n + 1, lamport=n, sequence=n,
        step=n // 4,
    )  # fmt: skip


def body(rank: int, numbers: range, job: str = "crash") -> bytes:
    """Spans with these sequences of one rank of a job."""
    who = Identity(job=job, rank=rank, world_size=RANKS, host="h")
    request = wire.encode(who, [span(n) for n in numbers]).traces
    assert request is not None
    raw: bytes = request.SerializeToString()
    return raw


def stored(data: Path) -> dict[int, list[int]]:
    """Sequences in the file by rank, in order, repeats kept, after what a killed server left in its journal."""
    EventStore.open(ServerSettings(data=str(data), memory_limit="1GB")).close()
    with duckdb.connect(str(next(data.glob("*.duckdb"))), read_only=False) as file:
        rows = file.execute("SELECT rank, sequence FROM spans WHERE job = 'crash' ORDER BY ALL").fetchall()
    found: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
    for rank, sequence in rows:
        found[rank].append(sequence)
    return found


def check(data: Path, sent: dict[int, set[int]]) -> None:
    """Every acknowledged row is in the file of a server that has ended, and none is there twice."""
    for rank, found in stored(data).items():
        assert len(found) == len(set(found)), f"rank {rank}: stored twice"
        assert sent[rank] <= set(found), f"rank {rank}: acknowledged and lost"
