"""Orbax's ``CheckpointManager`` with asynchronous saves after every step, on rank 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch

from benches.peers.arm import Place, Trained


class Orbax:
    """Torch tensors as NumPy views, which Orbax copies before ``save`` returns.

    A save waits for the one before, as its documentation says.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._manager = ocp.CheckpointManager(
            place.files.absolute(),
            options=ocp.CheckpointManagerOptions(enable_async_checkpointing=True),
            # Floats in training do not shrink; compressing them would only take time.
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
        )

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        if self._place.rank == 0:
            tree = _arrays(self._training.state())
            assert self._manager.save(step, args=ocp.args.PyTreeSave(tree)), "Orbax skipped it"
        return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        self._manager.wait_until_finished()

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: the manager knows which of its steps are whole."""
        step = self._manager.latest_step()
        if step is None:
            return 0
        tree = self._manager.restore(step, args=ocp.args.PyTreeRestore())
        state = training.optimizer.state_dict()
        state["state"] = {int(i): _tensors(values) for i, values in tree["optimizer"].items()}
        training.load({"model": _tensors(tree["model"]), "optimizer": state})
        return int(step)


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    entries = state["optimizer"]["state"]
    return {
        "model": {name: tensor.numpy() for name, tensor in state["model"].items()},
        "optimizer": {
            str(i): {name: np.atleast_1d(tensor.numpy()) for name, tensor in values.items()}
            for i, values in entries.items()
        },
    }


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    # Orbax has no arrays without dimensions of NumPy's own: "step" comes back as one element.
    found = {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
    return {n: t.reshape(()) if n == "step" else t for n, t in found.items()}
