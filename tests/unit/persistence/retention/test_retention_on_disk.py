"""Retention on files: what is removed, in which order, and what a kill leaves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import Manifest, manifest_file, shard_file
from lowdiff.persistence.retention.collect import check_snapshots, collect, take_inventory
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import create_run, write_fence
from lowdiff.persistence.run.journal import Collected, Pin, read_journal, write_pin
from lowdiff.types import Retention
from tests.mounts import tmpfs_or_skip
from tests.unit.persistence.made_runs import RUN_ID
from tests.unit.persistence.network_disk import keep_open
from tests.unit.persistence.retained import fence
from tests.unlinked import by_os


def complete_run(root: Path, steps: list[int], world_size: int = 2) -> RunFolder:
    folder = RunFolder(root)
    create_run(folder, RUN_ID)
    for rank in range(world_size):
        write_fence(folder, fence(0, None, 0, world_size, rank))
    add_snapshots(folder, steps, world_size)
    return folder


def add_snapshots(folder: RunFolder, steps: list[int], world_size: int = 2) -> None:
    for rank in range(world_size):
        make_directory(folder.segments_of(rank))
        for step in steps:
            path = folder.snapshot(0, step)
            make_directory(path)
            shard_file(path, rank).write_bytes(b"shard")
            manifest = Manifest(RUN_ID, 0, step, rank, world_size, bytes=5, checksum=0, parts=())
            write_json(manifest_file(path, rank), asdict(manifest))
            folder.segment(0, rank, step + 1).write_bytes(b"segment")


def on_disk(folder: RunFolder) -> tuple[list[int], list[tuple[int, int]]]:
    return (
        [step for _, step, _ in folder.snapshots()],
        [(rank, first) for _, rank, first, _ in folder.segments()],
    )


def test_collecting_removes_the_files_of_every_rank(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30])
    collect(folder, RUN_ID, Retention(2))
    assert on_disk(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])
    collect(folder, RUN_ID, Retention(2))  # nothing more to do
    assert on_disk(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])


def test_a_snapshot_without_the_manifests_of_all_ranks_is_not_counted(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    manifest_file(folder.snapshot(0, 20), 1).unlink()
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder)[0] == [10, 20]


def test_a_collection_that_was_killed_halfway_is_finished_by_the_next(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    for rank in range(2):  # its manifests went first
        manifest_file(folder.snapshot(0, 0), rank).unlink()
    collect(folder, RUN_ID, Retention(2))
    assert on_disk(folder)[0] == [10, 20]


class Killed(BaseException):
    """SIGKILL, as far as files are concerned."""


def test_killed_before_any_deletion_it_leaves_only_complete_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, left = os.unlink, 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        unlink(*arguments, **options)

    by_os(monkeypatch)
    monkeypatch.setattr(os, "unlink", counted)
    for deletions in range(100):
        folder = complete_run(tmp_path / str(deletions), [0, 10, 20])
        left = deletions
        try:
            collect(folder, RUN_ID, Retention(1))
        except Killed:
            found = {s.step for s in complete_snapshots(folder, RUN_ID)}
            for step in found:  # whoever is listed is whole
                assert len(list(folder.snapshot(0, step).glob("rank-*.safetensors"))) == 2
            assert 20 in found
            assert read_journal(folder, RUN_ID).collected == Collected(((0, 1, 20),))
        else:
            break
    assert deletions == 2 * (2 + 2) + 2 * 2  # manifests and shards, then segments
    assert on_disk(folder) == ([20], [(0, 21), (1, 21)])


def test_a_power_failure_cannot_bring_back_manifests_without_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10])
    unlink, fsync, done = os.unlink, os.fsync, list[str]()

    def log_unlink(path: str | Path, **options: Any) -> None:
        done.append(Path(path).suffix)
        unlink(path, **options)

    def log_fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    by_os(monkeypatch)
    monkeypatch.setattr(os, "unlink", log_unlink)
    monkeypatch.setattr(os, "fsync", log_fsync)
    collect(folder, RUN_ID, Retention(1))
    assert done[1:] == [
        "fsync run",  # what will be missing is written down
        *(".json", ".json", "fsync i000000-s0000000000", ".safetensors", ".safetensors"),
        *(".seg", ".seg"),
    ]


def test_a_shard_that_is_open_where_that_cannot_be_deleted_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path, [0, 10, 20, 30])
    for _ in range(2):  # the second time it is there under its other name
        with monkeypatch.context() as patch:
            keep_open(patch, ["rank-0000.safetensors"])
            collect(folder, RUN_ID, Retention(1))
        assert [found.step for found in complete_snapshots(folder, RUN_ID)] == [30]
        left = [path for *_, old in list(folder.snapshots())[:-1] for path in old.iterdir()]
        assert [path.name[:4] for path in left] == [".nfs"] * 3
    for path in left:  # as their file system does when they are closed
        path.unlink()
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder)[0] == [30]


def test_a_full_disk_is_freed(tmp_path: Path) -> None:
    """Before anything else can be written, what retention writes down included."""
    with tmpfs_or_skip(tmp_path / "disk", 1) as disk:
        folder = complete_run(disk / "run", [0, 10, 20, 30])
        filler = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(bytes(filler))
        with pytest.raises(OSError, match="No space left on device"):
            write_json(disk / "another", {})
        collect(folder, RUN_ID, Retention(1))
        assert on_disk(folder) == ([30], [(0, 31), (1, 31)])
        assert read_journal(folder, RUN_ID).collected == Collected(((0, 1, 30),))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_will_be_missing_is_written_down_once_snapshots_made_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30], world_size=1)
    before = on_disk(folder)
    snapshots: list[list[int]] = []

    def full(*arguments: Any) -> None:
        snapshots.append(on_disk(folder)[0])
        assert on_disk(folder)[1] == before[1], "no segment goes without a word"
        if len(snapshots) < 2 or number == errno.EIO:
            raise OSError(number, os.strerror(number))
        write_json(*arguments)

    monkeypatch.setattr("lowdiff.persistence.run.journal.write_json", full)
    if number == errno.EIO:  # room is not what it lacks
        with pytest.raises(OSError, match="Input/output error"):
            collect(folder, RUN_ID, Retention(1))
        assert on_disk(folder) == before
    else:
        collect(folder, RUN_ID, Retention(1))
        assert snapshots == [[0, 10, 20, 30], [30]]
        assert on_disk(folder) == ([30], [(0, 31)])
        assert read_journal(folder, RUN_ID).collected == Collected(((0, 1, 30),))


def test_segments_stay_where_nothing_makes_room_for_a_word_about_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20], world_size=1)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.persistence.run.journal.write_json", full)
        with pytest.raises(OSError, match="No space left on device"):
            collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder) == ([20], [(0, 1), (0, 11), (0, 21)])
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder) == ([20], [(0, 21)])


def test_where_an_incarnation_is_about_to_begin_is_read_from_its_first_fence(
    tmp_path: Path,
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30])
    write_fence(folder, fence(1, 0, 15, 2))
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder) == ([10, 30], [(0, 11), (0, 31), (1, 11), (1, 31)])
    write_fence(folder, fence(1, 0, 15, 2, rank=1))
    collect(folder, RUN_ID, Retention(1))  # it has begun: all beyond its base is void
    assert [step for step in on_disk(folder)[0] if step <= 15] == [10]


def test_a_shard_of_another_length_than_its_manifest_says_does_not_count(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    shard_file(folder.snapshot(0, 20), 1).write_bytes(b"shar")
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder)[0] == [10, 20]


def test_nothing_appears_where_a_run_was_unmounted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        collect(RunFolder(tmp_path / "run"), RUN_ID, Retention(1))
    assert not (tmp_path / "run").exists()


# What cannot be read

KEPT = Retention(snapshots=2, every_steps=100)


def kept_run(root: Path) -> RunFolder:
    """Snapshots of which all but the one at 0 are kept: as pinned, for ever, and as the newest."""
    folder = complete_run(root, [0, 40, 100, 200, 300])
    write_pin(folder, RUN_ID, Pin("best", 40, 0))
    collect(folder, RUN_ID, KEPT)
    assert on_disk(folder)[0] == [40, 100, 200, 300]
    return folder


@contextmanager
def stale(*paths: Path) -> Iterator[None]:
    """As a network file system answers now and then, for files that are there and whole."""
    real = Path.open

    def answer(path: Path, *arguments: Any, **options: Any) -> Any:
        if path in paths:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", answer)
        yield


def test_a_manifest_that_cannot_be_read_now_takes_nothing_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kept_run(tmp_path / "run")
    before = on_disk(folder)
    manifests = [
        manifest_file(folder.snapshot(0, 40), 0),
        manifest_file(folder.snapshot(0, 100), 1),
    ]
    with stale(*manifests):
        collect(folder, RUN_ID, KEPT)
    assert on_disk(folder) == before
    for manifest in manifests:
        assert f"old files stay: {manifest.parent} may be needed, but it cannot be" in caplog.text
    caplog.clear()
    collect(folder, RUN_ID, KEPT)
    assert on_disk(folder) == before
    assert caplog.text == ""
    assert len(complete_snapshots(folder, RUN_ID)) == 4


def test_a_damaged_manifest_keeps_its_snapshot_and_holds_up_no_other(tmp_path: Path) -> None:
    folder = kept_run(tmp_path / "run")
    manifest = manifest_file(folder.snapshot(0, 40), 1)
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    add_snapshots(folder, [410, 520])
    collect(folder, RUN_ID, KEPT)
    assert on_disk(folder)[0] == [40, 100, 200, 300, 410, 520]
    collect(folder, RUN_ID, Retention(snapshots=2))
    steps, segments = on_disk(folder)
    assert steps == [40, 410, 520]
    assert len(list(folder.snapshot(0, 40).iterdir())) == 4
    assert [first for rank, first in segments if rank == 0] == [411, 521]


def test_a_shard_that_cannot_be_read_for_its_checksum_keeps_its_snapshot(tmp_path: Path) -> None:
    folder = kept_run(tmp_path / "run")
    shard = shard_file(folder.snapshot(0, 40), 0)
    with stale(shard):
        checked = check_snapshots(folder, RUN_ID)
    found = {s.step: s for s in take_inventory(folder, RUN_ID, checked=checked).snapshots}
    assert found[40].unreadable
    assert not found[40].complete
    assert not found[100].unreadable
    shard.unlink()  # it is known what that is worth
    checked = check_snapshots(folder, RUN_ID)
    assert not any(s.unreadable for s in take_inventory(folder, RUN_ID, checked=checked).snapshots)
