"""Making a staged snapshot durable: the shard under its own name, and after it the manifest."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import aiofiles
from crc32c import crc32c

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.assembly import Assembly
from lowdiff.persistence.copying import own_copy
from lowdiff.persistence.cycles import CycleMark
from lowdiff.persistence.durable import fsync_directory, write_json
from lowdiff.persistence.framing import RecordKind, RecordRef
from lowdiff.persistence.images import StagedImage
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.segments import make_run_directory
from lowdiff.persistence.snapshots import Manifest, decode_mark, manifest_file, shard_file
from lowdiff.persistence.writer_settings import WriterSettings

_COPY_BYTES = 4 << 20


class CycleLost(Exception):
    """The slices of a rolling snapshot are not all there; the text says why."""


def staged_mark(record: RecordRef, image: Path) -> StagedImage | CycleMark | None:
    """What a snapshot's mark says; None if it was overwritten.

    Then it is not lost: every chunk that a trainer begins has its newest mark first.

    Args:
        record: The mark.
        image: Where an atomic snapshot lies.
    """
    own = own_copy(record)
    if own is None:
        return None
    if own.header.kind is RecordKind.CYCLE:
        return CycleMark.of(own)
    return StagedImage(own.header.step, *decode_mark(bytes(own.meta)), image)


class SnapshotWriter:
    """Writes one rank's shards."""

    def __init__(self, settings: WriterSettings, assembly: Assembly) -> None:
        self._settings = settings
        self._assembly = assembly

    async def write(self, mark: StagedImage | CycleMark) -> int:
        """Make one shard durable; after a failure the same one can be given again.

        Returns:
            Its bytes.

        Raises:
            CycleLost: If it can never be.
            StorageError: If a staged image changed while it was copied.
        """
        settings = self._settings
        folder = settings.folder.snapshot(settings.incarnation, mark.step)
        await asyncio.to_thread(make_run_directory, settings.folder, folder)
        target = shard_file(folder, settings.rank)
        partial = target.with_name(target.name + ".partial")
        if isinstance(mark, CycleMark):
            size, first_base = mark.image_bytes, mark.first_base
            if target.exists() and not partial.exists():
                partial = target  # an earlier attempt failed after it was durable
            try:
                checksum = await asyncio.to_thread(self._assembly.complete, partial, mark)
            except DamagedFile as error:
                if partial != target:
                    with suppress(OSError):
                        partial.unlink(missing_ok=True)  # nor may a successor take it for whole
                raise CycleLost(error.what) from error
        else:
            size, checksum, first_base = mark.bytes, mark.checksum, None
            try:
                await _copy_image(mark, partial)
            except OSError:
                partial.unlink(missing_ok=True)  # what is left of the disk is for differentials
                raise
        manifest = Manifest(
            run_id=settings.run_id,
            incarnation=settings.incarnation,
            step=mark.step,
            rank=settings.rank,
            world_size=settings.world_size,
            bytes=size,
            checksum=checksum,
            first_base=first_base,
        )
        path = manifest_file(folder, settings.rank)
        # An earlier attempt's manifest stays: other ranks may rely on the snapshot already.
        if await asyncio.to_thread(_is_of_another, path, manifest):
            path.unlink()  # a shard is never under another's manifest
            await asyncio.to_thread(fsync_directory, folder)
        partial.replace(target)
        await asyncio.to_thread(fsync_directory, folder)
        await asyncio.to_thread(write_json, path, manifest.document())
        return size


def _is_of_another(path: Path, manifest: Manifest) -> bool:
    """Whether another manifest is there, as that of a rolling snapshot of the same step."""
    try:
        return Manifest.read(path) != manifest
    except FileNotFoundError:
        return False
    except DamagedFile:
        return True


async def _copy_image(mark: StagedImage, partial: Path) -> None:
    source = read_view(mark.image)[: mark.bytes]
    checksum = 0
    async with aiofiles.open(partial, "wb") as file:
        for start in range(0, mark.bytes, _COPY_BYTES):
            piece = source[start : start + _COPY_BYTES]
            checksum = crc32c(piece, checksum)
            await file.write(piece)
        await file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    if checksum != mark.checksum:
        raise StorageError(f"the staged snapshot of step {mark.step} changed before it was durable")
