"""A user's loop with Accelerate, after its example for images, which may kill itself anywhere.

Nothing in it knows of lowdiff but three lines.
"""

# ruff: noqa: C408 - arguments are written as a call writes them

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from lowdiff.compressors import TopK
from lowdiff.integrations.accelerate import LowDiffRun
from tests.integrations.kills import Kill, leave

_ROWS, _PIXELS = 52, 6


@dataclass(frozen=True)
class Kind:
    """What a script trains.

    Attributes:
        accelerator: Arguments of ``Accelerator``.
        loader: Arguments of the training's ``DataLoader``.
        settings: Of the run.
        epochs: How many.
        by_hand: Batches that are accumulated without ``accelerator.accumulate``.
        most: Batches after which both loops are left; 0 for no end.
        average: An ``AveragedModel`` that is registered: ``ema``, or ``swa`` with its scheduler.
        thaws_at: Batch at which the first layer is thawed.
        evaluates_every: Batches between evaluations in an epoch; 0: at its end alone.
        patience: Evaluations without a better one after which training ends; 0: all epochs are made.
        judged: Whether the last layer has an optimizer of its own.
    """

    accelerator: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(
        default_factory=lambda: {"compressor": TopK(density=0.2, dense_below=1)}
    )
    epochs: int = 3
    by_hand: int = 0
    most: int = 0
    average: str = ""
    thaws_at: int = 0
    evaluates_every: int = 0
    patience: int = 0
    judged: bool = False


#: 13 batches in an epoch.
KINDS = {
    "images": Kind(),
    "accumulated": Kind(dict(gradient_accumulation_steps=3, mixed_precision="bf16")),
    "workers": Kind(loader=dict(num_workers=2, persistent_workers=True), epochs=2),
    "replica": Kind(settings={}, epochs=2),
    "seedable": Kind(dict(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))),
    "fresh workers": Kind(loader=dict(num_workers=2), epochs=2),
    "by hand": Kind(by_hand=2, epochs=2),
    "left": Kind(most=20),
    "average": Kind(average="ema", epochs=2),
    "stochastic": Kind(average="swa", epochs=2),
    "thaws by number": Kind(thaws_at=9, epochs=2),
    "evaluates": Kind(evaluates_every=4, epochs=2),
    "stops early": Kind(patience=1, epochs=9),
    "compiled": Kind(dict(dynamo_backend="eager"), epochs=2),
    "two optimizers": Kind(judged=True, epochs=2),
    "two": Kind(dict(gradient_accumulation_steps=2), epochs=2),
}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Noisy pictures of two kinds; counts what is loaded."""

    def __init__(self, count: int, killer: Kill | None) -> None:
        self.killer, self.count = killer, count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.killer is not None:
            self.killer.happens("load")
        self.loaded.append(index)
        noise = torch.randn(1, _PIXELS, _PIXELS) + random.random() + float(np.random.rand())
        return noise + index % 2, index % 2


class Average:
    """An object of the user's that Accelerate is told of."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.value = state_dict["value"]


def network() -> nn.Sequential:
    """A small one, with batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 2)
    )  # fmt: skip


def warm_up() -> None:
    """Nothing takes long."""


def main(name: str, folder: str, more: str = "{}", kill: str = "") -> None:
    """Train or resume, and write what is compared to ``FOLDER/result-RANK.pt``.

    Args:
        name: Of the kind.
        folder: Of run, staging and output.
        more: ``batch_size``, and ``epochs`` in place of the kind's.
        kill: Where the last rank dies: ``PLACE:COUNT``, or ``PLACE:COUNT:SIGNAL`` for another signal than ``SIGKILL``.
    """
    kind, given = KINDS[name], json.loads(more)
    killer = Kill(kill)
    epochs = given.get("epochs", kind.epochs)
    accelerator = Accelerator(cpu=True, **kind.accelerator)
    set_seed(7)
    rows, average = Images(_ROWS, killer), Average()
    loader = DataLoader(rows, batch_size=given.get("batch_size", 4), shuffle=True, **kind.loader)
    evaluation = DataLoader(Images(10, None), batch_size=4)
    model = network()
    parts = [model[:-1], model[-1]] if kind.judged else [model]
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.02, total_steps=200)
    if kind.average == "swa":
        scheduler = SWALR(optimizers[0], swa_lr=0.02, anneal_epochs=10)
    model, loader, evaluation, scheduler, *optimizers = accelerator.prepare(
        model, loader, evaluation, scheduler, *optimizers
    )
    accelerator.register_for_checkpointing(average)
    averaged = None
    if kind.average:
        update = get_ema_multi_avg_fn(0.8) if kind.average == "ema" else get_swa_multi_avg_fn()
        averaged = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=update)
        accelerator.register_for_checkpointing(averaged)
    settings = {"staging": f"{folder}/staging", **kind.settings}
    with LowDiffRun(
        accelerator, f"{folder}/run", model, optimizers, loader, scheduler, **settings
    ) as run:

        def evaluate() -> int:
            model.eval()
            right = 0
            for inputs, targets in evaluation:
                killer.happens("evaluation")
                with torch.no_grad():
                    found = model(inputs).argmax(-1)
                found, expected = accelerator.gather_for_metrics((found, targets))
                right += int((found == expected).sum())
            killer.happens("evaluated")
            model.train()
            return right

        losses = run.checkpointer.state.setdefault("losses", [])
        metrics = run.checkpointer.state.setdefault("metrics", [])
        for _ in run.epochs(epochs):
            model.train()
            for inputs, targets in loader:
                killer.happens("batch")
                if kind.thaws_at:
                    model[0].requires_grad_(len(losses) >= kind.thaws_at)
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss / (kind.by_hand or 1))
                    killer.happens("backward")
                    if not kind.by_hand or (run.consumed % kind.by_hand == 0):
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        for optimizer in optimizers:
                            optimizer.step()
                        scheduler.step()
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        if averaged is not None:
                            averaged.update_parameters(accelerator.unwrap_model(model))
                killer.happens("step")
                losses.append(float(loss.detach()))
                average.value = 0.9 * average.value + 0.1 * losses[-1]
                if kind.evaluates_every and len(losses) % kind.evaluates_every == 0:
                    metrics.append([evaluate(), random.random()])
                if len(losses) == kind.most:
                    break
            if len(losses) == kind.most:
                break
            metrics.append([evaluate(), random.random()])
            best = max(range(len(metrics)), key=lambda i: metrics[i][0])
            if kind.patience and len(metrics) - 1 - best >= kind.patience:
                break
        killer.happens("end")
    result = {
        "weights": model.state_dict(),
        "optimizers": [optimizer.optimizer.state_dict() for optimizer in optimizers],
        "averaged": None if averaged is None else averaged.state_dict(),
        "scheduler": scheduler.scheduler.state_dict()["last_epoch"],
        "losses": list(losses),
        "average": average.value,
        "metrics": list(metrics),
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "loaded": rows.loaded,
        "epochs": [run.epoch, run.consumed],
    }
    leave(result, folder)
