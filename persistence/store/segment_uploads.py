"""Which segments a store has, and how the others get there: each is one object, once nobody adds to it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.records import list_segment
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.patience import StoreClient, check_read, unreadable
from lowdiff.persistence.writer.adoption import ranks_to_adopt
from lowdiff.persistence.writer.settings import WriterSettings


class SegmentUploads:
    """The segments that one rank uploads. Lives on the writer's event loop.

    Attributes:
        there: Names of objects that the store has.
        lacks_snapshots: Whether snapshots could not be read, of whichever life.
    """

    def __init__(
        self, settings: WriterSettings, page: StatusPage[WriterStatus], client: StoreClient
    ) -> None:
        self._settings = settings
        self._page = page
        self._client = client
        self._me = settings.incarnation, settings.rank
        self._adopts = ranks_to_adopt(settings)
        self._last = settings.base_step
        # With a replica all that counts is one snapshot of this life.
        self._is_base_there = settings.has_replica
        self._needed_snapshot = settings.base_step if settings.has_replica else -1
        # Segments of earlier lives that could not be read, and did not get there since.
        self._missing: set[Path] = set()
        self.there: set[str] = set()
        self.lacks_snapshots = False

    def has_segments_of(self, rank: int) -> bool:
        """Whether this rank uploads segments of another, or of its own."""
        return rank in self._adopts or self._settings.serves(rank)

    async def upload(
        self, old: Collection[Path], *, is_adopted: bool, base_will_be_there: bool
    ) -> None:
        """Upload what nobody adds to any more and the store lacks.

        Args:
            old: Those that are not worth it.
            is_adopted: Whether all of earlier lives is durable.
            base_will_be_there: Whether, after this, the store has all that this life builds on.

        Raises:
            StorageError: If some could not be read. All others are there.
        """
        settings, is_last = self._settings, self._client.is_ending
        segments = await self._client.threads.run(
            lambda: list(settings.folder.segments(self.has_segments_of))
        )
        newest = max((first for *key, first, _ in segments if tuple(key) == self._me), default=-1)
        unread, follows = list[str](), True
        for incarnation, rank, first, path in segments:
            is_own = (incarnation, rank) == self._me
            # Until its log is adopted, an earlier life's segments may have another writer; and those
            # of another rank that lives are its own.
            is_mine = settings.serves(rank) or incarnation < settings.incarnation
            if path in old or not is_mine or not (is_own or is_adopted):
                continue
            name = settings.folder.name(path)
            may_grow = is_own and first == newest and not is_last
            try:
                if name not in self.there:
                    if may_grow and not await self._client.threads.run(_is_sealed, path):
                        continue
                    await self._client.upload("segments", name, path)
                    self.there.add(name)
                if is_own and follows and first > self._last:
                    await self._count(path)
            except FileNotFoundError:
                continue  # collected
            except (OSError, DamagedFile) as error:
                unread.append(unreadable(name, error))
                follows = follows and not is_own
                if not is_own:
                    self._missing.add(path)
            else:
                self._missing.discard(path)
        self._is_base_there |= base_will_be_there and not self._missing
        self.publish()
        check_read(unread)

    async def _count(self, path: Path) -> None:
        """Steps of a segment of this life's, which is there with all before it."""
        owner = self._settings.run_id, *self._me
        found, _ = await self._client.threads.run(partial(list_segment, check=False), path, owner)
        for stretch in found:
            if stretch.first > self._last + 1:  # collected here before the store had it
                self._needed_snapshot = stretch.first - 1
            self._needed_snapshot = max((self._needed_snapshot, *stretch.rebases))
            self.publish(stretch.last)

    def publish(self, last: int = -1) -> None:
        """Own steps, the last one given included, count once all that they build on is there."""
        self._last = max(self._last, last)
        snapshot = self._page.status.remote_snapshot
        # A snapshot of this life needs nothing of those before.
        lacks_some = bool(self._missing) or self.lacks_snapshots
        is_covered = lacks_some and snapshot >= self._settings.base_step
        is_base_there = self._is_base_there or is_covered
        if is_base_there and snapshot >= self._needed_snapshot:
            # A restarted writer has yet to count what its predecessor uploaded.
            self._page.update(remote_step=max(self._last, self._page.status.remote_step))


def _is_sealed(path: Path) -> bool:
    return SegmentFile(path).footer is not None
