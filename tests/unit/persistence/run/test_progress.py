"""Watching a run: what is said at each age of it, and that old records are not read again."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lowdiff.errors import NotARun
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import RecordHeader, RecordRef
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.progress import RunWatch
from lowdiff.persistence.staging.status import StatusPage, TrainerStatus, WriterStatus
from tests.unit.loops import Loop


def train(loop: Loop, first: int, last: int) -> None:
    for number in range(first, last):
        loop.step(number)
        loop.checkpointer.commit()


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_is_watched_while_it_trains_after_its_death_and_after_its_staging_is_gone(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path, settings={"batch_size": 4, "snapshot_every": 1000})
    loop.attach()
    watch = RunWatch(RunFolder(tmp_path / "run"), tmp_path / "staging")
    train(loop, 0, 7)
    live = watch.look(1e10)
    (rank,) = live.ranks
    assert (live.incarnation, live.committed_step, rank.trainer) == (0, 7, "running")
    assert rank.durable_step in (0, 4)
    assert rank.commit_age_seconds is not None
    assert rank.commit_age_seconds > 0
    assert rank.disk_bytes > 0
    loop.die()
    page = next((tmp_path / "staging").glob("*/i000000-r0000/trainer"))
    # This process lives on; no process has a number as large as this one.
    StatusPage(page, TrainerStatus(2**22 + 1, 7, 6, 1e9, True))
    (dead,) = watch.look(1e9 + 5).ranks
    assert (dead.trainer, dead.staged_step, dead.preempted) == ("gone", 7, True)
    assert dead.commit_age_seconds == 5
    shutil.rmtree(tmp_path / "staging")
    gone = watch.look(1e10)
    assert gone.durable_step in (rank.durable_step, 4)  # its writer may have gone on meanwhile
    assert gone.committed_step == gone.durable_step


def test_each_look_reads_only_the_records_added_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, settings={"batch_size": 1, "snapshot_every": 1000})
    loop.attach()
    steps: list[int] = []

    def counting(file: SegmentFile) -> RecordRef | None:
        record = read_next(file)
        steps.extend([] if record is None else [record.header.step])
        return record

    read_next = SegmentFile.next
    monkeypatch.setattr(SegmentFile, "next", counting)
    # As from a machine that shares the run folder only.
    watch = RunWatch(RunFolder(tmp_path / "run"), tmp_path / "elsewhere")
    for last in (3, 3, 8):
        train(loop, loop.checkpointer.stats()["steps"], last)
        while loop.checkpointer.stats()["durable_step"] < last:
            os.sched_yield()
        seen = watch.look(0.0)
        assert (seen.durable_step, seen.ranks[0].trainer) == (last, "gone")
    assert steps == list(range(1, 9))
    loop.checkpointer.close()


def test_steps_behind_a_lost_one_are_durable_once_a_snapshot_leads_to_them(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"batch_size": 1, "snapshot_every": 1000})
    loop.attach()
    train(loop, 0, 6)
    loop.die()
    (stage,) = StagingFolder.all(tmp_path / "staging")
    status = WriterStatus(durable_step=6, durable_snapshot=0, first_lost_step=4, lost_step=4)
    watch = RunWatch(RunFolder(tmp_path / "run"), tmp_path / "staging")
    StatusPage(stage.status, status)
    seen = watch.look(0.0)
    assert (seen.committed_step, seen.durable_step) == (6, 3)
    StatusPage(stage.status, replace(status, durable_snapshot=5))
    assert watch.look(0.0).durable_step == 6


def test_watching_writes_nothing(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    before = files_of(tmp_path)
    watch = RunWatch(RunFolder(tmp_path / "run"), tmp_path / "staging")
    assert watch.look(0.0).committed_step == watch.look(1.0).durable_step == 3
    assert files_of(tmp_path) == before


def test_a_torn_segment_says_what_is_before_it(tmp_path: Path) -> None:
    Loop(tmp_path, settings={"snapshot_every": 4}).run(6)
    newest = list(RunFolder(tmp_path / "run").segments())[-1][3]
    newest.write_bytes(newest.read_bytes()[:100])
    assert RunWatch(RunFolder(tmp_path / "run"), tmp_path).look(0.0).durable_step == 4


def test_a_segment_that_is_cut_back_while_it_is_read_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file that is beyond its end is a SIGBUS."""
    Loop(tmp_path, settings={"snapshot_every": 4}).run(6)
    newest = list(RunFolder(tmp_path / "run").segments())[-1][3]

    def cutting(data: memoryview) -> RecordHeader | None:
        found = unpack(data)
        os.truncate(newest, 0)
        return found

    unpack = RecordHeader.unpack
    monkeypatch.setattr(RecordHeader, "unpack", cutting)
    seen = RunWatch(RunFolder(tmp_path / "run"), tmp_path).look(0.0)
    assert seen.durable_step in (4, 5, 6)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="is not a lowdiff run"):
        RunWatch(RunFolder(tmp_path), tmp_path)


def test_a_run_without_a_log_is_durable_at_its_newest_snapshot(tmp_path: Path) -> None:
    Loop(tmp_path, settings={"compressor": None}).run(7)
    found = RunWatch(RunFolder(tmp_path / "run"), tmp_path / "staging").look(1e10)
    assert (found.committed_step, found.durable_step) == (7, 7)


def test_a_run_that_takes_anothers_place_is_watched(tmp_path: Path) -> None:
    settings = {"batch_size": 1, "snapshot_every": 1000}
    first = Loop(tmp_path, settings=settings)
    first.attach()
    train(first, 0, 7)
    first.checkpointer.close()
    watches = [
        RunWatch(RunFolder(tmp_path / "run"), tmp_path / staging)
        for staging in ("staging", "elsewhere")
    ]
    assert [watch.look(0.0).durable_step for watch in watches] == [7, 7]
    shutil.rmtree(tmp_path / "run")
    second = Loop(tmp_path, settings=settings)
    second.attach()
    train(second, 0, 3)
    while second.checkpointer.stats()["durable_step"] < 3:
        os.sched_yield()
    live, elsewhere = (watch.look(0.0) for watch in watches)
    assert (live.committed_step, live.ranks[0].trainer) == (3, "running")
    assert elsewhere.durable_step == 3
    second.checkpointer.close()
