"""Snapshots that are broken off or find no memory: training goes on, and what is committed comes back."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.commit.images import Images
from lowdiff.compressors import TopK
from lowdiff.errors import LowDiffError, StorageError
from lowdiff.persistence.format.image import ImageFile
from lowdiff.persistence.format.values import same
from tests.crash.lives import as_from_an_accelerator
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import Loop, fail_once


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_snapshot_that_is_broken_off_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    fail_once(monkeypatch, ImageFile, "stage", error("once"), call=2)  # the base is the first
    loop = Loop(tmp_path, settings={"snapshot_every": 4})
    loop.attach()
    for number in range(10):
        loop.step(number)
        with suppress(error):
            loop.checkpointer.commit()
    assert loop.checkpointer.stats()["snapshot_step"] == 8
    weights = loop.weights()
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run")
    assert state.step == 10
    assert same(dict(state.model_state_dict()), weights)


def test_a_step_that_counted_counts_once_though_its_snapshot_finds_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, ImageFile, "stage", StorageError("no memory"), call=2)
    loop = Loop(tmp_path, settings={"snapshot_every": 1000, "on_error": "raise"})
    loop.attach()
    errors = 0
    for number in range(8):
        loop.step(number)
        if number == 4:
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        try:
            loop.checkpointer.commit()
        except LowDiffError:
            errors += 1
            loop.checkpointer.commit()
    assert errors == 1
    assert loop.checkpointer.stats()["snapshot_step"] in (6, 7)
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] >= 6)
    loop.step(8)
    loop.checkpointer.commit()
    committed = loop.checkpointer.stats()["committed_step"]
    loop.die()
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == committed == 9


@pytest.mark.parametrize("error", [StorageError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_snapshot_that_a_step_needs_and_does_not_get_is_taken_at_a_later_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], is_late: bool
) -> None:
    tried = fail_once(monkeypatch, Images, "write", error("once"), call=2)
    with ExitStack() as late:
        if is_late:
            late.enter_context(as_from_an_accelerator(0))
        loop = Loop(tmp_path, settings={"snapshot_every": 1000})
        loop.attach()
        for number in range(9):
            loop.step(number)
            if number == 4:
                loop.optimizer.load_state_dict(loop.optimizer.state_dict())
            with suppress(error):
                loop.checkpointer.commit()
            if number == 4:
                loop.settle()
                assert loop.checkpointer.stats()["committed_step"] == 4
        loop.settle()
        committed = loop.checkpointer.stats()["committed_step"]
        assert len(tried) >= 3
        testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] >= 5)
        loop.die()
    assert committed <= lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step


def lived(
    rank: int,
    world_size: int,
    folder: str,
    fails: dict[int, list[int]],
    until: int,
    is_late: bool,
) -> tuple[int, int]:
    """Train with steps 5 and 6 that cannot be replayed, and die behind the optimizer's step after the last commit.

    Returns:
        Where it began, and what this rank knew to be committed.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 4))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", snapshot_every=100, compressor=TopK(0.1)
    )
    write = Images.write

    def failing(images: Images, tensors: Any) -> Any:
        if images.step in fails.get(rank, ()):
            raise StorageError("no memory")
        return write(images, tensors)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as late:
        patch.setattr(Images, "write", failing)
        if is_late:
            late.enter_context(as_from_an_accelerator(rank))
        began = checkpointer.attach(model, optimizer)
        for number in range(began, until + 1):
            optimizer.zero_grad()
            model(batch(number, rank, 6, 12)).square().mean().backward()
            optimizer.step()
            if number + 1 in (5, 6):
                for state in optimizer.state.values():
                    state["momentum_buffer"].mul_(0.5)
            if number < until:
                checkpointer.commit()
        committed = checkpointer.stats()["committed_step"]
        testing.kill(checkpointer)
        return began, committed


@pytest.mark.parametrize(
    "fails", [{1: [5], 0: [6, 7, 8, 9]}, {1: [5, 6, 7, 8]}, {0: [5]}, {}], ids=str
)
@pytest.mark.parametrize("until", [6, 7, 10])
@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_snapshot_that_one_rank_lacks_makes_no_step_committed(
    pool: Pool, tmp_path: Path, fails: dict[int, list[int]], until: int, is_late: bool
) -> None:
    first = pool.run(lived, 2, str(tmp_path), fails, until, is_late)
    begun = {began for began, _ in pool.run(lived, 2, str(tmp_path), {}, until, is_late)}
    assert len(begun) == 1
    assert max(committed for _, committed in first) <= begun.pop()


def test_a_rank_that_needs_a_snapshot_at_each_step_holds_nobody_up(
    pool: Pool, tmp_path: Path
) -> None:
    assert min(pool.run(unsteady, 2, str(tmp_path))) >= 12


def unsteady(rank: int, world_size: int, folder: str) -> int:
    """Load optimizer state on rank 0 at each step; returns what was committed after 15."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 4))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", snapshot_every=100, compressor=TopK(0.1)
    )
    checkpointer.attach(model, optimizer)
    for number in range(15):
        optimizer.zero_grad()
        model(batch(number, rank, 6, 12)).square().mean().backward()
        optimizer.step()
        if rank == 0 and number >= 3:
            optimizer.load_state_dict(optimizer.state_dict())
        checkpointer.commit()
    committed: int = checkpointer.stats()["committed_step"]
    checkpointer.close()
    return committed
