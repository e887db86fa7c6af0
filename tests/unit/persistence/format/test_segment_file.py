"""A stranger's segment costs no more memory than it has reason to."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format import segment_file
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
)
from lowdiff.persistence.format.segment_file import SegmentFile
from tests.unit.persistence.made_runs import RUN_ID

BODY_BYTES = 64 << 20


def sparse(path: Path, body_bytes: int, checksum: int) -> SegmentFile:
    """A segment of one record whose body is a hole."""
    header = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 1)
    record = RecordHeader(RecordKind.DIFFERENTIAL, True, 8, body_bytes, checksum, 1, 0, 0, 1, 0)
    path.write_bytes(header.pack() + record.pack())
    os.truncate(path, 2 * HEADER_BYTES + body_bytes)
    return SegmentFile(path)


def test_a_long_body_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    file = sparse(tmp_path / "a.seg", BODY_BYTES, 123)
    tracemalloc.start()
    try:
        assert file.next() is None
        assert tracemalloc.get_traced_memory()[1] < BODY_BYTES / 8
    finally:
        tracemalloc.stop()


def test_a_long_body_that_passes_is_handed_out(tmp_path: Path) -> None:
    found = sparse(tmp_path / "a.seg", BODY_BYTES, crc32c(bytes(BODY_BYTES))).next()
    assert found is not None
    assert len(found.body) == BODY_BYTES


def test_a_body_longer_than_any_is_no_record(tmp_path: Path, limits: Callable[..., None]) -> None:
    limits(record_body_bytes=1000)
    assert sparse(tmp_path / "a.seg", 1000, crc32c(bytes(1000))).next() is not None
    assert sparse(tmp_path / "b.seg", 1001, crc32c(bytes(1001))).next() is None


def test_a_body_for_which_there_is_no_memory_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sparse(tmp_path / "a.seg", 1 << 20, 123)

    def refuse(data: object) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(segment_file, "memoryview", refuse, raising=False)
    with pytest.raises(DamagedFile, match="does not fit in memory"):
        file.next()
