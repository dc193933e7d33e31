"""The training job of ``lanterne demo``: a small transformer, DDP over gloo, with the collector attached.

It is an ordinary loop: the lines that concern Lanterne are ``attach``, ``session.steps``, ``session.log``
and ``session.phase``. A fault (``inject.py``) is switched on in one rank's process from a given step on, in the
first attempt only: a later one resumes from the newest whole checkpoint, in a world without the fault.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lanterne
from lanterne.collector.identity import identity_from_environment
from lanterne.collector.sim.inject import KINDS, Injector

WIDTH, TOKENS, CLASSES, SAMPLES = 96, 24, 32, 4096


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Synthetic sequences ``[TOKENS, WIDTH]`` whose class is a fixed random projection: learnable, seeded."""

    def __init__(self, fault: Injector, batch: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, 1, WIDTH, generator=generator)
        self.y = (self.x[:, 0] @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
        self.fault, self.batch, self.made = fault, batch, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.made % self.batch == 0:
            self.fault.loading(self.made // self.batch)
        self.made += 1
        return self.x[index] + 0.1 * torch.randn(TOKENS, WIDTH), self.y[index]


class Model(nn.Module):
    """Two transformer encoder layers with a skip connection, and a classifier over the mean token."""

    def __init__(self, fault: Injector) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fault, self.step = fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.forward(self.step, self)
        logits: torch.Tensor = self.head(self.encoder(x).mean(1) + x.mean(1))
        return logits


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fault", choices=KINDS, default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--onset", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=40)
    return parser.parse_args()


def _save(
    session: lanterne.Session, fault: Injector, model: nn.Module, parts: dict[str, Any], folder: Path, step: int
) -> None:
    """Each rank saves its shard, then all agree that the checkpoint is whole and read it back."""
    path = folder / f"step-{step}" / f"rank-{dist.get_rank()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with session.phase("checkpoint"):
        fault.while_saving(step)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"step": step, "model": model.state_dict(), **state}, path)
        fault.saved(step, path)
        dist.barrier()


def _save_apart(model: nn.Module, parts: dict[str, Any], folder: Path, step: int) -> None:
    """By order: a checkpoint beside the regular ones, in a folder of its own, without waiting for other ranks."""
    path = folder / f"ordered-{step - 1}" / f"rank-{dist.get_rank()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step - 1, "model": model.state_dict(), **state}, path)


def _resume(folder: Path, model: nn.Module, parts: dict[str, Any]) -> int:
    """Load the newest checkpoint that every rank can read; returns the step to go on with, 0 without one."""
    mine: dict[int, dict[str, Any]] = {}
    for path in folder.glob(f"*-*/rank-{dist.get_rank()}.pt"):
        try:
            mine[int(path.parent.name.partition("-")[2])] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
            continue
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sorted(mine))
    common: set[int] = set.intersection(*map(set, everybody))
    if not common:
        return 0
    state = mine[max(common)]
    model.load_state_dict(state["model"])
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return max(common) + 1


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    first = identity_from_environment().attempt == 0
    fault = Injector(arguments.fault if first else "none", arguments.rank, arguments.onset, me=rank)
    torch.manual_seed(fault.seed(arguments.seed))
    half = fault.kind == "overflow"
    model = Model(fault)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * (0.6 + 0.4 * math.cos(math.pi * min(1.0, s / 2000)))
    )
    scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=2.0**12, growth_interval=10_000)
    batch = 8
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        Sequences(fault, batch), world, rank, seed=fault.seed(arguments.seed)
    )
    loader = DataLoader(sampler.dataset, batch_size=batch, sampler=sampler, drop_last=True)
    fault.gradients(0, model)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    step = 0 if first else _resume(arguments.checkpoints, model, parts)
    session = lanterne.attach(
        ddp, optimizer, scheduler=scheduler, scaler=scaler if half else None, dataloader=loader, start_step=step
    )
    session.on_save(lambda done: _save_apart(model, parts, arguments.checkpoints, done))
    while step < arguments.steps:
        for x, y in session.steps(loader):
            model.step = step
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = nn.functional.cross_entropy(ddp(fault.batch(step, x)).float(), y)
            scaler.scale(fault.loss(step, loss)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            fault.after_step(step, model, scheduler)
            session.log(loss=loss)
            if step % 10 == 9:
                dist.all_reduce(torch.zeros(16 + fault.collective(step)))
            if step % arguments.checkpoint_every == arguments.checkpoint_every - 1:
                _save(session, fault, model, parts, arguments.checkpoints, step)
            step += 1
            if step >= arguments.steps:
                break
    session.close()


def main() -> None:
    arguments = _arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    train(arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
