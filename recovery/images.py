"""A state's tensors as those of a snapshot's image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowdiff.layout import byte_view, dtype_name, shaped
from lowdiff.persistence.snapshots import OPTIMIZER, PARAMETER, SCALARS, ImageTensor
from lowdiff.persistence.values import encode
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    TENSOR_ITEM,
    RecoveredState,
    decode_item,
    is_aligned,
)

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


def image_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> ImageTensor:
    """One tensor of an image, in logical order.

    Args:
        name: Its name there.
        tensor: The tensor, or flat memory whose ``shape`` and ``strides`` are given.
        shape: Logical shape.
        strides: In elements.
    """
    host = tensor.detach()
    if shape is not None and strides is not None:
        host = host.as_strided(tuple(shape), tuple(strides))
    host = host.cpu().contiguous()
    data = byte_view(host) if host.numel() else memoryview(b"")
    return ImageTensor(name, _CODES[dtype_name(host.dtype)], tuple(host.shape), data)


def scalars_image(
    groups: list[Any],
    state: list[dict[str, dict[str, Any]]],
    held: list[int],
    items: dict[str, Any],
) -> ImageTensor:
    """Everything of a shard that is no tensor."""
    scalars = {"groups": groups, "state": state, "held": held, "items": items}
    data = torch.frombuffer(bytearray(encode(scalars, name="snapshot")), dtype=torch.uint8)
    return image_tensor(SCALARS, data)


def shard_images(state: RecoveredState) -> list[ImageTensor]:
    """A rank's shard as a trainer would have taken it.

    Args:
        state: What the rank owns, with its own items only.
    """
    specs = {spec.name: spec for spec in state.fence.layout.parameters}
    images = [
        image_tensor(PARAMETER + name, shaped(values, specs[name]))
        for name, values in state.parameters.items()
    ]
    numbers: list[dict[str, dict[str, Any]]] = [{} for _ in state.optimizers]
    for index, optimizer in enumerate(state.optimizers):
        for name, entries in optimizer.state.items():
            for key, value in entries.items():
                if is_aligned(key, value, specs[name].numel):
                    full = f"{OPTIMIZER}{index}/{name}/{key}"
                    images.append(image_tensor(full, shaped(value, specs[name])))
                else:
                    numbers[index].setdefault(name, {})[key] = value
    for average, tensors in state.averages.items():
        images += [
            image_tensor(f"{AVERAGE_ITEM}{average}/{name}", shaped(values, specs[name]))
            for name, values in tensors.items()
        ]
    items = {}
    for name, data in state.items[0].items():
        if name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            images.append(image_tensor(name, decode_item(name, data)))
        else:
            items[name] = data
    groups = [list(optimizer.groups) for optimizer in state.optimizers]
    return [*images, scalars_image(groups, numbers, list(state.held), items)]
