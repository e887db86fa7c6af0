"""A copy that was damaged costs steps, and it is said which."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowdiff.compressors import Cast
from lowdiff.errors import DamagedFile, LowDiffError
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import SavedStatus, read_status
from lowdiff.recovery.plan import RecoveryPlan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import Search
from lowdiff.recovery.sources.chooser import MemoryPlan
from lowdiff.recovery.state import RecoveredState
from lowdiff.testing import kill, wait_until
from tests.crash.pool import Pool
from tests.unit.protect.copies.test_copies import Said, Training


def lived(rank: int, world_size: int, folder: str, *steps: int) -> tuple[int, list[str]]:
    """A life on a node with a disk of its own, which ends as by SIGKILL of all."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training = Training(rank, f"{folder}/node-{rank}", Cast(), snapshot_every=4)
    training.train(*steps)
    if steps:
        newest = steps[-1] + 1
        wait_until(training.checkpointer, lambda stats: stats["held_step"] >= newest, seconds=20)
    kill(training.checkpointer)
    logging.getLogger("lowdiff").removeHandler(said)
    return training.began, said.texts


def copy_of(folder: Path) -> StagingFolder:
    """What node 0 keeps of rank 1."""
    (copy,) = (s for s in StagingFolder.all(folder / "node-0" / "staging-0") if s.rank == 1)
    return copy


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def record(copy: StagingFolder) -> None:
    """Change a bit of the record of step 6."""
    for path, found in staged_records(copy):
        if found.header.step == 6:
            flip(path, found.end - len(found.body))


def newest_image(copy: StagingFolder) -> None:
    """Change a bit of the image of step 4, behind which all steps are logged."""
    marks = {slot: read_status(page, SavedStatus).image for slot, page in copy.kept_pages()}
    steps = {mark.step: slot for slot, mark in marks.items() if mark is not None}
    path = copy.kept(steps[max(steps)])
    flip(path, path.stat().st_size - 8)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("damage", "most"), [(record, 5), (newest_image, 7)])
def test_what_a_damaged_copy_costs_is_said(
    pool: Pool, tmp_path: Path, damage: Callable[[StagingFolder], Any], most: int
) -> None:
    pool.run(lived, 2, str(tmp_path), *range(7))
    damage(copy_of(tmp_path))
    shutil.rmtree(tmp_path / "node-1")
    for began, said in pool.run(lived, 2, str(tmp_path)):
        assert began <= most
        assert began == 7 or any("LD6" in text for text in said), said


@pytest.mark.cases(1)
def test_memory_that_cannot_be_used_is_tried_once(pool: Pool, tmp_path: Path) -> None:
    """What an attempt finds damaged is left out in the next one, with the copies."""
    pool.run(lived, 2, str(tmp_path), *range(7))
    shutil.rmtree(tmp_path / "node-1")
    tried: list[MemoryPlan | RecoveryPlan] = []

    def act(_: Any, plan: MemoryPlan | RecoveryPlan, *__: Any) -> RecoveredState:
        tried.append(plan)
        raise DamagedFile(tmp_path, "damage that only an attempt finds")

    catalog = scan(RunFolder(tmp_path / "node-0/run"), [tmp_path / "node-0/staging-0"])
    with pytest.raises(LowDiffError):
        Search(catalog, None, goes_back=True, act=act).run(ReplayOptions())
    assert [isinstance(plan, MemoryPlan) for plan in tried] == [True] + [False] * (len(tried) - 1)
