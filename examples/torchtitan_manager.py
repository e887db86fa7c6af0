"""torchtitan: every step kept, behind its own seam for checkpoint managers.

In a config of torchtitan, in place of its manager's::

    checkpoint=LowDiffManager.Config(enable=True, folder="lowdiff")

torchtitan calls ``save`` after every optimizer step, which commits it, whatever ``interval`` says; a validation comes after
that, so it is not made again by a run that resumes there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager

import lowdiff
from lowdiff.errors import ConfigError


class LowDiffManager(BaseCheckpointManager):
    """Attaches the trainer's objects when it loads, and commits each step that it saves.

    FSDP2, HSDP and tensor parallelism keep a replica of the state; see docs/sharded.md for what is refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """What torchtitan's managers share, and a place for staging."""

        staging: str | None = None
        """Folder in memory (tmpfs); by default in /dev/shm."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if len(model_parts) != 1:
            raise ConfigError(
                f"{len(model_parts)} model parts: a pipeline's stages are not checkpointed; train without one"
            )
        if config.initial_load_path:
            raise ConfigError(
                "initial_load_path is not read here; begin the run with a seed that torchtitan's own manager loaded"
            )
        self.folder = os.path.join(base_folder, config.folder)
        self.load_only = config.load_only
        self.staging_future = self.save_future = None
        self._model, self._optimizers = model_parts[0], list(optimizers)
        self._objects = {**states, "lr_scheduler": lr_schedulers, "dataloader": dataloader}
        self.checkpointer = lowdiff.Checkpointer(self.folder, staging=config.staging)

    def _load(self, step: int = -1) -> bool:
        completed = self.checkpointer.attach(
            self._model, self._optimizers, step=None if step == -1 else step, **self._objects
        )
        return completed > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only:
            return False
        self.checkpointer.commit()
        return True

    def _close(self) -> None:
        self.checkpointer.close()

    # A commit has copied what it needs when it returns.

    def _maybe_wait_for_staging(self) -> None:
        """Wait for nothing."""

    def _wait_for_saving(self) -> None:
        """Wait for nothing."""

    def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool:
        return False
