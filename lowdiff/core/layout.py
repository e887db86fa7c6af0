"""Layout of torch tensors: names, flat views in memory order, bit patterns.

Offsets count in *memory* order, the order in which torch's kernels walk a tensor. A channels-last
weight is therefore one contiguous range here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.types import ITEM_BYTES, Layout, ParameterSpec

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
#: What `torch.compile` and activation checkpointing put into names.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
#: Integer dtype by item size; signed, because torch has full kernels for signed integers only.
INT_OF_BYTES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def own_name(name: str) -> str:
    """Return a tensor's name in the user's own module, parts of which may be compiled."""
    if not any(part in name for part in _WRAPPED):  # this runs for every buffer in every step
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's dtype name."""
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Convert ``torch.float32`` to ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor covers its memory range without holes or overlap."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of a dense tensor in memory order; shares its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(values: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return a view of flat ``values`` (memory order) with the parameter's shape and strides."""
    return values.as_strided(spec.shape, spec.strides, values.storage_offset())


def flat_like(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return ``tensor`` flat in the memory order of ``spec``; copied only if its order differs.

    Raises:
        UnsupportedModel: If the tensor is sparse.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedModel(
            f"the gradient of {spec.name!r} has layout {tensor.layout}; compressors take dense "
            "gradients: build the embedding with sparse=False"
        )
    if tuple(tensor.stride()) != spec.strides and tensor.numel() > 1:
        copy = torch.empty(spec.numel, dtype=tensor.dtype, device=tensor.device)
        shaped(copy, spec).copy_(tensor)
        return copy
    return flat(tensor)


def spec_of(name: str, tensor: torch.Tensor) -> ParameterSpec:
    """Describe a parameter that is no shard; it lies at offset 0."""
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=dtype_name(tensor.dtype),
        offset=0,
    )


def layout_of(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Lay out trainable parameters one after the other; see `laid_out`."""
    return laid_out((spec_of(name, tensor), tensor) for name, tensor in named_parameters)


def laid_out(parts: Iterable[tuple[ParameterSpec, torch.Tensor]]) -> Layout:
    """Lay out parts of trainable parameters one after the other.

    Args:
        parts: What this rank trains, described; offsets do not count.

    Raises:
        UnsupportedModel: For sparse, complex or overlapping parameters.
    """
    held = list(parts)
    for spec, tensor in held:
        _refuse_unsupported(spec.tensor, tensor)
    if not held:
        raise ConfigError(
            "the model has no trainable parameter that an attached optimizer owns; attach the "
            "model after building its optimizer, with requires_grad set"
        )
    refuse_shared_memory({spec.name: tensor for spec, tensor in held})
    return in_a_row(spec for spec, _ in held)


def in_a_row(specs: Iterable[ParameterSpec]) -> Layout:
    """Give entries offsets from 0, one behind the other; those that they have do not count."""
    found, offset = [], 0
    for spec in specs:
        found.append(replace(spec, offset=offset))
        offset = found[-1].stop
    return Layout(tuple(found))


def by_tensor(layout: Layout) -> dict[str, list[ParameterSpec]]:
    """Return the entries of each tensor of the model."""
    found: dict[str, list[ParameterSpec]] = {}
    for spec in layout.parameters:
        found.setdefault(spec.tensor, []).append(spec)
    return found


def _refuse_unsupported(name: str, parameter: torch.Tensor) -> None:
    if dtype_name(parameter.dtype) not in ITEM_BYTES:
        raise UnsupportedModel(
            f"parameter {name!r} has dtype {parameter.dtype}; supported are "
            + ", ".join(ITEM_BYTES)
        )
    if parameter.layout != torch.strided or not is_dense(parameter):
        raise UnsupportedModel(
            f"parameter {name!r} does not cover its memory densely (layout {parameter.layout}, "
            f"strides {tuple(parameter.stride())}); make it contiguous before attach"
        )
    kept_as = getattr(parameter, "grad_dtype", None)  # new in PyTorch
    if kept_as not in (None, parameter.dtype):
        raise UnsupportedModel(
            f"parameter {name!r} is {parameter.dtype} and keeps gradients in {kept_as} "
            "(grad_dtype), while the log holds them in the parameter's dtype; leave grad_dtype "
            "alone, or train fp32 parameters under torch.autocast"
        )


def refuse_shared_memory(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters that share memory: both updates change both, which replay does not repeat.

    Raises:
        UnsupportedModel: Naming the first two.
    """
    ranges = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
        for name, parameter in named.items()
        if parameter.numel() and not parameter.is_meta
    )
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise UnsupportedModel(
                f"parameters {first!r} and {second!r} share memory (one's .data was assigned to the "
                "other's?), so that an update of either changes both; tie them by assigning the "
                "Parameter itself, e.g. decoder.weight = encoder.weight, before the model is "
                "wrapped and its optimizer built"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """Some entries of a layout, in a layout of their own.

    Attributes:
        indices: The index of each in the whole layout, ascending.
        layout: The entries, with offsets from 0; whoever holds the part trains all of it.
    """

    indices: tuple[int, ...]
    layout: Layout

    def own(self, indices: Iterable[int]) -> set[int]:
        """Return the places in this part of entries that are given by their index in the whole layout."""
        place_of = {index: place for place, index in enumerate(self.indices)}
        return {place_of[index] for index in indices}


def cut_out(layout: Layout, indices: Iterable[int]) -> Part:
    """Lay some entries out one after the other; the whole layout stays as it is."""
    chosen = tuple(indices)
    if len(chosen) == len(layout.parameters):
        return Part(chosen, layout)
    return Part(chosen, in_a_row(replace(layout.parameters[index], ranks=()) for index in chosen))


def trained_by(layout: Layout, rank: int) -> Part:
    """Return what one rank trains."""
    entries = enumerate(layout.parameters)
    return cut_out(layout, (i for i, spec in entries if not spec.ranks or rank in spec.ranks))


def replica_groups(layout: Layout) -> dict[tuple[int, ...], Part]:
    """Return what each replica group trains, by its ranks; ``()`` are all of them."""
    of_ranks: dict[tuple[int, ...], list[int]] = {}
    for index, spec in enumerate(layout.parameters):
        of_ranks.setdefault(spec.ranks, []).append(index)
    return {ranks: cut_out(layout, indices) for ranks, indices in of_ranks.items()}


def share_owners(layout: Layout, world_size: int) -> list[int]:
    """Return which rank stores each parameter and its optimizer state, balanced by bytes.

    Of a shard one of the ranks that train it; any rank where another number of them recovers.
    """
    load = [0] * world_size
    owners = [0] * len(layout.parameters)
    sizes = [spec.nbytes for spec in layout.parameters]
    for parameter in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        ranks = layout.parameters[parameter].ranks
        if not ranks or ranks[-1] >= world_size:
            ranks = tuple(range(world_size))
        owners[parameter] = min(ranks, key=load.__getitem__)
        load[owners[parameter]] += sizes[parameter]
    return owners


def shares_of(layout: Layout, world_size: int) -> list[list[int]]:
    """Return the layout indices of the parameters that each rank stores, ascending."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for parameter, owner in enumerate(share_owners(layout, world_size)):
        shares[owner].append(parameter)
    return shares
