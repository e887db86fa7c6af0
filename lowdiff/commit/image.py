"""Which tensors a rank's shard of a full snapshot holds, and reading them from the live run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import share_owners
from lowdiff.model.averages import Averages
from lowdiff.model.binding import Attached
from lowdiff.model.items import ItemTracker
from lowdiff.persistence.format.image import OPTIMIZER, PARAMETER, RESIDUAL, SCALARS, ImageTensor
from lowdiff.recovery.images import image_tensor, scalars_tensor
from lowdiff.recovery.state import AVERAGE_ITEM, is_scalar

#: An optimizer's groups without their parameters.
Groups: TypeAlias = "tuple[dict[str, Any], ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """What there is to copy.

    Attributes:
        attached: Model and optimizers.
        tracker: Their items.
        residual: Every rank stores its own whole.
        averages: Replayed averages of the parameters.
        shares_constants: Whether frozen parameters as they were at the start are stored apart.
        rank: This rank.
        world_size: Number of ranks.
    """

    attached: Attached
    tracker: ItemTracker
    residual: RotatingResidual
    averages: Averages
    shares_constants: bool
    rank: int
    world_size: int

    def shard(self, held: Sequence[int], groups: Sequence[Groups]) -> list[ImageTensor]:
        """Read everything that this rank stores of the current state.

        Args:
            held: Layout indices of parameters that held a gradient at the last commit.
            groups: Each optimizer's hyper-parameters as of the last commit: a scheduler may have
                moved them since, at an epoch's end say.
        """
        attached, tracker = self.attached, self.tracker
        residual, averages = self.residual.named(), self.averages.named_tensors()
        tensors: list[tuple[str, torch.Tensor]] = []
        state: list[dict[str, dict[str, Any]]] = [{} for _ in attached.optimizers]
        owners = share_owners(attached.layout, self.world_size)
        for i, spec in enumerate(attached.layout.parameters):
            if owners[i] != self.rank:
                continue
            parameter = attached.parameters[i]
            tensors.append((PARAMETER + spec.name, parameter))
            entries = attached.optimizers[attached.owner[i]].state.get(parameter, {})
            for key, value in entries.items():
                if is_full(key, value, parameter):
                    name = f"{OPTIMIZER}{attached.owner[i]}/{spec.name}/{key}"
                    tensors.append((name, value))
                else:
                    state[attached.owner[i]].setdefault(spec.name, {})[key] = value
            tensors += [
                (f"{AVERAGE_ITEM}{name}/{spec.name}", values[i])
                for name, values in averages.items()
                if i in values
            ]
        # Tensor names hold the item's own prefix: "buffer/...", "frozen/..." or "tensor/...".
        tensors += [
            (name, value)
            for name, value in tracker.tensors.items()
            if not (self.shares_constants and tracker.is_as_started(name))
        ]
        tensors += [(RESIDUAL + name, values) for name, values in residual.items()]
        return [
            *(image_tensor(name, tensor) for name, tensor in tensors),
            image_tensor(
                SCALARS,
                scalars_tensor(
                    [list(own) for own in groups], state, list(held), dict(tracker.committed)
                ),
            ),
        ]


def constant_images(attached: Attached) -> list[ImageTensor]:
    """The frozen parameters, to be stored once for all snapshots."""
    return [image_tensor(name, tensor) for name, tensor in attached.frozen_parameters().items()]


def is_full(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state entry has one element per element of its parameter: a tensor of a snapshot."""
    is_shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return is_shaped and not is_scalar(key, parameter.numel())
