"""Which sharded trainings are taken, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import lowdiff
import lowdiff.testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UnsupportedModel, UnsupportedOptimizer, UsageError
from lowdiff.model.binding import describe, of_all_ranks
from lowdiff.model.ranks import Ranks
from lowdiff.model.sharding import joined, local_of, part_of, refuse_ranks_outside, told
from lowdiff.types import Layout, ParameterSpec


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    return model


def part(tensor: str, start: int, rows: int, of: int, ranks: tuple[int, ...] = ()) -> ParameterSpec:
    whole = (of, 2)
    return ParameterSpec(
        f"{tensor}@{start},0", (rows, 2), (2, 1), "float32", 0, (start, 0), tensor, whole, ranks
    )


def of_ranks(*ranks: list[ParameterSpec]) -> Layout:
    return joined([told(Layout(tuple(specs))) for specs in ranks])


def test_ranks_that_hold_one_shard_share_an_entry() -> None:
    low, high = part("w", 0, 3, 5), part("w", 3, 2, 5)
    layout = of_ranks([low], [high], [low], [high])
    assert [(s.name, s.ranks) for s in layout.parameters] == [("w@0,0", (0, 2)), ("w@3,0", (1, 3))]
    assert [s.offset for s in layout.parameters] == [0, 6]
    everywhere = of_ranks([low, high], [low, high])
    assert [s.ranks for s in everywhere.parameters] == [(), ()]


def test_parts_that_are_not_the_whole_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="have 6 elements in all, and the tensor has 10"):
        of_ranks([part("w", 0, 3, 5)], [part("w", 0, 3, 5)])


def test_stages_of_a_pipeline_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"not train the same tensors .* a run of their own"):
        of_ranks([part("w", 0, 5, 5)], [part("v", 0, 5, 5)])


def test_shapes_that_differ_between_ranks_are_refused() -> None:
    other = replace(part("w", 3, 2, 5), whole_shape=(6, 2))
    with pytest.raises(UnsupportedModel, match="has other shapes on other ranks"):
        of_ranks([part("w", 0, 3, 5)], [other])


def test_addends_are_refused(mesh: DeviceMesh) -> None:
    addends = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
    with pytest.raises(
        UnsupportedModel, match=r"ranks hold addends; redistribute it to Replicate\(\)"
    ):
        part_of("w", addends)


def test_parameters_that_are_kept_on_the_host_are_refused(mesh: DeviceMesh) -> None:
    elsewhere = torch.ones(3, 2, device="meta")  # as seen from a mesh on another device than theirs
    offloaded = DTensor.from_local(elsewhere, mesh, [Shard(0)])
    with pytest.raises(UnsupportedModel, match=r"CPUOffloadPolicy.*leave offload_policy out"):
        part_of("w", offloaded)


@pytest.mark.filterwarnings("ignore:.*NO_SHARD:UserWarning")
def test_fsdp1_is_refused(tmp_path: Path, mesh: DeviceMesh) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st")
    with pytest.raises(UnsupportedModel, match=r"FSDP1.*shard the model by .*fully_shard"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_mesh_of_some_of_the_ranks_is_refused(mesh: DeviceMesh) -> None:
    parameter = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    refuse_ranks_outside(parameter, 1)
    with pytest.raises(ConfigError, match=r"over 1 of the job's 2 ranks; .* of their own"):
        refuse_ranks_outside(parameter, 2)


def test_an_object_that_keeps_a_sharded_tensor_is_told_how_to_keep_its_part(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    model = sharded(mesh)
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st")
    checkpointer.state["best"] = model.get_parameter("weight").detach()
    with pytest.raises(ConfigError, match=r"DTensor .* value\.to_local\(\)"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_whole_tensor_on_a_mesh_keeps_its_name(mesh: DeviceMesh) -> None:
    for placement in (Replicate(), Shard(0)):
        spec = part_of("w", DTensor.from_local(torch.ones(3, 2), mesh, [placement]))
        assert (spec.name, spec.tensor, spec.is_shard) == ("w", "w", False)


def test_sharded_inside_ddp_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
    wrapped = type("Wrapped", (nn.Module,), {})()
    wrapped.inner = model
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = wrapped
    with pytest.raises(UnsupportedModel, match="inside DistributedDataParallel"):
        describe(ddp, (torch.optim.SGD(model.parameters(), lr=0.1),))


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_what_couples_elements_is_refused_where_a_tensor_is_divided(
    mesh: DeviceMesh, kind: str
) -> None:
    model = sharded(mesh)
    model.get_parameter("bias").requires_grad_(False)  # Muon takes matrices alone
    optimizer = getattr(torch.optim, kind)([model.get_parameter("weight")])
    attached = describe(model, (optimizer,))
    ranks = Ranks(None)
    low, high = part("weight", 0, 1, 3), part("weight", 1, 2, 3)
    low, high = (replace(s, whole_shape=(3, 2)) for s in (low, high))

    class Two(Ranks):
        def gather(self, value: object) -> list[object]:
            return [[told(Layout((s,))), []] for s in (low, high)]

    assert of_all_ranks(attached, ranks).layout == attached.layout
    message = rf"{kind} couples the elements of a tensor.*\(AdamW, SGD"
    with pytest.raises(UnsupportedOptimizer, match=message):
        of_all_ranks(attached, Two(None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compressor": TopK(0.1)}, "replicate=mesh"),
        ({"strategy": "survivors"}, "needs every rank to hold the whole model"),
    ],
)
def test_strategies_for_whole_models_are_refused(
    tmp_path: Path, mesh: DeviceMesh, settings: dict[str, object], message: str
) -> None:
    model = sharded(mesh)
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_average_of_shards_is_refused(tmp_path: Path, mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    average = AveragedModel(nn.Linear(4, 3))
    average.module = model
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st")
    with pytest.raises(UnsupportedModel, match="averages sharded parameters"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=average)


def test_a_shard_that_moved_is_refused(tmp_path: Path, mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st")
    checkpointer.attach(model, optimizer)
    assert isinstance(model.weight, DTensor)
    model.weight._local_tensor = model.weight._local_tensor.clone()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match="lies elsewhere than at attach"):
        optimizer.step()
    lowdiff.testing.kill(checkpointer)


def test_a_write_to_a_shard_costs_nothing_but_its_bytes(tmp_path: Path, mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    weight = model.get_parameter("weight")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "st")
    checkpointer.attach(model, optimizer)
    for _ in checkpointer.steps(until=4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            local_of(weight).clamp_(-0.1, 0.1)
    expected = local_of(weight).detach().clone()
    lowdiff.testing.kill(checkpointer)
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "st")
    assert state.step == 4
    assert torch.equal(state.model_state_dict()["weight"], expected)
