"""The ranks that hold the same shards of a model: with ``attach(replicate=...)`` lowdiff averages over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lowdiff.core.layout import Part, trained_by
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.model.sharding import is_sharded, local_of, sharded
from lowdiff.types import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TWO_DIMENSIONS = (
    'mesh = init_device_mesh(device, (copies, shards), mesh_dim_names=("rep", "shard")); '
    'fully_shard(module, mesh=mesh["shard"]); attach(model, optimizer, replicate=mesh["rep"])'
)


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The replica group of this rank.

    Attributes:
        group: Its process group.
        part: What its ranks train.
    """

    group: dist.ProcessGroup
    part: Part


def replicas_of(
    mesh: DeviceMesh, layout: Layout, parameters: Mapping[int, torch.Tensor], rank: int
) -> Replicas:
    """Check that a mesh holds the copies of this rank's shards, and that nobody averages over it yet.

    Args:
        mesh: What ``attach`` was given as ``replicate``.
        layout: Of the run.
        parameters: Layout index -> parameter, of what this rank trains.
        rank: This rank.

    Raises:
        ConfigError: If it is no mesh of one dimension, the model is not sharded, or other ranks hold the
            copies.
        UnsupportedModel: If a shard does not lie in memory as FSDP's buffers do.
    """
    if getattr(mesh, "ndim", None) != 1 or not hasattr(mesh, "get_group"):
        raise ConfigError(
            f"replicate is a DeviceMesh of one dimension, whose ranks hold copies, got {mesh!r}; "
            f"{_TWO_DIMENSIONS}"
        )
    if not any(map(is_sharded, parameters.values())):
        raise ConfigError(
            "replicate= says where the copies of a sharded model are, and this model is not sharded; leave "
            "it out: DistributedDataParallel averages over all of its ranks"
        )
    group = mesh.get_group()
    copies = tuple(dist.get_process_group_ranks(group))
    everyone = tuple(range(dist.get_world_size()))
    for index, parameter in parameters.items():
        spec = layout.parameters[index]
        if is_sharded(parameter):
            own_mesh = sharded(parameter).device_mesh
            averaged = sorted({*own_mesh.mesh.flatten().tolist()} & {*copies} - {rank})
            if averaged:
                raise ConfigError(
                    f"{spec.tensor!r} lies on a mesh with the ranks {averaged}, which replicate= names as "
                    "well, so that FSDP averages over them before lowdiff could; shard over one "
                    f"dimension alone: {_TWO_DIMENSIONS}"
                )
        if (spec.ranks or everyone) != copies:
            raise ConfigError(
                f"{spec.name!r} is trained by the ranks {list(spec.ranks or everyone)}, and replicate= "
                f"names {list(copies)}; give the dimension of the mesh whose ranks hold the same "
                f"shards, and shard every parameter over the other: {_TWO_DIMENSIONS}"
            )
        if not local_of(parameter).is_contiguous():
            raise UnsupportedModel(
                f"this rank's part of {spec.tensor!r} is not contiguous, as FSDP's buffers are; make "
                "the parameter contiguous before fully_shard"
            )
    return Replicas(group, trained_by(layout, rank))
