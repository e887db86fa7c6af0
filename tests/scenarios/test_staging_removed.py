"""Somebody removes a live run's staging memory: it is named, made anew, and covered by a snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios.lives import Kill, assert_identical, history
from tests.scenarios.pool import Pool
from tests.scenarios.trainings import TRAININGS, Training

UNTIL, REMOVED_AT = 16, 6
STRATEGIES: dict[str, dict[str, Any]] = {"log": {}, "replica": {"compressor": None}}


def remove_all(own: Path) -> None:
    """The folder of every rank, and of every run."""
    shutil.rmtree(own.parents[1], ignore_errors=True)


def remove_own(own: Path) -> None:
    """The folder of one rank."""
    shutil.rmtree(own)


def remove_residual(own: Path) -> None:
    """One file, as a cleaner of old files would."""
    (own / "residual").unlink(missing_ok=True)
    (own / "owner.json").unlink(missing_ok=True)


def losing(
    rank: int,
    world_size: int,
    *,
    staging: Path,
    lost_by: frozenset[int],
    remove: Callable[[Path], None],
    between: bool,
) -> Training:
    """A training whose staging is removed once: before a step, or between backward and commit."""
    made = TRAININGS["gpt_adamw"](rank, world_size)
    own_step, mark = made.step, staging.parent / f"removed-{rank}"

    def step(t: int) -> torch.Tensor:
        loss = own_step(t) if between else None
        if t == REMOVED_AT and rank in lost_by and not mark.exists():
            mark.touch()
            (own,) = staging.glob(f"*/i*-r{rank:04d}")
            remove(own)
        return own_step(t) if loss is None else loss

    made.step = step
    return made


def build_of(folder: Path, lost_by: set[int], remove: Any, between: bool = False) -> Any:
    return partial(
        losing,
        staging=folder / "staging",
        lost_by=frozenset(lost_by),
        remove=remove,
        between=between,
    )


@pytest.mark.parametrize(
    ("world_size", "lost_by", "remove", "between"),
    [
        (1, {0}, remove_own, False),
        (1, {0}, remove_own, True),
        (1, {0}, remove_all, False),
        (1, {0}, remove_residual, False),
        (2, {1}, remove_own, False),
        (2, {0}, remove_all, True),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_lost_its_staging_is_soon_as_safe_as_before(
    pool: Pool,
    tmp_path: Path,
    strategy: str,
    world_size: int,
    lost_by: set[int],
    remove: Any,
    between: bool,
) -> None:
    settings = STRATEGIES[strategy]
    whole = history(
        pool,
        TRAININGS["gpt_adamw"],
        tmp_path / "whole",
        world_size=world_size,
        until=UNTIL,
        settings=settings,
    )
    everyone = frozenset(range(world_size))
    killed = history(
        pool,
        build_of(tmp_path / "killed", lost_by, remove, between),
        tmp_path / "killed",
        world_size=world_size,
        until=UNTIL,
        kills=[Kill(REMOVED_AT + 5, staged_by=everyone)],
        settings=settings,
    )
    assert killed.resumed == [REMOVED_AT + 5]
    assert_identical(killed, whole)


@pytest.mark.parametrize("dies_after", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_right_after_it_goes_on_from_an_exact_step(
    pool: Pool, tmp_path: Path, strategy: str, world_size: int, dies_after: int
) -> None:
    settings = STRATEGIES[strategy]
    whole = history(
        pool,
        TRAININGS["gpt_adamw"],
        tmp_path / "whole",
        world_size=world_size,
        until=UNTIL,
        settings=settings,
    )
    killed = history(
        pool,
        build_of(tmp_path / "killed", {world_size - 1}, remove_own),
        tmp_path / "killed",
        world_size=world_size,
        until=UNTIL,
        kills=[Kill(REMOVED_AT + 1 + dies_after, staged_by=frozenset(range(world_size)))],
        settings=settings,
    )
    (resumed,) = killed.resumed
    assert 0 <= resumed <= REMOVED_AT + 1 + dies_after
    for rank in range(world_size):
        # The residual may be lost, so only the first step is sure to be the same.
        assert killed.lives[1][rank].losses[resumed + 1] == whole.losses(rank)[resumed + 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_close_makes_the_last_step_durable(pool: Pool, tmp_path: Path, strategy: str) -> None:
    folder, build = tmp_path, build_of(tmp_path, {0}, remove_own, True)
    settings = STRATEGIES[strategy]
    (first,) = history(
        pool, build, folder, world_size=1, until=REMOVED_AT + 1, settings=settings
    ).lives
    assert (folder / "removed-0").exists()
    assert not list((folder / "staging").glob("*/i*"))
    (second,) = history(
        pool, build, folder, world_size=1, until=REMOVED_AT + 1, settings=settings
    ).lives
    assert second[0].resumed == REMOVED_AT + 1
    assert {k: v for k, v in second[0].state.items() if "rng" not in k} == {
        k: v for k, v in first[0].state.items() if "rng" not in k
    }
