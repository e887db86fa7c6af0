"""An fsync that failed is believed by nobody later: Linux tells an error once, and then forgets it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import HEADER_BYTES, FileHeader, FileKind, read_records
from lowdiff.persistence.format.image import ImageTensor, manifest_file, stage_image
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.retention.staging import clear_staging
from lowdiff.persistence.run.fences import write_fence
from lowdiff.persistence.run.owner import claim
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, WriterStatus, read_status
from lowdiff.persistence.writer.adoption import adopt_predecessors
from lowdiff.persistence.writer.images import StagedImage, persist_image
from lowdiff.persistence.writer.main import Writer
from lowdiff.persistence.writer.segments import SegmentWriter, batches_of, durable_step
from tests.unit.persistence.forgetful import ForgetfulKernel
from tests.unit.persistence.made_runs import LIFE, fence
from tests.unit.persistence.writers import RUN_ID, append, log_of, settings_in, stored

STEPS = 6
#: Up to here the dead writer's fsyncs succeeded, and it said so.
DURABLE = 4


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ForgetfulKernel:
    return ForgetfulKernel(monkeypatch)


@pytest.fixture
def dead(tmp_path: Path, kernel: ForgetfulKernel) -> WriterSettings:
    """A life whose writer was killed when an fsync had failed, before it could write again."""
    settings = settings_in(tmp_path)
    log = log_of(settings)
    for step in range(1, STEPS + 1):
        append(log, step)
    records = [record for _, record in staged_records(settings.staging)]
    header = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, sequence=0)
    segments = SegmentWriter(settings.folder, header, settings.segment_bytes)
    for first, last in ((0, DURABLE), (DURABLE, STEPS)):
        (batch,) = batches_of(records[first:last], Codec())
        if first:
            StatusPage(settings.staging.status, WriterStatus(DURABLE))
            kernel.fail_next(".seg")
            with pytest.raises(OSError, match="Input/output error"):
                asyncio.run(segments.append(batch))
        else:
            asyncio.run(segments.append(batch))
    assert stored(settings.folder) == list(range(1, STEPS + 1)), "it can still be read"
    return settings


def segment(settings: WriterSettings, first: int = 1) -> Path:
    return settings.folder.segment(0, 0, first)


def offset_of(path: Path, step: int) -> int:
    data = memoryview(path.read_bytes())
    records = read_records(data, FileHeader.unpack(data, path))
    return next(record.offset for record in records if record.header.step == step)


def check_rewritten(kernel: ForgetfulKernel, path: Path, step: int) -> None:
    """All is on the disk, and of the records only those from a step on were written again."""
    assert kernel.on_disk(path) == path.read_bytes()
    first = min(start for start, _ in kernel.rewritten if start >= HEADER_BYTES)
    assert first == offset_of(path, step)


def test_a_successor_writes_again_what_its_predecessor_did_not_call_durable(
    dead: WriterSettings, kernel: ForgetfulKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        Writer(dead)
    assert read_status(dead.staging.status, WriterStatus).durable_step == STEPS
    check_rewritten(kernel, segment(dead), DURABLE + 1)


def test_what_is_known_to_be_durable_is_not_written_again(
    dead: WriterSettings, kernel: ForgetfulKernel
) -> None:
    assert durable_step(dead.folder, RUN_ID, 0, 0, 0, known_step=STEPS) == STEPS
    footer = SegmentFile(segment(dead)).footer
    assert footer is not None, "it is sealed"
    assert min(start for start, _ in kernel.rewritten) == footer.end, "and only that is new"
    kernel.fail_next(".seg")
    assert durable_step(dead.folder, RUN_ID, 0, 0, 0, known_step=DURABLE) == DURABLE, (
        "the rest is not"
    )
    assert durable_step(dead.folder, RUN_ID, 0, 0, 0, known_step=-1) == STEPS
    check_rewritten(kernel, segment(dead), 1)


def test_an_adopter_writes_again_what_its_predecessor_did_not_call_durable(
    dead: WriterSettings, kernel: ForgetfulKernel, tmp_path: Path
) -> None:
    after = settings_in(tmp_path, incarnation=1, base_step=STEPS)
    assert adopt_predecessors(after, threading.Event()) == ""
    check_rewritten(kernel, segment(dead), DURABLE + 1)
    assert not dead.staging.root.exists()


def test_memory_is_cleared_once_what_is_doubtful_was_written_again(
    dead: WriterSettings, kernel: ForgetfulKernel
) -> None:
    write_fence(dead.folder, fence(0))
    claim(dead.staging, dead.folder, LIFE)
    kernel.fail_next(".seg")
    (verdict,) = clear_staging(Path(dead.staging_root))
    assert not verdict.goes
    why = f"{dead.run} does not tell ([Errno 5] Input/output error)"
    assert verdict.reason.startswith(f"steps 1 to {STEPS} may be here only: {why}")
    assert dead.staging.root.exists()
    (verdict,) = clear_staging(Path(dead.staging_root))
    assert verdict.goes
    check_rewritten(kernel, segment(dead), DURABLE + 1)


@pytest.mark.parametrize("is_fetched", [False, True], ids=["a new tail", "before what was durable"])
def test_an_adoption_that_failed_is_made_again_with_all_it_wrote(
    tmp_path: Path, kernel: ForgetfulKernel, is_fetched: bool
) -> None:
    """Also where the dead writer's word, that all was durable, held for files that are gone."""
    dead = settings_in(tmp_path)
    log = log_of(dead)
    for step in range(1, STEPS + 1):
        append(log, step)
    StatusPage(dead.staging.status, WriterStatus(STEPS if is_fetched else 0))
    after = settings_in(tmp_path, incarnation=1, base_step=STEPS)
    kernel.fail_next(".seg")
    assert "Input/output error" in adopt_predecessors(after, threading.Event())
    assert dead.staging.root.exists()
    assert kernel.has_failed
    assert adopt_predecessors(after, threading.Event()) == ""
    assert not dead.staging.root.exists()
    assert stored(dead.folder) == list(range(1, STEPS + 1))
    for *_, path in dead.folder.segments():
        assert kernel.on_disk(path) == path.read_bytes()


def written(settings: WriterSettings, image: StagedImage) -> Path:
    asyncio.run(persist_image(settings, image))
    return settings.folder.snapshot(0, image.step)


def test_a_snapshot_that_others_may_have_seen_keeps_its_manifest(
    tmp_path: Path, kernel: ForgetfulKernel
) -> None:
    """So does what an attempt leaves whose very last fsync failed, and that is made again."""
    settings = settings_in(tmp_path)
    image = settings.staging.snapshot
    size, checksum = stage_image(image, [ImageTensor("model/w", "U8", (5,), memoryview(b"bytes"))])
    mark = StagedImage(3, size, checksum, image)
    folder = written(settings, mark)
    kernel.fail_next(".partial")
    with pytest.raises(OSError, match="Input/output error"):
        written(settings, mark)
    assert not list(folder.glob("*.safetensors.partial"))
    manifests: list[bool] = []
    fsync_file = os.fsync

    def watched(descriptor: int) -> None:
        manifests.append(manifest_file(folder, 0).is_file())
        fsync_file(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watched)
        written(settings, mark)
    assert len(manifests) > 3
    assert all(manifests)
