"""Lightning: a callback that attaches when training starts and commits after every batch.

python examples/lightning_trainer.py runs/lightning
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import TopK


class CommitEachBatch(lightning.Callback):
    """Commits every batch of a Trainer, resumes the Trainer, and stops it after some steps."""

    def __init__(self, checkpointer: lowdiff.Checkpointer, until: int) -> None:
        self.checkpointer = checkpointer
        self.until = until
        self.completed = 0
        self.losses: dict[int, float] = {}

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Attach; the model is wrapped by now, and optimizers and schedulers exist."""
        schedulers = {
            f"scheduler{i}": config.scheduler
            for i, config in enumerate(trainer.lr_scheduler_configs)
        }
        self.completed = self.checkpointer.attach(trainer.model, trainer.optimizers, **schedulers)
        print(f"starting at step {self.completed}", flush=True)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> int | None:
        """Stop a run that has all its steps."""
        if self.completed < self.until:
            return None
        trainer.should_stop = True
        return -1

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Commit; optimizer and schedulers have stepped."""
        self.checkpointer.commit()
        self.completed += 1
        self.losses[self.completed] = float(outputs["loss"])
        print(f"step {self.completed}: loss {outputs['loss']:.9g}", flush=True)
        trainer.should_stop = self.completed >= self.until or self.checkpointer.preempted


class Regression(lightning.LightningModule):
    """A small network that learns a sum of cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """Return the loss of one batch."""
        features, targets = batch
        return nn.functional.mse_loss(self.net(features), targets)

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a learning rate that halves every 500 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def optimizer_step(
        self, epoch: int, batch_index: int, optimizer: Any, closure: Callable[[], Any] | None = None
    ) -> None:
        """Run the closure first: Lightning hides forward and backward in ``step(closure)``."""
        assert closure is not None
        closure()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # instead of gradient_clip_val
        optimizer.optimizer.step()


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
    with lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.05), staging=args.staging
    ) as checkpointer:
        loader = checkpointer.dataloader(dataset, batch_size=32)
        callback = CommitEachBatch(checkpointer, args.steps)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=-1, callbacks=[callback], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regression(), loader)
    return callback.losses


if __name__ == "__main__":
    main()
