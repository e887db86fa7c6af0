"""A user's script with a Lightning Trainer, which may kill itself anywhere.

Nothing in it knows of lowdiff but the one callback.
"""

# ruff: noqa: C408 - arguments are written as a call writes them

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from lowdiff.compressors import TopK
from lowdiff.integrations.lightning import LowDiffCallback
from tests.integrations.kills import Kill, leave, rank

_ROWS, _WIDTH = 52, 12


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with noise that is drawn when one is loaded; counts what is loaded."""

    def __init__(self, count: int, happens: Callable[[str], None]) -> None:
        generator = torch.Generator().manual_seed(count)
        self.rows = torch.randn(count, _WIDTH, generator=generator)
        self.happens = happens
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.happens("load")
        self.loaded.append(index)
        noise = 0.1 * torch.rand(_WIDTH) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.rows[index] + noise, self.rows[index].cos().sum(0, keepdim=True)


class Regression(lightning.LightningModule):
    """A network with dropout and batch norm; logs per step and per epoch, and sums up a metric."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            nn.Linear(_WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1)
        )
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """Return the loss."""
        features, targets = batch
        found = self.net(features)
        loss = nn.functional.mse_loss(found, targets)
        self.error(found, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        """Log the loss; draws, as what generates samples does."""
        features, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(features), targets) + random.random())

    def configure_optimizers(self) -> Any:
        """AdamW, with the kind's scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.kind.rate)
        if self.kind.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        made = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": made, "interval": self.kind.scheduler}]


class Gan(lightning.LightningModule):
    """Two networks and optimizers, by hand."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, _WIDTH))
        self.judge = nn.Sequential(nn.Linear(_WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_index: int) -> None:
        """Train the judge, then the maker."""
        features, _ = batch
        first, second = self.optimizers()
        made = self.maker(torch.randn(len(features), 4))
        loss = self.judge(made.detach()).mean() - self.judge(features).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.toggle_optimizer(first)
        other = -self.judge(self.maker(torch.randn(len(features), 4))).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()
        self.untoggle_optimizer(first)
        self.log_dict({"judge": loss, "maker": other})
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        """Two of them, and a scheduler for the first."""
        first = torch.optim.Adam(self.maker.parameters(), lr=1e-3)
        second = torch.optim.Adam(self.judge.parameters(), lr=1e-3)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


@dataclass(frozen=True)
class Kind:
    """What a script trains.

    Attributes:
        arguments: Of ``Trainer``.
        loader: Of the training's ``DataLoader``.
        settings: Of ``LowDiffCallback``.
        model: Makes the module.
        scheduler: Per ``step`` or ``epoch``, or ``plateau``.
        patience: Of early stopping; None without it.
        saves: Whether a ``ModelCheckpoint`` is there.
        stateful: Whether the loader is torchdata's.
        more: Makes further callbacks.
    """

    arguments: dict[str, Any]
    loader: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"compressor": TopK(density=0.2)})
    model: Any = Regression
    scheduler: str = "step"
    rate: float = 1e-2
    patience: int | None = None
    saves: bool = False
    stateful: bool = False
    more: Callable[[], list[Any]] = list


class Streak(lightning.Callback):
    """A callback that keeps its state in a checkpoint of Lightning's, as older ones do: a number and a tensor."""

    def __init__(self, factor: float = 0.9) -> None:
        self.factor, self.mean, self.seen = factor, torch.zeros(3), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Average the loss."""
        self.seen += 1
        self.mean = self.factor * self.mean + outputs["loss"].detach()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put it in."""
        assert checkpoint["state_dict"].keys() == pl_module.state_dict().keys()
        checkpoint[f"streak{self.factor}"] = {"mean": self.mean, "seen": self.seen}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        assert checkpoint["global_step"] == trainer.global_step > 0
        found = checkpoint[f"streak{self.factor}"]
        self.mean, self.seen = found["mean"], found["seen"]

    def kept(self) -> list[Any]:
        """What is compared."""
        return [self.mean, self.seen]


class Ema(EMAWeightAveraging):
    """An average over all steps but the first three."""

    def __init__(self) -> None:
        super().__init__(decay=0.8, update_starting_at_step=3)

    def kept(self) -> list[Any]:
        """What is compared."""
        assert self._average_model is not None
        return [self._average_model.state_dict()]


