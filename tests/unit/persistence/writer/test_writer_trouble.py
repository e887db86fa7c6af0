"""A disk that is full, broken or away: the writer says so, waits, and loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.format.image import shard_file
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import write_fence
from lowdiff.persistence.writer.segments import Batch, SegmentWriter
from lowdiff.types import Retention
from tests.mounts import remount, tmpfs_or_skip
from tests.unit.persistence.made_runs import fence, tear
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    RUN_ID,
    append,
    log_of,
    noise,
    settings_in,
    stage_snapshot,
    stored,
    wait_until,
    write_here,
    writing,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with tmpfs_or_skip(tmp_path / "disk", 2) as folder:
        yield folder


class Trouble:
    """Something that is wrong with a disk for a while."""

    def __init__(self, kind: str, disk: Path) -> None:
        self.kind, self.disk = kind, disk

    def begin(self) -> None:
        if self.kind == "full":
            free = shutil.disk_usage(self.disk).free
            (self.disk / "filler").write_bytes(bytes(free - (48 << 10)))
        elif self.kind == "read-only":
            remount(self.disk, "ro")
        else:
            (self.disk / "run").rename(self.disk / "elsewhere")

    def end(self) -> None:
        if self.kind == "full":
            (self.disk / "filler").unlink()
        elif self.kind == "read-only":
            remount(self.disk, "rw")
        else:
            assert not (self.disk / "run").exists(), "nobody may put another run in its place"
            (self.disk / "elsewhere").rename(self.disk / "run")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("gone", "run.json is gone; bring the run folder back, or mount it"),
    ],
)
def test_trouble_is_reported_and_waited_out(small_disk: Path, kind: str, message: str) -> None:
    settings = settings_in(small_disk.parent, run=small_disk / "run", batch_size=2)
    log = log_of(settings)
    trouble = Trouble(kind, small_disk)
    with writing(settings) as writer:
        for step in (1, 2):
            append(log, step, num_items=4000)
        wait_until(writer, lambda s: s.durable_step == 2)
        trouble.begin()
        for step in range(3, 11):
            append(log, step, num_items=4000)
        status = wait_until(writer, lambda s: s.error)
        assert message in status.error
        before = status.durable_step
        assert before < 10
        trouble.end()
        status = wait_until(writer, lambda s: s.durable_step == 10)
        assert status.error == ""
    assert stored(settings.folder, num_items=4000) == list(range(1, 11))


def test_a_writer_started_while_the_run_is_away_makes_no_other_run(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(process_check_seconds=0.1)
    settings = settings_in(tmp_path, batch_size=2)
    log = log_of(settings)
    run, away = tmp_path / "run", tmp_path / "away"
    with writing(settings) as writer:
        append(log, 1)
        append(log, 2)
        wait_until(writer, lambda s: s.durable_step == 2)
        run.rename(away)
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        append(log, 3)
        append(log, 4)
        wait_until(writer, lambda _: writer.pid != first)
        time.sleep(0.5)
        assert not run.exists()
        away.rename(run)
        wait_until(writer, lambda s: s.durable_step == 4)
    assert stored(settings.folder) == [1, 2, 3, 4]


def test_a_snapshot_that_does_not_fit_holds_up_no_differential_and_outlives_its_writer(
    small_disk: Path, limits: Callable[..., None]
) -> None:
    limits(process_check_seconds=0.05)
    settings = settings_in(small_disk.parent, run=small_disk / "run", batch_size=1)
    log = log_of(settings, cap_bytes=3 * 4096)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1 << 20))
    with writing(settings) as writer:
        append(log, 1)
        stage_snapshot(log, 1, 1 << 18)
        wait_until(writer, lambda s: "No space left" in s.error)
        for step in range(2, 40):
            assert append(log, step, durable=step - 1)
            status = wait_until(writer, lambda s, step=step: s.durable_step == step)  # type: ignore[misc]
            assert "No space left" in status.error, "the success of others hides it"
        assert status.durable_snapshot == -1
        # By now the part of the log that said first where the image is has been reused.
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        wait_until(writer, lambda _: writer.pid != first)
        filler.unlink()
        wait_until(writer, lambda s: s.durable_snapshot == 1)
    (snapshot,) = complete_snapshots(settings.folder, RUN_ID)
    tensors = load_file(shard_file(snapshot.folder, 0))
    np.testing.assert_array_equal(tensors["model/w"], noise(1, 1 << 18))
    assert stored(settings.folder) == list(range(1, 40))


def test_a_full_disk_is_freed_as_soon_as_retention_can(small_disk: Path) -> None:
    """It could not when the snapshot came that it waits for; no other comes while nothing is written."""
    settings = settings_in(
        small_disk.parent, run=small_disk / "run", batch_size=1, retention=Retention(snapshots=1)
    )
    write_fence(settings.folder, fence(0))
    unreadable = settings.folder.pin("best")
    make_directory(unreadable.parent)
    log = log_of(settings)
    with writing(settings) as writer:
        for step in (1, 2):
            append(log, step)
            stage_snapshot(log, step, 1 << 16)
            wait_until(writer, lambda s, step=step: s.durable_snapshot == step)  # type: ignore[misc]
            unreadable.write_text("not a pin")
        Trouble("full", small_disk).begin()
        for step in range(3, 10):
            append(log, step, num_items=4000)
        wait_until(writer, lambda s: "No space left on device" in s.error)
        assert [step for _, step, _ in settings.folder.snapshots()] == [1, 2]
        unreadable.unlink()
        assert not wait_until(writer, lambda s: s.durable_step == 9).error
    assert [step for _, step, _ in settings.folder.snapshots()] == [2]


def test_a_run_folder_that_does_not_answer_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    limits(write_retry_seconds=0.01)
    settings = settings_in(tmp_path, batch_size=1, folder_timeout_seconds=0.0)
    append(log_of(settings), 1)
    tries, broken = list[Batch](), pytest.MonkeyPatch()

    def stale(path: Path) -> bytes:
        raise OSError(116, "Stale file handle")

    async def fail(_: SegmentWriter, batch: Batch) -> int:
        tries.append(batch)
        if len(tries) == 1:
            broken.setattr(Path, "read_bytes", stale)
        elif len(tries) == 3:
            broken.undo()
            shutil.rmtree(settings.run)
        raise OSError("the write failed")

    monkeypatch.setattr(SegmentWriter, "append", fail)
    with (
        open(os.devnull) as pipe_of_the_dead,
        pytest.raises(WriterFailed, match="is gone, and so is its trainer"),
    ):
        write_here(settings, pipe_of_the_dead, monkeypatch)
    assert len(tries) == 4


@pytest.mark.parametrize("last", [9, 40], ids=["in one chunk", "in several"])
def test_a_damaged_record_holds_up_nothing_and_what_it_costs_is_said(
    tmp_path: Path, last: int
) -> None:
    settings = settings_in(tmp_path, batch_size=2)
    log = log_of(settings)
    for step in range(1, last + 1):
        append(log, step)
    tear(settings.staging, 4)
    with writing(settings) as writer:
        status = wait_until(writer, lambda s: s.durable_step >= last - 1)
        assert (status.first_lost_step, status.lost_step, status.unbroken_step) == (4, 4, 3)
        stage_snapshot(log, last, 100)
        status = wait_until(writer, lambda s: s.durable_snapshot == last)
        assert status.unbroken_step == status.durable_step
    assert stored(settings.folder) == [step for step in range(1, last + 1) if step != 4]


def test_a_damaged_record_at_the_end_keeps_no_writer_from_ending(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, batch_size=2)
    log = log_of(settings)
    for step in range(1, 5):
        append(log, step)
    tear(settings.staging, 3)
    with writing(settings) as writer:
        assert writer.finish(PATIENCE_SECONDS).lost_step == 3
    assert stored(settings.folder) == [1, 2, 4]
