"""A tiny GPT-2 trained with the Hugging Face Trainer: python examples/huggingface.py [STEPS]. Nothing is fetched."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lanterne.collector.integrations.huggingface import LanterneCallback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows that count upwards: easy to learn, nothing to download."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(32) + at) % 64
        return {"input_ids": row, "labels": row}


def main(steps: int) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3,
        logging_steps=50, save_steps=max(steps // 2, 1), report_to=[],
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=[LanterneCallback()]).train()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
