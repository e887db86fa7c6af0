"""What lowdiff raises inside DDP's hook and futures is the same error for backward()'s caller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import UsageError
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import bound_reducers, close_after_error

COMPRESSORS: list[Compressor | None] = [TopK(0.1), PowerSGD(1, dense_below=8), None]
NAMES = ["topk", "powersgd", "none"]


class Rank:
    """A model of two buckets under DDP, attached."""

    def __init__(self, folder: str, rank: int, compressor: Compressor | None) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
        )
        self.checkpointer.attach(self.ddp, self.optimizer)

    def backward(self, step: int) -> None:
        self.ddp(batch(step, self.rank, 6, 12)).square().mean().backward()

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()
        self.checkpointer.commit()


def caught(call: Any, *arguments: Any) -> tuple[str, str]:
    """Type and text of what a call raises."""
    try:
        call(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def after_close(
    rank: int, world_size: int, folder: str, compressor: Compressor | None
) -> tuple[tuple[str, str], int]:
    """A backward pass without a Checkpointer, twice, and then a life with one."""
    made = Rank(folder, rank, compressor)
    made.train(0)
    made.checkpointer.close()
    first, second = caught(made.backward, 1), caught(made.backward, 2)
    assert first == second
    made.optimizer.zero_grad()
    resumed = made.checkpointer.attach(made.ddp, made.optimizer)
    made.train(1)
    made.checkpointer.close()
    return first, resumed


@pytest.mark.slow
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=NAMES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_pass_outside_attach_is_a_usage_error_and_ddp_still_works(
    pool: Pool, tmp_path: Path, compressor: Compressor | None, world_size: int
) -> None:
    for (kind, text), resumed in pool.run(after_close, world_size, str(tmp_path), compressor):
        assert kind == "UsageError"
        assert text.startswith("a backward pass ran outside the life of its Checkpointer")
        assert resumed == 1


def apart(
    rank: int, world_size: int, folder: str, compressor: Compressor | None
) -> tuple[list[tuple[str, str]], float]:
    """Rank 1 commits once more than rank 0."""
    made = Rank(folder, rank, compressor)
    made.train(0)
    if rank == 1:
        made.checkpointer.commit()
    seen = [caught(made.train, 1), caught(made.optimizer.step)]
    began = time.monotonic()
    try:
        raise UsageError("what the script dies of")
    except UsageError:
        made.checkpointer.close()
    return seen, time.monotonic() - began


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=NAMES)
def test_a_rank_at_another_step_is_a_usage_error_and_close_ends(
    pool: Pool, tmp_path: Path, compressor: Compressor | None
) -> None:
    for (seen, later), seconds in pool.run(apart, 2, str(tmp_path), compressor):
        # Without a compressor rank 0 hears of it before its next optimizer step.
        first = seen if seen[0] else later
        assert compressor is None or first is seen
        assert first[0] == "UsageError"
        assert "every rank must attach to the same run and commit the same steps" in first[1]
        # Whatever DDP left in the gradients is not stepped on.
        assert later[0] in ("UsageError", "RankLost")
        assert seconds < 30


def failing(
    rank: int, world_size: int, folder: str, compressor: Compressor, kind: str
) -> tuple[str, str]:
    """An error inside the compressor's own code, on every rank."""
    with bound_reducers(type(compressor)) as reducers:
        made = Rank(folder, rank, compressor)
    made.train(0)
    reducer = reducers[-1]
    error = {"lowdiff": UsageError("odd"), "python": KeyError("odd")}[kind]

    def fails(*_: Any, **__: Any) -> None:
        raise error

    if isinstance(compressor, TopK):
        reducer.kept = fails
    else:
        reducer.average = fails
    seen = caught(made.backward, 1)
    close_after_error(made.checkpointer)
    return seen


@pytest.mark.cases(2)
@pytest.mark.parametrize("compressor", COMPRESSORS[:2], ids=NAMES[:2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("kind", "name"), [("lowdiff", "UsageError"), ("python", "KeyError")])
def test_what_a_compressor_raises_keeps_its_type(
    pool: Pool, tmp_path: Path, compressor: Compressor, world_size: int, kind: str, name: str
) -> None:
    for seen, text in pool.run(failing, world_size, str(tmp_path), compressor, kind):
        assert seen == name
        assert text in ("odd", "'odd'")


def alone(rank: int, world_size: int, folder: str, compressor: Compressor) -> tuple[str, str]:
    """Without DDP compression happens in the optimizer's hook."""
    model = nn.Linear(12, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=compressor, staging=f"{folder}/staging"
    )
    with bound_reducers(type(compressor)) as reducers:
        checkpointer.attach(model, optimizer)
    reducer = reducers[-1]

    def fails(*_: Any, **__: Any) -> None:
        raise UsageError("odd")

    if isinstance(compressor, TopK):
        reducer.kept = fails
    else:
        reducer.average = fails
    model(batch(0, 0, 6, 12)).square().mean().backward()
    seen = caught(optimizer.step)
    close_after_error(checkpointer)
    return seen


@pytest.mark.parametrize("compressor", COMPRESSORS[:2], ids=NAMES[:2])
def test_so_it_does_without_ddp(pool: Pool, tmp_path: Path, compressor: Compressor) -> None:
    assert pool.run(alone, 1, str(tmp_path), compressor) == [("UsageError", "odd")]
