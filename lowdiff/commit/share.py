"""A rank's share of a full snapshot: the tensors in it, read from the live training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowdiff.core.layout import share_owners
from lowdiff.model.binding import Attached
from lowdiff.model.tracked import Live
from lowdiff.persistence.format.image import OPTIMIZER, PARAMETER, RESIDUAL, SCALARS, ImageTensor
from lowdiff.recovery.images import image_tensor, scalars_tensor
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    TENSOR_ITEM,
    decode_item,
    is_scalar,
)
from lowdiff.step.states import Sealed


def share_of(live: Live, sealed: Sealed) -> list[ImageTensor]:
    """Read everything that this rank stores of the current state, which is that of ``sealed``.

    Hyper-parameters are those that were sealed: a scheduler may have moved them since, at an epoch's
    end say.
    """
    tracker = live.tracker
    # Tensor names hold the item's own prefix: "buffer/...", "frozen/..." or "tensor/...".
    tensors = {
        name: value
        for name, value in tracker.tensors.items()
        if not (live.shares_constants and tracker.is_as_started(name))
    }
    tensors |= {RESIDUAL + name: values for name, values in live.residual.named().items()}
    return _share(live, sealed, live.rank, tensors, tracker.committed)


def share_of_items(
    live: Live, sealed: Sealed, rank: int, items: Mapping[str, bytes]
) -> list[ImageTensor]:
    """Read what a rank would store of the current state; parameters and optimizer state are equal on all.

    Args:
        live: Any rank's training without error feedback.
        sealed: The step whose state it is.
        rank: Whose share.
        items: All items of that rank at that step; no bytes for one that is gone.
    """
    tensors, values = {}, {}
    for name, data in items.items():
        if not name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            values[name] = data
        elif data:
            tensors[name] = decode_item(name, data)
    return _share(
        live, sealed, rank, tensors, {name: data for name, data in values.items() if data}
    )


def _share(
    live: Live,
    sealed: Sealed,
    rank: int,
    tensor_items: Mapping[str, torch.Tensor],
    items: Mapping[str, bytes],
) -> list[ImageTensor]:
    attached, averages = live.attached, live.averages.named_tensors()
    tensors: list[tuple[str, torch.Tensor]] = []
    state: list[dict[str, dict[str, Any]]] = [{} for _ in attached.optimizers]
    owners = share_owners(attached.layout, live.world_size)
    for i, spec in enumerate(attached.layout.parameters):
        if owners[i] != rank:
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
    tensors += tensor_items.items()
    return [
        *(image_tensor(name, tensor) for name, tensor in tensors),
        image_tensor(
            SCALARS,
            scalars_tensor(
                [list(own) for own in sealed.groups],
                state,
                list(sealed.differential.held),
                dict(items),
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
