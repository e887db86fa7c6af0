"""What torchtitan's trainer does with a checkpoint manager, as its sources of 2026-08-21 (commit b5bcd76, 0.2.2) have it.

The package itself does not install beside this repository's versions. Recorded are the public methods of
``torchtitan/components/checkpointer/base.py`` with their hooks, the arguments that ``torchtitan/trainer.py`` builds a
manager with, and the order of its calls in ``train`` and ``train_step``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn


class BaseCheckpointManager(ABC):
    """The contract of a manager: guarded public methods, and hooks below them."""

    enable: bool
    save_future: Any

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Those of its fields that a manager reads."""

        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        load_only: bool = False
        load_step: int = -1

    def load(self, step: int = -1) -> bool:
        return self._load(step) if self.enable else False

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._save(curr_step, last_step) if self.enable else False

    def maybe_wait_for_staging(self) -> None:
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        if self.enable and getattr(self, "save_future", None) is not None:
            self._wait_for_saving()

    def close(self) -> None:
        if not getattr(self, "enable", False):
            return
        try:
            self.maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        finally:
            self._close()

    @abstractmethod
    def _load(self, step: int = -1) -> bool: ...

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool: ...

    @abstractmethod
    def _close(self) -> None: ...


def install() -> None:
    """Let ``torchtitan.components.checkpointer`` be this module's contract."""
    names = ("torchtitan", "torchtitan.components", "torchtitan.components.checkpointer")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].BaseCheckpointManager = BaseCheckpointManager  # type: ignore[attr-defined]
    sys.modules.update(modules)


class Optimizers(torch.optim.Optimizer):
    """``OptimizersContainer``: an optimizer for each model part, which it steps one after the other."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in model_parts]
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


class Schedulers:
    """``LRSchedulersContainer``: its state is the number of steps."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
            for optimizer in optimizers
        ]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict({**scheduler.state_dict(), **state_dict})


class Trainer:
    """The order of the trainer's calls."""

    def __init__(
        self,
        build: Callable[..., BaseCheckpointManager],
        model: nn.Module,
        dataloader: Any,
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        steps: int,
        base_folder: str,
        happens: Callable[[str], None] = lambda place: None,
    ) -> None:
        self.step, self.ntokens_seen, self.steps = 0, 0, steps
        self.losses: dict[int, float] = {}
        self.model_parts, self.dataloader, self.loss_of = [model], dataloader, loss_of
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers = Schedulers(self.optimizers)
        self.happens = happens
        self.checkpointer = build(
            dataloader=dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=base_folder,
        )

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        data_iterator = iter(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            self.train_step(data_iterator)
            self.happens("stepped")
            self.checkpointer.save(self.step, last_step=(self.step == self.steps))
            self.happens("saved")

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.optimizers.zero_grad()
        for _ in range(2):  # gradient_accumulation_steps
            batch = next(data_iterator)
            self.ntokens_seen += batch.numel()
            loss = self.loss_of(self.model_parts[0], batch)
            loss.backward()
        self.happens("backward")
        nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0, foreach=True)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.losses[self.step] = float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]

    def close(self) -> None:
        self.checkpointer.close()
