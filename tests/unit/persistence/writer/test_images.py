"""Which images wait to be persisted, and what is said of one that was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.image import (
    ImageTensor,
    Manifest,
    manifest_file,
    shard_file,
    stage_image,
)
from lowdiff.persistence.staging.status import ReplicaStatus, StatusPage, TrainerStatus
from lowdiff.persistence.writer.images import StagedImage, newer_images, persist_image
from tests.unit.persistence.writers import settings_in
from tests.unit.recovery.training import part_sums


def test_of_two_of_one_step_the_trainers_counts_and_the_oldest_comes_first(tmp_path: Path) -> None:
    staging = StagingFolder.of(tmp_path, "00112233445566778899aabbccddeeff", 0, 0)
    staging.root.mkdir(parents=True)
    assert newer_images(staging, -1) == []
    trainer = TrainerStatus(1, 20, 20, 0.0, preempted=False, image=ImageMark(20, 5, 2))
    StatusPage(staging.trainer_status, trainer)
    assert [(i.step, i.image) for i in newer_images(staging, 10)] == [(20, staging.snapshot)]
    replica = StatusPage(staging.replica_status, ReplicaStatus())
    replica.update(image=ImageMark(20, 5, 1))
    assert [(i.step, i.image) for i in newer_images(staging, 10)] == [(20, staging.snapshot)]
    replica.update(image=ImageMark(30, 5, 3))
    found = [(i.step, i.image) for i in newer_images(staging, 10)]
    assert found == [(20, staging.snapshot), (30, staging.replica_image)]
    assert [i.step for i in newer_images(staging, 20)] == [30]
    assert newer_images(staging, 30) == []


@pytest.mark.parametrize("at", [None, 0, 3, 30, -1])
def test_a_manifest_has_the_sums_of_the_bytes_that_were_staged(
    tmp_path: Path, at: int | None
) -> None:
    """What was changed meanwhile, be it in its header, is not persisted."""
    settings = settings_in(tmp_path)
    image = settings.staging.snapshot
    names = {"model/a": b"four", "model/b": b"", "model/c": b"more bytes"}
    size, checksum = stage_image(
        image, [ImageTensor(n, "U8", (len(data),), memoryview(data)) for n, data in names.items()]
    )
    mark = StagedImage(3, size, checksum, image)
    folder = settings.folder.snapshot(settings.incarnation, 3)
    if at is not None:
        data = bytearray(image.read_bytes())
        data[at] ^= 1
        image.write_bytes(data)
        with pytest.raises(StorageError, match="changed before it was durable"):
            asyncio.run(persist_image(settings, mark))
        assert not manifest_file(folder, 0).exists()
        return
    asyncio.run(persist_image(settings, mark))
    manifest = Manifest.read(manifest_file(folder, 0))
    assert list(manifest.parts) == part_sums(shard_file(folder, 0).read_bytes())
