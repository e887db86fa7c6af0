"""The main job: train, die, resume; every bit is that of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.writer.segments import durable_step
from tests.crash.lives import History, Kill, assert_identical, assert_resumed, history, live
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS

STEPS = 20


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("gpt_adamw", 2),
        ("cnn_sgd", 1),
        *(pytest.param("gpt_adamw", size, marks=pytest.mark.slow) for size in (1, 3)),
        *(pytest.param("cnn_sgd", size, marks=pytest.mark.slow) for size in (2, 3)),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    whole = history(pool, TRAININGS[name], tmp_path / "whole", world_size=world_size, until=STEPS)
    everyone = frozenset(range(world_size))
    kills = [
        Kill(5, staged_by=everyone),
        Kill(6, staged_by=everyone),
        Kill(13, staged_by=frozenset({0}), writers=False),
        Kill(16),
    ]
    killed = history(
        pool, TRAININGS[name], tmp_path / "killed", world_size=world_size, until=STEPS, kills=kills
    )
    one_apart = 13 if world_size == 1 else 12
    assert_resumed(killed, [5, 6, one_apart, 15], engine)
    assert_identical(killed, whole)


@pytest.fixture(scope="module")
def whole_of_two(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Two ranks of a GPT that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    return history(pool, TRAININGS["gpt_adamw"], folder, world_size=2, until=STEPS)


@pytest.mark.slow
def test_no_rank_needs_to_see_the_files_of_another(
    pool: Pool, engine: str, tmp_path: Path, whole_of_two: History
) -> None:
    killed = history(
        pool,
        TRAININGS["gpt_adamw"],
        tmp_path / "killed",
        world_size=2,
        until=STEPS,
        kills=[Kill(11, staged_by=frozenset({0, 1})), Kill(17)],
        run="node{rank}/run",
        staging="node{rank}/staging",
    )
    assert_resumed(killed, [11, 16], engine)
    assert_identical(killed, whole_of_two)


@pytest.mark.slow
def test_a_segment_that_was_torn_when_another_rank_fetched_it_is_fetched_again(
    pool: Pool, tmp_path: Path, whole_of_two: History
) -> None:
    folder = tmp_path / "killed"
    lives = []
    for kill in (Kill(11, staged_by=frozenset({0, 1})), Kill(17), None):
        arguments = (
            TRAININGS["gpt_adamw"],
            *(str(folder / f"node{{rank}}/{name}") for name in ("run", "staging")),
            STEPS,
            kill,
            {"batch_size": 50, "snapshot_every": 100},
        )
        lives.append(tuple(pool.run(live, 2, *arguments)))
        if len(lives) == 1:  # as if killed in the middle of its first write after the last durable
            own = RunFolder(folder / "node0/run")
            last = durable_step(own, read_run_id(own), 0, 0, 0)
            assert last < 11
            torn = own.segment(0, 0, last + 1)
            torn.parent.mkdir(parents=True, exist_ok=True)
            torn.write_bytes(b"torn")
    killed = History(tuple(lives))
    assert killed.resumed == [11, 16]
    assert_identical(killed, whole_of_two)


def attach_twice(rank: int, world_size: int, folder: str) -> list[int]:
    """Two checkpointers, one after the other, on the same DDP model and optimizer."""
    made = TRAININGS["gpt_adamw"](rank, world_size)
    resumed = []
    for until in (3, 5):
        checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", compressor=TopK(0.1), staging=f"{folder}/staging"
        )
        resumed.append(checkpointer.attach(made.model, made.optimizer, **made.stateful))
        for step in checkpointer.steps(until):
            made.step(step)
        checkpointer.close()
    return resumed


@pytest.mark.slow
def test_a_model_can_be_attached_again_after_close(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(attach_twice, 2, str(tmp_path)) == [[0, 3], [0, 3]]


def swap_on_one_rank(rank: int, world_size: int, folder: str, until: int, dies: bool) -> int:
    """Rank 0 alone writes its parameters and puts them back, as an EMA swap for evaluation does."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        compressor=TopK(0.1),
        staging=f"{folder}/staging",
        snapshot_every=100,
    )
    resumed = checkpointer.attach(made.model, made.optimizer)
    for step in checkpointer.steps(until):
        made.step(step)
        if rank == 0 and step == 3:
            with torch.no_grad():
                for parameter in made.model.parameters():
                    kept = parameter.clone()
                    parameter.mul_(0.5).copy_(kept)
    if dies:
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return resumed


@pytest.mark.slow
def test_what_one_rank_alone_put_back_costs_no_step(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(swap_on_one_rank, 2, str(tmp_path), 8, True) == [0, 0]
    assert pool.run(swap_on_one_rank, 2, str(tmp_path), 9, False) == [8, 8]
