"""Upload durable files from the run folder to the object store, inside the writer process.

Nothing is queued in memory. Each pass compares the run folder with the store and uploads the rest.
A store that was away, a writer that was killed, and batches that come faster than the store takes
them are therefore all the same case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, RunMismatch, StorageError, StoreError
from lowdiff.persistence.files.paths import RunFile
from lowdiff.persistence.format.document import good_bytes
from lowdiff.persistence.format.image import manifest_file, shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.retention.plan import (
    Inventory,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.run.catalog import begun_fences
from lowdiff.persistence.run.fences import lineage, read_fence, require_run
from lowdiff.persistence.run.journal import read_pins
from lowdiff.persistence.run.records import list_segment
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.client import StoreClient
from lowdiff.persistence.store.fetch import Listing
from lowdiff.types import Fence

#: How often a failing run folder is tried once the trainer is gone, and the delay in between.
_LAST_TRIES, _RETRY_SECONDS = 3, 2.0


class Uploader:
    """Uploads one rank's share of a run; used on the writer's event loop only.

    A rank uploads its own files, files of ranks that no longer exist, and segments of logs that it
    adopts: if it has a machine of its own, no other rank may see them.

    Large because its few tasks share what is known of the store, on one event loop.
    """

    def __init__(
        self, settings: WriterSettings, page: StatusPage[WriterStatus], recorder: Recorder
    ) -> None:
        self._settings = settings
        self._page = page
        self._client = StoreClient(settings, page, recorder)
        self._store = self._client.store
        self._adopts = settings.ranks_to_adopt
        #: Listing of the store at the last look, plus names of segments uploaded since.
        self._listing = Listing({})
        self._segments: set[str] = set()
        #: Files that the policy does not keep in the store.
        self._spent: frozenset[Path] = frozenset()
        self._notes: dict[str, bytes] = {}
        self._last = settings.base_step
        # With a replica, only a snapshot of this incarnation is needed.
        self._needed_snapshot = -1 if settings.logs_steps else settings.base_step
        self._is_base_there = False
        #: Segments of earlier incarnations that could not be read, and were not uploaded since.
        self._missing: set[Path] = set()
        self._is_adopted = self._has_snapshots = False
        self._new_segments, self._new_snapshots = asyncio.Event(), asyncio.Event()

    def wake(self, *, batch: bool = False, snapshot: bool = False) -> None:
        """Declare that something new is durable."""
        if batch:
            self._new_segments.set()
        if snapshot:
            self._new_snapshots.set()

    def adopted(self) -> None:
        """Declare that everything of earlier incarnations is durable."""
        self._is_adopted = True
        self.wake(batch=True, snapshot=True)

    def end(self) -> None:
        """Declare that nothing more comes: stop when all is uploaded, or the store is away too long."""
        self._client.end()
        self.wake(batch=True, snapshot=True)

    async def run(self) -> None:
        """Upload until told to end; never raises, because local durability matters more."""
        try:
            await self._upload()
        except RunMismatch as error:
            Code.STORE_OF_OTHER_HISTORY.warn(error, rank=self._settings.rank, level=logging.ERROR)
            self._client.complaints.report("history", str(error))
        except StoreError as error:
            Code.UPLOADS_GIVEN_UP.warn(
                f"given up: {error}", rank=self._settings.rank, level=logging.ERROR
            )
        except Exception as error:  # noqa: BLE001 -- a bug must cost the copy in the store only, and be seen
            Code.UPLOADS_ENDED.warn(
                "uploads ended", rank=self._settings.rank, level=logging.ERROR, exc_info=True
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
        # A rank's steps count once the first pass of snapshots is over, perhaps the last pass of
        # all.
        await self._try("segments folder", self._upload_segments)

    async def _follow(
        self, what: str, new: asyncio.Event, one_pass: Callable[[], Awaitable[None]]
    ) -> None:
        while True:
            is_last = self._client.is_ending
            new.clear()
            # A failure with files of one kind must not delay files of the other.
            if not await self._try(what, one_pass) or is_last:
                return
            await new.wait()

    async def _try(self, what: str, action: Callable[[], Awaitable[None]]) -> bool:
        """Repeat an action while the run folder fails; False after the trainer's end and a few tries."""
        tries_left, said = _LAST_TRIES, ""
        while True:
            try:
                # If another run is in this run's place, its files must not reach the store.
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
                    Code.UPLOAD_FAILED.warn(text, rank=self._settings.rank)
                self._client.complaints.report(what, text)
                # One failure is no reason to give up, because retention and users remove files
                # meanwhile.
                tries_left -= self._client.is_ending
                if not tries_left:
                    return False
                await self._client.sleep(_RETRY_SECONDS)
            else:
                self._client.complaints.report(what, "")
                return True

    # Files that must be there before any batch

    async def _begin(self) -> None:
        """Upload ``run.json``, frozen parameters and fences; then list the store."""
        folder = self._settings.folder
        if self._settings.serves(0):
            await self._upload_constants()
        fences = [path for _, rank, path in folder.fences() if self._settings.serves(rank)]
        for path in [folder.run_file, *fences]:
            content = await asyncio.to_thread(good_bytes, path)
            await self._client.create("fences", folder.name(path), content)
        await self._take_stock()

    async def _upload_constants(self) -> None:
        """Upload frozen parameters that fences name, before these fences."""
        folder = self._settings.folder
        there = await self._client.ask("fences", lambda: self._store.sizes("constants"))
        here = await asyncio.to_thread(Listing.of_folder, folder)
        for name in here.constants():
            if there.get(name) != here.sizes[name]:
                await self._client.upload("snapshots", name, folder.root / name)

    # Differentials

    def _has_segments_of(self, rank: int) -> bool:
        """Return whether this rank uploads the segments of a rank, which may be its own."""
        return rank in self._adopts or self._settings.serves(rank)

    async def _upload_segments(self) -> None:
        """Upload the segments that are complete and that the store lacks.

        Raises:
            StorageError: If some could not be read; all others are uploaded.
        """
        settings, is_last = self._settings, self._client.is_ending
        # Read this first: what is adopted or uploaded meanwhile is for the next pass.
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
            # Until a log is adopted, an earlier incarnation's segments may have another writer.
            # Segments of another living rank are that rank's own.
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
                continue  # removed by retention
            except (OSError, DamagedFile) as error:
                unread.append(_unreadable(name, error))
                if is_own:
                    follows = False
                else:
                    self._missing.add(path)
            else:
                self._missing.discard(path)
        self._is_base_there |= base_will_be_there and not self._missing
        # A snapshot of this incarnation needs nothing of earlier incarnations.
        self._is_base_there |= self._page.status.remote_snapshot >= settings.base_step
        self._publish()
        _check_read(unread)

    async def _count(self, path: Path) -> None:
        """Count an uploaded segment of this incarnation; all earlier segments are uploaded."""
        settings = self._settings
        owner = settings.run_id, settings.incarnation, settings.rank
        found, _ = await asyncio.to_thread(list_segment, path, owner, check=False)
        for stretch in found:
            if stretch.first > self._last + 1:  # retention removed steps before the store had them
                self._needed_snapshot = stretch.first - 1
            self._needed_snapshot = max((self._needed_snapshot, *stretch.rebases))
            self._publish(stretch.last)

    def _publish(self, last: int = -1) -> None:
        """Publish the last uploaded step, once everything that the steps build on is uploaded."""
        self._last = max(self._last, last)
        status = self._page.status
        if self._is_base_there and status.remote_snapshot >= self._needed_snapshot:
            # A restarted writer has yet to count its predecessor's uploads.
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
                        await self._upload_image(path, file.rank)
                        uploaded = True
                except FileNotFoundError:
                    continue  # removed by retention
                except OSError as error:
                    unread.append(_unreadable(file.name, error))
                    continue
                if incarnation == settings.incarnation and file.rank == settings.rank:
                    newest = max(step, self._page.status.remote_snapshot)
                    self._page.update(remote_snapshot=newest)
                    self._publish(-1 if settings.logs_steps else newest)
        if uploaded and settings.retention is not None:
            await self._collect()
        self._has_snapshots |= not unread
        self._new_segments.set()  # more of this rank's steps may count now
        _check_read(unread)

    async def _upload_image(self, path: Path, rank: int) -> None:
        """Upload an image and then its manifest, which makes the image count."""
        folder, image = self._settings.folder, shard_file(path, rank)
        manifest = manifest_file(path, rank)
        content = await asyncio.to_thread(manifest.read_bytes)
        size = await self._client.upload("snapshots", folder.name(image), image)
        await self._client.create("snapshots", folder.name(manifest), content)
        sizes = {folder.name(image): size, folder.name(manifest): len(content)}
        self._listing = replace(self._listing, sizes={**self._listing.sizes, **sizes})

    # Retention

    async def _take_stock(self) -> None:
        """List this rank's files in the store, and the files that the policy does not keep."""
        self._listing = await self._client.ask("retention", self._list_store)
        self._segments |= self._listing.sizes.keys()
        self._spent = await asyncio.to_thread(self._find_spent)

    def _list_store(self) -> Listing:
        """List all snapshots, and the segments that this rank uploads."""
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
            Code.STORE_RETENTION_FAILED.warn(f"old objects stay: {error}", rank=self._settings.rank)
            return frozenset()

    async def _collect(self) -> None:
        """Remove this rank's files from the store that retention does not keep there."""
        settings, folder = self._settings, self._settings.folder
        name = await self._client.ask("retention", self._other_incarnation)
        if name is not None:  # this incarnation cannot judge what the other one needs
            raise self._client.mismatch(name)
        if settings.serves(0):
            await self._upload_journal()
        await self._take_stock()
        names = [
            file.name
            for kind in ("manifest", "image", "segment")  # manifests first
            for file in self._listing.files(kind)
            if settings.serves(file.rank)
            and not self._spent.isdisjoint([path := folder.root / file.name, path.parent])
        ]
        await self._client.ask("retention", lambda: self._store.delete(names))
        left = {n: size for n, size in self._listing.sizes.items() if n not in set(names)}
        self._listing = replace(self._listing, sizes=left)
        self._segments -= set(names)

    def _other_incarnation(self) -> str | None:
        """Return a later incarnation's fence that the run folder lacks, as the run went on elsewhere."""
        settings, there = self._settings, Listing(self._store.sizes("incarnations"))
        known = settings.folder.incarnations()
        later = [f for f in there.files("fence") if f.incarnation > settings.incarnation]
        return next((f.name for f in later if f.incarnation not in known), None)

    async def _upload_journal(self) -> None:
        """Upload retention's files: rank 0's view replaces the store's."""
        folder = self._settings.folder
        here = (await asyncio.to_thread(Listing.of_folder, folder)).journal_files()
        for name in here:
            content = await asyncio.to_thread((folder.root / name).read_bytes)
            if self._notes.get(name) != content:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._client.ask("retention", upload)
                self._notes[name] = content
        there = await self._client.ask("retention", lambda: self._store.sizes("pins"))
        unpinned = [name for name in Listing(there).journal_files() if name not in here]
        await self._client.ask("retention", lambda: self._store.delete(unpinned))


