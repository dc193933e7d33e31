"""A small DDP job for the collector's tests: one rank computes longer from step 20 on; sub-groups and p2p are used."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lanterne

STEPS, ONSET, SLOW = 40, 20, 1


def main() -> None:
    attached = sys.argv[1] == "on"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 400), torch.nn.ReLU(), torch.nn.Linear(400, 400), torch.nn.Linear(400, 1)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    session = lanterne.attach(ddp, optimizer, shipper="none", commands=False, disabled=not attached)
    own = [dist.new_group([r]) for r in range(world)][rank]
    data = torch.randn(STEPS, 8, 32, generator=torch.Generator().manual_seed(rank))
    for step, x in enumerate(session.steps(data)):
        if attached and rank == SLOW and step >= ONSET:
            time.sleep(0.08)
        loss = ddp(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        if step % 10 == 0:
            dist.all_reduce(torch.ones(4), group=own)
            dist.send(x, 1) if rank == 0 else dist.recv(x.clone(), 0)
    if rank == 0:
        print("weights", [p.detach().numpy().tobytes().hex()[:4000] for p in model.parameters()])
    if len(sys.argv) > 2 and rank == SLOW:
        print("stuck", flush=True)
        time.sleep(600)
    dist.all_reduce(torch.ones(7))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
