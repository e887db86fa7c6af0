"""An index of segments saves reading them, and never changes what a run is found to hold."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.persistence import segment_index
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.fences import write_fence
from lowdiff.persistence.framing import HEADER_BYTES, FileHeader, FileKind, read_records
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.segment_index import (
    INDEX_NAME,
    Sealed,
    add_to_index,
    read_index,
    write_index,
)
from lowdiff.persistence.segments import Batch, SegmentWriter
from lowdiff.recovery.engine import look_again
from lowdiff.recovery.inspection import inspect
from lowdiff.recovery.plan import plan_recovery, recoverable
from tests.persistence.index_writer import write_for_ever
from tests.persistence.indexed_runs import (
    BATCHES,
    age,
    index_file,
    index_of,
    indexed,
    made,
    records_end,
    tampered,
)
from tests.persistence.made_runs import RUN_ID, fence


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of four segments, with an index of all of them; small runs are worth one here."""
    monkeypatch.setattr(segment_index, "_WORTH_RECORDS", 1)
    return indexed(tmp_path / "run")


def what_it_holds(catalog: Catalog) -> tuple[object, ...]:
    steps = {key: list(records) for key, records in catalog.records.items()}
    bodies = {key: [bytes(r.record.body) for r in v.values()] for key, v in catalog.records.items()}
    damage = [(error.path, error.offset) for error in catalog.damage]
    return steps, bodies, damage, recoverable(catalog)


def refuse_to_open(path: Path) -> NoReturn:
    raise AssertionError(f"{path} was read")


def test_what_the_index_knows_is_not_read_until_it_is_needed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = what_it_holds(scan(folder, check_all=True))
    with monkeypatch.context() as patched:
        patched.setattr("lowdiff.persistence.segment_scan.SegmentFile", refuse_to_open)
        found = scan(folder)
        assert recoverable(found) == [(0, 7)]
        with pytest.raises(AssertionError, match="was read"):
            plan_recovery(found)
    assert what_it_holds(scan(folder)) == expected


