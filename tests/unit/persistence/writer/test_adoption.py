"""What a dead life only staged is made durable by the writers of the next."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    FileKind,
    RecordKind,
    read_records,
)
from lowdiff.persistence.format.image import Manifest, manifest_file
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.journal import write_collected
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, TrainerStatus
from lowdiff.persistence.writer.adoption import adopt_predecessors
from tests.unit.persistence.network_disk import keep_open
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    RUN_ID,
    append,
    log_of,
    settings_in,
    stored,
    wait_until,
    writing,
)
from tests.unit.recovery.training import flip


def predecessor(
    root: Path, steps: range, incarnation: int = 0, rank: int = 0, run: Path | None = None
) -> WriterSettings:
    settings = settings_in(root, run, incarnation=incarnation, rank=rank, world_size=4)
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


def test_only_what_attach_named_is_adopted(tmp_path: Path) -> None:
    dead = [predecessor(tmp_path, range(1, 3), rank=rank) for rank in range(2)]
    adopt(replace(settings_in(tmp_path, incarnation=1), adopts=[dead[1].staging.root.name]))
    assert [d.staging.root.exists() for d in dead] == [True, False]
    assert [stored(d.folder, 0, d.rank) for d in dead] == [[], [1, 2]]


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


def test_a_folder_is_adopted_once_where_what_is_open_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is open while it goes, and a chunk of it may be in whoever reads the run."""
    dead = predecessor(tmp_path, range(1, 3))
    settings = settings_in(tmp_path, incarnation=1)
    with monkeypatch.context() as patch:
        keep_open(patch, ["writer.lock", "log-00000000.chunk"])
        assert adopt_predecessors(settings, threading.Event()) == ""
    left = list(dead.staging.root.iterdir())
    assert [path.name[:4] for path in left] == [".nfs", ".nfs"]
    for path in left:  # as their file system does when they are closed
        path.unlink()
    assert adopt_predecessors(settings, threading.Event()) == ""
    assert not dead.staging.root.exists()


def test_a_folder_that_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predecessor(tmp_path, range(1, 3))

    def refused(path: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "unlink", refused)
    said = adopt_predecessors(settings_in(tmp_path, incarnation=1), threading.Event())
    assert "Permission denied" in said


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


# What is durable is looked for step by step


def made_durable(dead: WriterSettings) -> Path:
    """What its own writer would have written, in one segment."""
    with writing(dead):
        pass
    (path,) = dead.folder.segments_of(dead.rank).glob("*.seg")
    return path


def cut(path: Path, first: int, last: int) -> None:
    """Leave some steps of a segment, as a store's objects have them."""
    data = path.read_bytes()
    header = FileHeader.unpack(data, path)
    kept = [r for r in read_records(memoryview(data), header) if first <= r.header.step <= last]
    name = f"i{header.incarnation:06d}-s{first:010d}.seg"
    head = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 4, first).pack()
    path.unlink()
    (path.parent / name).write_bytes(head + data[kept[0].offset : kept[-1].end])


def test_steps_before_those_that_were_fetched_are_adopted_as_well(tmp_path: Path) -> None:
    """A fetch leaves out what staging has: the end of what is durable says nothing of the rest."""
    dead = predecessor(tmp_path, range(1, 21))
    cut(made_durable(dead), 15, 16)
    adopt(settings_in(tmp_path, incarnation=1, base_step=20))
    assert stored(dead.folder) == [*range(1, 15), 15, 16, *range(17, 21)]
    assert not dead.staging.root.exists()


def test_steps_that_a_damaged_segment_held_are_adopted_as_well(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 21))
    path = made_durable(dead)
    whole = path.read_bytes()
    cut(path, 11, 20)
    path.write_bytes(whole)
    records = list(read_records(memoryview(whole), FileHeader.unpack(whole, path)))
    flip(path, records[4].offset + HEADER_BYTES)
    assert scan(dead.folder, check_all=True).of(0, 0).ranges == [(1, 4), (11, 20)]
    adopt(settings_in(tmp_path, incarnation=1, base_step=20))
    assert scan(dead.folder, check_all=True).of(0, 0).ranges == [(1, 20)]
    assert not dead.staging.root.exists()


def test_what_retention_has_removed_does_not_come_back(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 11))
    cut(made_durable(dead), 6, 8)
    write_collected(dead.folder, RUN_ID, [(0, 1, 4)])
    adopt(settings_in(tmp_path, incarnation=1, base_step=10))
    assert stored(dead.folder) == list(range(5, 11))


