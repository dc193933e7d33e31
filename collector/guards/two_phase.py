"""A parameter update that all replicas make, or none.

    update = TwoPhaseUpdate(optimizer, folder, rank=rank, world=world)
    loss.backward()                       # gradients are reduced, so all replicas hold the same ones
    outcome = update.step(step)           # "committed", or why nobody stepped

PREPARE: each rank takes a checksum of its reduced gradients and writes ``prepared`` to its log (fsync). VOTE: one
small all-reduce of (finite, checksum, -checksum); its minimum tells whether every gradient is finite and all
checksums are the same. COMMIT: the optimizer steps and ``committed`` is written; else nobody steps, the gradients are
dropped and ``aborted`` is written. All ranks decide from the same reduced numbers, so none decides alone.

A rank that dies between vote and step leaves ``prepared`` as its last word: ``in_doubt`` tells it to the next attempt,
which must start from a checkpoint and not from what is in memory. Cost: one reading of the gradients, one all-reduce
of three numbers and two fsyncs a step; for runs in which one silently different replica costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanterne.collector.votelog import VoteLog, read

if TYPE_CHECKING:
    import torch

COMMITTED = "committed"


def checksum(gradients: list[torch.Tensor]) -> tuple[bool, float]:
    """Whether all are finite, and an order-fixed float64 sum of values weighted by their position."""
    import torch

    total, finite = torch.zeros((), dtype=torch.float64), True
    for index, gradient in enumerate(gradients, start=1):
        flat = gradient.detach().reshape(-1).to(torch.float64)
        weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
        total = total + index * torch.dot(flat, weights / flat.numel()).cpu()
        finite = finite and bool(torch.isfinite(flat).all())
    return finite, float(total) if finite else 0.0


def reduce_min(values: list[float]) -> list[float]:
    """The smallest of each number over all ranks of the default process group."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    found: list[float] = tensor.tolist()
    return found


class TwoPhaseUpdate:
    """One a rank. ``folder`` takes ``update-R.wal``; ``reduce`` may replace the all-reduce (default: all ranks)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, folder: str | Path, *, rank: int = 0, world: int = 1,
        reduce: Callable[[list[float]], list[float]] | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.rank, self.world = optimizer, rank, world
        self.path = Path(folder) / f"update-{rank}.wal"
        last: dict[str, Any] = {}
        for entry in read(self.path):
            last = entry
        self.in_doubt: int | None = int(last["step"]) if last.get("kind") == "prepared" else None
        """The step whose update may or may not have been made when an earlier life of this rank ended."""
        self.log = VoteLog(self.path)
        self.reduce = reduce or (reduce_min if world > 1 else lambda values: values)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def step(self, step: int) -> str:
        """Vote on the reduced gradients and step on all ranks or on none; returns ``committed`` or the reason."""
        finite, total = checksum(self._gradients())
        self.log.write("prepared", step=step, finite=finite, checksum=total)
        everywhere, low, minus_high = self.reduce([float(finite), total, -total])
        if not everywhere:
            return self._abort(step, "a gradient is not finite")
        if low != -minus_high:
            return self._abort(step, f"replicas hold different gradients: checksums {low!r} to {-minus_high!r}")
        self.optimizer.step()
        self.log.write("committed", step=step)
        return COMMITTED

    def _abort(self, step: int, why: str) -> str:
        self.optimizer.zero_grad(set_to_none=True)
        self.log.write("aborted", step=step, why=why)
        return why

    def close(self) -> None:
        self.log.close()
