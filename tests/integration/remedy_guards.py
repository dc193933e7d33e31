"""Guards on two real gloo ranks: DistributedDataParallel under a breaker, two-phase updates, a checkpoint store.

Prints one JSON line a rank. python remedy_guards.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lanterne.clock import SimulatedClock
from lanterne.collector.guards.checkpoint_store import CheckpointStore, agree
from lanterne.collector.guards.collective_breaker import CollectiveBreaker
from lanterne.collector.guards.two_phase import TwoPhaseUpdate

WORLD, STEPS, SICK = 2, 60, range(20, 35)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def broken_network(rank: int, store: Any) -> dict[str, Any]:
    """Reductions take ten times as long in steps SICK, by rank 0's clock."""
    ddp = DistributedDataParallel(model())
    optimizer, clock = torch.optim.SGD(ddp.parameters(), lr=0.1), SimulatedClock()
    breaker = CollectiveBreaker(ddp, store=store, rank=rank, window=5, rest_s=0.5, clock=clock)
    states, stepped = [], []
    for step in range(STEPS):
        with breaker.step(step) as reduced:
            (ddp(batch(rank, step)).pow(2).mean() / breaker.share).backward()
            clock.advance(1_000_000_000 if step in SICK and reduced else 100_000_000)
        states.append(breaker.state)
        if reduced:
            stepped.append(step)
            optimizer.step()
            optimizer.zero_grad()
    return {"states": states, "stepped": stepped, "sum": sum(float(p.sum()) for p in ddp.parameters())}


def expected(stepped: list[int]) -> float:
    """The same run in one process: each update uses the mean over all ranks and all steps since the last one."""
    alone = model()
    optimizer, first = torch.optim.SGD(alone.parameters(), lr=0.1), 0
    for last in stepped:
        steps = range(first, last + 1)
        losses = [alone(batch(rank, step)).pow(2).mean() for step in steps for rank in range(WORLD)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        first = last + 1
    return sum(float(p.sum()) for p in alone.parameters())


def two_phases(rank: int, folder: Path) -> list[str]:
    torch.manual_seed(5)
    parameter = torch.nn.Parameter(torch.ones(3))
    update = TwoPhaseUpdate(torch.optim.SGD([parameter], lr=0.5), folder, rank=rank, world=WORLD)
    said = []
    for step, gradient in enumerate(([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [float("inf"), 0.0, 0.0], [2.0, 2.0, 2.0])):
        parameter.grad = torch.tensor(gradient)
        if step == 1 and rank == 1:
            parameter.grad[0] += 1e-6  # a bit flipped on the way
        if step == 2 and rank == 0:
            parameter.grad = torch.zeros(3)
        said.append(update.step(step))
    return [*said, str(parameter.detach().tolist())]


def checkpoints(rank: int, folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder, rank=rank, world=WORLD, barrier=dist.barrier, agree=agree)
    for step in (10, 20, 30):
        store.save(step, {"rank": rank, "weights": torch.full((100,), float(step))})
    if rank == 1:
        path = folder / "step-30" / "rank-1.pt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    dist.barrier()
    found = store.load()
    assert found is not None
    return {"step": found[0], "rank": found[1]["rank"], "left": store.steps(), "value": float(found[1]["weights"][0])}


def work(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=WORLD)
    found = {"rank": rank, "breaker": broken_network(rank, dist.PrefixStore("breaker", store))}
    found["alone"] = expected(found["breaker"]["stepped"])  # type: ignore[index]
    found |= {"updates": two_phases(rank, folder), "checkpoint": checkpoints(rank, folder / "store")}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    children = [os.fork() for _ in range(1)]
    rank = 0 if children[0] else 1
    code = 1
    try:
        work(rank, folder, port)
        code = 0
    finally:
        if rank:
            os._exit(code)
    os.waitpid(children[0], 0)


if __name__ == "__main__":
    main()
