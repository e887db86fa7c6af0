"""With another world size every rank goes on from the mean of the old residuals, exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.protocols import Compressor
from tests.contract.compressors import FAMILY
from tests.crash.lives import owed_by
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS

Residual = dict[str, torch.Tensor]


def train(
    rank: int,
    world_size: int,
    folder: str,
    compressor: Compressor,
    until: int,
    closes: bool = False,
) -> tuple[int, Residual, Residual]:
    """A pool's job: the residuals at the start of a life and at its end, when it is killed."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=compressor, staging=f"{folder}/staging"
    )
    resumed = checkpointer.attach(made.model, made.optimizer)
    before = owed_by(checkpointer)
    for step in checkpointer.steps(until):
        made.step(step)
    after = owed_by(checkpointer)
    if closes:
        checkpointer.close()
    else:
        testing.kill(checkpointer)
    return resumed, before, after


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_the_mean_of_what_is_owed_survives_a_change_of_world_size(
    pool: Pool, engine: str, tmp_path: Path, name: str
) -> None:
    compressor, sizes = FAMILY[name], [2, 3, 1]
    owed: list[Residual] = [{}]
    for life, size in enumerate(sizes):
        until = 4 * (life + 1)
        ranks = pool.run(train, size, str(tmp_path), compressor, until)
        for resumed, before, _ in ranks:
            assert resumed == 4 * life
            assert life == 0 or before.keys() >= owed[0].keys()
            for key, residual in before.items():
                # Parameters that are exchanged whole owe nothing, and may be missing.
                olds = [old.get(key, torch.zeros_like(residual)) for old in owed]
                mean = torch.stack(olds).sum(0) / len(owed)
                assert torch.equal(residual, mean), (key, life)
        owed = [after for _, _, after in ranks]
        assert any(bool(residual.any()) for residual in owed[0].values())
    warm = [key for key in owed[0] if key.endswith("/warm_start")]
    assert bool(warm) == (name == "powersgd")


@pytest.mark.parametrize(
    "name", ["powersgd", pytest.param("cast to bfloat16", marks=pytest.mark.slow)]
)
def test_without_staging_memory_it_is_that_of_the_snapshot(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    compressor = FAMILY[name]
    ended = pool.run(train, 2, str(tmp_path), compressor, 4, True)
    shutil.rmtree(tmp_path / "staging")
    began = pool.run(train, 2, str(tmp_path), compressor, 5)
    for (_, _, after), (resumed, before, _) in zip(ended, began, strict=True):
        assert resumed == 4
        assert all(torch.equal(before[key], residual) for key, residual in after.items())
        assert bool(after) == (name == "powersgd")


def lose_snapshots_after(folder: Path, kept: str) -> None:
    for snapshot in (folder / "run/snapshots").iterdir():
        if snapshot.name > kept:
            shutil.rmtree(snapshot)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_rank_goes_on_with_its_own_where_the_snapshot_of_the_change_is_lost(
    pool: Pool, engine: str, tmp_path: Path, first: int, then: int
) -> None:
    compressor = FAMILY["topk"]
    pool.run(train, first, str(tmp_path), compressor, 4)
    ended = pool.run(train, then, str(tmp_path), compressor, 8)
    lose_snapshots_after(tmp_path, "i000000-s0000000000")
    began = pool.run(train, then, str(tmp_path), compressor, 9)
    for (_, _, after), (resumed, before, _) in zip(ended, began, strict=True):
        assert resumed == 8
        assert any(bool(residual.any()) for residual in after.values())
        assert all(torch.equal(before[key], residual) for key, residual in after.items())


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 2)])
def test_without_staging_memory_it_is_then_the_mean_of_the_older_snapshot(
    pool: Pool, tmp_path: Path, first: int, then: int
) -> None:
    compressor = FAMILY["topk"]
    owed = [after for _, _, after in pool.run(train, first, str(tmp_path), compressor, 4, True)]
    pool.run(train, then, str(tmp_path), compressor, 8, True)
    lose_snapshots_after(tmp_path, "i000000-s0000000004")
    shutil.rmtree(tmp_path / "staging")
    for resumed, before, _ in pool.run(train, then, str(tmp_path), compressor, 9):
        assert resumed == 8
        for key, residual in before.items():
            olds = [old.get(key, torch.zeros_like(residual)) for old in owed]
            assert torch.allclose(residual, torch.stack(olds).sum(0) / first), key
