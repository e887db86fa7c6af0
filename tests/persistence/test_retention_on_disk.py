"""Retention on files: what is removed, in which order, and what a kill leaves."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.catalog import complete_snapshots
from lowdiff.persistence.durable import make_directory, write_json
from lowdiff.persistence.fences import create_run, write_fence
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.policy import Retention
from lowdiff.persistence.retention import collect
from lowdiff.persistence.retention_notes import Collected, read_notes
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from tests.persistence.made_runs import RUN_ID
from tests.persistence.retained import fence


def complete_run(root: Path, steps: list[int], world_size: int = 2) -> RunFolder:
    folder = RunFolder(root)
    create_run(folder, RUN_ID)
    for rank in range(world_size):
        write_fence(folder, fence(0, None, 0, world_size, rank))
        make_directory(folder.segments_of(rank))
        for step in steps:
            path = folder.snapshot(0, step)
            make_directory(path)
            shard_file(path, rank).write_bytes(b"shard")
            manifest = Manifest(RUN_ID, 0, step, rank, world_size, bytes=5, checksum=0)
            write_json(manifest_file(path, rank), asdict(manifest))
            folder.segment(0, rank, step + 1).write_bytes(b"segment")
    return folder


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
            assert read_notes(folder, RUN_ID).collected == Collected(((0, 1, 20),))
        else:
            break
    assert deletions == 2 * (2 + 2) + 2 * 2  # manifests and shards, then segments
    assert on_disk(folder) == ([20], [(0, 21), (1, 21)])


def test_a_power_failure_cannot_bring_back_manifests_without_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10])
    unlink, fsync, done = os.unlink, os.fsync, list[str]()

    def log_unlink(path: Path, **options: Any) -> None:
        done.append(path.suffix)
        unlink(path, **options)

    def log_fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "unlink", log_unlink)
    monkeypatch.setattr(os, "fsync", log_fsync)
    collect(folder, RUN_ID, Retention(1))
    assert done[1:] == [
        "fsync run",  # what will be missing is written down
        *(".json", ".json", "fsync i000000-s0000000000", ".safetensors", ".safetensors"),
        *(".seg", ".seg"),
    ]


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
