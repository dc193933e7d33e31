"""A DDP job whose device is a stand-in for CUPTI: each step "runs" kernels, and on one rank they take longer."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lanterne

STEPS, ONSET, SLOW = 160, 40, 1
USUAL_MS, LONG_MS = 4, 40


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = ctypes.CDLL(sys.argv[1])
    device.standin_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64]

    def compute(name: bytes, ms: float) -> None:
        time.sleep(ms / 1e3)  # what the host waits for while the device works
        device.standin_kernel(name, int(ms * 1e6))

    session = lanterne.attach(model, optimizer, kernels_every=20, commands=False)
    for step, x in enumerate(session.steps(torch.randn(STEPS, 8, 32))):
        compute(b"_Z9attentionIfEvPT_", USUAL_MS)
        compute(b"_Z4gemmIfEvPT_", LONG_MS if rank == SLOW and step >= ONSET else USUAL_MS)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
