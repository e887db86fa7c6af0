"""Guarantee G1 with rolling snapshots: recovery starts from blocks of several steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.persistence.catalog import scan
from lowdiff.persistence.paths import RunFolder
from lowdiff.recovery.verify import verify
from tests.scenarios.all_trainings import PLAIN, TRAININGS
from tests.scenarios.lives import Kill, assert_identical, history
from tests.scenarios.pool import Pool

STEPS = 22
ROLLING = {"snapshot": "rolling", "snapshot_every": 5, "retention": None}
NAMES = sorted(TRAININGS)
#: The others are slow tests.
FAST = {("gpt_adamw", 3)}


def cases() -> list[object]:
    found: list[object] = []
    for name in NAMES:
        plain = name in PLAIN
        for size in [1] if plain else [1, 2, 3] if name in ("gpt_adamw", "cnn_sgd") else [2]:
            marks = () if (name, size) in FAST else pytest.mark.slow
            found.append(pytest.param(name, size, marks=marks))
    return found


@pytest.mark.parametrize(("name", "world_size"), cases())
def test_a_run_killed_in_and_between_cycles_resumes_bit_for_bit(
    pool: Pool, tmp_path: Path, name: str, world_size: int
) -> None:
    whole = history(pool, TRAININGS[name], tmp_path / "whole", world_size=world_size, until=STEPS)
    everyone = frozenset(range(world_size))
    kills = [
        Kill(8, staged_by=everyone, writers=False),
        Kill(18, staged_by=frozenset({0})),
    ]
    killed = history(
        pool,
        TRAININGS[name],
        tmp_path / "killed",
        world_size=world_size,
        until=STEPS,
        kills=kills,
        settings=ROLLING,
    )
    assert killed.resumed == [8, 18 if world_size == 1 else 17]
    assert_identical(killed, whole)
    rolling = {s.step for s in scan(RunFolder(tmp_path / "killed/run")).snapshots if s.is_rolling}
    # A life that began in the middle of a cycle has a shorter one, or an atomic snapshot if less
    # than half is left; the second kill may spoil that of step 15. What is changed outside the
    # optimizer takes an atomic one at that step, be it one or each.
    shorter = {20} if world_size > 1 else set()
    first = {5} if name != "clamped_weights" else set()
    undisturbed = first | shorter if name != "ema_updated_before_the_step" else set()
    assert rolling | {15} == {15} | undisturbed
    report = verify(tmp_path / "killed/run", tmp_path / "killed/staging")
    assert report.ok, report.failures
    assert {replay.last for replay in report.replays if replay.compared} >= rolling
