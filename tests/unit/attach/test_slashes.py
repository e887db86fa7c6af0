"""Names that hold the slash which snapshots put between a parameter's name and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import same
from lowdiff.recovery.load import entry_of
from tests.unit.model.test_odd_parameters import in_order


def named_with_slashes() -> nn.Module:
    torch.manual_seed(1)
    return nn.ModuleDict({"a": nn.Linear(4, 4), "a/b": nn.Linear(4, 4), "/": nn.Linear(4, 4)})


def train(
    folder: Path, model: nn.Module, until: int, *, dies: bool, **settings: Any
) -> tuple[int, dict[str, Any]]:
    """One life; returns where it resumed, and the state of its optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", snapshot_every=4, **settings
    )
    resumed = checkpointer.attach(model, optimizer)
    for step in checkpointer.steps(until):
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.stack([part(inputs).square().sum() for part in model.children()]).sum().backward()
        optimizer.step()
    if dies:
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return resumed, optimizer.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": TopK(0.5)},
        pytest.param({"compressor": None}, marks=pytest.mark.slow),
    ],
    ids=["TopK", "LowDiff+"],
)
def test_parameters_may_be_named_with_slashes(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole, first, second = (named_with_slashes() for _ in range(3))
    _, optimizer = train(tmp_path / "whole", whole, 11, dies=False, **settings)
    train(tmp_path / "killed", first, 9, dies=True, **settings)
    resumed, _ = train(tmp_path / "killed", second, 11, dies=False, **settings)
    assert resumed == 9
    assert same(dict(second.state_dict()), dict(whole.state_dict()))
    for folder in ("whole", "killed"):
        found = lowdiff.recover(tmp_path / folder / "run", staging=tmp_path / folder / "staging")
        assert same(dict(found.model_state_dict()), dict(whole.state_dict()))
        state = found.optimizer_state_dict()["state"]
        assert same(in_order(state), in_order(optimizer["state"]))


def test_keys_of_an_optimizers_state_may_hold_slashes_too() -> None:
    assert entry_of("0/a/mean", {"a", "b"}) == (0, "a", "mean")
    assert entry_of("1/a/mean/slow", {"a", "b"}) == (1, "a", "mean/slow")
    assert entry_of("1/a/mean/slow", {"a", "a/mean"}) == (1, "a/mean", "slow")
    with pytest.raises(KeyError):
        entry_of("0/c/mean", {"a", "b"})


def test_the_name_of_an_average_holds_none(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.5)
    )
    named: dict[str, Any] = {"my/ema": AveragedModel(model)}
    with pytest.raises(ConfigError, match=r"'my/ema'.*slash"):
        checkpointer.attach(model, optimizer, **named)
