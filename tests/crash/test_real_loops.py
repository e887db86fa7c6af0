"""Guarantee G1 for what people really do: each training is killed twice and compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.all_trainings import AVERAGED, PLAIN, REAL, TRAININGS
from tests.crash.lives import Kill, assert_identical, assert_resumed, history
from tests.crash.pool import Pool

STEPS = 16
NAMES = sorted(REAL | AVERAGED)


def world_sizes(name: str) -> list[int]:
    """A plain module is a world of its own; the rest have 2 ranks, and every other one 3 as well."""
    if name in PLAIN:
        return [1]
    return [2, 3] if NAMES.index(name) % 2 else [2]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        # With the slow tests each has one of them; every other one runs with another compressor, in
        # tests/crash/test_compressors.py.
        pytest.param(
            name,
            size,
            marks=pytest.mark.slow
            if size == world_sizes(name)[-1] and (name not in REAL or number % 2)
            else pytest.mark.campaign,
        )
        for number, name in enumerate(NAMES)
        for size in world_sizes(name)
    ],
)
def test_this_training_resumes_bit_for_bit(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    whole = history(pool, TRAININGS[name], tmp_path / "whole", world_size=world_size, until=STEPS)
    kills = [
        Kill(6, staged_by=frozenset(range(world_size))),
        Kill(12, staged_by=frozenset({0})),
    ]
    killed = history(
        pool, TRAININGS[name], tmp_path / "killed", world_size=world_size, until=STEPS, kills=kills
    )
    assert_resumed(killed, [6, 12 if world_size == 1 else 11], engine)
    assert_identical(killed, whole)
