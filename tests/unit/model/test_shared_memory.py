"""Tensors that share memory are captured and restored each under its own name, with its own bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same
from tests.crash.lives import Kill, assert_identical, history
from tests.crash.pool import Pool
from tests.crash.sharing_trainings import (
    KINDS,
    Basis,
    EmaOfWeight,
    EmaThatStaysTheWeight,
    Everything,
    FrozenTwins,
    Sharing,
    named_tensors,
    regression,
)
from tests.crash.trainings import TRAININGS


def checkpointer_in(folder: Path) -> lowdiff.Checkpointer:
    return lowdiff.Checkpointer(
        folder / "run",
        staging=folder / "staging",
        compressor=TopK(0.2),
        snapshot_every=4,
        retention=None,
    )


def train(
    folder: Path, make: Callable[[], nn.Module], until: int, *, kill: bool = False
) -> tuple[int, dict[int, object], nn.Module]:
    """Attach, train, and close or die; where it resumed, every step's loss and tensors, the model."""
    torch.manual_seed(3)
    made = regression(make(), 0)
    checkpointer = checkpointer_in(folder)
    resumed = checkpointer.attach(made.model, made.optimizer)
    found: dict[int, object] = {resumed: named_tensors(made.model)} if resumed else {}
    for step in checkpointer.steps(until):
        loss = made.step(step).detach()
        if not resumed or step >= resumed:
            found[step + 1] = [loss, named_tensors(made.model)]
    if kill:
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return resumed, found, made.model


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_every_tensor_comes_back_under_its_own_name(
    tmp_path: Path, make: Callable[[], Sharing]
) -> None:
    _, whole, _ = train(tmp_path / "whole", make, 8)
    found: dict[int, object] = {}
    for until, kill in ((3, True), (6, False), (8, True)):
        resumed, own, model = train(tmp_path / "killed", make, until, kill=kill)
        at_start = own.pop(resumed) if resumed else None
        if resumed:
            assert same(at_start, whole[resumed][1])  # type: ignore[index]
        found |= own
    assert same(found, whole)
    state = lowdiff.recover(tmp_path / "killed/run", staging=tmp_path / "killed/staging")
    recovered = state.model_state_dict()
    assert {n: v.tolist() for n, v in recovered.items()} == {
        n: v.tolist() for n, v in model.state_dict().items()
    }


@pytest.mark.slow
def test_with_two_ranks_all_of_them_do(pool: Pool, tmp_path: Path) -> None:
    build = TRAININGS["shared_memory"]
    whole = history(pool, build, tmp_path / "whole", world_size=2, until=10)
    kills = [Kill(4, staged_by=frozenset({0, 1})), Kill(8, staged_by=frozenset({0}))]
    killed = history(pool, build, tmp_path / "killed", world_size=2, until=10, kills=kills)
    assert killed.resumed == [4, 7]
    assert_identical(killed, whole)


def test_an_alias_is_kept_where_the_bytes_agree_and_broken_where_they_differ(
    tmp_path: Path,
) -> None:
    train(tmp_path / "agree", EmaThatStaysTheWeight, 3, kill=True)
    _, _, agreeing = train(tmp_path / "agree", EmaThatStaysTheWeight, 3)
    assert agreeing.get_buffer("ema").data_ptr() == agreeing.get_parameter("last.weight").data_ptr()
    train(tmp_path / "differ", EmaOfWeight, 3, kill=True)
    _, _, differing = train(tmp_path / "differ", EmaOfWeight, 3)
    assert (
        differing.get_buffer("ema").data_ptr() != differing.get_parameter("last.weight").data_ptr()
    )


def test_the_weights_alone_are_taken_by_name_as_well(tmp_path: Path) -> None:
    def several() -> nn.Module:
        return Everything([EmaOfWeight, Basis, FrozenTwins])

    _, found, _ = train(tmp_path, several, 3)
    expected = found[3][1]  # type: ignore[index]
    torch.manual_seed(4)
    made = regression(several(), 0)
    checkpointer = checkpointer_in(tmp_path)
    assert checkpointer.attach(made.model, made.optimizer, restore="model") == 0
    assert same(named_tensors(made.model), expected)
    checkpointer.close()


class Follower(Sharing):
    """A buffer that begins as the weight and is assigned to in the averaged model."""

    ema: torch.Tensor

    def share(self) -> None:
        self.register_buffer("ema", self.last.weight.detach())


def test_a_copy_of_a_model_that_shares_is_restored_by_name(tmp_path: Path) -> None:
    """An AveragedModel's copy shares as its model does, and its buffers may part from its weights."""
    expected: dict[str, torch.Tensor] = {}
    for until, part in ((3, True), (4, False)):
        torch.manual_seed(3)
        made = regression(Follower(), 0)
        average = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        checkpointer = checkpointer_in(tmp_path)
        checkpointer.attach(made.model, made.optimizer, average=average)
        if expected:
            assert same(named_tensors(average), expected)
        for step in checkpointer.steps(until):
            if part and step == 1:
                inner: Any = average.module
                inner.ema = inner.ema + 7.0
            made.step(step)
        expected = named_tensors(average)
        testing.kill(checkpointer)


def test_frozen_parameters_that_parted_are_each_their_own(tmp_path: Path) -> None:
    train(tmp_path, FrozenTwins, 3, kill=True)
    resumed, _, model = train(tmp_path, FrozenTwins, 3)
    assert resumed == 3
    values = {n: model.get_parameter(n)[0].item() for n in ("one", "other")}
    assert values == {"one": 1.0, "other": 3.375}
    assert model.get_buffer("scale")[0].item() == 0.125


class Twins(nn.Module):
    """Two parts of the same names and shapes, as two generators are."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Sharing(), Sharing()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.left(inputs) + self.right(inputs * 2)
        return outputs


def test_an_average_of_one_of_two_parts_that_are_alike_is_that_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected: dict[str, torch.Tensor] = {}
    for begins, until in ((0, 3), (3, 5)):
        torch.manual_seed(3)
        model = Twins()
        made = regression(model, 0)
        average = AveragedModel(model.right, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        checkpointer = checkpointer_in(tmp_path)
        assert checkpointer.attach(made.model, made.optimizer, average=average) == begins
        if expected:
            assert same(named_tensors(average), expected)
        for step in checkpointer.steps(until):
            made.step(step)
            average.update_parameters(model.right)
        expected = named_tensors(average)
        testing.kill(checkpointer)
    assert "one of several parts that are alike" in caplog.text
