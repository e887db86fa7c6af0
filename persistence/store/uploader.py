"""The writer's other half: what is durable in the run folder goes to the object store.

Nothing is queued in memory. Each pass compares the run folder with what the store has and uploads
the rest, so a store that was away, a writer that was killed, and batches that came faster than the
store takes them are all the same case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lowdiff.core.events import Code, warn
from lowdiff.errors import DamagedFile, RunMismatch, StorageError, StoreError
from lowdiff.persistence.files.paths import RunFile
from lowdiff.persistence.format.image import manifest_file, shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.fences import require_run
from lowdiff.persistence.run.records import list_segment
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.client import StoreClient
from lowdiff.persistence.store.fetch import Listing
from lowdiff.persistence.store.retention import spent

_logger = logging.getLogger(__name__)

#: How often a run folder that gives trouble is tried once the trainer is gone, and how far apart.
_LAST_ATTEMPTS, _ATTEMPT_SECONDS = 3, 2.0


class Uploader:
    """Keeps one rank's share of a run in its store. Lives on the writer's event loop.

    A rank uploads its own files, those of ranks that are no longer there, and the segments of those
    whose logs it makes durable: on a machine of its own, perhaps nobody else sees them.
    """

    def __init__(
        self, settings: WriterSettings, page: StatusPage[WriterStatus], recorder: Recorder
    ) -> None:
        self._settings = settings
        self._page = page
        self._client = StoreClient(settings, page, recorder)
        self._store = self._client.store
        self._adopts = settings.ranks_to_adopt
        #: What the store had when it was listed last, and names of the segments that it has by now.
        self._listing = Listing({})
        self._segments: set[str] = set()
        #: What the policy does not keep in the store.
        self._spent: frozenset[Path] = frozenset()
        self._notes: dict[str, bytes] = {}
        self._last = settings.base_step
        # With a replica all that counts is one snapshot of this life.
        self._needed_snapshot = settings.base_step if settings.has_replica else -1
        self._is_base_there = False
        #: Segments of earlier lives that could not be read, and did not get there since.
        self._missing: set[Path] = set()
        self._is_adopted = self._has_snapshots = False
        self._new_segments, self._new_snapshots = asyncio.Event(), asyncio.Event()

    def wake(self, *, batch: bool = False, snapshot: bool = False) -> None:
        """Something new is durable."""
        if batch:
            self._new_segments.set()
        if snapshot:
            self._new_snapshots.set()

    def adopted(self) -> None:
        """Everything of earlier incarnations is durable."""
        self._is_adopted = True
        self.wake(batch=True, snapshot=True)

    def end(self) -> None:
        """Nothing more comes: stop when all is uploaded, or when the store stays away."""
        self._client.end()
        self.wake(batch=True, snapshot=True)

    async def run(self) -> None:
        """Upload until told to end; never raises, because what is local matters more."""
        try:
            await self._upload()
        except RunMismatch as error:
            warn(
                _logger,
                Code.STORE_OF_OTHER_HISTORY,
                "rank %d: %s",
                self._settings.rank,
                error,
                level=logging.ERROR,
            )
            self._client.complaints.report("history", str(error))
        except StoreError as error:
            warn(
                _logger,
                Code.UPLOADS_GIVEN_UP,
                "rank %d: given up: %s",
                self._settings.rank,
                error,
                level=logging.ERROR,
            )
        except Exception as error:  # noqa: BLE001 -- a bug must cost the copy in the store only, and be seen
            warn(
                _logger,
                Code.UPLOADS_ENDED,
                "rank %d: uploads ended",
                self._settings.rank,
                level=logging.ERROR,
                exc_info=True,
            )
            self._client.complaints.report("uploads", f"ended by {error!r}; see the writer's log")

    async def _upload(self) -> None:
        if not await self._try("run folder", self._begin):
            return
        tasks = [
            asyncio.create_task(
                self._follow("segments folder", self._new_segments, self._upload_segments)
            ),
            asyncio.create_task(
                self._follow("snapshots folder", self._new_snapshots, self._upload_snapshots)
            ),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        # Its steps count once the first pass of snapshots is over, which may have been the last.
        await self._try("segments folder", self._upload_segments)

    async def _follow(
        self, what: str, new: asyncio.Event, one_pass: Callable[[], Awaitable[None]]
    ) -> None:
        while True:
            is_last = self._client.is_ending
            new.clear()
            # Trouble with files of one kind holds up nothing of the other.
            if not await self._try(what, one_pass) or is_last:
                return
            await new.wait()

    async def _try(self, what: str, action: Callable[[], Awaitable[None]]) -> bool:
        """Wait out trouble with the run folder, not for long once the trainer is gone; then False."""
        last_attempts, said = _LAST_ATTEMPTS, ""
        while True:
            try:
                # What another run has in this one's place is none of its store's business.
                await asyncio.to_thread(require_run, self._settings.folder, self._settings.run_id)
                await action()
            except StoreError:
                raise
            except (OSError, StorageError) as error:
                text = (
                    str(error)
                    if isinstance(error, StorageError)
                    else f"{type(error).__name__}: {error}"
                )
                if text != said:
                    said = text
                    warn(_logger, Code.UPLOAD_FAILED, "rank %d: %s", self._settings.rank, text)
                self._client.complaints.report(what, text)
                # Once is no reason to give up: retention and users remove files meanwhile.
                last_attempts -= self._client.is_ending
                if not last_attempts:
                    return False
                await self._client.sleep(_ATTEMPT_SECONDS)
            else:
                self._client.complaints.report(what, "")
                return True

    # What has to be there before any batch

    async def _begin(self) -> None:
        """``run.json``, frozen parameters and fences; then what the store has already."""
        folder = self._settings.folder
        if self._settings.serves(0):
            await self._upload_constants()
        fences = [path for _, rank, path in folder.fences() if self._settings.serves(rank)]
        for path in [folder.run_file, *fences]:
            content = await asyncio.to_thread(path.read_bytes)
            await self._client.create("fences", folder.name(path), content)
        await self._take_stock()

    async def _upload_constants(self) -> None:
        """Frozen parameters that fences name, before those fences."""
        folder = self._settings.folder
        there = await self._client.ask("fences", lambda: self._store.sizes("constants"))
        here = await asyncio.to_thread(Listing.of_folder, folder)
        for name in here.constants():
            if there.get(name) != here.sizes[name]:
                await self._client.upload("snapshots", name, folder.root / name)

    # Differentials

    def _has_segments_of(self, rank: int) -> bool:
        """Whether this rank uploads segments of another, or of its own."""
        return rank in self._adopts or self._settings.serves(rank)

    async def _upload_segments(self) -> None:
        """Upload the segments that nobody adds to any more and the store lacks.

        Raises:
            StorageError: If some could not be read. All others are there.
        """
        settings, is_last = self._settings, self._client.is_ending
        # Looked at first: what is adopted or uploaded meanwhile is for the next pass.
        is_adopted = self._is_adopted
        base_will_be_there = is_adopted and self._has_snapshots
        me = settings.incarnation, settings.rank
        segments = await asyncio.to_thread(
            lambda: list(settings.folder.segments(self._has_segments_of))
        )
        newest = max((first for *key, first, _ in segments if tuple(key) == me), default=-1)
        unread, follows = list[str](), True
        for incarnation, rank, first, path in segments:
            is_own = (incarnation, rank) == me
            # Until its log is adopted, an earlier life's segments may have another writer; and those
            # of another rank that lives are its own.
            is_mine = settings.serves(rank) or incarnation < settings.incarnation
            if path in self._spent or not is_mine or not (is_own or is_adopted):
                continue
            name = settings.folder.name(path)
            may_grow = is_own and first == newest and not is_last
            try:
                if name not in self._segments:
                    if may_grow and not await asyncio.to_thread(_is_sealed, path):
                        continue
                    await self._client.upload("segments", name, path)
                    self._segments.add(name)
                if is_own and follows and first > self._last:
                    await self._count(path)
            except FileNotFoundError:
                continue  # collected
            except (OSError, DamagedFile) as error:
                unread.append(_unreadable(name, error))
                if is_own:
                    follows = False
                else:
                    self._missing.add(path)
            else:
                self._missing.discard(path)
        self._is_base_there |= base_will_be_there and not self._missing
        # A snapshot of this life needs nothing of those before.
        self._is_base_there |= self._page.status.remote_snapshot >= settings.base_step
        self._publish()
        _check_read(unread)

    async def _count(self, path: Path) -> None:
        """Steps of a segment of this life's, which is there with all before it."""
        settings = self._settings
        owner = settings.run_id, settings.incarnation, settings.rank
        found, _ = await asyncio.to_thread(list_segment, path, owner, check=False)
        for stretch in found:
            if stretch.first > self._last + 1:  # collected here before the store had it
                self._needed_snapshot = stretch.first - 1
            self._needed_snapshot = max((self._needed_snapshot, *stretch.rebases))
            self._publish(stretch.last)

    def _publish(self, last: int = -1) -> None:
        """Own steps, the last one given included, count once all that they build on is there."""
        self._last = max(self._last, last)
        status = self._page.status
        if self._is_base_there and status.remote_snapshot >= self._needed_snapshot:
            # A restarted writer has yet to count what its predecessor uploaded.
            self._page.update(remote_step=max(self._last, status.remote_step))

    # Snapshots

    async def _upload_snapshots(self) -> None:
        settings, folder = self._settings, self._settings.folder
        uploaded, unread = False, []
        for incarnation, step, path in list(folder.snapshots()):
            if path in self._spent:
                continue
            for manifest in folder.manifests(path):
                file = RunFile.parse(folder.name(manifest))
                if file is None or not settings.serves(file.rank):
                    continue
                try:
                    if file.name not in self._listing.sizes:
                        await self._upload_shard(path, file.rank)
                        uploaded = True
                except FileNotFoundError:
                    continue  # collected
                except OSError as error:
                    unread.append(_unreadable(file.name, error))
                    continue
                if incarnation == settings.incarnation and file.rank == settings.rank:
                    newest = max(step, self._page.status.remote_snapshot)
                    self._page.update(remote_snapshot=newest)
                    self._publish(newest if settings.has_replica else -1)
        if uploaded and settings.retention is not None:
            await self._collect()
        self._has_snapshots |= not unread
        self._new_segments.set()  # more of its steps may count now
        _check_read(unread)

    async def _upload_shard(self, path: Path, rank: int) -> None:
        """A shard and then its manifest, which makes it exist."""
        folder, shard = self._settings.folder, shard_file(path, rank)
        manifest = manifest_file(path, rank)
        content = await asyncio.to_thread(manifest.read_bytes)
        size = await self._client.upload("snapshots", folder.name(shard), shard)
        await self._client.create("snapshots", folder.name(manifest), content)
        sizes = {folder.name(shard): size, folder.name(manifest): len(content)}
        self._listing = replace(self._listing, sizes={**self._listing.sizes, **sizes})

    # Retention

    async def _take_stock(self) -> None:
        """List what the store has of this rank's, and what of it and of the run folder is spent."""
        self._listing = await self._client.ask("retention", self._list_store)
        self._segments |= self._listing.sizes.keys()
        self._spent = await asyncio.to_thread(self._find_spent)

    def _list_store(self) -> Listing:
        """All snapshots, and the segments that this rank uploads."""
        snapshots = self._store.sizes_and_times("snapshots")
        sizes = {name: size for name, (size, _) in snapshots.items()}
        ranks = {rank for _, rank, _, _ in self._settings.folder.segments(self._has_segments_of)}
        for rank in {self._settings.rank, *ranks}:
            sizes |= self._store.sizes(f"segments/rank-{rank:04d}")
        return Listing(sizes, {name: written for name, (_, written) in snapshots.items()})

    def _find_spent(self) -> frozenset[Path]:
        try:
            here = Listing.of_folder(self._settings.folder)
            return spent(self._settings, self._listing, here)
        except DamagedFile as error:
            warn(
                _logger,
                Code.STORE_RETENTION_FAILED,
                "rank %d: old objects stay: %s",
                self._settings.rank,
                error,
            )
            return frozenset()

    async def _collect(self) -> None:
        """Remove from the store what retention no longer needs there, of this rank's."""
        settings, folder = self._settings, self._settings.folder
        name = await self._client.ask("retention", self._other_life)
        if name is not None:  # what it needs is not for this life to judge
            raise self._client.mismatch(name)
        if settings.serves(0):
            await self._upload_notes()
        await self._take_stock()
        names = [
            file.name
            for kind in ("manifest", "shard", "segment")  # without its manifests it does not exist
            for file in self._listing.files(kind)
            if settings.serves(file.rank)
            and not self._spent.isdisjoint([path := folder.root / file.name, path.parent])
        ]
        await self._client.ask("retention", lambda: self._store.delete(names))
        left = {n: size for n, size in self._listing.sizes.items() if n not in set(names)}
        self._listing = replace(self._listing, sizes=left)
        self._segments -= set(names)

    def _other_life(self) -> str | None:
        """Fence of a later incarnation that this run folder does not know: it is elsewhere."""
        settings, there = self._settings, Listing(self._store.sizes("incarnations"))
        known = settings.folder.incarnations()
        later = [f for f in there.files("fence") if f.incarnation > settings.incarnation]
        return next((f.name for f in later if f.incarnation not in known), None)

    async def _upload_notes(self) -> None:
        """What retention wrote down: rank 0's view replaces what the store has."""
        folder = self._settings.folder
        here = (await asyncio.to_thread(Listing.of_folder, folder)).notes()
        for name in here:
            content = await asyncio.to_thread((folder.root / name).read_bytes)
            if self._notes.get(name) != content:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._client.ask("retention", upload)
                self._notes[name] = content
        there = await self._client.ask("retention", lambda: self._store.sizes("pins"))
        unpinned = [name for name in Listing(there).notes() if name not in here]
        await self._client.ask("retention", lambda: self._store.delete(unpinned))


def _is_sealed(path: Path) -> bool:
    return SegmentFile(path).footer is not None


def _check_read(unread: Sequence[str]) -> None:
    """Raise a `StorageError` after a pass in which files could not be read: they are tried again."""
    if unread:
        raise StorageError(f"{'; '.join(unread)}; what does not build on that is uploaded")


def _unreadable(name: str, error: OSError | DamagedFile) -> str:
    why = error.what if isinstance(error, DamagedFile) else error.strerror or repr(error)
    return f"{name} cannot be read ({why})"
