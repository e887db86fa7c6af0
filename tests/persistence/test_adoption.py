"""What a dead life only staged is made durable by the writers of the next."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from lowdiff.persistence.adoption import adopt_predecessors
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.staging import StagingLog
from lowdiff.persistence.writer_settings import WriterSettings
from tests.persistence.writers import (
    PATIENCE_SECONDS,
    RUN_ID,
    append,
    log_of,
    settings_in,
    stored,
    wait_until,
    writing,
)


def predecessor(root: Path, steps: range, incarnation: int = 0, rank: int = 0) -> WriterSettings:
    settings = settings_in(root, incarnation=incarnation, rank=rank, world_size=4)
    log = log_of(settings)
    log.append(RecordKind.BASE, steps.start - 1, b"base", (), durable_step=-1)
    for step in steps:
        append(log, step)
    return settings


def adopt(settings: WriterSettings) -> None:
    adopt_predecessors(settings, threading.Event())


def test_a_later_incarnations_writer_adopts_what_a_dead_one_left(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 8))
    settings = settings_in(tmp_path, incarnation=1, base_step=7)
    log = log_of(settings)
    with writing(settings) as writer:
        time.sleep(0.2)
        # Not before its own log names the residual that it starts from.
        assert dead.staging.root.exists()
        log.append(RecordKind.BASE, 7, b"base", (), durable_step=-1)
        wait_until(writer, lambda _: not dead.staging.root.exists())
        writer.finish(PATIENCE_SECONDS)
    assert stored(dead.folder) == list(range(1, 8))


def test_only_what_is_missing_is_adopted(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 8))
    with writing(dead):
        pass
    append_more = StagingLog(
        dead.staging, run_id=RUN_ID, world_size=4, chunk_bytes=4096, cap_bytes=1 << 20
    )
    for step in range(6, 12):
        append(append_more, step)
    adopt(settings_in(tmp_path, incarnation=1))
    assert stored(dead.folder) == list(range(1, 12))


def test_ranks_that_are_no_more_are_shared_out_over_those_that_are(tmp_path: Path) -> None:
    dead = [predecessor(tmp_path, range(1, 3), rank=rank) for rank in range(4)]
    for rank in range(2):
        adopt(settings_in(tmp_path, incarnation=1, rank=rank, world_size=2))
        gone = [not d.staging.root.exists() for d in dead]
        assert gone == [True, rank == 1, True, rank == 1]
    for d in dead:
        assert stored(d.folder, 0, d.rank) == [1, 2]


def test_neither_its_own_nor_a_later_staging_is_adopted(tmp_path: Path) -> None:
    later = predecessor(tmp_path, range(1, 3), incarnation=2)
    own = settings_in(tmp_path, incarnation=1)
    adopt(own)
    assert later.staging.root.exists()
    assert own.staging.root.exists()
    assert stored(later.folder, 2) == []


def test_a_predecessor_whose_writer_still_works_is_waited_for(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    lock = FileLock(dead.staging.writer_lock)
    assert lock.acquire("an orphaned writer")
    adopting = threading.Thread(target=adopt, args=[settings_in(tmp_path, incarnation=1)])
    adopting.start()
    time.sleep(0.2)
    assert dead.staging.root.exists()
    assert stored(dead.folder) == []
    lock.release()
    adopting.join()
    assert stored(dead.folder) == [1, 2]


def test_waiting_for_a_predecessor_ends_with_the_trainer(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    lock = FileLock(dead.staging.writer_lock)
    assert lock.acquire("an orphaned writer")
    gone = threading.Event()
    gone.set()
    adopt_predecessors(settings_in(tmp_path, incarnation=1), gone)
    assert dead.staging.root.exists()
    lock.release()


def test_a_predecessor_that_another_writer_removed_in_the_meantime_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = [predecessor(tmp_path, range(1, 3), incarnation=number) for number in range(2)]
    acquire = FileLock.acquire

    def acquire_late(self: FileLock, description: str, *, timeout_seconds: float = 0.0) -> bool:
        if dead[0].staging.root in self.path.parents:
            shutil.rmtree(dead[0].staging.root)
        return acquire(self, description, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    adopt(settings_in(tmp_path, incarnation=2))
    assert stored(dead[1].folder, 1) == [1, 2]
    assert not caplog.records


def test_what_cannot_be_adopted_stays_in_staging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    settings = settings_in(tmp_path, incarnation=1)
    settings.folder.run_file.rename(tmp_path / "elsewhere")
    adopt(settings)
    assert dead.staging.root.exists()
    assert "stays in staging" in caplog.text
    (tmp_path / "elsewhere").rename(settings.folder.run_file)
    adopt(settings)
    assert stored(dead.folder) == [1, 2]


def test_adoption_is_tried_again_until_it_succeeds_and_reported_meanwhile(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 4))
    settings = settings_in(tmp_path, incarnation=1, base_step=3)
    blocked = dead.folder.segments_of(0)
    blocked.parent.mkdir()
    blocked.write_text("in the way of a folder")
    log = log_of(settings)
    with writing(settings) as writer:
        log.append(RecordKind.BASE, 3, b"base", (), durable_step=-1)
        assert not wait_until(writer, lambda s: "File exists" in s.error).adopted
        blocked.unlink()
        assert not wait_until(writer, lambda s: s.adopted).error
        assert stored(dead.folder) == [1, 2, 3]
