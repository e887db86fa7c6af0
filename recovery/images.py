"""A state's tensors as those of a snapshot's image; `recovery/load.py` reads them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import IO, Any

import torch
from crc32c import crc32c

from lowdiff.core import devices
from lowdiff.core.layout import dtype_name, shaped
from lowdiff.core.memory import byte_view, in_memory_order
from lowdiff.persistence.format.image import (
    OPTIMIZER,
    PARAMETER,
    SCALARS,
    ImageEntry,
    ImageTensor,
    PartSums,
    image_header,
    in_file_order,
)
from lowdiff.persistence.format.values import encode
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    TENSOR_ITEM,
    RecoveredState,
    decode_item,
    is_aligned,
)

_PIECE_BYTES = 16 << 20
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {code: getattr(torch, name) for name, code in _CODES.items()}


def holds(dtype: torch.dtype) -> bool:
    """Whether images have a code for a dtype."""
    return dtype_name(dtype) in _CODES


def image_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[ImageTensor]:
    """Tensors of an image by name, each in logical order."""
    named = list(tensors)
    made = []
    for (name, _), host in zip(
        named, devices.on_host([tensor for _, tensor in named]), strict=True
    ):
        values = in_memory_order(host)
        code, data = _CODES[dtype_name(host.dtype)], byte_view(values)
        made.append(ImageTensor(name, code, tuple(host.shape), data))
    return made


def scalars_tensor(
    groups: list[Any],
    state: list[dict[str, dict[str, Any]]],
    held: list[int],
    items: dict[str, Any],
) -> torch.Tensor:
    """Everything of a shard that is no tensor, encoded; its name in an image is `SCALARS`."""
    scalars = {"groups": groups, "state": state, "held": held, "items": items}
    return torch.frombuffer(bytearray(encode(scalars, name="snapshot")), dtype=torch.uint8)


def aligned_tensors(state: RecoveredState) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every flat tensor of a state: its name in an image, whose parameter's form it has, and itself."""
    for name, values in state.parameters.items():
        yield PARAMETER + name, name, values
    numels = {spec.name: spec.numel for spec in state.fence.layout.parameters}
    for index, optimizer in enumerate(state.optimizers):
        for name, entries in optimizer.state.items():
            for key, value in entries.items():
                if is_aligned(key, value, numels[name]):
                    yield f"{OPTIMIZER}{index}/{name}/{key}", name, value
    for average, followed in state.averages.items():
        for name, values in followed.items():
            yield f"{AVERAGE_ITEM}{average}/{name}", name, values


def other_numbers(state: RecoveredState) -> list[dict[str, dict[str, Any]]]:
    """Return all that each optimizer keeps beside those tensors, by parameter."""
    numels = {spec.name: spec.numel for spec in state.fence.layout.parameters}
    return [
        {
            name: {k: v for k, v in entries.items() if not is_aligned(k, v, numels[name])}
            for name, entries in optimizer.state.items()
        }
        for optimizer in state.optimizers
    ]


def shard_tensors(state: RecoveredState) -> dict[str, Callable[[], torch.Tensor]]:
    """A rank's shard as a trainer would have taken it: by name, what makes each of its tensors.

    Args:
        state: What the rank owns, with its own items only.
    """
    specs = {spec.name: spec for spec in state.fence.layout.parameters}
    made: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(shaped, values, specs[parameter])
        for name, parameter, values in aligned_tensors(state)
    }
    items = {}
    for name, data in state.items[0].items():
        if name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            made[name] = partial(decode_item, name, data)
        else:
            items[name] = data
    groups = [list(optimizer.groups) for optimizer in state.optimizers]
    scalars = scalars_tensor(groups, other_numbers(state), list(state.held), items)
    return {**made, SCALARS: lambda: scalars}


def shard_images(state: RecoveredState) -> list[ImageTensor]:
    """`shard_tensors`, to be copied into an image."""
    return image_tensors((name, make()) for name, make in shard_tensors(state).items())


def write_image(
    file: IO[bytes], tensors: Mapping[str, Callable[[], torch.Tensor]]
) -> tuple[int, int, tuple[int, ...]]:
    """Write an image, and hold no more of it than a tensor that is made and a piece of its bytes.

    Args:
        file: Open for writing, and empty.
        tensors: By name, what makes each of them; called twice.

    Returns:
        Length in bytes and CRC-32C, and the CRC-32C of each part as a manifest has them.
    """
    entries = in_file_order(image_entry(name, make()) for name, make in tensors.items())
    header, size, checksum = memoryview(image_header(entries)), 0, 0
    sums = PartSums(len(header), entries)
    pieces = chain.from_iterable(pieces_of(tensors[entry.name]()) for entry in entries)
    for piece in chain([header], pieces):
        checksum = crc32c(piece, checksum)
        sums.add(piece)
        size += file.write(piece)
    return size, checksum, tuple(sums.found)


def image_entry(name: str, tensor: torch.Tensor) -> ImageEntry:
    """Return what an image's header says of a tensor, whose values need not be there."""
    return ImageEntry(name, _CODES[dtype_name(tensor.dtype)], tuple(tensor.shape))


def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in logical order: in parts, each a copy, where they lie in another."""
    if not tensor.numel():
        return
    row_bytes = tensor.nbytes // len(tensor) if tensor.dim() else tensor.nbytes
    if tensor.is_contiguous():
        yield byte_view(tensor)
    elif row_bytes > _PIECE_BYTES:
        for row in tensor:
            yield from pieces_of(row)
    else:
        for part in tensor.split(_PIECE_BYTES // row_bytes):
            yield byte_view(part.contiguous())
