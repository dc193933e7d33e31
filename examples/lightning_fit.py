"""A Lightning module with one more callback: python examples/lightning_fit.py [STEPS]."""

import sys
import tempfile

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lanterne.collector.integrations.lightning import LanterneCallback


class Sum(pl.LightningModule):
    """Learns to add 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(steps: int) -> None:
    x = torch.randn(4096, 64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        max_steps=steps, logger=False, enable_progress_bar=False, gradient_clip_val=1.0,
        default_root_dir=tempfile.mkdtemp(), callbacks=[LanterneCallback()],
    )  # fmt: skip
    trainer.fit(Sum(), loader)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
