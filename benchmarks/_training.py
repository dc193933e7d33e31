"""The loop that the collector and its rivals observe, and how a step of it is measured. Needs torch alone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Training:
    """The loop that everybody observes: three linear layers, DDP, clipping, AdamW, batches ``[8, 32]``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1_000_000)
        self.x = torch.randn(8, 32)

    def step(self, watch: Callable[[torch.Tensor], object] | None = None) -> torch.Tensor:
        """One step; ``watch(loss)`` is called when the gradients are clipped."""
        loss: torch.Tensor = self.model(self.x).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if watch is not None:
            watch(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss


def plain(training: Training, steps: int) -> Iterator[None]:
    for _ in range(steps):
        training.step()
        yield


def decile_us(steps: Iterator[None]) -> float:
    """Lower decile of the thread's CPU time a step, in us; the first tenth warms up."""
    found, last = [], time.thread_time_ns()
    for _ in steps:
        now = time.thread_time_ns()
        found.append(now - last)
        last = now
    kept = sorted(found[len(found) // 10 :])
    return kept[len(kept) // 10] / 1e3


@contextlib.contextmanager
def group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        store: Any = torch._C._distributed_c10d.FileStore(str(Path(name) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
