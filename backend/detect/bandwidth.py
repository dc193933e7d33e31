"""Bandwidth of each group against the best that it has shown, and against its topology (contract: 70% is flagged).

Only the largest calls count: small ones measure latency. Best and present are medians over 50 calls, so that neither
one lucky call nor one bad one decides. Against its own best a group's algorithm bandwidth (payload over time) is
enough: the bus factor is constant and cancels out. What the topology gives is told by the user (``LANTERNE_LEVELS``:
``node_gb_per_s`` within a host, ``network_gb_per_s`` between hosts), and is compared with the bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.backend.detect.base import Levels
from lanterne.causal.facts import Facts, FloatArray, IntArray
from lanterne.nouns import Ruling

SHARE = 0.7
CALLS = 50
FLOOR_MS = 15.0
"""A shorter transfer is no matter of bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """``recent``: GB/s of the last calls of the largest kind; ``best``: highest median of 50; ``took_ms``: now."""

    kind: int
    op: str = ""
    recent: tuple[float, ...] = ()
    best: float = 0.0
    count: int = 0
    took_ms: float = 0.0

    @property
    def now(self) -> float:
        return float(np.median(self.recent)) if self.recent else float("nan")


def bus_factor(op: str, ranks: int) -> float | None:
    """Bus over algorithm bandwidth of an operation (nccl-tests, PERFORMANCE.md); None for operations without one.

    Bytes are those of the whole: the gathered output, the input that is scattered.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8), bus_factor("send", 2)
    (1.75, 0.875, 1.0, None)
    """
    name = op.lower().replace("_", "")
    if "allreduce" in name:
        return 2 * (ranks - 1) / ranks
    if any(part in name for part in ("allgather", "reducescatter", "alltoall")):
        return (ranks - 1) / ranks
    return 1.0 if name.startswith(("broadcast", "reduce")) else None


def follow(
    before: Speed | None, kind: IntArray, size: IntArray, took_ms: FloatArray, ops: Mapping[int, str] | None = None
) -> Speed | None:
    """The speed after more calls of a group (parallel arrays in order); a larger kind that comes often begins anew.

    ``ops`` names the operation of a kind.
    """
    usable = (size > 0) & (took_ms > 0)
    kinds, counts = np.unique(kind[usable], return_counts=True)
    often = kinds[counts >= CALLS]
    largest = int(often.max()) if len(often) else -1
    if before is None or largest > before.kind:
        if largest < 0:
            return before
        before = Speed(kind=largest, op=(ops or {}).get(largest, ""))
    mine = np.flatnonzero(usable & (kind == before.kind))
    if not len(mine):
        return before
    speed = np.array([*before.recent, *(size[mine] / took_ms[mine] / 1e6).tolist()])
    blocks = speed[: len(speed) // CALLS * CALLS].reshape(-1, CALLS)
    best = max([before.best, *np.median(blocks, axis=1).tolist()])
    return Speed(
        kind=before.kind, op=before.op, recent=tuple(speed[-CALLS:].tolist()), best=best,
        count=before.count + len(mine), took_ms=float(np.median(took_ms[mine][-CALLS:])),
    )  # fmt: skip


def rulings(speeds: Mapping[str, Speed]) -> list[Ruling]:
    """One rule a group with enough calls: its present share of the best."""
    return [
        Ruling(
            rule="bandwidth", broken=s.now < SHARE * s.best and s.took_ms >= FLOOR_MS, value=s.now / s.best,
            threshold=SHARE, unit="1",
            says=f"group {group} moves {s.now:.3g} GB/s in its largest calls, {s.best:.3g} at its best",
        )
        for group, s in sorted(speeds.items())
        if s.count >= 2 * CALLS and s.best > 0
    ]  # fmt: skip


def of_topology(speeds: Mapping[str, Speed], facts: Facts, levels: Levels) -> list[Ruling]:
    """Bus bandwidth of a group against what its links should give; nothing where the user told no figure for them."""
    found = []
    for group, s in sorted(speeds.items()):
        members = facts.groups.get(group, ())
        factor = bus_factor(s.op, len(members)) if len(members) > 1 else None
        hosts = {facts.places[r].host for r in members if r in facts.places}
        known = len(hosts) > 1 or (hosts and all(r in facts.places for r in members))
        should = levels.network_gb_per_s if len(hosts) > 1 else levels.node_gb_per_s
        if factor is None or not known or should <= 0 or s.count < CALLS:
            continue
        bus, links = factor * s.now, "between hosts" if len(hosts) > 1 else "within the host"
        found.append(
            Ruling(
                rule="bus_bandwidth", broken=bus < SHARE * should and s.took_ms >= FLOOR_MS, value=bus / should,
                threshold=SHARE, unit="1",
                says=f"group {group} moves {bus:.3g} GB/s over its links {links} in its largest {s.op} calls; "
                f"{should:g} GB/s is what you said they give",
            )
        )  # fmt: skip
    return found
