"""The writer's side of rolling snapshots: slices become a file beside what will be its place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.copying import own_copy
from lowdiff.persistence.cycles import CycleMark, SliceRef, complete, write_slices
from lowdiff.persistence.durable import fsync_directory
from lowdiff.persistence.framing import RecordRef
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.segments import make_run_directory
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from lowdiff.persistence.writer_settings import WriterSettings

_logger = logging.getLogger(__name__)

#: So many bytes of slices make a batch full: until it is durable, they take staging memory.
PENDING_BYTES = 32 << 20


class Assembly:
    """Puts the slices of one rank together. One thread at a time."""

    def __init__(self, settings: WriterSettings, durable_snapshot: int) -> None:
        """Ignore what belongs to the newest durable snapshot or to an earlier one."""
        self._settings = settings
        self._settled = durable_snapshot
        self._gap = -1

    def partial(self, step: int) -> Path:
        """The file that a cycle's image is put together in."""
        folder = self._settings.folder.snapshot(self._settings.incarnation, step)
        target = shard_file(folder, self._settings.rank)
        return target.with_name(target.name + ".partial")

    def settle(self, step: int) -> None:
        """The cycle that ends with this step, and all before it, need nothing more."""
        self._settled = max(self._settled, step)

    def follows(self, durable_step: int, first: int) -> None:
        """Differentials from ``first`` on are durable; those since ``durable_step`` were dropped."""
        if first > durable_step + 1:
            self._gap = first - 1

    def complete(self, partial: Path, mark: CycleMark) -> int:
        """As `cycles.complete`, for a cycle whose differentials are there as well.

        Raises:
            DamagedFile: If a slice or a differential is not.
        """
        if self._gap > mark.first_base:
            raise DamagedFile(partial, f"step {self._gap} was dropped before it was durable")
        return complete(partial, mark)

    def add(self, records: Sequence[RecordRef]) -> tuple[int, str]:
        """Write slices, but for those that were overwritten: their cycles prove to lack them.

        Returns:
            The last step of a cycle that is lost, and why; -1 if none is.
        """
        lost = -1, ""
        refs = []
        for record in records:
            own = own_copy(record)
            if own is None:
                text = "a slice of step %d was dropped before it was written"
                _logger.warning(text, record.header.step)
            else:
                refs.append((SliceRef.decode(bytes(own.meta)), own))
        for cycle, group in groupby(refs, key=lambda found: found[0].cycle):
            if cycle <= self._settled:
                continue
            try:
                make_run_directory(self._settings.folder, self.partial(cycle).parent)
                write_slices(self.partial(cycle), list(group))
            except (OSError, StorageError) as error:
                self._remove(cycle)  # what is left of the disk is for differentials
                self.settle(cycle)
                lost = cycle, f"{type(error).__name__}: {error}"
        return lost

    def discard(self) -> None:
        """Remove what is left of cycles that were never completed; nothing more will come."""
        settings = self._settings
        for incarnation, step, _ in list(settings.folder.snapshots()):
            if incarnation == settings.incarnation:
                self._remove(step)

    def _remove(self, cycle: int) -> None:
        with contextlib.suppress(OSError):  # an empty folder at worst, which counts for nothing
            self.partial(cycle).unlink(missing_ok=True)
            self.partial(cycle).parent.rmdir()


def durable_snapshot(folder: RunFolder, incarnation: int, rank: int) -> tuple[int, bool]:
    """One rank's newest durable shard of a snapshot of an incarnation.

    Returns:
        Its step, or -1, and whether it is atomic.
    """
    newest = -1, True
    for number, step, path in folder.snapshots():
        manifest = manifest_file(path, rank)
        if number == incarnation and manifest.is_file():
            fsync_directory(path)  # its writer may have been killed before it could
            newest = max(newest, (step, Manifest.read(manifest).first_base is None))
    return newest
