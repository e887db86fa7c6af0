"""A run folder was removed, and another run was made in its place: its files have the same names."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lowdiff.errors import RunMismatch, WriterFailed
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import FileHeader, FileKind
from lowdiff.persistence.retention.collect import collect
from lowdiff.persistence.run.fences import create_run
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.uploader import Uploader
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.persistence.writer.segments import SegmentWriter
from lowdiff.types import Retention
from tests.processes import is_alive
from tests.unit.persistence.writer.test_segments import HEADER, batch
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    RUN_ID,
    append,
    log_of,
    settings_in,
    stage_snapshot,
    wait_until,
)

OTHER_ID = RUN_ID[::-1]


def put_another_run(folder: RunFolder) -> dict[str, bytes]:
    """Replace the run by one with files of the same names and lengths; return its files."""
    names = [path for path in folder.root.rglob("*") if path.is_file() and path != folder.run_file]
    sizes = {path: path.stat().st_size for path in names}
    shutil.rmtree(folder.root)
    create_run(folder, OTHER_ID)
    for path, size in sizes.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\7" * size)
    return content(folder)


def content(folder: RunFolder) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.root.rglob("*") if p.is_file()}


def test_no_segment_of_another_run_is_written_or_sealed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    create_run(folder, RUN_ID)
    segments = SegmentWriter(folder, HEADER, 256 << 20)
    asyncio.run(segments.append(batch(1, 2)))
    other = put_another_run(folder)
    with pytest.raises(RunMismatch, match=rf"holds another run now.*{OTHER_ID}.*{RUN_ID}"):
        asyncio.run(segments.append(batch(3, 3)))
    asyncio.run(segments.seal())
    new = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 0)
    with pytest.raises(RunMismatch):
        asyncio.run(SegmentWriter(folder, new, 256 << 20).append(batch(1, 2)))
    assert content(folder) == other


def test_a_writer_without_trainer_ends_at_once_and_leaves_another_run_alone(
    tmp_path: Path,
) -> None:
    settings = settings_in(tmp_path, batch_size=1)
    log = log_of(settings)
    writer = WriterProcess(settings)
    append(log, 1)
    stage_snapshot(log, 1, 100)
    wait_until(writer, lambda s: s.durable_step == 1 and s.durable_snapshot == 1)
    other = put_another_run(settings.folder)
    append(log, 2)
    append(log, 3)
    stage_snapshot(log, 3, 100)
    assert "holds another run now" in wait_until(writer, lambda s: s.error).error
    with pytest.raises(WriterFailed, match="died 3 times while it finished"):
        writer.finish(PATIENCE_SECONDS)
    assert not is_alive(writer.pid)
    assert "its trainer is gone" in settings.staging.writer_log.read_text()
    assert content(settings.folder) == other
    assert [r.header.step for _, r in staged_records(settings.staging)] == [1, 2, 3]


def test_retention_removes_nothing_of_another_run(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    put_another_run(settings.folder)
    with pytest.raises(RunMismatch):
        collect(settings.folder, RUN_ID, Retention(1))


def test_nothing_of_another_run_goes_to_the_store(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, store=f"file://{tmp_path}/store", batch_size=1)
    put_another_run(settings.folder)
    page = StatusPage(settings.staging.status, WriterStatus())
    uploader = Uploader(settings, page, Recorder(settings.staging.measured_by_writer))
    uploader.end()
    asyncio.run(uploader.run())
    assert ObjectStore(f"file://{tmp_path}/store", make=True).sizes() == {}
    assert "holds another run now" in page.status.remote_error
