"""The staging log outlives its trainer, is read while it grows, and never kills training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.sections import read_sections
from lowdiff.persistence.staging.log import LogTail, StagingLog, open_chunk, staged_records
from lowdiff.types import Section
from tests.unit.persistence.staged_logs import (
    CHUNK,
    ITEMS,
    RUN_ID,
    ahead,
    append,
    check,
    drained,
    folder_in,
    log_in,
    payload,
    steps,
)


def test_what_is_appended_is_read_with_its_identity(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, incarnation=3, rank=2)
    log = StagingLog(folder, run_id=RUN_ID, world_size=4, chunk_bytes=CHUNK, cap_bytes=CHUNK)
    size = append(log, 41)
    (record,) = drained(LogTail(folder))
    assert check(record) == 41
    header = record.header
    assert (header.kind, header.incarnation, header.rank) == (RecordKind.DIFFERENTIAL, 3, 2)
    assert (header.world_size, header.lap, header.coded) == (4, 0, False)
    assert size == record.end - record.offset


def test_data_is_copied_so_later_changes_of_it_do_not_matter(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    data = np.zeros(100, np.uint32)
    section = Section("values/float32", "planes", data)
    log_in(folder).append(RecordKind.DIFFERENTIAL, 1, b"step 1", [section], durable_step=-1)
    data[:] = 7
    (_, record), *_ = staged_records(folder)
    assert not read_sections(record.sections, Codec(), coded=False)[0].data.any()


@pytest.mark.parametrize("parts", [[ITEMS], [40, 58], [1, 0, 3], [2000, 2]])
def test_what_is_staged_ahead_is_read_once_its_record_is_whole(
    tmp_path: Path, parts: list[int]
) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder), LogTail(folder)
    append(log, 1)
    for step in range(2, 40):
        section = Section("part 0", "planes", np.full(parts[0], step, np.uint32))
        log.append_ahead([section], durable_step=-1)
        assert [record.header.step for record in drained(tail)] == [step - 1]
        assert ahead(log, step, parts[1:])
        last = [record for _, record in staged_records(folder)][-1]
        assert bytes(last.meta) == b"step %d" % step
        found = read_sections(last.sections, Codec(), coded=False)
        assert [section.data.tolist() for section in found] == [[step] * n for n in parts]


def test_what_is_staged_ahead_moves_with_all_of_it_where_a_chunk_ends(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=CHUNK)
    for step in range(1, 60):  # each has begun in a chunk that it does not fit into
        assert ahead(log, step, [300 + step, 400], durable=step - 1)
        *_, (_, record) = staged_records(folder)
        found = read_sections(record.sections, Codec(), coded=False)
        assert [section.data.tolist() for section in found] == [[step] * (300 + step), [step] * 400]
    assert len(folder.chunks()) == 2


def test_ahead_waits_for_room_and_can_be_given_up(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in (1, 2, 3):  # two fit into a chunk
        assert ahead(log, step, [400])
    assert log.append_ahead(payload(4, 10), durable_step=1)
    assert not log.append_ahead(payload(4, 900), durable_step=1)
    log.drop_ahead()
    assert append(log, 4)
    assert [r.header.step for _, r in staged_records(folder)] == [1, 2, 3, 4]
    assert not ahead(log, 5, [900], durable=1)
    assert ahead(log, 5, [900], durable=2)
    assert [r.header.step for _, r in staged_records(folder)] == [3, 4, 5]


def test_the_log_rolls_into_new_chunks_which_a_reader_follows(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder), LogTail(folder)
    seen = []
    for step in range(1, 51):
        assert append(log, step)
        seen += [check(record) for record in drained(tail)]
    assert seen == list(range(1, 51)) == steps(folder)
    assert len(folder.chunks()) == 7  # eight records in each
    assert log.bytes_held == 7 * CHUNK


def test_a_reader_that_comes_late_starts_at_the_oldest_chunk(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    tail = LogTail(folder)
    assert tail.next() is None
    log = log_in(folder)
    assert tail.next() is None
    for step in range(1, 21):
        append(log, step)
    assert [check(record) for record in drained(tail)] == list(range(1, 21))


def test_chunks_of_durable_records_are_reused_in_turn(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder, cap_bytes=3 * CHUNK), LogTail(folder)
    seen = []
    for step in range(1, 201):
        assert append(log, step, durable=step - 8)
        seen += [check(record) for record in drained(tail)]
    assert seen == list(range(1, 201))
    assert log.bytes_held <= 3 * CHUNK
    assert sum(path.stat().st_size for _, path in folder.chunks()) == log.bytes_held


def test_stale_records_behind_the_newest_one_of_a_reused_chunk_do_not_count(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 18):
        assert append(log, step, durable=step - 1)
    # Step 17 opened the third lap, in the chunk of steps 1 to 8: 2 to 8 still lie behind it.
    (first, _), (second, path) = folder.chunks()
    assert (first, second) == (1, 2)
    assert b"step 2" in path.read_bytes()
    assert steps(folder) == [*range(9, 17), 17]


def test_a_chunk_that_was_renamed_but_not_yet_given_its_header_holds_nothing(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder)
    for step in range(1, 10):
        append(log, step)
    folder.chunk(0).rename(folder.chunk(2))  # what a trainer that dies right here leaves
    assert steps(folder) == [9]


def test_a_chunk_of_another_run_or_rank_holds_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    append(log_in(folder), 1)
    for other in (
        StagingFolder.of(tmp_path, RUN_ID[::-1], 0, 0),
        StagingFolder.of(tmp_path, RUN_ID, 1, 0),
        StagingFolder.of(tmp_path, RUN_ID, 0, 1),
    ):
        shutil.copytree(folder.root, other.root)
        assert open_chunk(other, 0) is None
        assert not list(staged_records(other))


def test_a_copy_that_fails_leaves_no_record_and_no_gap(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder)
    append(log, 1)
    gaps = Section("values/float32", "planes", np.zeros(8, np.uint32)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        log.append(RecordKind.DIFFERENTIAL, 2, b"", [*payload(2), gaps], durable_step=-1)
    assert steps(folder) == [1]
    assert append(log, 2)
    assert steps(folder) == [1, 2]
