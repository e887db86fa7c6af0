"""Sharded tensors (FSDP2, HSDP, tensor parallelism): what of each this rank trains, and what all ranks do.

A rank trains its local shards. The layout of a run has an entry for each shard of all ranks, so that its parts
together are the whole model; ranks that hold the same shard divide the work on it. In DDP every rank holds everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lowdiff.core.layout import in_a_row, spec_of
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.types import Layout, ParameterSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``, without importing their module, which takes long."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__name__ == "DTensor"


def sharded(tensor: torch.Tensor) -> DTensor:
    """Return a tensor, which `is_sharded`, as what it is."""
    return cast("DTensor", tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, sharing its memory: the tensor itself, unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else it is a new view at each call, with a history
        return sharded(tensor).to_local()


def sharded_as(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this rank's part as one that is sharded as a parameter is; plain where that is."""
    if not is_sharded(parameter):
        return local
    like = sharded(parameter)
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def refuse_ranks_outside(parameter: torch.Tensor, world_size: int) -> None:
    """See that all ranks of the job train: those that do not would be waited for.

    Raises:
        ConfigError: If the mesh of a sharded parameter, with all its dimensions, has fewer ranks.
    """
    mesh = sharded(parameter).device_mesh
    # A model may lie on one dimension of a mesh; nothing public tells which others there are.
    root = mesh._get_root_mesh()
    if root.size() < world_size:
        raise ConfigError(
            f"the model is sharded over {root.size()} of the job's {world_size} ranks; ranks that do not "
            "train it need a job, or a torchrun, of their own"
        )


def add_up(parameter: torch.Tensor) -> None:
    """Give a parameter its gradient as it is placed itself: with sequence parallelism ranks hold addends.

    An optimizer would add them up in each of its operations, and read the same values. All ranks of its mesh
    call this for the same parameters in the same order.
    """
    gradient = parameter.grad
    if gradient is None or not (is_sharded(parameter) and is_sharded(gradient)):
        return
    placements = sharded(parameter).placements
    if sharded(gradient).placements != placements:
        parameter.grad = sharded(gradient).redistribute(placements=placements)


def sharded_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules that ``fully_shard`` was called on."""
    from torch.distributed.fsdp import FSDPModule  # takes long, and only sharded models need it

    return ((name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule))


def groups_of(module: Any) -> list[Any]:
    """Return FSDP's parameter groups of one module; nothing public leads to them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of PyTorch have one at most
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def drawing_alike(
    model: torch.nn.Module, parameters: Iterable[torch.Tensor], rank: int
) -> list[int]:
    """Return the ranks that compute one replica of a model together, with this one: they draw the same numbers.

    Those are the ranks of a sharded parameter's mesh (tensor parallelism), but for the dimensions of it that FSDP
    averages over: along these each rank has data of its own.

    Args:
        model: The model.
        parameters: Those of it that this rank trains.
        rank: This rank.
    """
    averaged = {rank}
    for _, module in sharded_modules(model):
        for group in groups_of(module):
            averaged.update(group.mesh_info.mesh.mesh.flatten().tolist())
    mesh = next((sharded(p).device_mesh for p in parameters if is_sharded(p)), None)
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return [rank]
    alike: list[int | slice] = []
    for dimension, own in enumerate(place):
        line = mesh.mesh[tuple(slice(None) if d == dimension else p for d, p in enumerate(place))]
        alike.append(own if {*line.tolist()} <= averaged else slice(None))
    return sorted(mesh.mesh[tuple(alike)].flatten().tolist())


