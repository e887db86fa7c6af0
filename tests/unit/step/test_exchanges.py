"""No optimizer uses gradients of one rank alone, and DDP averages all that an optimizer trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import ConfigError, UnsupportedModel, UsageError
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

COMPRESSORS: list[Compressor | None] = [TopK(0.1), PowerSGD(2), None]


class Rank:
    """A small model under DDP, attached."""

    def __init__(self, folder: str, rank: int, compressor: Compressor | None = None) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
        first, last = self.ddp.module[0], self.ddp.module[2]
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1) for layer in (first, last)
        ]
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
        )
        self.resumed = self.checkpointer.attach(self.ddp, self.optimizers)

    def backward(self, step: int) -> None:
        self.ddp(batch(step, self.rank, 6, 12)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.ddp.parameters()])


def left_over(
    rank: int, world_size: int, folder: str, compressor: Compressor | None
) -> tuple[str, bool, int]:
    """Four micro-batches a step, of which the last one averages; the epoch ends with a fifth."""
    made = Rank(folder, rank, compressor)
    for micro in range(9):
        if micro % 4 == 3:
            made.backward(micro)
            made.step()
            made.checkpointer.commit()
            made.ddp.zero_grad()
        else:
            with made.ddp.no_sync():
                made.backward(micro)
    before = made.weights()
    message = ""
    try:
        made.step()
    except UsageError as error:
        message = str(error)
    unchanged = torch.equal(before, made.weights())
    made.ddp.zero_grad()
    made.checkpointer.close()
    return message, unchanged, made.checkpointer.stats()["committed_step"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=["topk", "powersgd", "none"])
def test_a_step_on_gradients_of_one_rank_alone_is_refused_before_it_changes_anything(
    pool: Pool, tmp_path: Path, compressor: Compressor | None
) -> None:
    for message, unchanged, committed in pool.run(left_over, 2, str(tmp_path), compressor):
        assert "step 3 would use gradients that were not averaged" in message
        assert "'0.weight'" in message
        assert "outside ddp.no_sync()" in message
        assert unchanged
        assert committed == 2


def without_gradients(rank: int, world_size: int, folder: str, to_none: bool) -> list[int]:
    """Steps after which ranks agree without an exchange: only weight decay, or nothing at all."""
    made = Rank(folder, rank, TopK(0.1))
    told = []
    for step in made.checkpointer.steps(4):
        made.ddp.zero_grad(set_to_none=to_none)
        if step % 2 == 0:
            made.backward(step)
        made.step()
        told.append(made.checkpointer.stats()["committed_step"])
    made.checkpointer.close()
    return told


@pytest.mark.cases(1)
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_without_gradients_needs_no_exchange_and_is_committed_as_any_other(
    pool: Pool, tmp_path: Path, to_none: bool
) -> None:
    assert pool.run(without_gradients, 2, str(tmp_path), to_none) == [[0, 1, 2, 3]] * 2
    assert lowdiff.recover(tmp_path / "run").step == 4


def stepped_late(rank: int, world_size: int, folder: str) -> bool:
    """Each body begins with the optimizer step of the one before."""
    made = Rank(folder, rank, TopK(0.1))
    for step in made.checkpointer.steps(4):
        before = made.weights()
        if step:
            made.step()
        moved = not torch.equal(before, made.weights())
        made.ddp.zero_grad()
        made.backward(step)
    made.checkpointer.close()
    return moved


def test_averaged_gradients_may_be_used_after_a_commit(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(stepped_late, 2, str(tmp_path)) == [True, True]
    assert lowdiff.recover(tmp_path / "run").step == 4


def alone(rank: int, world_size: int, folder: str) -> int:
    """DDP around a single process."""
    made = Rank(folder, rank, TopK(0.1))
    for step in made.checkpointer.steps(2):
        made.ddp.zero_grad()
        with made.ddp.no_sync():
            made.backward(step)
        made.step()
    made.checkpointer.close()
    return int(made.checkpointer.stats()["committed_step"])


def test_a_single_process_may_step_under_no_sync(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(alone, 1, str(tmp_path)) == [2]


def thawed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    ddp = wrapped(model)
    model[0].bias.requires_grad_(True)
    return ddp


def ignored() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    vars(model)["_ddp_params_and_buffers_to_ignore"] = ["0.bias"]
    return wrapped(model)


def frozen() -> nn.Module:
    ddp = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), find_unused_parameters=True)
    ddp.module[0].bias.requires_grad_(False)
    return ddp


def replaced() -> nn.Module:
    ddp = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), find_unused_parameters=True)
    del ddp.module[0]
    return ddp


def sparse() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    ddp = wrapped(model, find_unused_parameters=True)
    model[0].weight.requires_grad_(False)
    return ddp


def thawed_and_wrapped_anew() -> nn.Module:
    inner = thawed().module
    assert isinstance(inner, nn.Module)
    return wrapped(inner)


def attach(rank: int, world_size: int, folder: str, make: Callable[[], Any]) -> tuple[str, str]:
    ddp = make()
    checkpointer = lowdiff.Checkpointer(f"{folder}/run", compressor=TopK(0.1), staging=folder)
    trained = [p for p in ddp.module.parameters() if p.requires_grad]
    try:
        checkpointer.attach(ddp, torch.optim.SGD(trained, lr=0.1))
    except ConfigError as error:
        return type(error).__name__, str(error)
    for step in checkpointer.steps(1):
        ddp(batch(step, rank, 3, 4)).sum().backward()
    checkpointer.close()
    return "attached", ""


ANEW = "wrap the module in DistributedDataParallel anew after freezing or unfreezing"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (thawed, "does not average '0.bias', which an attached optimizer trains"),
        (ignored, "does not average '0.bias', which an attached optimizer trains"),
        (frozen, "averages '0.bias', which is frozen"),
        (replaced, "averages a parameter of shape (4, 4) that is not in the model any more"),
    ],
)
def test_attach_refuses_ddp_around_other_parameters_than_those_that_are_trained(
    pool: Pool, tmp_path: Path, make: Callable[[], Any], message: str, world_size: int
) -> None:
    for kind, text in pool.run(attach, world_size, str(tmp_path), make):
        assert kind == ConfigError.__name__
        assert message in text
        assert ANEW in text
    assert not (tmp_path / "run").exists()


def test_attach_refuses_sparse_gradients_that_were_frozen_too_late(
    pool: Pool, tmp_path: Path
) -> None:
    [(kind, text)] = pool.run(attach, 1, str(tmp_path), sparse)
    assert kind == UnsupportedModel.__name__
    assert "sparse=False" in text


def test_wrapping_anew_after_unfreezing_is_the_way_out(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(attach, 2, str(tmp_path), thawed_and_wrapped_anew)
    assert answers == [("attached", "")] * 2