def _is_sealed(path: Path) -> bool:
    return SegmentFile(path).footer is not None


def _check_read(unread: Sequence[str]) -> None:
    """Raise StorageError after a pass with unreadable files, so that the pass is repeated."""
    if unread:
        raise StorageError(f"{'; '.join(unread)}; all files that do not build on them are uploaded")


def _unreadable(name: str, error: OSError | DamagedFile) -> str:
    why = error.what if isinstance(error, DamagedFile) else error.strerror or repr(error)
    return f"{name} cannot be read ({why})"


def spent(settings: WriterSettings, in_store: Listing, here: Listing) -> frozenset[Path]:
    """Return the snapshots and segments that the run's policy does not keep in the store.

    Of these, files in the store can be removed, and files in the run folder only are not worth an
    upload. Completeness and age of a snapshot are those in the store.

    Args:
        settings: Policy, run and rank of the writer.
        in_store: Listing of the store, at least all snapshots, with their times.
        here: Listing of the run folder.

    Raises:
        DamagedFile: If a fence or a pin is damaged, so that it is unknown which files must stay.
    """
    folder = settings.folder
    if settings.retention is None:
        return frozenset()
    fences = _fences(settings)
    complete = set(in_store.snapshots(fences))
    both = Listing({**here.sizes, **in_store.sizes})
    sizes: Counter[tuple[int, int]] = Counter()
    written: dict[tuple[int, int], float] = {}
    for file in both.files("manifest", "image"):
        key = file.step, file.incarnation
        sizes[key] += both.sizes[file.name]
        written[key] = max(written.get(key, 0.0), in_store.written.get(file.name, 0.0))
    inventory = Inventory(
        spans=lineage(fences),
        snapshots=tuple(
            StoredSnapshot(
                number,
                step,
                folder.snapshot(number, step),
                size,
                (step, number) in complete,
                written[step, number],
            )
            for (step, number), size in sorted(sizes.items())
        ),
        segments=tuple(
            StoredSegment(
                file.incarnation,
                file.rank,
                file.step,
                folder.root / file.name,
                both.sizes[file.name],
            )
            for file in both.files("segment")
        ),
    )
    pins = read_pins(folder, settings.run_id)
    plan = plan_collection(inventory, settings.retention, pins, now_seconds=time.time())
    return frozenset(removal.path for removal in plan.removals)


def _fences(settings: WriterSettings) -> dict[int, Fence]:
    """Return the fence of every incarnation that began."""
    own = read_fence(settings.folder.fence(settings.incarnation, settings.rank))
    # If ranks have run folders of their own, they do not see each other's newest fences.
    return {own.incarnation: own, **begun_fences(settings.folder, settings.run_id)}
