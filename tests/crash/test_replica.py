"""Without compression: the replica's memory gives back the bits of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.all_trainings import PLAIN, TRAININGS
from tests.crash.lives import Kill, assert_identical, assert_resumed, history
from tests.crash.pool import Pool

STEPS = 12
PLUS = {"compressor": None, "reproducible": True, "snapshot_every": 4}


def check(pool: Pool, folder: Path, name: str, world_size: int) -> None:
    whole = history(
        pool, TRAININGS[name], folder / "whole", world_size=world_size, until=STEPS, settings=PLUS
    )
    everyone = frozenset(range(world_size))
    kills = [Kill(5, staged_by=everyone), Kill(10, staged_by=frozenset({0}), writers=False)]
    killed = history(
        pool,
        TRAININGS[name],
        folder / "killed",
        world_size=world_size,
        until=STEPS,
        kills=kills,
        settings=PLUS,
    )
    assert_resumed(killed, [5, 10 if world_size == 1 else 9])
    assert_identical(killed, whole)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_memory(
    pool: Pool, engine: str, tmp_path: Path, world_size: int
) -> None:
    check(pool, tmp_path, "gpt_adamw", world_size)


@pytest.mark.turns(2)
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
def test_every_training_goes_on_from_memory(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    check(pool, tmp_path, name, world_size)


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
