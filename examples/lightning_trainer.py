"""Lightning: one callback commits every step, and resumes the Trainer.

python examples/lightning_trainer.py runs/lightning
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowdiff.compressors import TopK
from lowdiff.integrations.lightning import LowDiffCallback


class Regression(lightning.LightningModule):
    """A small network that learns a sum of cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """Return the loss of one batch."""
        features, targets = batch
        loss = nn.functional.mse_loss(self.net(features), targets)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a learning rate that halves every 500 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step that this process made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    inputs = torch.randn(1000, 32)
    dataset = TensorDataset(inputs, inputs.cos().sum(1, keepdim=True))
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=args.steps, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LowDiffCallback(args.run, compressor=TopK(density=0.05), staging=args.staging)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(dataset, batch_size=32, shuffle=True))
    return model.losses


if __name__ == "__main__":
    main()
