"""The footer of a segment: it finds a step, and nothing that happens to it costs one."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
)
from lowdiff.persistence.format.segment_file import (
    Footer,
    SegmentFile,
    seal_left,
)
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.fences import create_run
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.persistence.writer.segments import Batch, SegmentWriter
from lowdiff.recovery.damage import judge
from tests.unit.persistence.made_runs import RUN_ID, began, listed, segment, stage
from tests.unit.persistence.writers import append, log_of, settings_in, stored, wait_until, writing
from tests.unit.recovery.training import flip

STEPS = range(1, 10)
OWNER = (RUN_ID, 0, 0)
FOOTER_BYTES = 8 * len(STEPS) + 64


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    create_run(found, RUN_ID)
    began(found)
    return found


@pytest.fixture
def path(folder: RunFolder, tmp_path: Path) -> Path:
    """A sealed segment with steps 1 to 9."""
    return segment(folder, stage(tmp_path / "staging", STEPS), STEPS, seals=True)


def steps_by_footer(path: Path) -> dict[int, int]:
    """Step -> where its record was found, each by a reader that has read nothing before."""
    found = {}
    for step in STEPS:
        file = SegmentFile(path)
        record = file.record(step)
        assert record is not None
        assert record.header.step == step
        found[step] = record.offset
    return found


def places(path: Path) -> list[int]:
    """Where the records are, read from the start."""
    file, found = SegmentFile(path), []
    while (record := file.next()) is not None:
        found.append(record.offset)
    return found


def test_a_step_is_found_without_what_is_before_it(path: Path) -> None:
    where = places(path)
    for offset in where[:8]:
        flip(path, offset + HEADER_BYTES)
    file = SegmentFile(path)
    record = file.record(9)
    assert record is not None
    assert (record.header.step, record.offset) == (9, where[8])
    assert file.end == HEADER_BYTES, "nothing was read in order"
    assert SegmentFile(path).record(8) is None
    assert SegmentFile(path).record(10) is None


def test_what_follows_a_step_that_was_found_is_read_on_from_there(path: Path) -> None:
    file = SegmentFile(path)
    found = [file.record(step) for step in (4, 5, 6, 9, 2)]
    assert [record and record.header.step for record in found] == [4, 5, 6, 9, 2]


def test_a_writer_seals_what_it_ends_and_the_whole_file_agrees(
    tmp_path: Path, folder: RunFolder
) -> None:
    settings = settings_in(tmp_path, folder.root)
    log = log_of(settings)
    for step in range(1, 6):
        append(log, step)
    with writing(settings):
        pass
    (found,) = (path for *_, path in folder.segments())
    footer = SegmentFile(found).footer
    assert footer is not None
    assert list(footer.offsets) == places(found)
    assert (len(footer.offsets), len(footer.rebases)) == (5, 0)
    assert found.stat().st_size - footer.end == 5 * 8 + 64
    assert SegmentFile(found).damage() is None
    assert stored(folder) == [1, 2, 3, 4, 5]


# Writers that die


@pytest.fixture
def killed(tmp_path: Path, folder: RunFolder) -> WriterSettings:
    """A life whose writer was killed when steps 1 to 8 were durable, but not sealed; 9 is staged."""
    settings = settings_in(tmp_path, folder.root)
    log = log_of(settings)
    for step in STEPS:
        append(log, step)
    writer = WriterProcess(settings)
    wait_until(writer, lambda status: status.durable_step == 8)
    writer.stop()  # with SIGKILL
    return settings


def assert_all_sealed(folder: RunFolder) -> None:
    assert stored(folder) == list(STEPS)
    segments = [path for *_, path in folder.segments()]
    assert len(segments) == 2
    for path in segments:
        assert SegmentFile(path).footer is not None
        assert SegmentFile(path).damage() is None


def test_kill_9_between_data_and_footer_costs_nothing(killed: WriterSettings) -> None:
    folder = killed.folder
    assert SegmentFile(folder.segment(0, 0, 1)).footer is None
    assert stored(folder) == list(range(1, 9))
    catalog = scan(folder, [Path(killed.staging_root)])
    assert not catalog.damage
    assert catalog.of(0, 0).ranges == [(1, 9)]


def test_a_writer_that_is_started_again_seals_what_the_killed_one_left(
    killed: WriterSettings,
) -> None:
    with writing(killed):
        pass
    assert_all_sealed(killed.folder)


def test_the_next_life_seals_what_a_killed_writer_left(
    tmp_path: Path, killed: WriterSettings
) -> None:
    settings = settings_in(tmp_path, killed.folder.root, incarnation=1, base_step=9)
    log_of(settings).append(RecordKind.BASE, 9, b"base", (), durable_step=-1)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.adopted)
    assert_all_sealed(killed.folder)


# Footers that are cut, damaged, or another's


@pytest.mark.parametrize("left", [1, 7, 8, 9, 63, 64, 80, FOOTER_BYTES - 1])
def test_a_footer_that_is_cut_costs_no_step_and_is_no_failure(
    folder: RunFolder, path: Path, left: int
) -> None:
    whole = path.read_bytes()
    os.truncate(path, len(whole) - FOOTER_BYTES + left)
    catalog = scan(folder)
    assert listed(catalog) == dict.fromkeys(STEPS, False)
    assert list(steps_by_footer(path)) == list(STEPS)
    failures, notes = judge(folder, catalog)
    assert not failures
    assert "no step is lost (its writer died while it sealed the file" in notes[0].message
    assert seal_left(path, OWNER)
    assert path.read_bytes() == whole


@pytest.mark.cases(17)
@pytest.mark.parametrize("place", range(0, FOOTER_BYTES, 3))
def test_a_flipped_byte_in_a_footer_is_said_and_costs_no_step(
    folder: RunFolder, path: Path, place: int
) -> None:
    before = places(path)
    flip(path, path.stat().st_size - FOOTER_BYTES + place)
    catalog = scan(folder)
    assert listed(catalog) == dict.fromkeys(STEPS, False)
    assert list(steps_by_footer(path).values()) == before
    failures, _ = judge(folder, catalog)
    assert [failure.path for failure in failures] == [str(path)]
    data = path.read_bytes()
    assert not seal_left(path, OWNER), "damage is not written over"
    assert path.read_bytes() == data


def two_of_a_name() -> tuple[bytes, bytes, int]:
    """Files of steps 1 and 2 that differ in where step 2 starts, without footers; their length."""
    header = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 1)

    def record(step: int, size: int) -> bytes:
        body = bytes([step]) * size
        kind = RecordKind.DIFFERENTIAL
        header = RecordHeader(kind, True, 0, size, crc32c(body), step, 0, 0, 1, 0)
        return header.pack() + body

    old = header.pack() + record(1, 800) + record(2, 400)
    new = header.pack() + record(1, 400) + record(2, 800)
    assert len(old) == len(new)
    return old, new, len(old)


def test_the_footer_of_an_older_file_of_the_name_costs_no_step(folder: RunFolder) -> None:
    _, new, size = two_of_a_name()
    header = FileHeader.unpack(new, Path("segment"))
    old = Footer([HEADER_BYTES, HEADER_BYTES + 864], [], size).pack(header)
    path = folder.segment(0, 0, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(new + old)
    assert SegmentFile(path).footer is not None, "all but its offsets fits"
    found = SegmentFile(path).record(2)
    assert found is not None
    assert (found.header.step, len(found.body)) == (2, 800)
    damage = SegmentFile(path).damage()
    assert damage is not None
    assert "its footer lists other records than can be read before it" in str(damage)


def test_a_footer_counts_only_where_the_file_has_its_length_and_header(path: Path) -> None:
    whole = path.read_bytes()
    for other in (whole + bytes(8), whole[: -FOOTER_BYTES - 8] + whole[-FOOTER_BYTES:]):
        path.write_bytes(other)
        assert SegmentFile(path).footer is None
    header = replace(FileHeader.unpack(whole, path), world_size=2)
    path.write_bytes(header.pack() + whole[HEADER_BYTES:])
    assert SegmentFile(path).footer is None


def test_records_behind_a_damaged_one_are_not_sealed_over(folder: RunFolder, path: Path) -> None:
    os.truncate(path, path.stat().st_size - FOOTER_BYTES)
    flip(path, places(path)[4] + HEADER_BYTES)
    data = path.read_bytes()
    assert not seal_left(path, OWNER)
    assert path.read_bytes() == data
    assert listed(scan(folder)) == dict.fromkeys(range(1, 5), False)


def test_nobody_seals_anothers_segment(path: Path) -> None:
    os.truncate(path, path.stat().st_size - FOOTER_BYTES)
    for owner in (("ff" * 16, 0, 0), (RUN_ID, 1, 0), (RUN_ID, 0, 1)):
        assert not seal_left(path, owner)
    assert seal_left(path, OWNER)
    assert not seal_left(path, OWNER), "once is enough"


def test_a_footer_that_cannot_be_written_leaves_the_segment_as_it_was(
    tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(folder, FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 0), 256 << 20)
    data = np.arange(104, dtype=np.uint8).tobytes()
    asyncio.run(writer.append(Batch(data, 1, 1, (len(data),))))
    path = folder.segment(0, 0, 1)
    before = path.read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fdatasync", refuse)
        asyncio.run(writer.seal())
    assert path.read_bytes() == before
    asyncio.run(writer.append(Batch(data, 2, 2, (len(data),))))
    assert [first for _, _, first, _ in folder.segments()] == [1, 2]


def test_a_segment_too_short_for_a_footer_has_none(tmp_path: Path) -> None:
    path = tmp_path / "short.seg"
    path.write_bytes(FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 1).pack())
    assert SegmentFile(path).footer is None
    path.write_bytes(b"short")
    with pytest.raises(DamagedFile, match="too few for a header"):
        SegmentFile(path)
