"""Rows and servers for the backend's tests: real events through the real wire, a real server on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from lanterne import wire
from lanterne.backend.app import create_app
from lanterne.nouns import Event, Identity, Kind
from lanterne.settings import ServerSettings

PROTOBUF = {"content-type": "application/x-protobuf"}
ROUTES = {"traces": "spans", "metrics": "points", "logs": "logs"}


def identity(rank: int = 0, *, job: str = "demo", attempt: int = 0, world_size: int = 4) -> Identity:
    return Identity(job=job, attempt=attempt, rank=rank, local_rank=rank, world_size=world_size, host=f"h{rank // 2}")


def events(
    steps: int = 10, *, first_step: int = 0, first_sequence: int = 0, rank: int = 0, now_ns: int = 0
) -> list[Event]:
    """Steps of 100 ms with two phases, one all-reduce and the loss; then ``attached``."""
    base = (now_ns or time.time_ns()) - steps * 10**8
    found: list[Event] = []

    def add(kind: Kind, name: str, at: int, duration: int = 0, **more: Any) -> None:
        n = first_sequence + len(found)
        found.append(
            Event(
                kind=kind,
                name=name,
                sequence=n,
                lamport=n,
                unix_ns=at,
                monotonic_ns=n + 1,
                duration_ns=duration,
                **more,
            )
        )

    for step in range(first_step, first_step + steps):
        at = base + (step - first_step) * 10**8
        add(Kind.PHASE, "forward", at, 3 * 10**7, step=step)
        add(Kind.PHASE, "backward", at + 3 * 10**7, 6 * 10**7, step=step)
        call = {wire.GROUP: "0-3", wire.GROUP_SEQUENCE: step, wire.BYTES: 1 << 20, wire.DTYPE: "float32"}
        add(Kind.COLLECTIVE, "all_reduce", at + 6 * 10**7 + rank * 10**6, 10**7, step=step, attributes=call)
        add(Kind.STEP, "step", at, 10**8, step=step)
        add(Kind.METRIC, "training.loss", at, step=step, value=1.0 / (1 + step))
    add(Kind.EVENT, "attached", base, attributes={"seed": 7})
    return found


def bodies(who: Identity, found: list[Event]) -> dict[str, bytes]:
    """The OTLP bodies by route."""
    encoded = wire.encode(who, found)
    requests = {name: getattr(encoded, name) for name in ROUTES}
    return {name: request.SerializeToString() for name, request in requests.items() if request is not None}


def send(client: httpx.Client, who: Identity, found: list[Event]) -> None:
    for route, body in bodies(who, found).items():
        answer = client.post(f"/v1/{route}", content=body, headers=PROTOBUF)
        assert answer.status_code == 200, answer.content


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(data: Path, *, page: Any = None, **more: Any) -> Iterator[httpx.Client]:
    """A server of its own on a free port; the client has its base URL and, when there is one, the token."""
    settings = ServerSettings(**{"data": str(data), "port": free_port(), "grpc_port": 0, "memory_limit": "1GB", **more})
    config = uvicorn.Config(
        create_app(settings, page), host="127.0.0.1", port=settings.port, log_level="warning", server_header=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    headers = {"authorization": f"Bearer {settings.token}"} if settings.token else {}
    with httpx.Client(base_url=f"http://127.0.0.1:{settings.port}", headers=headers, timeout=120) as client:
        yield client
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
