"""A user's training script that knows nothing of Lanterne: DDP on gloo, a loader with workers, clipping.

torchrun --nproc-per-node N plain_ddp.py STEPS [ENDING]
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    steps, ending = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(steps * 4, 16), torch.randn(steps * 4, 1))
    for x, y in DataLoader(data, batch_size=4, num_workers=1):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()} sum {sum(p.double().sum().item() for p in model.parameters()):.17g}", flush=True)
    if ending == "crash" and dist.get_rank() == 1:
        sys.stderr.write("disk on fire\n")
        sys.stderr.flush()
        os._exit(3)
    if ending == "hang":
        if dist.get_rank() == 1:
            stuck_in_user_code()
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def stuck_in_user_code() -> None:
    time.sleep(600)


if __name__ == "__main__":
    main()
