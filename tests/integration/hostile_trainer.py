"""A short training for test_shipper_hostile.py: the shipper is at work meanwhile; prints every bit of the weights."""

from __future__ import annotations

import sys
import time

import torch

import lanterne

STEPS, PAUSE_S = 150, 0.02


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = lanterne.attach(model, optimizer, disabled=sys.argv[1] == "off", job="hostile", commands=False)
    for _ in session.steps(range(STEPS)):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        time.sleep(PAUSE_S)  # so that exports happen, and fail, during training
    session.close()
    print(b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex(), torch.rand(1).item())


if __name__ == "__main__":
    main()
