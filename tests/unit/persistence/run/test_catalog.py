"""The catalog lists what exists and passed its checks, and says what did not."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from lowdiff.errors import ConfigError, DamagedFile, NotARun, OtherFormat, RunInUse
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder, entries_of
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.document import copy_of, read_json, write_json
from lowdiff.persistence.format.framing import FileHeader, FileKind, RecordKind
from lowdiff.persistence.format.image import Manifest, manifest_file, shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.catalog import begun_fences, next_incarnation, scan
from lowdiff.persistence.run.fences import create_run, read_fence, read_run_id, write_fence
from lowdiff.persistence.writer.segments import durable_step
from tests.unit.persistence.made_runs import (
    RUN_ID,
    began,
    differential,
    fence,
    listed,
    segment,
    stage,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    create_run(run, RUN_ID)
    return run


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


# The run


def test_a_folder_without_a_run_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="no such folder"):
        scan(RunFolder(tmp_path / "nowhere"))
    with pytest.raises(NotARun, match=r"it has no run\.json; give the folder"):
        scan(RunFolder(tmp_path))


@pytest.mark.parametrize("run_id", ["", "xyz", RUN_ID.upper(), RUN_ID + "00", 7, None])
def test_a_run_whose_identity_is_none_is_damaged(tmp_path: Path, run_id: object) -> None:
    write_json(tmp_path / "run.json", {"run_id": run_id})
    with pytest.raises(DamagedFile, match="is not 32 hexadecimal digits"):
        read_run_id(RunFolder(tmp_path))


def test_a_run_keeps_the_identity_it_was_given_first(folder: RunFolder) -> None:
    create_run(folder, "ff" * 16)
    assert read_run_id(folder) == RUN_ID


def test_an_empty_run_lists_nothing_and_no_damage(folder: RunFolder, staging: Path) -> None:
    found = scan(folder, [staging])
    assert (found.run_id, found.root) == (RUN_ID, folder.root)
    assert (dict(found.incarnations), found.snapshots, dict(found.records)) == ({}, (), {})
    assert (found.staging, found.damage) == ((), [])
    assert next_incarnation(folder, RUN_ID, [staging]) == 0


# Incarnations


def test_a_fence_comes_back_as_it_was_written(folder: RunFolder) -> None:
    write_fence(folder, fence(3, rank=1, world_size=2, base=40))
    assert read_fence(folder.fence(3, 1)) == fence(3, rank=1, world_size=2, base=40)


def test_a_beginning_without_a_durable_snapshot_never_was(folder: RunFolder) -> None:
    write_fence(folder, fence(0))
    assert scan(folder).incarnations == {}
    assert next_incarnation(folder, RUN_ID, []) == 1
    folder.fence(0, 0).unlink()
    began(folder)
    assert set(scan(folder).incarnations) == {0}


def test_of_two_that_begin_the_same_incarnation_one_is_refused(folder: RunFolder) -> None:
    write_fence(folder, fence(0))
    with pytest.raises(RunInUse, match="a trainer that attached at the same time"):
        write_fence(folder, fence(0, base=7))
    assert read_fence(folder.fence(0, 0)) == fence(0)
    written = sorted(path.name for path in folder.fence(0, 0).parent.iterdir())
    assert written == ["rank-0000.copy", "rank-0000.json"]
    assert read_json(copy_of(folder.fence(0, 0))) == read_json(folder.fence(0, 0))


def test_a_fence_of_more_ranks_than_files_have_names_for_is_none(folder: RunFolder) -> None:
    """A list of so many ranks would take all memory."""
    with pytest.raises(ConfigError, match="at most 10,000 ranks"):
        write_fence(folder, fence(3, world_size=10_001))
    write_fence(folder, fence(3))
    document = read_json(folder.fence(3, 0))
    write_json(folder.fence(3, 0), document | {"world_size": 2**31})
    with pytest.raises(DamagedFile, match="rank 0 of 2147483648"):
        read_fence(folder.fence(3, 0))
    assert scan(folder).damage


def test_an_incarnation_counts_once_all_its_ranks_wrote_their_fence(folder: RunFolder) -> None:
    began(folder)
    for rank in (2, 0):
        write_fence(folder, fence(1, rank, world_size=3))
        assert set(scan(folder).incarnations) == {0}
    write_fence(folder, fence(1, 1, world_size=3))
    found = scan(folder)
    assert found.incarnations[1] == fence(1, 0, world_size=3)


def test_the_number_of_an_incarnation_that_never_began_is_not_given_again(
    folder: RunFolder,
) -> None:
    write_fence(folder, fence(0))
    write_fence(folder, fence(4, 1, world_size=2))
    assert next_incarnation(folder, RUN_ID, []) == 5


def test_a_fence_in_a_place_of_another_is_damage(folder: RunFolder) -> None:
    began(folder)
    for path in (folder.fence(0, 1), folder.fence(1, 0)):
        make_directory(path.parent)
        shutil.copy(folder.fence(0, 0), path)
    found = scan(folder)
    assert set(found.incarnations) == {0}
    assert [error.path for error in found.damage] == [folder.fence(0, 1), folder.fence(1, 0)]


def test_a_document_that_is_no_fence_is_damage(folder: RunFolder) -> None:
    path = folder.fence(0, 0)
    make_directory(path.parent)
    whole = asdict(fence(0))
    for content in ({}, {**whole, "layout": 7}, {**whole, "news": 1}, {**whole, "optimizers": [1]}):
        write_json(path, content)
        with pytest.raises(DamagedFile, match="not a fence"):
            read_fence(path)
    with pytest.raises(DamagedFile, match="not a fence"):
        begun_fences(folder, RUN_ID)


@pytest.mark.parametrize(
    ("key", "number", "why"),
    [
        ("whole_shape", 1e308, "reaches beyond"),
        ("global_offset", 0.0, "reaches beyond"),
        ("whole_shape", 2**31, "are not all of"),
    ],
)
def test_parameters_whose_parts_are_not_the_whole_are_damage(
    folder: RunFolder, key: str, number: Any, why: str
) -> None:
    write_fence(folder, fence(0))
    document = read_json(folder.fence(0, 0))
    document["layout"]["parameters"][0][key][0] = number
    write_json(folder.fence(0, 0), document)
    with pytest.raises(DamagedFile, match=why):
        read_fence(folder.fence(0, 0))


# Records


def test_records_are_listed_by_incarnation_rank_and_step(folder: RunFolder, staging: Path) -> None:
    stage(staging, [1, 2, 3])
    stage(staging, [4], incarnation=1, rank=2, base=3)
    found = scan(folder, [staging])
    assert listed(found) == {0: True, 1: True, 2: True, 3: True}  # the base under its step
    assert listed(found, 1, 2) == {3: True, 4: True}
    assert found.records[0, 0][0].record.header.kind is RecordKind.BASE
    assert [s.root.name for s in found.staging] == ["i000000-r0000", "i000001-r0002"]


def test_what_is_both_staged_and_durable_is_taken_from_staging(
    folder: RunFolder, staging: Path
) -> None:
    path = segment(folder, stage(staging, [1, 2, 3, 4]), [1, 2])
    shutil.rmtree(staging)
    segment(folder, stage(staging, [2, 3, 4]), [3, 4])
    found = scan(folder, [staging])
    assert listed(found) == {0: True, 1: False, 2: True, 3: True, 4: True}
    assert found.records[0, 0][1].path == path
    assert listed(scan(folder)) == dict.fromkeys([1, 2, 3, 4], False)


def test_a_record_decodes_alike_from_staging_and_from_a_segment(
    folder: RunFolder, staging: Path
) -> None:
    segment(folder, stage(staging, [1, 2]), [1, 2])
    for roots in ([staging], []):
        stored = scan(folder, roots).records[0, 0][2]
        found, expected = read_differential(stored, Codec()), differential(2)
        assert (found.step, found.optimizers, found.items) == (
            2,
            expected.optimizers,
            expected.items,
        )
        for left, right in zip(found.payload.sections, expected.payload.sections, strict=True):
            assert (left.name, left.coding, left.data.dtype) == (
                right.name,
                right.coding,
                right.data.dtype,
            )
            np.testing.assert_array_equal(left.data, right.data)


def test_a_staged_record_that_is_overwritten_after_it_was_listed_is_not_believed(
    folder: RunFolder, staging: Path
) -> None:
    lock = FileLock(stage(staging, [1, 2, 3]).trainer_lock)
    assert lock.acquire("its trainer")
    found = scan(folder, [staging])
    lock.release()
    stored = found.records[0, 0][2]
    other = found.records[0, 0][3].record
    with stored.path.open("r+b") as file:  # a live trainer's next lap puts a twin in its place
        file.seek(stored.record.offset)
        file.write(bytes(other.header.pack()) + bytes(other.body))
    with pytest.raises(DamagedFile, match="step 2 was overwritten"):
        read_differential(stored, Codec())


def test_what_a_dead_trainer_staged_is_read_where_it_lies(folder: RunFolder, staging: Path) -> None:
    stage(staging, [1, 2]).trainer_lock.touch()
    stored = scan(folder, [staging]).records[0, 0][2]
    body = np.frombuffer(stored.record.body, np.uint8)
    for section in read_differential(stored, Codec()).payload.sections:
        assert np.shares_memory(section.data, body)


def test_the_unbroken_sequence_after_a_base_ends_before_the_first_gap(
    folder: RunFolder, staging: Path
) -> None:
    stage(staging, [6, 7, 9], base=5)
    found = scan(folder, [staging])
    assert found.of(0, 0).unbroken(5) == 7
    assert found.of(0, 0).unbroken(7) == 7
    assert found.of(0, 0).unbroken(8) == 9
    assert found.of(4, 0).unbroken(3) == 3


# Damage


def test_a_torn_tail_is_reported_and_what_is_before_it_counts(
    folder: RunFolder, staging: Path
) -> None:
    path = segment(folder, stage(staging, [1, 2, 3]), [1, 2, 3])
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    found = scan(folder)
    assert listed(found) == {1: False, 2: False}
    (error,) = found.damage
    assert error.path == path
    assert error.offset is not None
    assert path.stat().st_size > error.offset > 64
    path.write_bytes(data)
    assert not scan(folder).damage


def test_a_segment_under_the_name_of_another_is_damage(folder: RunFolder, staging: Path) -> None:
    path = segment(folder, stage(staging, [1, 2]), [1, 2])
    for other in (folder.segment(1, 0, 1), folder.segment(0, 1, 1)):
        make_directory(other.parent)
        shutil.copy(path, other)
    found = scan(folder)
    assert set(found.records) == {(0, 0)}
    assert {error.path for error in found.damage} == {
        folder.segment(1, 0, 1),
        folder.segment(0, 1, 1),
    }


def test_a_segment_of_another_run_is_damage(folder: RunFolder, staging: Path) -> None:
    path = segment(folder, stage(staging, [1]), [1])
    header = FileHeader(FileKind.SEGMENT, "ff" * 16, 0, 0, 1, 1)
    path.write_bytes(header.pack() + path.read_bytes()[64:])
    found = scan(folder)
    assert listed(found) == {}
    assert "another run" in str(found.damage[0])


def test_an_empty_segment_is_damage_and_hides_no_other(folder: RunFolder, staging: Path) -> None:
    stage_folder = stage(staging, [1, 2])
    segment(folder, stage_folder, [1])
    segment(folder, stage_folder, [2])
    folder.segment(0, 0, 1).write_bytes(b"")
    found = scan(folder)
    assert listed(found) == {2: False}
    assert [error.path for error in found.damage] == [folder.segment(0, 0, 1)]


def test_files_of_a_later_version_stop_the_scan_by_name(folder: RunFolder) -> None:
    write_fence(folder, fence(0))
    later = {"format": 5, **asdict(fence(0))}
    text = json.dumps(later, sort_keys=True, separators=(",", ":")).encode()
    content = {**later, "crc32c": crc32c(text)}
    folder.fence(0, 0).write_text(json.dumps(content))
    with pytest.raises(OtherFormat, match=r"rank-0000\.json has format version 5"):
        scan(folder)


def test_snapshots_are_compared_with_their_checksums_only_when_asked(folder: RunFolder) -> None:
    path = folder.snapshot(0, 40)
    make_directory(path)
    shard_file(path, 0).write_bytes(b"other bytes")
    write_json(manifest_file(path, 0), asdict(Manifest(RUN_ID, 0, 40, 0, 1, 11, 7, ())))
    assert [s.step for s in scan(folder).snapshots] == [40]
    found = scan(folder, check_all=True)
    assert found.snapshots == ()
    assert [error.path for error in found.damage] == [shard_file(path, 0)]


def test_a_snapshot_that_is_removed_while_it_is_looked_at_has_no_manifests(tmp_path: Path) -> None:
    gone = RunFolder(tmp_path).snapshot(0, 5)
    assert RunFolder.manifests(gone) == []
    assert entries_of(gone) == []


def test_strange_names_are_passed_over_and_links_refused(folder: RunFolder, staging: Path) -> None:
    path = segment(folder, stage(staging, [1]), [1])
    for name in ("i000000-s1.seg", "i000000-s0000000002.seg.partial", ".i000000-s0000000002.seg"):
        shutil.copy(path, path.with_name(name))
    (folder.root / "snapshots").write_text("a file where a folder belongs")
    found = scan(folder)
    assert listed(found) == {1: False}
    assert not found.damage
    folder.segment(0, 0, 2).symlink_to(path)
    with pytest.raises(DamagedFile, match="it is a link"):
        scan(folder)


# Beside a live trainer


def test_files_that_retention_removes_during_the_scan_are_no_damage(
    folder: RunFolder, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment(folder, stage(staging, [1, 2]), [1])
    segment(folder, StagingFolder.of(staging, RUN_ID, 0, 0), [2])
    for step in (1, 2):
        path = folder.snapshot(0, step)
        make_directory(path)
        write_json(manifest_file(path, 0), asdict(Manifest(RUN_ID, 0, step, 0, 1, 0, 0, ())))
    read = Manifest.read

    def open_late(path: Path) -> SegmentFile:
        folder.segment(0, 0, 1).unlink(missing_ok=True)
        return SegmentFile(path)

    def read_late(path: Path) -> Manifest:
        manifest_file(folder.snapshot(0, 1), 0).unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr("lowdiff.persistence.run.records.SegmentFile", open_late)
    monkeypatch.setattr(Manifest, "read", read_late)
    found = scan(folder)
    assert listed(found) == {2: False}
    assert [s.step for s in found.snapshots] == [2]
    assert not found.damage


# Where a restarted writer goes on


def test_a_restarted_writer_goes_on_behind_the_newest_segment_that_holds_a_record(
    folder: RunFolder, staging: Path
) -> None:
    stage_folder = stage(staging, [1, 2, 3, 4])
    assert durable_step(folder, RUN_ID, 0, 0, base_step=0) == 0
    segment(folder, stage_folder, [1, 2])
    segment(folder, stage_folder, [3])
    newest = segment(folder, stage_folder, [4])
    torn = newest.read_bytes()[:-1]  # of its only record
    assert durable_step(folder, RUN_ID, 0, 0, base_step=0) == 4
    newest.write_bytes(torn)
    assert durable_step(folder, RUN_ID, 0, 0, base_step=0) == 3
    newest.write_bytes(b"")
    assert durable_step(folder, RUN_ID, 0, 0, base_step=0) == 3
    assert durable_step(folder, RUN_ID, 0, 1, base_step=2) == 2
    assert durable_step(folder, RUN_ID, 1, 0, base_step=2) == 2
