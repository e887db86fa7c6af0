"""Gradients in memory, on an image there, give back the bits of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.all_trainings import PLAIN, TRAININGS
from tests.crash.lives import Kill, assert_identical, history
from tests.crash.pool import Pool

STEPS = 12
SETTINGS: dict[str, Any] = {
    "compressor": None,
    "strategy": "gradients",
    "reproducible": True,
    "snapshot_every": 4,
}


def check(pool: Pool, folder: Path, name: str, world_size: int, *, is_late: bool) -> None:
    settings = SETTINGS | {"is_late": is_late}
    whole = history(
        pool,
        TRAININGS[name],
        folder / "whole",
        world_size=world_size,
        until=STEPS,
        settings=settings,
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
        settings=settings,
    )
    if not is_late:  # else what was on its way is gone
        assert killed.resumed == [5, 10 if world_size == 1 else 9]
    assert_identical(killed, whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_run_goes_on_from_memory(pool: Pool, tmp_path: Path, world_size: int) -> None:
    check(pool, tmp_path, "gpt_adamw", world_size, is_late=False)


@pytest.mark.turns(2)
@pytest.mark.parametrize("is_late", [False, True])
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
    pool: Pool, tmp_path: Path, name: str, world_size: int, is_late: bool
) -> None:
    check(pool, tmp_path, name, world_size, is_late=is_late)