def test_a_chunk_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = predecessor(tmp_path, range(1, 21))
    chunks = [path for _, path in dead.staging.chunks()]
    assert len(chunks) > 2

    def broken(path: Path) -> memoryview:
        if path == chunks[1]:
            raise DamagedFile(path, "it cannot be read ([Errno 5] Input/output error)")
        return memoryview(path.read_bytes())

    settings = settings_in(tmp_path, incarnation=1, base_step=20)
    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.persistence.staging.log.read_view", broken)  # for a moment
        assert "Input/output error" in adopt_predecessors(settings, threading.Event())
    assert dead.staging.root.exists()
    assert adopt_predecessors(settings, threading.Event()) == ""
    assert stored(dead.folder) == list(range(1, 21))


def test_a_chunk_that_its_trainer_had_only_begun_is_no_trouble(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 4))
    dead.staging.chunk(1).write_bytes(bytes(4096))
    dead.staging.chunk(2).write_bytes(dead.staging.chunk(0).read_bytes())  # renamed, no more
    assert adopt_predecessors(settings_in(tmp_path, incarnation=1), threading.Event()) == ""
    assert stored(dead.folder) == [1, 2, 3]


# Memory that only a later life's snapshot makes void


def replica_of(dead: WriterSettings) -> WriterSettings:
    dead.staging.replica_status.touch()
    return dead


def snapshot(settings: WriterSettings, rank: int) -> None:
    path = manifest_file(settings.folder.snapshot(settings.incarnation, 3), rank)
    make_directory(path.parent)
    write_json(path, Manifest(RUN_ID, settings.incarnation, 3, rank, 2, 0, 0, ()).document())


def test_another_ranks_replica_stays_until_that_ranks_shard_is_durable(tmp_path: Path) -> None:
    dead = replica_of(predecessor(tmp_path, range(1, 4), rank=1))
    settings = settings_in(tmp_path, incarnation=1, world_size=2, base_step=3)
    snapshot(settings, rank=0)
    adopting = threading.Thread(target=adopt, args=[settings])
    adopting.start()
    time.sleep(0.3)
    assert dead.staging.root.exists()
    snapshot(settings, rank=1)
    adopting.join()
    assert not dead.staging.root.exists()


@pytest.mark.parametrize("logs_steps", [False, True], ids=["LowDiff+", "a compressor"])
def test_a_replicas_memory_stays_until_no_rank_can_fail_to_begin(
    tmp_path: Path, logs_steps: bool
) -> None:
    dead = replica_of(predecessor(tmp_path, range(1, 4), rank=0))
    settings = settings_in(
        tmp_path, incarnation=1, world_size=2, base_step=3, logs_steps=logs_steps
    )
    snapshot(settings, rank=0)  # its own base is durable; the other rank still starts
    make_directory(settings.staging.root)
    page = StatusPage(settings.staging.trainer_status, TrainerStatus(0, 3, 3))
    adopting = threading.Thread(target=adopt, args=[settings])
    adopting.start()
    time.sleep(0.3)
    assert dead.staging.root.exists()
    page.update(step=4)  # a step for which both were needed
    adopting.join(20)
    assert not dead.staging.root.exists()


@pytest.mark.parametrize("how", ["its first snapshot", "a step of all ranks"])
def test_what_a_life_does_not_go_on_from_stays_until_that_life_has_begun(
    tmp_path: Path, how: str
) -> None:
    """Until then the life before is the run's history, and only there is its newest residual."""
    dead = predecessor(tmp_path, range(1, 4))
    settings = settings_in(tmp_path, incarnation=1, world_size=2, continues=False)
    page = StatusPage(settings.staging.trainer_status, TrainerStatus())
    snapshot(settings, rank=0)
    gone = threading.Event()
    gone.set()
    assert adopt_predecessors(settings, gone) == ""
    assert stored(dead.folder) == [1, 2, 3]
    assert dead.staging.root.exists()
    adopting = threading.Thread(target=adopt, args=[settings])
    adopting.start()
    if how == "its first snapshot":
        snapshot(settings, rank=1)
    else:
        page.update(step=1)
    adopting.join(PATIENCE_SECONDS)
    assert not dead.staging.root.exists()
