"""An atomic snapshot that takes a rolling one's place does so in the store as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.persistence.durable import make_directory, write_json
from lowdiff.persistence.fences import write_fence
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from lowdiff.persistence.writer_settings import WriterSettings
from tests.persistence.made_runs import fence
from tests.persistence.writers import (
    RUN_ID,
    append,
    log_of,
    settings_in,
    stage_snapshot,
    wait_until,
    writing,
)

STEP = 4


@pytest.fixture
def settings(tmp_path: Path) -> WriterSettings:
    """A life whose store has four steps."""
    url = f"file://{tmp_path}/store"
    settings = settings_in(tmp_path, store=url, batch_size=1, is_rolling=True)
    write_fence(settings.folder, fence(0))
    log = log_of(settings)
    with writing(settings) as writer:
        for step in range(1, STEP + 1):
            append(log, step)
        wait_until(writer, lambda status: status.remote_step == STEP)
    return settings


def shard(folder: RunFolder, step: int, first_base: int | None, data: bytes) -> None:
    """A durable shard, in the place of what is there."""
    path = folder.snapshot(0, step)
    make_directory(path)
    shard_file(path, 0).write_bytes(data)
    made = Manifest(RUN_ID, 0, step, 0, 1, len(data), crc32c(data), first_base)
    write_json(manifest_file(path, 0), made.document())


def uploads(settings: WriterSettings, step: int) -> dict[str, bytes]:
    """What the store has of a snapshot when a writer has gone over the run folder."""
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_snapshot >= step)
    store = ObjectStore(settings.store or "")
    prefix = settings.folder.name(settings.folder.snapshot(0, step))
    return {name: store.read(name) for name in store.sizes(prefix)}


def here(settings: WriterSettings, step: int) -> dict[str, bytes]:
    path = settings.folder.snapshot(0, step)
    return {settings.folder.name(file): file.read_bytes() for file in path.iterdir()}


def test_it_is_uploaded_in_its_place(settings: WriterSettings) -> None:
    shard(settings.folder, 0, None, b"the first")
    shard(settings.folder, STEP, 1, b"rolling")
    rolling = uploads(settings, STEP)
    assert rolling == here(settings, STEP)
    shard(settings.folder, STEP, None, b"atomic")
    assert uploads(settings, STEP) == here(settings, STEP) != rolling


def test_a_live_writer_uploads_it_as_well(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, store=f"file://{tmp_path}/store", batch_size=1)
    write_fence(settings.folder, fence(0))
    shard(settings.folder, 0, None, b"the first")
    shard(settings.folder, 3, 1, b"rolling")
    log = log_of(settings)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_snapshot == 3)
        shard(settings.folder, 3, None, b"atomic")
        stage_snapshot(log, 5, 10)
        wait_until(writer, lambda status: status.remote_snapshot == 5)
    store = ObjectStore(settings.store or "")
    assert {n: store.read(n) for n in here(settings, 3)} == here(settings, 3)


def test_a_store_is_never_left_without_its_only_snapshot(settings: WriterSettings) -> None:
    store = ObjectStore(settings.store or "")
    segments = store.sizes("segments")
    shard(settings.folder, STEP, 1, b"rolling")
    rolling = uploads(settings, STEP)
    shard(settings.folder, STEP, None, b"atomic")
    assert uploads(settings, STEP) == rolling
    # What it is replayed with stays, though the one that is here needs nothing.
    assert segments
    assert store.sizes("segments") == segments
    shard(settings.folder, 0, None, b"another")
    uploads(settings, STEP)
    assert uploads(settings, STEP) == here(settings, STEP)


def test_a_rank_uploads_what_it_makes_durable_for_one_that_is_elsewhere_now(
    tmp_path: Path,
) -> None:
    """The other rank's writer has a run folder of its own."""
    dead = settings_in(tmp_path, rank=1, world_size=2)
    log = log_of(dead)
    for step in range(1, 4):
        append(log, step)
    settings = settings_in(
        tmp_path, incarnation=1, world_size=2, base_step=3, store=f"file://{tmp_path}/store"
    )
    append(log_of(settings), 4)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_step == 3)  # so all it builds on is there
        names = ObjectStore(settings.store or "").sizes("segments/rank-0001")
        assert list(names) == ["segments/rank-0001/i000000-s0000000001.seg"]
