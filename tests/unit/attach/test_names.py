"""Tensors keep the names that the user's own module gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowdiff
from lowdiff.core.layout import own_name
from lowdiff.errors import UnsupportedModel
from lowdiff.model.binding import describe
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import Loop, small_model


class Counting(nn.Module):
    """Counts its forward passes."""

    seen: torch.Tensor

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by
        self.lin = nn.Linear(20, 20)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += self.by
        outputs: torch.Tensor = self.lin(inputs)
        return outputs


class Outer(Counting):
    """Has tensors of the same names in a part that is called as DDP calls what it wraps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(10)
        self.module = Counting(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.module(inputs))


def test_a_part_called_module_keeps_its_name_and_its_tensors(tmp_path: Path) -> None:
    first = Loop(tmp_path, model=Outer())
    first.attach()
    for number in first.checkpointer.steps(3):
        first.step(number)
    expected = first.weights()
    first.die()
    second = Loop(tmp_path, model=Outer())
    assert second.attach() == 3
    assert same(second.weights(), expected)
    second.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    Outer().load_state_dict(recovered.model_state_dict())
    assert same(dict(recovered.model_state_dict()), expected)


def test_averages_of_a_model_with_a_part_called_module_are_replayed(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=Outer())
    average = AveragedModel(loop.model)
    loop.attach(average=average)
    for number in loop.checkpointer.steps(3):
        loop.step(number)
        average.update_parameters(loop.model)
    names = lowdiff.recover(tmp_path / "run", 0).fence.averages["average"]
    assert set(names) == {name for name, _ in Outer().named_parameters()}
    loop.checkpointer.close()
    found = lowdiff.recover(tmp_path / "run", 2).stateful["average"]
    assert found.keys() == average.state_dict().keys()


def attach_in_ddp(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    """Resume in DDP what one process began without; the names of the new life."""
    loop = Loop(Path(folder), model=wrapped(Outer()))
    resumed = loop.attach()
    loop.checkpointer.close()
    newest = scan(RunFolder(loop.folder / "run"), []).incarnations[1]
    return resumed, [spec.name for spec in newest.layout.parameters]


def test_ddp_around_it_changes_no_name(pool: Pool, tmp_path: Path) -> None:
    Loop(tmp_path, model=Outer()).run(2)
    expected = [name for name, _ in Outer().named_parameters()]
    assert pool.run(attach_in_ddp, 1, str(tmp_path)) == [(2, expected)]


def test_data_parallel_around_a_model_changes_no_name() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, parallel = describe(model, [optimizer]), describe(nn.DataParallel(model), [optimizer])
    assert parallel.layout == plain.layout
    assert parallel.names == plain.names
    assert parallel.constants().keys() == plain.constants().keys()


def test_two_tensors_with_one_name_are_refused() -> None:
    compiled = nn.Module()  # as torch.compile makes of a part
    compiled._orig_mod = nn.BatchNorm1d(3)
    compiled.register_buffer("running_mean", torch.zeros(3))
    model = nn.ModuleDict({"part": compiled})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedModel, match=r"'part.running_mean' .*'part._orig_mod.running_mean'"
    ):
        describe(model, [optimizer])


def test_a_name_loses_what_torch_compile_puts_into_it() -> None:
    assert own_name("module.part._orig_mod.weight") == "module.part.weight"
