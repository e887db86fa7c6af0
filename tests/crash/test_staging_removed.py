"""Somebody removes a live run's staging memory: it is named, made anew, and covered by a snapshot."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.lives import History, Kill, assert_identical, assert_resumed, history
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS, Training

UNTIL, REMOVED_AT = 16, 6
Undisturbed = Callable[[str, int], History]
STRATEGIES: dict[str, dict[str, Any]] = {"log": {}, "replica": {"compressor": None}}


def remove_tree(folder: Path) -> None:
    """Remove a folder whose files others remove, and make, at the same time."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def remove_all(own: Path) -> None:
    """The folder of every rank, and of every run."""
    shutil.rmtree(own.parents[1], ignore_errors=True)


def remove_own(own: Path) -> None:
    """The folder of one rank."""
    remove_tree(own)


def remove_and_kill(own: Path) -> None:
    """The folder, with a writer that has made nothing durable yet: the steps in it are lost."""
    os.kill(int((own / "writer.lock").read_text().split()[-1]), signal.SIGKILL)
    remove_tree(own)


def remove_files(own: Path) -> None:
    """Single files, as a cleaner of old files would."""
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


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same training, whose staging nobody removes."""

    @cache
    def of(strategy: str, world_size: int) -> History:
        return history(
            pool,
            TRAININGS["gpt_adamw"],
            tmp_path_factory.mktemp("whole"),
            world_size=world_size,
            until=UNTIL,
            settings=STRATEGIES[strategy],
        )

    return of


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "lost_by", "remove", "between"),
    [
        (1, {0}, remove_own, False),
        (1, {0}, remove_all, False),
        (1, {0}, remove_files, False),
        (1, {0}, remove_and_kill, False),
        (2, {1}, remove_and_kill, True),
        pytest.param(1, {0}, remove_own, True, marks=pytest.mark.slow),
        pytest.param(2, {1}, remove_own, False, marks=pytest.mark.slow),
        pytest.param(2, {0}, remove_all, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_lost_its_staging_is_soon_as_safe_as_before(
    pool: Pool,
    engine: str,
    tmp_path: Path,
    undisturbed: Undisturbed,
    strategy: str,
    world_size: int,
    lost_by: set[int],
    remove: Any,
    between: bool,
) -> None:
    settings = STRATEGIES[strategy]
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
    assert_resumed(killed, [REMOVED_AT + 5], engine)
    assert_identical(killed, undisturbed(strategy, world_size))


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "remove", "dies_after"),
    [
        (1, remove_and_kill, 0),
        (2, remove_own, 0),
        (2, remove_and_kill, 1),
        pytest.param(1, remove_own, 1, marks=pytest.mark.slow),
        pytest.param(1, remove_and_kill, 2, marks=pytest.mark.slow),
        pytest.param(2, remove_and_kill, 0, marks=pytest.mark.slow),
        pytest.param(2, remove_and_kill, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_right_after_it_goes_on_from_an_exact_step(
    pool: Pool,
    engine: str,
    tmp_path: Path,
    undisturbed: Undisturbed,
    strategy: str,
    world_size: int,
    remove: Any,
    dies_after: int,
) -> None:
    settings = {**STRATEGIES[strategy], "batch_size": 64}
    whole = undisturbed(strategy, world_size)
    killed = history(
        pool,
        build_of(tmp_path / "killed", {world_size - 1}, remove),
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_close_makes_the_last_step_durable(
    pool: Pool, engine: str, tmp_path: Path, strategy: str
) -> None:
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
