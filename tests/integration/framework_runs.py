"""Tiny real training runs in each framework, one process on CPU: ``python framework_runs.py NAME STEPS FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Seeded regression pairs."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[at], "labels": self.y[at]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def huggingface(steps: int, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from lanterne.collector.integrations.huggingface import LanterneCallback

    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=4, logging_steps=2,
        eval_strategy="steps", eval_steps=steps // 2, save_steps=steps // 2, report_to=[], use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False, learning_rate=5e-2,
    )  # fmt: skip
    Trainer(
        model=Net(), args=arguments, train_dataset=Pairs(4 * steps), eval_dataset=Pairs(16),
        callbacks=[LanterneCallback()],
    ).train()  # fmt: skip


def lightning(steps: int, folder: Path) -> None:
    import lightning.pytorch as pl

    from lanterne.collector.integrations.lightning import LanterneCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            self.log("val", self.net(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 5e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "interval": "step"}]

    pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, default_root_dir=str(folder / "out"), callbacks=[LanterneCallback()],
        val_check_interval=steps // 2,
    ).fit(Module(), DataLoader(Pairs(4 * steps), 4), DataLoader(Pairs(16), 4))  # fmt: skip


def accelerate(steps: int, folder: Path) -> None:
    from accelerate import Accelerator

    from lanterne.collector.integrations.accelerate import attach_prepared

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 5e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, DataLoader(Pairs(8 * steps), 4), scheduler)
    session = attach_prepared(accelerator, net, optimizer, scheduler=scheduler, dataloader=loader)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with session.phase("checkpoint"):
        accelerator.save_state(str(folder / "out"))
    session.close()


def deepspeed(steps: int, folder: Path) -> None:
    import deepspeed as ds

    from lanterne.collector.integrations.deepspeed import attach_engine

    net = Net()
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    }
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
    session = attach_engine(engine)
    for batch in DataLoader(Pairs(4 * steps), 4):
        engine.backward(engine(**batch)["loss"])
        engine.step()
    session.close()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
