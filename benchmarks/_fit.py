"""How the small networks of the predictors are fitted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

BATCH = 1024
Pair = tuple[torch.Tensor, torch.Tensor]


def least_on(
    stop: Pair, network: torch.nn.Module, optimizer: torch.optim.Optimizer, fit: Pair, epochs: int,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, NDArray[np.float32]]:  # fmt: skip
    """The network's weights at the epoch with the least loss on ``stop``, fitted on ``fit``: inputs ``[N, ...]`` and
    targets ``[N]``. Gradients are clipped to a norm of 1."""
    (x, y), (vx, vy) = fit, stop
    best, kept = float("inf"), {k: v.clone() for k, v in network.state_dict().items()}
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(BATCH):
            loss = loss_of(network(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            now = float(loss_of(network(vx), vy))
        if now < best:
            best, kept = now, {k: v.clone() for k, v in network.state_dict().items()}
    return {k: v.numpy() for k, v in kept.items()}
