"""An Accelerate loop with gradient accumulation: python examples/accelerate_loop.py [STEPS] (or accelerate launch)."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lanterne.collector.integrations.accelerate import attach_prepared


def main(steps: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(steps * 2 * 8 * accelerator.num_processes, 64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    session = attach_prepared(accelerator, model, optimizer, dataloader=loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 250)
