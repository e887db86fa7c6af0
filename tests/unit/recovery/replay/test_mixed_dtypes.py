"""Adafactor over parameters of several dtypes, whose default ``eps`` is that of the first of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.replay.optimizers import independent
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import OptimizerSpec

STEPS = 8


class Model(nn.Module):
    """Norms in float32 around a matrix in bfloat16; the first norm rests in every third step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LayerNorm(24)
        self.matrix = nn.Linear(24, 20).bfloat16()
        self.last = nn.LayerNorm(20)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = x if step % 3 == 0 else self.first(x)
        result: torch.Tensor = self.last(self.matrix(hidden.bfloat16()).float())
        return result


class Training:
    """One life of it."""

    def __init__(self, folder: Path, compressor: Compressor | None, **adafactor: Any) -> None:
        self.model = Model()
        parameters = list(self.model.parameters())
        if adafactor.pop("reversed", False):
            parameters.reverse()
        self.optimizer = torch.optim.Adafactor(parameters, lr=1e-2, **adafactor)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run",
            staging=folder / "staging",
            compressor=compressor,
            snapshot_every=100,
            batch_size=2,
        )
        self.models: dict[int, dict[str, Any]] = {}
        self.states: dict[int, dict[str, Any]] = {}

    def train(self, until: int) -> int:
        """Ends as SIGKILL would; returns where it began."""
        resumed = self.checkpointer.attach(self.model, self.optimizer)
        for step in self.checkpointer.steps(until):
            batch = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            # So small that eps decides.
            (1e-3 * self.model(batch, step).square().mean()).backward()
            self.optimizer.step()
            self.models[step + 1] = copy.deepcopy(self.model.state_dict())
            self.states[step + 1] = copy.deepcopy(self.optimizer.state_dict())
        testing.kill(self.checkpointer)
        return resumed


WAYS = [{}, {"reversed": True}, {"foreach": True}, {"foreach": True, "reversed": True}]


def assert_as_live(state: RecoveredState, live: Training) -> None:
    assert same(dict(state.model_state_dict()), dict(live.models[state.step]))
    found, expected = state.optimizer_state_dict(), live.states[state.step]
    assert same(found["param_groups"], expected["param_groups"])
    assert same(found["state"], dict(sorted(expected["state"].items())))


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_adafactor_replays_over_several_dtypes(tmp_path: Path, way: dict[str, bool]) -> None:
    live = Training(tmp_path, TopK(0.2, dense_below=16), **way)
    live.train(STEPS)
    for step, whole in ((3, False), (STEPS, False), (STEPS, True)):
        options = ReplayOptions(whole=whole)
        state = lowdiff.recover(
            tmp_path / "run", step, staging=tmp_path / "staging", options=options
        )
        assert state.base_step == 0
        assert_as_live(state, live)
    assert Training(tmp_path, TopK(0.2, dense_below=16), **way).train(STEPS) == STEPS


def test_so_does_its_replica(tmp_path: Path) -> None:
    live = Training(tmp_path, None)
    live.train(STEPS)
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == STEPS
    assert_as_live(state, live)


@pytest.mark.parametrize("foreach", [None, True])
def test_what_needs_no_help_gets_none(foreach: bool | None) -> None:
    device = torch.device("cpu")
    spec = OptimizerSpec("torch.optim.Adafactor", (("a", "b"),))
    mixed = (torch.float32, torch.bfloat16)
    given = {"eps": (1e-30, 1e-3), "foreach": foreach}
    assert independent(spec, given, mixed, device) is given
    none_there = {"eps": (None, 1e-3), "foreach": foreach}
    assert independent(spec, none_there, (), device) is none_there
    adam = {"eps": 1e-8}
    other = OptimizerSpec("torch.optim.adam.Adam", (("a", "b"),))
    assert independent(other, adam, mixed, device) is adam
