"""Every compressor: a run killed five times equals its uninterrupted twin, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.compressors import FAMILY
from tests.crash.all_trainings import AVERAGED, PLAIN, REAL, TRAININGS
from tests.crash.lives import (
    Kill,
    as_from_an_accelerator,
    assert_identical,
    assert_resumed,
    history,
)
from tests.crash.pool import Pool

STEPS = 11
QUICK = {("8 bits", 1), ("topk of 2 bits", 2), ("topk by buckets", 2)}


def marks(name: str, size: int) -> list[pytest.MarkDecorator]:
    """With the slow tests every other compressor has one number of ranks, in turns."""
    if (name, size) in QUICK:
        return []
    return [pytest.mark.slow if size == 1 + list(FAMILY).index(name) % 3 else pytest.mark.campaign]


CASES = [
    pytest.param(name, size, marks=marks(name, size), id=f"{name}, {size}")
    for name in FAMILY
    for size in (1, 2, 3)
]


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_five_kills_change_no_bit(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    """AdamW, clipping after the hook, dropout, a scheduler."""
    settings = {"compressor": FAMILY[name], "by_buckets": "by buckets" in name}
    build = TRAININGS["gpt_adamw"]
    whole = history(
        pool, build, tmp_path / "whole", world_size=world_size, until=STEPS, settings=settings
    )
    everyone = frozenset(range(world_size))
    kills = [
        Kill(2, staged_by=everyone),
        Kill(3, staged_by=everyone),
        Kill(6, staged_by=frozenset({0}), writers=False),
        Kill(8),
        Kill(10, staged_by=everyone, writers=False),
    ]
    killed = history(
        pool,
        build,
        tmp_path / "killed",
        world_size=world_size,
        until=STEPS,
        kills=kills,
        settings=settings,
    )
    assert_resumed(killed, [2, 3, 6 if world_size == 1 else 5, 7, 10], engine)
    assert_identical(killed, whole)


#: What happens between hook and optimizer, and what the hook does not see, in real loops.
LOOPS, NAMES = sorted(REAL), sorted(REAL | AVERAGED)
REPRESENTATIVES = (
    "powersgd",
    "8 bits",
    "cast to bfloat16",
    "topk bfloat16",
    "topk of 2 bits",
    "topk by buckets of 2 bits",
    "cyclic",
    "randomk",
)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        # With the slow tests a loop has one of them, in turns, unless tests/crash/test_real_loops.py runs it.
        pytest.param(
            loop,
            name,
            marks=pytest.mark.slow
            if REPRESENTATIVES[number % len(REPRESENTATIVES)] == name and NAMES.index(loop) % 2 == 0
            else pytest.mark.campaign,
            id=f"{loop}, {name}",
        )
        for number, loop in enumerate(LOOPS)
        for name in REPRESENTATIVES
    ],
)
def test_real_loops_resume_bit_for_bit(
    pool: Pool, engine: str, tmp_path: Path, loop: str, name: str
) -> None:
    world_size = 1 if loop in PLAIN else 2
    settings = {"compressor": FAMILY[name], "by_buckets": "by buckets" in name}
    whole = history(
        pool,
        TRAININGS[loop],
        tmp_path / "whole",
        world_size=world_size,
        until=9,
        settings=settings,
    )
    killed = history(
        pool,
        TRAININGS[loop],
        tmp_path / "killed",
        world_size=world_size,
        until=9,
        kills=[Kill(6, staged_by=frozenset(range(world_size)))],
        settings=settings,
    )
    assert_resumed(killed, [6], engine)
    assert_identical(killed, whole)


LATE = ("topk by buckets", "topk by buckets bfloat16", "topk by buckets of 2 bits")


@pytest.mark.parametrize(
    ("training", "name", "world_size"),
    [
        pytest.param(training, name, size, marks=[] if size == 2 and is_quick else pytest.mark.slow)
        for training, name, is_quick in [
            *(("gpt_adamw", name, name == LATE[0]) for name in LATE),
            ("rate_in_a_tensor", LATE[0], True),
            ("frozen_parameters", LATE[0], False),
            ("large_stateful_object", LATE[0], False),
        ]
        for size in (1, 2, 3)
    ],
)
def test_steps_that_arrive_late_come_back_bit_for_bit(
    pool: Pool, tmp_path: Path, training: str, name: str, world_size: int
) -> None:
    """A step counts once it is staged, at most two steps after it ended; what a kill takes is made again."""
    settings = {"compressor": FAMILY[name], "by_buckets": True}
    build = TRAININGS[training]
    whole = history(
        pool, build, tmp_path / "whole", world_size=world_size, until=STEPS, settings=settings
    )
    everyone = frozenset(range(world_size))
    kills = [Kill(3, staged_by=everyone), Kill(6), Kill(9, staged_by=frozenset({0}), writers=False)]
    ends = [3, 5, 9 if world_size == 1 else 8]
    with pool.within(as_from_an_accelerator):
        killed = history(
            pool,
            build,
            tmp_path / "killed",
            world_size=world_size,
            until=STEPS,
            kills=kills,
            settings=settings,
        )
    assert_resumed(killed, ends, "late")
    assert_identical(killed, whole)


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_buckets_train_to_the_bits_of_single_parameters(
    pool: Pool, tmp_path: Path, world_size: int
) -> None:
    found = [
        history(
            pool,
            TRAININGS["gpt_adamw"],
            tmp_path / str(by_buckets),
            world_size=world_size,
            until=STEPS,
            settings={"compressor": FAMILY["topk warming up"], "by_buckets": by_buckets},
        )
        for by_buckets in (False, True)
    ]
    assert_identical(*found)
