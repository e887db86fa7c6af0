"""DeepSpeed's engine with its torch checkpoint engine: ``save_checkpoint`` after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed

from benches.peers.arm import Place, Trained
from benches.peers.full_state import newest_that_loads


class TorchEngine:
    """An engine without ZeRO around the trained model and optimizer, which saves and loads them.

    The steps are made outside the engine, as in all arms, so that only saving is compared.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._engine: Any = None

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._engine, *_ = deepspeed.initialize(
            model=training.model,
            optimizer=training.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 0},
                "checkpoint": {"writer": None},
            },
            dist_init_required=False,
        )

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        tag = self._place.step(step).name
        self._engine.save_checkpoint(str(self._place.files), tag=tag)
        return True

    def drain(self) -> None:
        """Nothing is under way."""

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``."""
        self.open(training)

        def load(path: Path) -> None:
            loaded, _ = self._engine.load_checkpoint(str(path.parent), tag=path.name)
            assert loaded is not None, path

        return newest_that_loads(self._place.saved(), load, (RuntimeError, OSError, EOFError))
