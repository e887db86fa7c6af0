"""The writer's other half: what is durable in the run folder goes to the object store.

Nothing is queued in memory. Each pass compares the run folder with what the store has and uploads
the rest, so a store that was away, a writer that was killed, and batches that came faster than the
store takes them are all the same case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lowdiff.errors import DamagedFile, RunMismatch, StorageError, StoreError
from lowdiff.persistence.files.paths import RunFile, RunFolder
from lowdiff.persistence.format.image import manifest_file, shard_file
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.fetch import Listing
from lowdiff.persistence.store.patience import StoreClient, check_read, unreadable
from lowdiff.persistence.store.retention import spent
from lowdiff.persistence.store.segment_uploads import SegmentUploads
from lowdiff.persistence.writer.settings import WriterSettings

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
        self._store, self._threads = self._client.store, self._client.threads
        self._segments = SegmentUploads(settings, page, self._client)
        self._listing = Listing({})
        self._old: frozenset[Path] = frozenset()
        self._notes: dict[str, bytes] = {}
        self._adopted = asyncio.Event()
        self._snapshots_passed = asyncio.Event()
        self._new_segments, self._new_snapshots = asyncio.Event(), asyncio.Event()

    def wake(self, *, batch: bool = False, snapshot: bool = False) -> None:
        """Something new is durable."""
        if batch:
            self._new_segments.set()
        if snapshot:
            self._new_snapshots.set()

    def adopted(self) -> None:
        """Everything of earlier incarnations is durable."""
        self._adopted.set()
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
            _logger.error("rank %d: %s", self._settings.rank, error)
            self._client.report("history", str(error))
        except StoreError as error:
            _logger.error("rank %d: given up: %s", self._settings.rank, error)
        except Exception as error:
            # A bug must cost the copy in the store only, and be seen.
            _logger.exception("rank %d: uploads ended", self._settings.rank)
            self._client.report("uploads", f"ended by {error!r}; see the writer's log")
        finally:
            self._threads.close()

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
            await asyncio.wait(tasks)  # for requests under way: what comes next is not to meet them
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
                    _logger.warning("rank %d: %s", self._settings.rank, text)
                self._client.report(what, text)
                # Once is no reason to give up: retention and users remove files meanwhile.
                last_attempts -= self._client.is_ending
                if not last_attempts:
                    return False
                await self._client.sleep(_ATTEMPT_SECONDS)
            else:
                self._client.report(what, "")
                return True

    # What has to be there before any batch

    async def _begin(self) -> None:
        """``run.json``, frozen parameters and fences; then what the store has already."""
        folder = self._settings.folder
        if self._settings.serves(0):
            await self._upload_constants()
        fences = [path for _, rank, path in folder.fences() if self._settings.serves(rank)]
        for path in [folder.run_file, *fences]:
            await self._client.create(
                "fences", folder.name(path), await self._threads.run(path.read_bytes)
            )
        self._listing = await self._client.ask("fences", self._my_listing)
        self._segments.there |= self._listing.sizes.keys()
        self._old = await self._spent_here()

    async def _upload_constants(self) -> None:
        """Frozen parameters that fences name, before those fences."""
        folder = self._settings.folder
        there = await self._client.ask("fences", lambda: self._store.sizes("constants"))
        here = await self._threads.run(Listing.of_folder, folder)
        for name in here.constants():
            if there.get(name) != here.sizes[name]:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._client.ask("fences", upload)
                self._client.count(here.sizes[name])

    def _other_life(self) -> str | None:
        """Fence of a later incarnation that this run folder does not know: it is elsewhere."""
        settings, there = self._settings, Listing(self._store.sizes("incarnations"))
        known = {number for number, _, _ in settings.folder.fences()}
        later = [f for f in there.files("fence") if f.incarnation > settings.incarnation]
        return next((f.name for f in later if f.incarnation not in known), None)

    def _my_listing(self) -> Listing:
        """All snapshots, and the segments that this rank uploads."""
        snapshots = self._store.sizes_and_times("snapshots")
        sizes = {name: size for name, (size, _) in snapshots.items()}
        ranks = {
            rank for _, rank, _, _ in self._settings.folder.segments(self._segments.has_segments_of)
        }
        for rank in {self._settings.rank, *ranks}:
            sizes |= self._store.sizes(f"segments/rank-{rank:04d}")
        return Listing(sizes, {name: written for name, (_, written) in snapshots.items()})

    # Differentials

    async def _upload_segments(self) -> None:
        # Looked at first: what is adopted or uploaded meanwhile is for the next pass.
        is_adopted = self._adopted.is_set()
        await self._segments.upload(
            self._old,
            is_adopted=is_adopted,
            base_will_be_there=is_adopted and self._snapshots_passed.is_set(),
        )

    # Snapshots

    async def _upload_snapshots(self) -> None:
        settings, folder = self._settings, self._settings.folder
        uploaded, unread = False, []
        for incarnation, step, path in list(folder.snapshots()):
            if path in self._old:
                continue
            for manifest in sorted(path.glob("rank-*.json")):
                file = RunFile.parse(folder.name(manifest))
                if file is None or not self._settings.serves(file.rank):
                    continue
                try:
                    if file.name not in self._listing.sizes:
                        await self._upload_shard(path, file.rank)
                        uploaded = True
                except FileNotFoundError:
                    continue  # collected
                except OSError as error:
                    unread.append(unreadable(file.name, error))
                    continue
                if incarnation == settings.incarnation and file.rank == settings.rank:
                    newest = max(step, self._page.status.remote_snapshot)
                    self._page.update(remote_snapshot=newest)
                    self._segments.publish(newest if settings.has_replica else -1)
        if uploaded and settings.retention is not None:
            await self._collect()
        self._segments.lacks_snapshots = bool(unread)
        self._segments.publish()
        check_read(unread)
        if not self._snapshots_passed.is_set():
            self._snapshots_passed.set()
            self._new_segments.set()

    async def _upload_shard(self, path: Path, rank: int) -> None:
        """A shard and then its manifest, which makes it exist."""
        folder, shard = self._settings.folder, shard_file(path, rank)
        manifest = manifest_file(path, rank)
        content = await self._threads.run(manifest.read_bytes)
        size = await self._client.upload("snapshots", folder.name(shard), shard)
        await self._client.create("snapshots", folder.name(manifest), content)
        sizes = {folder.name(shard): size, folder.name(manifest): len(content)}
        self._listing = replace(self._listing, sizes={**self._listing.sizes, **sizes})

    # Retention

    async def _upload_notes(self) -> None:
        """What retention wrote down: rank 0's view replaces what the store has."""
        folder = self._settings.folder
        here = (await self._threads.run(Listing.of_folder, folder)).notes()
        for name in here:
            content = await self._threads.run((folder.root / name).read_bytes)
            if self._notes.get(name) != content:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._client.ask("retention", upload)
                self._notes[name] = content
        there = await self._client.ask("retention", lambda: self._store.sizes("pins"))
        unpinned = [name for name in Listing(there).notes() if name not in here]
        await self._client.ask("retention", lambda: self._store.delete(unpinned))

    async def _collect(self) -> None:
        """Remove from the store what retention no longer needs there, of this rank's."""
        name = await self._client.ask("retention", self._other_life)
        if name is not None:  # what it needs is not for this life to judge
            raise self._client.mismatch(name)
        if self._settings.serves(0):
            await self._upload_notes()
        self._listing = await self._client.ask("retention", self._my_listing)
        gone = await self._threads.run(self._spent, self._listing)
        folder = self._settings.folder
        names = [
            file.name
            for kind in ("manifest", "shard", "segment")  # without its manifests it does not exist
            for file in self._listing.files(kind)
            if self._settings.serves(file.rank) and not gone.isdisjoint(_places(folder, file))
        ]
        await self._client.ask("retention", lambda: self._store.delete(names))
        left = {n: size for n, size in self._listing.sizes.items() if n not in set(names)}
        self._listing = replace(self._listing, sizes=left)
        self._segments.there -= set(names)
        self._old = await self._spent_here()

    async def _spent_here(self) -> frozenset[Path]:
        """What of the run folder is not worth uploading any more."""
        here = await self._threads.run(Listing.of_folder, self._settings.folder)
        return await self._threads.run(self._spent, here)

    def _spent(self, listing: Listing) -> frozenset[Path]:
        mine = {f.name for f in listing.files("segment") if self._segments.has_segments_of(f.rank)}
        try:
            return spent(self._settings, self._listing, listing, mine)
        except DamagedFile as error:
            _logger.warning("rank %d: old objects stay: %s", self._settings.rank, error)
            return frozenset()


def _places(folder: RunFolder, file: RunFile) -> set[Path]:
    """The path of a file, and the folder of the snapshot it belongs to."""
    path = folder.root / file.name
    return {path} if file.kind == "segment" else {path.parent}
