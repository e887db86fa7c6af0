"""Which steps a store has, and how the others get there: segments, cut into objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from lowdiff.persistence.adoption import ranks_to_adopt
from lowdiff.persistence.framing import HEADER_BYTES
from lowdiff.persistence.paths import RunFile
from lowdiff.persistence.segments import Batch, Uploaded, read_batch, uploaded_records
from lowdiff.persistence.status import StatusPage
from lowdiff.persistence.stored_run import StoredRun, check_read, unreadable
from lowdiff.persistence.writer_settings import WriterSettings


class SegmentUploads:
    """The segments that one rank uploads. Lives on the writer's event loop.

    Where one cannot be read, those behind it of the same life and rank wait: up to the newest object
    that is found there, a later writer takes the store's for whole.
    """

    def __init__(self, settings: WriterSettings, page: StatusPage, stored: StoredRun) -> None:
        self._settings = settings
        self._page = page
        self._stored = stored
        self._cursors: dict[Path, int] = {}
        self._done: set[Path] = set()
        self._me = settings.incarnation, settings.rank
        self._adopts = ranks_to_adopt(settings)
        self._last = settings.base_step
        # With a replica all that counts is one snapshot of this life.
        self._is_base_there = settings.has_replica
        self._needed_snapshot = settings.base_step if settings.has_replica else -1
        #: Segments of earlier lives that could not be read, and did not get there since.
        self._missing: set[Path] = set()
        #: Whether snapshots could not be read, of whichever life.
        self.lacks_snapshots = False

    def has_segments_of(self, rank: int) -> bool:
        """Whether this rank uploads segments of another, or of its own."""
        return rank in self._adopts or self._settings.serves(rank)

    async def _listed(self) -> list[tuple[int, int, int, Path]]:
        """As `RunFolder.segments`, those that this rank uploads: of another only its dead lives'."""
        settings = self._settings
        found = await self._stored.threads.run(
            lambda: list(settings.folder.segments(self.has_segments_of))
        )
        return [s for s in found if settings.serves(s[1]) or s[0] < settings.incarnation]

    async def resume(
        self, newest: Mapping[tuple[int, int], RunFile], sizes: Mapping[str, int]
    ) -> None:
        """Go on where the store stopped.

        Args:
            newest: The newest object of each life and rank.
            sizes: Length of each object.

        Raises:
            RunMismatch: If this life's is not what is here.
        """
        segments = await self._listed()
        for (incarnation, rank, _, path), after in zip_longest(segments, segments[1:]):
            key = incarnation, rank
            found = newest.get(key)
            if found is None:
                continue
            if after is not None and after[:2] == key and after[2] <= found.step:
                # One that retention removed there may be needed again: this life may have gone
                # back to a step that only the run folder still has.
                if self._settings.folder.name(path) in sizes:
                    self._done.add(path)
                continue
            # It was collected; or it cannot be read, which counts when it is to be uploaded.
            with suppress(OSError):
                await self._resume(found, sizes[found.name], path, is_own=key == self._me)

    async def _resume(self, found: RunFile, size: int, path: Path, *, is_own: bool) -> None:
        """Go on in the segment that holds the newest object's records."""
        uploaded = await self._stored.threads.run(uploaded_records, path, found.step, size)
        if is_own:
            await self._compare(found, path, uploaded)
            self._last = max(self._last, uploaded.last)
        self._cursors[path] = uploaded.end

    async def _compare(self, found: RunFile, path: Path, uploaded: Uploaded) -> None:
        """Fences of two lives that went on from one step may be equal; what followed is not."""
        if uploaded.start is None:
            return
        there = await self._stored.read("segments", found.name)
        size = len(there) - HEADER_BYTES
        here = await self._stored.threads.run(_part, path, uploaded.start, size)
        if here != there[HEADER_BYTES:]:
            raise self._stored.mismatch(found.name)

    async def upload(
        self, old: Collection[Path], *, is_adopted: bool, base_will_be_there: bool
    ) -> None:
        """What they hold and the store lacks.

        Args:
            old: Those that are not worth it.
            is_adopted: Whether all of earlier lives is durable.
            base_will_be_there: Whether, after this, the store has all that this life builds on.

        Raises:
            StorageError: If some could not be read. All that does not build on them is there.
        """
        segments = await self._listed()
        paths = {path for *_, path in segments}
        self._done &= paths  # what retention removed needs no memory here
        self._cursors = {path: end for path, end in self._cursors.items() if path in paths}
        newest = max((first for *key, first, _ in segments if tuple(key) == self._me), default=-1)
        unread: dict[tuple[int, int], str] = {}
        for incarnation, rank, first, path in segments:
            key = incarnation, rank
            is_own = key == self._me
            # Until its log is adopted, an earlier incarnation's segments may have another writer.
            is_due = path not in self._done and path not in old and (is_own or is_adopted)
            if not is_due or key in unread:
                continue
            try:
                await self._upload(key, path)
            except OSError as error:
                unread[key] = unreadable(self._settings.folder.name(path), error)
                if not is_own:
                    self._missing.add(path)
                continue
            self._missing.discard(path)
            if not is_own or first < newest:
                self._done.add(path)
        self._is_base_there |= base_will_be_there and not self._missing
        self.publish()
        check_read(list(unread.values()))

    async def _upload(self, key: tuple[int, int], path: Path) -> None:
        """What a segment holds and the store lacks; batches that piled up share an object.

        Raises:
            OSError: If it cannot be read.
        """
        folder = self._settings.folder
        while True:
            start = self._cursors.get(path, HEADER_BYTES)
            try:
                batch = await self._stored.threads.run(read_batch, path, start)
            except FileNotFoundError:
                return  # collected
            if batch is None:
                return
            name = folder.name(folder.segment(*key, batch.first))
            there = await self._stored.create("segments", name, batch.data)
            self._cursors[path] = start + there - HEADER_BYTES
            self._stored.count(there)
            if key == self._me and there == len(batch.data):
                self._advance(batch)

    def _advance(self, batch: Batch) -> None:
        if batch.first > self._last + 1:  # collected here before the store had it
            self._needed_snapshot = batch.first - 1
        self._needed_snapshot = max((self._needed_snapshot, *batch.rebases))
        self.publish(batch.last)

    def publish(self, last: int = -1) -> None:
        """Own steps, the last one given included, count once all that they build on is there."""
        self._last = max(self._last, last)
        snapshot = self._page.status.remote_snapshot
        # A snapshot of this life needs nothing of those before.
        lacks_some = bool(self._missing) or self.lacks_snapshots
        is_covered = lacks_some and snapshot >= self._settings.base_step
        is_base_there = self._is_base_there or is_covered
        if is_base_there and snapshot >= self._needed_snapshot:
            self._page.update(remote_step=self._last)


def _part(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
