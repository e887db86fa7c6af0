"""Which tensors a rank's shard of a full snapshot holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowdiff.attached import Attached, hyper_parameters
from lowdiff.capture import ItemTracker
from lowdiff.layout import byte_view, dtype_name
from lowdiff.persistence.snapshots import OPTIMIZER, PARAMETER, RESIDUAL, SCALARS, ImageTensor
from lowdiff.persistence.values import encode
from lowdiff.recovery.optimizers import SCALAR_STATE
from lowdiff.recovery.state import AVERAGE_ITEM
from lowdiff.types import Layout

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def shard_owners(layout: Layout, world_size: int) -> list[int]:
    """Which rank stores each parameter and its optimizer state: balanced by bytes."""
    load = [0] * world_size
    owners = [0] * len(layout.parameters)
    sizes = [spec.nbytes for spec in layout.parameters]
    for parameter in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[parameter] = load.index(min(load))
        load[owners[parameter]] += sizes[parameter]
    return owners


def shard_tensors(
    attached: Attached,
    tracker: ItemTracker,
    residual: Mapping[int, torch.Tensor],
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
        residual: Flat residual by layout index; every rank stores its own whole.
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
    specs = attached.layout.parameters
    tensors += [
        image_tensor(RESIDUAL + specs[i].name, values, specs[i].shape, specs[i].strides)
        for i, values in residual.items()
    ]
    scalars = {
        "groups": [list(hyper_parameters(o)) for o in attached.optimizers],
        "state": state,
        "held": list(held),
        "items": dict(tracker.committed),
    }
    data = torch.frombuffer(bytearray(encode(scalars, name="snapshot")), dtype=torch.uint8)
    tensors.append(image_tensor(SCALARS, data))
    return tensors


def constant_images(attached: Attached) -> list[ImageTensor]:
    """The frozen parameters, to be stored once for all snapshots."""
    return [image_tensor(name, tensor) for name, tensor in attached.frozen.items()]


def image_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> ImageTensor:
    """A tensor as an image holds it: on the CPU, row-major; a view where it is both already.

    Args:
        name: Its name in the image.
        tensor: The tensor, or its elements in memory order if shape and strides are given.
        shape: Its logical shape.
        strides: Its strides in elements.
    """
    host = tensor.detach()
    if shape is not None and strides is not None:
        host = host.as_strided(tuple(shape), tuple(strides))
    host = host.cpu().contiguous()
    data = byte_view(host) if host.numel() else memoryview(b"")
    return ImageTensor(name, _CODES[dtype_name(host.dtype)], tuple(host.shape), data)
