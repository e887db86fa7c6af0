"""Lightning's ``AsyncCheckpointIO`` after every step, on rank 0, without a Trainer."""

from __future__ import annotations

import pickle
from pathlib import Path

from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from benches.peers.arm import Place, Trained
from benches.peers.full_state import newest_that_loads


class AsyncPlugin:
    """A thread of the trainer writes; what it has not yet written waits in memory without bound.

    Its only way to wait is ``teardown``, so each drain ends one plugin and makes the next.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        if self._place.rank == 0:
            self._io.save_checkpoint(self._training.state(), self._place.step(step, ".ckpt"))
        return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        self._io.teardown()
        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``."""

        def load(path: Path) -> None:
            training.load(self._io.load_checkpoint(path, weights_only=True))

        broken = (RuntimeError, EOFError, OSError, pickle.UnpicklingError)
        return newest_that_loads(self._place.saved(".ckpt"), load, broken)
