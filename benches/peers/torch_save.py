"""``torch.save`` after every step, on rank 0."""

from __future__ import annotations

import pickle

import torch

from benches.peers.arm import Place, Trained
from benches.peers.full_state import newest_that_loads, tensors_only


class TorchSave:
    """A file per step, written beside its name and renamed, so that a kill never tears the newest."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        if self._place.rank == 0:
            path = self._place.step(step, ".pt")
            partial = path.with_suffix(".partial")
            torch.save(self._training.state(), partial)
            partial.replace(path)
        return True

    def drain(self) -> None:
        """Nothing is under way."""

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``."""
        return newest_that_loads(
            self._place.saved(".pt"),
            lambda path: training.load(tensors_only(path)),
            (RuntimeError, EOFError, OSError, pickle.UnpicklingError),
        )
