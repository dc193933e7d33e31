"""Send a simulated job to a server over OTLP/HTTP, as its ranks would."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence

import zstandard

from lanterne import wire
from lanterne.collector.sim.events import identity as identity_of
from lanterne.collector.sim.events import to_events
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.errors import LanterneError, UsageError
from lanterne.nouns import Event, Identity

BATCH_EVENTS = 2_000
TIMEOUT_S = 60.0


def parse_fault(text: str) -> tuple[str, int, int]:
    """``KIND:RANK:STEP`` -> its parts. Raises :class:`UsageError` on anything else."""
    try:
        kind, rank, step = text.split(":")
        return kind, int(rank), int(step)
    except ValueError:
        raise UsageError(f"--fault {text!r}: write KIND:RANK:STEP, for example slow_compute:3:80") from None


def post(endpoint: str, identity: Identity, events: Sequence[Event], token: str = "") -> None:
    """Post one rank's events; raises :class:`LanterneError` when the server does not take them."""
    encoded = wire.encode(identity, events)
    squeeze = zstandard.ZstdCompressor(level=1)
    for signal in ("traces", "metrics", "logs"):
        request = getattr(encoded, signal)
        if request is None:
            continue
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        body = squeeze.compress(request.SerializeToString())
        call = urllib.request.Request(f"{endpoint.rstrip('/')}/v1/{signal}", data=body, headers=headers)
        try:
            urllib.request.urlopen(call, timeout=TIMEOUT_S).close()
        except (urllib.error.URLError, OSError) as error:
            raise LanterneError(f"{endpoint}: {error}; is `lanterne serve` running there?") from error


def send_simulated(
    *, faults: Sequence[str], shape: tuple[int, int, int], steps: int, seed: int, endpoint: str, job: str
) -> int:
    """Simulate and send; returns the number of events. ``shape`` is (dp, pp, tp)."""
    dp, pp, tp = shape
    parsed = tuple(parse_fault(f) for f in faults if f != "none")
    made = simulate(Shape(dp=dp, pp=pp, tp=tp, steps=steps), parsed, seed=seed, name=job)
    waiting: dict[int, list[Event]] = {}
    sent = 0
    for identity, _, events in to_events(made):
        mine = waiting.setdefault(identity.rank, [])
        mine += events
        if len(mine) >= BATCH_EVENTS:
            post(endpoint, identity, mine)
            sent += len(mine)
            mine.clear()
    for rank, mine in waiting.items():
        if mine:
            post(endpoint, identity_of(made, rank), mine)
            sent += len(mine)
    return sent