def test_a_plan_reads_only_the_segments_it_uses(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (3, 5, 7):
        path = folder.segment(0, 0, first)
        tampered(path, bytes(path.stat().st_size))
    assert plan_recovery(scan(folder), 2).step == 2


# The index itself


def test_an_index_comes_back_as_it_was_written(tmp_path: Path) -> None:
    entries = [Sealed(0, 1, 2, 300, 7, ()), Sealed(3, 5, 5, 200, 1 << 61, (5,))]
    write_index(tmp_path, RUN_ID, 4, reversed(entries))
    assert list(read_index(tmp_path, RUN_ID, 4, 0).values()) == entries
    assert read_index(tmp_path, "ff" * 16, 4, 0) == {}, "another run's"
    assert read_index(tmp_path, RUN_ID, 3, 0) == {}, "another rank's"


def test_every_damage_of_an_index_makes_it_none(folder: RunFolder) -> None:
    expected = what_it_holds(scan(folder, check_all=True))
    whole = index_file(folder).read_bytes()
    for at in range(len(whole)):
        index_file(folder).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert index_of(folder) == {}
    for size in range(len(whole)):
        index_file(folder).write_bytes(whole[:size])
        assert index_of(folder) == {}
    for data in (whole + b"\0", b"", b"no index", bytes(1 << 20)):
        index_file(folder).write_bytes(data)
        assert index_of(folder) == {}
        assert what_it_holds(scan(folder)) == expected


@pytest.mark.parametrize(
    "entry",
    [
        Sealed(0, 5, 4, 300, 7, ()),
        Sealed(0, 1, 1 << 40, 300, 7, ()),
        Sealed(0, 1, 2, 300, 7, (3,)),
        Sealed(0, 1 << 63, 1 << 63, 300, 7, ()),
    ],
    ids=["backwards", "more records than fit", "a step outside", "too large a step"],
)
def test_impossible_entries_are_refused(tmp_path: Path, entry: Sealed) -> None:
    write_index(tmp_path, RUN_ID, 0, [entry])
    assert (tmp_path / INDEX_NAME).exists()
    assert read_index(tmp_path, RUN_ID, 0, 0) == {}


def test_an_index_too_large_to_be_one_is_neither_read_nor_written(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_index, "_MAX_BYTES", 100)
    assert index_of(folder) == {}
    index_file(folder).unlink()
    scan(folder)
    assert not index_file(folder).exists()


def test_a_name_that_is_no_file_is_no_index(folder: RunFolder) -> None:
    index_file(folder).unlink()
    index_file(folder).mkdir()
    assert recoverable(scan(folder)) == [(0, 7)]


# Files that changed


def test_a_segment_that_grew_is_read(folder: RunFolder, tmp_path: Path) -> None:
    other = made(tmp_path / "other", [[7, 8, 9]])
    shutil.copy(other.segment(0, 0, 7), folder.segment(0, 0, 7))
    assert recoverable(scan(folder)) == [(0, 9)]


def test_a_segment_of_another_time_is_read(folder: RunFolder) -> None:
    path = folder.segment(0, 0, 5)
    path.write_bytes(bytes(path.stat().st_size))
    found = scan(folder)
    assert recoverable(found) == [(0, 4)]
    assert [error.path for error in found.damage] == [path]


def test_a_torn_tail_is_never_in_the_index(folder: RunFolder) -> None:
    path = folder.segment(0, 0, 7)
    path.write_bytes(path.read_bytes()[: records_end(path) - 3])
    age(path)
    for _ in range(2):
        found = scan(folder)
        assert recoverable(found) == [(0, 6)]
        assert [error.path for error in found.damage] == [path]
    assert (0, 7) not in index_of(folder) or index_of(folder)[0, 7].bytes != path.stat().st_size


def test_a_segment_that_is_gone_is_missing(folder: RunFolder) -> None:
    folder.segment(0, 0, 3).unlink()
    found = scan(folder)
    assert recoverable(found) == [(0, 2)]
    with pytest.raises(StepNotFound, match="step 3 is missing"):
        plan_recovery(found, 5)


def test_what_was_changed_a_moment_ago_is_not_remembered(folder: RunFolder) -> None:
    index_file(folder).unlink()
    age(folder.segment(0, 0, 5), seconds=0.5)
    scan(folder)
    assert set(index_of(folder)) == {(0, 1), (0, 3), (0, 7)}


def test_a_run_that_is_read_in_no_time_gets_no_index(tmp_path: Path) -> None:
    run = made(tmp_path / "run", BATCHES)
    scan(run)
    assert not index_file(run).exists()


def test_a_file_from_before_1970_is_read_and_not_remembered(folder: RunFolder) -> None:
    os.utime(folder.segment(0, 0, 5), ns=(-5, -5))
    index_file(folder).unlink()
    assert recoverable(scan(folder)) == [(0, 7)]
    assert set(index_of(folder)) == {(0, 1), (0, 3), (0, 7)}


@pytest.mark.parametrize("check_all", [False, True])
def test_whoever_believes_no_index_believes_none_on_the_second_look(
    folder: RunFolder, check_all: bool
) -> None:
    index_file(folder).unlink()
    staging = folder.root.parent / "none"
    seen = []

    def act(catalog: Catalog) -> None:
        seen.append(catalog)
        if len(seen) == 1:
            raise DamagedFile(staging / "log-00000000.chunk", "overwritten")

    look_again(folder, staging, scan(folder, check_all=True), act, check_all=check_all)
    assert len(seen) == 2
    assert index_file(folder).exists() != check_all


# Who else is there


def test_an_index_of_far_more_segments_than_there_are_is_none(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_index, "_SPARE_ENTRIES", 0)
    many = [Sealed(1, step, step, 128, 7, ()) for step in range(1, 18)]
    write_index(folder.segments_of(0), RUN_ID, 0, many)
    assert len(read_index(folder.segments_of(0), RUN_ID, 0, 5)) == 17
    assert read_index(folder.segments_of(0), RUN_ID, 0, 4) == {}
    assert recoverable(scan(folder)) == [(0, 7)]


def test_what_killed_writers_left_is_swept(folder: RunFolder) -> None:
    old, new = (folder.segments_of(0) / f"{INDEX_NAME}.{n}.partial" for n in ("0a", "0b"))
    old.touch()
    age(old, seconds=4000)
    new.touch()
    write_index(folder.segments_of(0), RUN_ID, 0, [])
    assert not old.exists()
    assert new.exists(), "its writer may be alive"


def test_names_that_are_no_folders_of_segments_are_passed_over(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.segments_of(1).write_bytes(b"")
    assert recoverable(scan(folder)) == [(0, 7)]
    gone = [(0, folder.segments_of(0)), (2, folder.segments_of(2))]
    monkeypatch.setattr(RunFolder, "segment_folders", lambda self: iter(gone))
    assert recoverable(scan(folder)) == [(0, 7)]


def test_a_folder_that_cannot_be_written_is_read(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_file(folder).unlink()

    def refuse(*arguments: object) -> NoReturn:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(segment_index, "replaced", refuse)
    assert recoverable(scan(folder)) == [(0, 7)]
    assert not index_file(folder).exists()


def test_retention_takes_entries_along_with_files(folder: RunFolder) -> None:
    folder.segment(0, 0, 1).unlink()
    add_to_index(folder.segments_of(0), RUN_ID, 0, [])
    assert set(index_of(folder)) == {(0, 3), (0, 5), (0, 7)}


def test_a_segment_that_retention_removes_while_a_plan_is_made_is_missing(
    folder: RunFolder,
) -> None:
    found = scan(folder)
    folder.segment(0, 0, 7).unlink()
    assert plan_recovery(found).step == 6
    plan = plan_recovery(scan(folder))
    folder.segment(0, 0, 5).unlink()
    with pytest.raises(DamagedFile, match="step 5 should be in it and is not"):
        [planned.shards for planned in plan.steps]


def test_what_a_fence_made_void_stays_void(folder: RunFolder) -> None:
    write_fence(folder, fence(1, base=4))
    made(folder.root, [[5, 6, 7, 8]], incarnation=1)
    for _ in range(2):
        plan = plan_recovery(scan(folder))
        assert [(s.incarnation, s.step) for s in plan.steps] == [
            *((0, step) for step in range(1, 5)),
            *((1, step) for step in range(5, 9)),
        ]
    assert (1, 5) in index_of(folder)
    differentials = inspect(folder.root, staging=folder.root / "none").differentials
    assert differentials is not None
    assert (differentials.first, differentials.last, differentials.count) == (1, 8, 8)


def test_inspection_counts_the_same_with_and_without(folder: RunFolder, tmp_path: Path) -> None:
    write_fence(folder, fence(1, base=3))  # in the middle of a segment
    made(folder.root, [[4, 5]], incarnation=1)
    found = inspect(folder.root, staging=tmp_path)
    index_file(folder).unlink()
    assert inspect(folder.root, staging=tmp_path) == found


@pytest.mark.launch
def test_writers_that_are_killed_or_in_each_others_way_leave_a_whole_index(tmp_path: Path) -> None:
    many = [[Sealed(who, t, t, 128, 7, ()) for t in range(1, 3000)] for who in (0, 1)]
    write_index(tmp_path, RUN_ID, 0, many[0])
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_for_ever, args=(tmp_path, RUN_ID, own)) for own in many]
    for writer in writers:
        writer.start()
    seen: set[int] = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 and time.monotonic() < deadline:
        entries = list(read_index(tmp_path, RUN_ID, 0, 0).values())
        assert entries in many
        seen.add(entries[0].incarnation)
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert seen == {0, 1}, "both have written"
    assert list(read_index(tmp_path, RUN_ID, 0, 0).values()) in many


# The writer process's part


def test_the_writer_indexes_what_it_has_filled(folder: RunFolder, tmp_path: Path) -> None:
    run = made(tmp_path / "new", [])

    async def write() -> None:
        writer = SegmentWriter(run, FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 0))
        for first, last in ((1, 2), (3, 4), (5, 6)):
            path = folder.segment(0, 0, first)
            whole = path.read_bytes()
            header = FileHeader.unpack(whole, path)
            records = list(read_records(memoryview(whole), header))
            sizes = tuple(record.end - record.offset for record in records)
            data = whole[HEADER_BYTES : records[-1].end]
            await writer.append(Batch(data, first, last, sizes, rebases=(first,)))
            if first != 1:
                await writer.seal()

    asyncio.run(write())
    found = [
        Sealed(0, first, last, path.stat().st_size, path.stat().st_mtime_ns, rebases)
        for first, last, rebases in ((1, 4, (1, 3)), (5, 6, (5,)))
        for path in [run.segment(0, 0, first)]
    ]
    assert list(index_of(run).values()) == found
