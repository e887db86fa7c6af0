"""Without compression: memory, or the last snapshot, gives back the bits of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.all_trainings import PLAIN, TRAININGS
from tests.crash.lives import History, Kill, assert_identical, assert_resumed, history
from tests.crash.pool import Pool

STEPS = 12
PLUS: dict[str, Any] = {
    "compressor": None,
    "strategy": "replica",
    "reproducible": True,
    "snapshot_every": 4,
}
SURVIVORS = {**PLUS, "strategy": "survivors"}


def killed_twice(
    pool: Pool, folder: Path, name: str, world_size: int, settings: dict[str, Any] = PLUS
) -> History:
    """Lives of a training, whose bits are compared with those of an uninterrupted one."""
    build = TRAININGS[name]
    whole = history(
        pool, build, folder / "whole", world_size=world_size, until=STEPS, settings=settings
    )
    everyone = frozenset(range(world_size))
    killed = history(
        pool,
        build,
        folder / "killed",
        world_size=world_size,
        until=STEPS,
        kills=[Kill(5, staged_by=everyone), Kill(10, staged_by=frozenset({0}), writers=False)],
        settings=settings,
    )
    assert_identical(killed, whole)
    return killed


def check(pool: Pool, engine: str, folder: Path, strategy: str, name: str, world_size: int) -> None:
    killed = killed_twice(pool, folder, name, world_size, {**PLUS, "strategy": strategy})
    # A replica's gradients are waited for.
    engine = engine if strategy == "gradients" else "host"
    assert_resumed(killed, [5, 10 if world_size == 1 else 9], engine)


@pytest.mark.parametrize("name", ["gpt_adamw", pytest.param("cnn_sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["gradients", "replica"])
def test_a_killed_run_goes_on_from_memory(
    pool: Pool, engine: str, tmp_path: Path, strategy: str, name: str, world_size: int
) -> None:
    check(pool, engine, tmp_path, strategy, name, world_size)


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        # With the slow tests every other one has one number of ranks, in turns.
        pytest.param(
            name,
            size,
            marks=pytest.mark.slow if size == sizes[number % len(sizes)] else pytest.mark.campaign,
        )
        for number, name in enumerate(sorted(TRAININGS))
        for sizes in ([1] if name in PLAIN else [1, 2, 3],)
        for size in sizes
    ],
)
@pytest.mark.parametrize("strategy", ["gradients", "replica"])
def test_every_training_goes_on_from_memory(
    pool: Pool, engine: str, tmp_path: Path, strategy: str, name: str, world_size: int
) -> None:
    check(pool, engine, tmp_path, strategy, name, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adamw", "cnn_sgd"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_no_survivor_is_left_it_goes_on_from_the_last_snapshot(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    killed = killed_twice(pool, tmp_path, name, world_size, SURVIVORS)
    # One that was on its way is lost.
    most = SURVIVORS["snapshot_every"] if engine == "late" else 0
    for resumed, snapshot in zip(killed.resumed, [4, 8], strict=True):
        assert resumed in (snapshot - most, snapshot)


@pytest.mark.slow
def test_no_rank_needs_to_see_the_memory_of_another(
    pool: Pool, engine: str, tmp_path: Path
) -> None:
    build = TRAININGS["gpt_adamw"]
    whole = history(pool, build, tmp_path / "whole", world_size=2, until=STEPS, settings=PLUS)
    killed = history(
        pool,
        build,
        tmp_path / "killed",
        world_size=2,
        until=STEPS,
        kills=[Kill(7, staged_by=frozenset({0, 1}))],
        settings=PLUS,
        run="node{rank}/run",
        staging="node{rank}/staging",
    )
    assert_resumed(killed, [7])
    assert_identical(killed, whole)
