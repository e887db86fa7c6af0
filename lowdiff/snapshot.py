"""Which tensors a rank's shard of a full snapshot holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowdiff.attached import Attached, hyper_parameters
from lowdiff.capture import ItemTracker
from lowdiff.layout import shard_owners
from lowdiff.persistence.snapshots import OPTIMIZER, PARAMETER, RESIDUAL, ImageTensor
from lowdiff.recovery.images import image_tensor, scalars_image
from lowdiff.recovery.optimizers import SCALAR_STATE
from lowdiff.recovery.state import AVERAGE_ITEM


def shard_tensors(
    attached: Attached,
    tracker: ItemTracker,
    residual: Mapping[str, torch.Tensor],
    averages: Mapping[str, Mapping[int, torch.Tensor]],
    *,
    held: Sequence[int],
    shares_constants: bool,
    rank: int,
    world_size: int,
) -> list[ImageTensor]:
    """Everything this rank stores of the current state.

    Args:
        attached: Model and optimizers.
        tracker: Their items.
        residual: By name; every rank stores its own whole.
        averages: Name of each replayed average -> layout index -> tensor.
        held: Layout indices of parameters that held a gradient at the last commit.
        shares_constants: Whether frozen parameters as they were at the start are stored apart.
        rank: This rank.
        world_size: Number of ranks.
    """
    tensors: list[ImageTensor] = []
    state: list[dict[str, dict[str, Any]]] = [{} for _ in attached.optimizers]
    owners = shard_owners(attached.layout, world_size)
    for i, spec in enumerate(attached.layout.parameters):
        if owners[i] != rank:
            continue
        parameter = attached.parameters[i]
        tensors.append(image_tensor(PARAMETER + spec.name, parameter))
        entries = attached.optimizers[attached.owner[i]].state.get(parameter, {})
        for key, value in entries.items():
            full = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if full and key not in SCALAR_STATE:
                name = f"{OPTIMIZER}{attached.owner[i]}/{spec.name}/{key}"
                tensors.append(image_tensor(name, value))
            else:
                state[attached.owner[i]].setdefault(spec.name, {})[key] = value
        tensors += [
            image_tensor(f"{AVERAGE_ITEM}{name}/{spec.name}", values[i])
            for name, values in averages.items()
            if i in values
        ]
    # Tensor names hold the item's own prefix: "buffer/...", "frozen/..." or "tensor/...".
    tensors += [
        image_tensor(name, value)
        for name, value in tracker.tensors.items()
        if not (shares_constants and tracker.is_as_started(name))
    ]
    tensors += [image_tensor(RESIDUAL + name, values) for name, values in residual.items()]
    groups = [list(hyper_parameters(o)) for o in attached.optimizers]
    tensors.append(scalars_image(groups, state, list(held), dict(tracker.committed)))
    return tensors


def constant_images(attached: Attached) -> list[ImageTensor]:
    """The frozen parameters, to be stored once for all snapshots."""
    return [image_tensor(name, tensor) for name, tensor in attached.frozen.items()]
