"""A plain DDP loop with Lanterne attached: torchrun --standalone --nproc-per-node 4 examples/ddp.py [STEPS]."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lanterne


def main(steps: int) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(steps * 8 * dist.get_world_size(), 64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    session = lanterne.attach(model, optimizer, scheduler=scheduler)
    for inputs, targets in session.steps(loader):
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.log(loss=loss)  # the tensor itself: no .item(), no device sync

    with session.phase("checkpoint"):
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), Path(tempfile.gettempdir(), "lanterne-example.pt"))
        dist.barrier()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
