"""What a loop carries from step to step comes back, and what it drew too early is said."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import same

STEPS = 8
DATA = torch.randn(500, 4, generator=torch.Generator().manual_seed(7))


class Prefetching:
    """A loop that fetches the next batch before it makes its step, like nanoGPT's."""

    def __init__(self, folder: Path, *, compressed: bool = True) -> None:
        torch.manual_seed(3)
        self.model = nn.LSTMCell(4, 6)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run",
            staging=folder / "staging",
            compressor=TopK(0.2) if compressed else None,
            snapshot_every=3,
        )

    def get_batch(self) -> torch.Tensor:
        return DATA[torch.randint(len(DATA), (8,))]

    def train(self, until: int) -> tuple[int, list[Any]]:
        """Train to a step; where it began, and all that it did."""
        step = begun = self.checkpointer.attach(self.model, self.optimizer)
        state, done = self.checkpointer.state, []
        if "batch" not in state:
            hidden = torch.zeros(8, 6), torch.zeros(8, 6)
            state.update(batch=self.get_batch(), hidden=hidden, best=float("inf"), log=[])
        while step < until:
            hidden = self.model(state["batch"], state["hidden"])
            loss = hidden[0].square().mean()
            state["batch"] = self.get_batch()  # while an accelerator would still be computing
            state["hidden"] = tuple(part.detach() for part in hidden)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            state["best"] = min(state["best"], loss.item())
            state["log"].append({"step": step, "loss": loss.item()})
            self.checkpointer.commit()
            step += 1
            done.append({n: v.clone() for n, v in self.model.state_dict().items()} | dict(state))
        return begun, done


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressed", [True, False])
def test_a_batch_fetched_ahead_and_hidden_state_come_back(
    tmp_path: Path, compressed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Prefetching(tmp_path / "other", compressed=compressed)
    _, expected = whole.train(STEPS)
    whole.checkpointer.close()
    killed = Prefetching(tmp_path, compressed=compressed)
    killed.train(5)
    testing.kill(killed.checkpointer)
    again = Prefetching(tmp_path, compressed=compressed)
    begun, done = again.train(STEPS)
    again.checkpointer.close()
    assert begun == 5
    assert same(done[-1], expected[-1])
    assert "drawn from" not in caplog.text


def test_recovered_steps_have_the_state(tmp_path: Path) -> None:
    loop = Prefetching(tmp_path)
    loop.checkpointer.attach(loop.model, loop.optimizer)
    loop.checkpointer.state["notes"] = ["kept"]
    for _ in loop.checkpointer.steps(4):
        loop.model(DATA[:8])[0].mean().backward()
        loop.optimizer.step()
    loop.checkpointer.close()
    for step in (3, 4):
        found = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert found.stateful["checkpointer.state"] == {"notes": ["kept"]}


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    loop = Prefetching(tmp_path)
    loop.checkpointer.attach(loop.model, loop.optimizer)
    loop.checkpointer.state["environment"] = object()
    loop.model(DATA[:8])[0].mean().backward()
    loop.optimizer.step()
    with pytest.raises(ConfigError, match=r"checkpointer\.state"):
        loop.checkpointer.commit()
    del loop.checkpointer.state["environment"]
    loop.checkpointer.commit()
    loop.checkpointer.close()


def draw_batch() -> object:
    return torch.randint(500, (8,))


def make_iterator() -> object:
    return next(iter(DataLoader(TensorDataset(DATA), batch_size=8, shuffle=True)))


def augment() -> object:
    return np.random.rand(3)


def shuffle_lists() -> object:
    return random.random()


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).to_sparse(),
        torch.empty(3, device="meta"),
        nn.Parameter(torch.ones(2)),
        nn.Linear(2, 2),
        print,
    ],
    ids=["sparse", "meta", "parameter", "module", "function"],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_cannot_be_stored_is_refused_by_name(
    tmp_path: Path, value: Any, is_nested: bool
) -> None:
    loop = Prefetching(tmp_path)
    loop.checkpointer.attach(loop.model, loop.optimizer)
    loop.checkpointer.state["bad"] = {"inner": [value]} if is_nested else value
    loop.model(torch.ones(1, 4))[0].sum().backward()
    loop.optimizer.step()
    where = r"checkpointer\.state\['bad'\]" + (r"\['inner'\]\[0\]" if is_nested else "")
    with pytest.raises(ConfigError, match=where):
        loop.checkpointer.commit()
    del loop.checkpointer.state["bad"]
    loop.checkpointer.commit()
    loop.checkpointer.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("draw", "generator"),
    [(draw_batch, "torch"), (augment, "numpy"), (shuffle_lists, "python"), (make_iterator, "")],
)
def test_a_generator_that_moved_before_the_first_step_of_a_resumed_run_is_named(
    tmp_path: Path, draw: Any, generator: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        loop = Prefetching(tmp_path)
        step = loop.checkpointer.attach(loop.model, loop.optimizer)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            draw()
            loop.model(DATA[:8])[0].mean().backward()
            loop.optimizer.step()
            loop.checkpointer.commit()
        loop.checkpointer.close()
    assert step == 1
    expected = f"the random generator of {generator} was drawn from" if generator else ""
    assert ("drawn from" in caplog.text) is bool(generator)
    assert expected in caplog.text