class Averages(lightning.Callback):
    """Several averages in a dict, and a hook beside them."""

    def __init__(self) -> None:
        self.averages: dict[str, AveragedModel] = {}
        self.epochs = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make them."""
        self.averages = {
            str(decay): AveragedModel(pl_module.net, multi_avg_fn=get_ema_multi_avg_fn(decay))
            for decay in (0.5, 0.9)
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Update them."""
        for average in self.averages.values():
            average.update_parameters(pl_module.net)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count."""
        self.epochs += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the count in."""
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        self.epochs = checkpoint["epochs"]

    def kept(self) -> list[Any]:
        """What is compared."""
        return [self.epochs, *(average.state_dict() for average in self.averages.values())]


class Exports(Ema):
    """Saves more than its average."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put a number in."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["more"] = 1


class Remembers(Regression):
    """A module with a running number that only a checkpoint of Lightning's holds."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.worst = 0.0

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """Add the worst loss to the next ones."""
        loss = super().training_step(batch, batch_index)
        self.worst = max(self.worst, float(loss))
        return loss * (1 + 0.1 * self.worst)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put it in."""
        checkpoint["worst"] = self.worst

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        self.worst = checkpoint["worst"]


class Swaps(lightning.Callback):
    """Puts another scheduler in, in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Swap."""
        if trainer.current_epoch == 1:
            made = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)
            trainer.lr_scheduler_configs[0].scheduler = made


class Thaws(BaseFinetuning):
    """Thaws the first layer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze it."""
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Thaw it."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class ByNumber(lightning.Callback):
    """Thaws the first layer at the tenth step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Freeze or thaw it."""
        pl_module.net[0].requires_grad_(trainer.global_step >= 9)


class Compiled(Regression):
    """A network that is compiled, as its author does."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.net.compile(backend="eager")


class Fails(Streak):
    """Cannot say what it holds."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Ask for what is not there."""
        checkpoint["optimizer_states"][0]["lr"] = 0.0


class Holds(Streak):
    """Holds what cannot be stored."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put a file in."""
        checkpoint["file"] = open


#: 13 batches in an epoch.
KINDS = {
    "steps": Kind(
        dict(max_steps=20, val_check_interval=4, log_every_n_steps=3, gradient_clip_val=0.5),
        saves=True,
    ),
    "epochs": Kind(
        dict(max_epochs=3, accumulate_grad_batches=3, log_every_n_steps=2),
        scheduler="epoch", saves=True,
    ),
    "plateau": Kind(dict(max_epochs=3, val_check_interval=0.5), scheduler="plateau"),
    "stops early": Kind(dict(max_epochs=20), rate=1.0, patience=2),
    "short epochs": Kind(dict(max_epochs=3, limit_train_batches=5, precision="bf16-mixed")),
    "own generators": Kind(dict(max_epochs=2), loader=dict(generator=torch.Generator().manual_seed(4))),
    "workers": Kind(dict(max_steps=18), loader=dict(num_workers=2, persistent_workers=True)),
    "torchdata": Kind(dict(max_steps=18), stateful=True),
    "replica": Kind(dict(max_steps=18), settings={}),
    "average": Kind(dict(max_epochs=2, val_check_interval=4, accumulate_grad_batches=2), more=lambda: [Ema()]),
    "average as is": Kind(dict(max_epochs=2, val_check_interval=4), settings={}, more=lambda: [Ema()]),
    "hooks": Kind(dict(max_epochs=2), model=Remembers, more=lambda: [Streak(), Streak(0.5), Averages()]),
    "stochastic": Kind(
        dict(max_epochs=4), scheduler="epoch", more=lambda: [StochasticWeightAveraging(swa_lrs=1e-2)]
    ),
    "thaws": Kind(dict(max_epochs=3), more=lambda: [Thaws()]),
    "thaws by number": Kind(dict(max_epochs=2), more=lambda: [ByNumber()]),
    "compiled": Kind(dict(max_epochs=2), model=Compiled),
    "swaps": Kind(dict(max_epochs=2), more=lambda: [Swaps()]),
    "exports": Kind(dict(max_epochs=1), more=lambda: [Exports()]),
    "fails": Kind(dict(max_epochs=1), more=lambda: [Fails()]),
    "holds": Kind(dict(max_epochs=1), more=lambda: [Holds()]),
    "gan": Kind(dict(max_epochs=2), settings={}, model=Gan),
    "two": Kind(
        dict(max_epochs=2, strategy="ddp", devices=2, accumulate_grad_batches=2, val_check_interval=3)
    ),
}  # fmt: skip


