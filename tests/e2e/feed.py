"""Send a simulated job to a running server through real OTLP/HTTP, its last step ending now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import httpx
import zstandard

from lanterne import wire
from lanterne.collector.sim.events import to_events
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape
from lanterne.nouns import Event, Identity

HEADERS = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
STEPS_A_ROUND = 20
EVENTS_A_REQUEST = 40_000
"""Below the server's bound of a request's size once encoded."""


def post(client: httpx.Client, batch: Iterable[tuple[Identity, Sequence[Event]]]) -> None:
    """Some steps of all ranks, one request a signal; raises on any answer but 200."""
    squeeze = zstandard.ZstdCompressor(level=1)
    encoded = [wire.encode(identity, events) for identity, events in batch]
    for signal in ("metrics", "logs", "traces"):
        parts = [part for one in encoded if (part := getattr(one, signal)) is not None]
        if not parts:
            continue
        for part in parts[1:]:
            parts[0].MergeFrom(part)
        body = squeeze.compress(parts[0].SerializeToString())
        client.post(f"/v1/{signal}", content=body, headers=HEADERS).raise_for_status()


def send(
    base: str, job: str, faults: Sequence[tuple[str, int, int]], *, dp: int = 4, pp: int = 1, tp: int = 1,
    steps: int = 120, seed: int = 5, step_ms: float = 120.0,
) -> int:  # fmt: skip
    """Simulate and send, all ranks in step with each other; returns the number of events."""
    shape = Shape(dp=dp, pp=pp, tp=tp, steps=steps, forward_ms=step_ms / 3, backward_ms=step_ms / 2)
    made = simulate(shape, tuple(faults), seed=seed, name=job)
    rounds: dict[int, dict[int, tuple[Identity, list[Event]]]] = {}
    for identity, step, events in to_events(made):
        at = rounds.setdefault(max(step, 0) // STEPS_A_ROUND, {})
        at.setdefault(identity.rank, (identity, []))[1].extend(events)
    last = max(e.unix_ns + e.duration_ns for ranks in rounds.values() for _, found in ranks.values() for e in found)
    shift = time.time_ns() - last
    sent = 0
    with httpx.Client(base_url=base, timeout=60.0) as client:
        for _, ranks in sorted(rounds.items()):
            batch: list[tuple[Identity, list[Event]]] = []
            waiting = 0
            for who, found in ranks.values():
                batch.append((who, [replace(e, unix_ns=e.unix_ns + shift) for e in found]))
                waiting += len(found)
                if waiting >= EVENTS_A_REQUEST:
                    post(client, batch)
                    sent, waiting, batch = sent + waiting, 0, []
            post(client, batch)
            sent += waiting
    return sent