def part_of(name: str, parameter: torch.Tensor) -> ParameterSpec:
    """Describe what this rank trains of a parameter; it lies at offset 0.

    Raises:
        UnsupportedModel: If it is not divided into ranges of its dimensions.
    """
    spec = spec_of(name, local_of(parameter))
    if not is_sharded(parameter):
        return spec
    placements, mesh = sharded(parameter).placements, sharded(parameter).device_mesh
    if local_of(parameter).device.type != mesh.device_type:
        raise UnsupportedModel(
            f"{name!r} lies on {local_of(parameter).device}, and its mesh on {mesh.device_type}: parameters that "
            "FSDP keeps on the host (CPUOffloadPolicy) are not supported; leave offload_policy out, or shard "
            "over more ranks"
        )
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedModel(
            f"{name!r} has the placements {placements}: a parameter whose ranks hold addends; "
            "redistribute it to Replicate() or Shard(dim) before its optimizer is built"
        )
    # Nothing public tells where a rank's part begins, with uneven and nested shards as well.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if tuple(shape) != spec.shape and spec.numel:
        raise UnsupportedModel(
            f"{name!r} is {spec.shape} on this rank, where its placements {placements} make it "
            f"{tuple(shape)}; attach the optimizer's own parameters, sharded as they train"
        )
    whole = tuple(parameter.shape)
    is_part = spec.shape != whole
    return replace(
        spec,
        name=f"{name}@{','.join(map(str, offset))}" if is_part else name,
        global_offset=tuple(offset),
        tensor=name,
        whole_shape=whole,
    )


@dataclass(frozen=True, slots=True, eq=False)
class FrozenShards:
    """Frozen parameters that are sharded.

    Attributes:
        layout: Their shards, of all ranks.
        parameters: Item name -> parameter; while FSDP2 has gathered it, the module has another.
    """

    layout: Layout
    parameters: Mapping[str, torch.nn.Parameter]


def told(layout: Layout) -> list[dict[str, Any]]:
    """Return a layout as plain values, for other ranks."""
    return [asdict(spec) for spec in layout.parameters]


def joined(layouts: Sequence[Sequence[Mapping[str, Any]]]) -> Layout:
    """Make the layout of a run of what every rank trains.

    Args:
        layouts: Of each rank; see `told`.

    Raises:
        UnsupportedModel: If ranks train other tensors, or their parts are not the whole.
    """
    of_rank = [[_spec(values) for values in layout] for layout in layouts]
    tensors = list(dict.fromkeys(spec.tensor for spec in of_rank[0]))
    for rank, specs in enumerate(of_rank):
        others = {spec.tensor for spec in specs} ^ set(tensors)
        if others:
            raise UnsupportedModel(
                f"rank {rank} and rank 0 do not train the same tensors ({min(others)!r}, say): stages of "
                "a pipeline are not supported; shard every stage's ranks in a run of their own"
            )
    ranks_of: dict[ParameterSpec, list[int]] = {}
    for rank, specs in enumerate(of_rank):
        for spec in specs:
            ranks_of.setdefault(spec, []).append(rank)
    order = {tensor: number for number, tensor in enumerate(tensors)}
    found = sorted(ranks_of, key=lambda spec: (order[spec.tensor], spec.global_offset, spec.shape))
    _refuse_incomplete(found)
    everywhere = tuple(range(len(of_rank)))
    holders = ((spec, tuple(ranks_of[spec])) for spec in found)
    return in_a_row(replace(s, ranks=() if ranks == everywhere else ranks) for s, ranks in holders)


def _spec(values: Mapping[str, Any]) -> ParameterSpec:
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list | tuple)}
    return ParameterSpec(**{**values, **tuples, "offset": 0})


def _refuse_incomplete(specs: Iterable[ParameterSpec]) -> None:
    """See that the parts of each tensor are the whole, each element once."""
    sizes: dict[str, int] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        sizes[spec.tensor] = sizes.get(spec.tensor, 0) + spec.numel
        if wholes.setdefault(spec.tensor, spec.whole_shape) != spec.whole_shape:
            raise UnsupportedModel(f"{spec.tensor!r} has other shapes on other ranks")
    for tensor, size in sizes.items():
        if size != math.prod(wholes[tensor]):
            raise UnsupportedModel(
                f"the ranks' parts of {tensor!r} have {size:,} elements in all, and the tensor has "
                f"{math.prod(wholes[tensor]):,}: shard it over a mesh of all ranks, by ranges of whole rows"
            )