class Logs(DummyLogger):
    """Keeps what is logged, by step; appended to a file, as loggers do."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write a line."""
        values = {name: float(value).hex() for name, value in metrics.items()}
        with self._path.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # DummyLogger answers to every name


class Killer(lightning.Callback):
    """Sends this process a signal when something happens for the n-th time."""

    def __init__(self, kill: str) -> None:
        self._kill = Kill(kill)
        self.is_armed = False

    def happens(self, place: str) -> None:
        """Say that it happens."""
        if self.is_armed:
            self._kill.happens(place)

    def on_train_start(self, *_: Any) -> None:
        """Let what is tried out before training pass."""
        self.is_armed = True


def _announced(name: str) -> Any:
    def happen(self: Killer, *_: Any, **__: Any) -> None:
        self.happens(name)

    return happen


for _name in (
    *("on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_train_batch_end", "on_validation_start", "on_validation_batch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end"),
):  # fmt: skip
    setattr(Killer, _name, _announced(_name))


class Counter(lightning.Callback):
    """A callback of the user's with a state, and random numbers of its own."""

    def __init__(self) -> None:
        self.batches, self.drawn = 0, 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """Count."""
        self.batches += 1

    def on_validation_end(self, *_: Any) -> None:
        """Draw."""
        self.drawn = self.drawn / 2 + random.random()

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"batches": self.batches, "drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.batches, self.drawn = state_dict["batches"], state_dict["drawn"]


def warm_up() -> None:
    """Make a trainer once."""
    lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def main(name: str, folder: str, more: str = "{}", kill: str = "") -> None:
    """Train or resume, and write what is compared to ``FOLDER/result-RANK.pt``.

    Args:
        name: Of the kind.
        folder: Of run, staging and output.
        more: Further arguments of ``Trainer`` as JSON; ``ckpt_path`` is that of ``fit``, and ``lowdiff`` says whether the
            run is kept ``"as is"``, without a compressor, or ``"not"`` at all.
        kill: Where the last rank dies: ``PLACE:COUNT``, or ``PLACE:COUNT:SIGNAL`` for another signal than ``SIGKILL``.
    """
    kind, given = KINDS[name], json.loads(more)
    killer = Killer(kill)
    ckpt_path, kept = given.pop("ckpt_path", None), given.pop("lowdiff", "")
    lightning.seed_everything(5, verbose=False)
    rows = Rows(_ROWS, killer.happens)
    model = kind.model(kind)
    counter = Counter()
    settings = {} if kept == "as is" else kind.settings
    callbacks: list[Any] = [counter, killer, LearningRateMonitor()]
    if kept != "not":
        callbacks.append(LowDiffCallback(f"{folder}/run", staging=f"{folder}/staging", **settings))
    further = kind.more()
    callbacks += further
    if kind.patience is not None:
        callbacks.append(EarlyStopping("val_loss", patience=kind.patience))
    saving = None
    if kind.saves:
        saving = ModelCheckpoint(
            f"{folder}/saved", monitor="val_loss", save_last=True, save_top_k=2
        )
        callbacks.append(saving)
    options: dict[str, Any] = dict(
        accelerator="cpu", devices=1, logger=Logs(Path(folder, f"logs-{rank()}.jsonl")), callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=kind.saves, log_every_n_steps=1,
    )  # fmt: skip
    trainer = lightning.Trainer(**(options | kind.arguments | given))
    load: Any = StatefulDataLoader if kind.stateful else DataLoader
    loader = load(rows, batch_size=4, shuffle=True, **kind.loader)
    validation = DataLoader(Rows(9, lambda _: None), batch_size=4)
    trainer.fit(model, loader, None if kind.model is Gan else validation, ckpt_path=ckpt_path)
    optimizers = trainer.optimizers
    result = {
        "weights": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.state_dict()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "callbacks": [callback.state_dict() for callback in callbacks if callback is not saving],
        "kept": [callback.kept() for callback in further if hasattr(callback, "kept")],
        "saved": None if saving is None else [str(saving.best_model_score), saving.best_k_models],
        "logs": logged(Path(folder, f"logs-{rank()}.jsonl")),
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "loaded": rows.loaded,
    }
    leave(result, folder)


def logged(path: Path) -> dict[str, Any]:
    """What was logged last of each value at each step."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        step, values = json.loads(line)
        for name, value in values.items():
            found[f"{step}/{name}"] = value
    return dict(sorted(found.items()))
