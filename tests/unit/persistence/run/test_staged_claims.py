"""Steps that a replica was to apply are listed by their headers, and compared when one is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.image import shard_file
from lowdiff.persistence.retention.staging import clear_staging
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.fences import create_run
from lowdiff.persistence.run.owner import claim
from lowdiff.recovery.damage import judge
from lowdiff.recovery.plan import plan_recovery, recoverable
from tests.unit.persistence.made_runs import LIFE, RUN_ID, began, listed, segment, stage, tear


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run without a differential."""
    run = RunFolder(tmp_path / "run")
    create_run(run, RUN_ID)
    began(run)
    shard_file(run.snapshot(0, 0), 0).touch()
    return run


def queue(root: Path, steps: Sequence[int]) -> StagingFolder:
    """The log of a life that had a replica."""
    log = stage(root, steps)
    log.replica_status.touch()
    return log


def test_a_torn_record_is_found_before_it_is_used(
    folder: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tear(queue(tmp_path / "staging", range(1, 6)), 3)
    found = scan(folder, [tmp_path / "staging"])
    assert recoverable(found) == [(0, 5)], "as the headers have it"
    assert plan_recovery(found).step == 2
    assert [error.path for error in found.damage] == [path]
    assert f"{path} is damaged" in caplog.text
    assert "step 3 fails its checksum" in caplog.text
    assert recoverable(found) == [(0, 2)]
    with pytest.raises(StepNotFound, match="step 3 is missing"):
        plan_recovery(scan(folder, [tmp_path / "staging"]), 4)


def test_memory_that_a_live_trainer_has_reused_is_no_damage(
    folder: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tear(queue(tmp_path / "staging", range(1, 6)), 3)
    found = scan(folder, [tmp_path / "staging"])
    path.rename(path.with_name("its next name"))
    assert plan_recovery(found).step == 2
    assert not found.damage
    assert not caplog.text


def test_what_a_segment_has_of_it_is_taken_from_there(folder: RunFolder, tmp_path: Path) -> None:
    log = queue(tmp_path / "staging", range(1, 6))
    segment(folder, log, [1, 2, 3])
    tear(log, 3)
    found = scan(folder, [tmp_path / "staging"])
    assert plan_recovery(found).step == 5
    assert listed(found) == {0: True, 1: True, 2: True, 3: False, 4: True, 5: True}


def test_of_two_copies_the_whole_one_counts(folder: RunFolder, tmp_path: Path) -> None:
    roots = [tmp_path / "staging", tmp_path / "imported"]
    logs = [queue(root, range(1, 4)) for root in roots]
    tear(logs[0], 2)
    found = scan(folder, roots)
    assert plan_recovery(found).step == 3
    assert found.of(0, 0)[2].path.is_relative_to(roots[1])


def test_reading_one_that_nobody_confirmed_is_an_error(folder: RunFolder, tmp_path: Path) -> None:
    path = tear(queue(tmp_path / "staging", [1, 2]), 2)
    records = scan(folder, [tmp_path / "staging"]).of(0, 0)
    with pytest.raises(DamagedFile, match="step 2 fails its checksum") as caught:
        records[2]
    assert caught.value.path == path
    assert 2 not in records
    assert list(records) == [0, 1]


def test_nothing_is_claimed_when_everything_is_checked(folder: RunFolder, tmp_path: Path) -> None:
    path = tear(queue(tmp_path / "staging", range(1, 6)), 3)
    found = scan(folder, [tmp_path / "staging"], check_all=True)
    assert recoverable(found) == [(0, 2)]
    failures, _ = judge(folder, found, check_all=True)
    assert [failure.path for failure in failures] == [str(path)]


def test_a_log_without_a_replica_ends_where_its_writer_lets_it_end(
    folder: RunFolder, tmp_path: Path
) -> None:
    tear(stage(tmp_path / "staging", range(1, 6)), 3)
    found = scan(folder, [tmp_path / "staging"])
    assert recoverable(found) == [(0, 2)], "what is adopted by the next life ends there too"
    assert plan_recovery(found).step == 2


def test_memory_that_may_hold_a_step_is_not_cleared(folder: RunFolder, tmp_path: Path) -> None:
    log = stage(tmp_path / "staging", range(1, 6))
    claim(log, folder, LIFE)
    segment(folder, log, [1, 2, 3])
    tear(log, 3)
    (verdict,) = clear_staging(tmp_path / "staging", dry_run=True)
    assert not verdict.goes, verdict.reason
