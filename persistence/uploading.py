"""The writer's other half: what is durable in the run folder goes to the object store.

Nothing is queued in memory. Each pass compares the run folder with what the store has and uploads
the rest, so a store that was away, a writer that was killed, and batches that came faster than the
store takes them are all the same case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from lowdiff.errors import DamagedFile, RunMismatch, StorageError, StoreError
from lowdiff.persistence.adoption import ranks_to_adopt
from lowdiff.persistence.fetching import Listing
from lowdiff.persistence.framing import HEADER_BYTES
from lowdiff.persistence.measurements import Recorder
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFile, RunFolder
from lowdiff.persistence.patience import Patience
from lowdiff.persistence.remote_retention import may_be_replaced, spent
from lowdiff.persistence.segments import Uploaded, read_batch, uploaded_records
from lowdiff.persistence.snapshots import manifest_file, shard_file
from lowdiff.persistence.status import StatusPage
from lowdiff.persistence.writer_settings import WriterSettings

_logger = logging.getLogger(__name__)

#: How often a run folder that gives trouble is tried once the trainer is gone, and how far apart.
_LAST_ATTEMPTS, _ATTEMPT_SECONDS = 3, 2.0


class Uploader:
    """Keeps one rank's share of a run in its store. Lives on the writer's event loop.

    A rank uploads its own files, those of ranks that are no longer there, and the segments of those
    whose logs it makes durable: on a machine of its own, perhaps nobody else sees them.
    """

    def __init__(self, settings: WriterSettings, page: StatusPage, recorder: Recorder) -> None:
        assert settings.store is not None
        self._settings = settings
        self._page = page
        self._patience = Patience(settings, page, recorder)
        self._store = ObjectStore(settings.store, make=True)
        self._listing = Listing({})
        self._cursors: dict[Path, int] = {}
        self._done: set[Path] = set()
        self._old: frozenset[Path] = frozenset()
        self._notes: dict[str, bytes] = {}
        self._me = settings.incarnation, settings.rank
        self._adopts = ranks_to_adopt(settings)
        self._last = settings.base_step
        # With a replica all that counts is one snapshot of this life.
        self._is_base_there = settings.has_replica
        self._needed_snapshot = settings.base_step if settings.has_replica else -1
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
        self._patience.end()
        self.wake(batch=True, snapshot=True)

    async def run(self) -> None:
        """Upload until told to end; never raises, because what is local matters more."""
        last_attempts = _LAST_ATTEMPTS
        while True:
            try:
                return await self._upload()
            except RunMismatch as error:
                _logger.error("rank %d: %s", self._settings.rank, error)
                return self._patience.report("history", str(error))
            except StoreError as error:
                return _logger.error("rank %d: given up: %s", self._settings.rank, error)
            except (OSError, StorageError) as error:
                _logger.warning("rank %d: %s", self._settings.rank, error)
                self._patience.report("run folder", f"{type(error).__name__}: {error}")
                # Once is no reason to give up: retention and users remove files meanwhile.
                last_attempts -= self._patience.is_ending
                if not last_attempts:
                    return None
                await self._patience.sleep(_ATTEMPT_SECONDS)
            except Exception as error:
                # A bug must cost the copy in the store only, and be seen.
                _logger.exception("rank %d: uploads ended", self._settings.rank)
                return self._patience.report("uploads", f"ended by {error!r}; see the writer's log")

    async def _upload(self) -> None:
        await self._begin()
        self._patience.report("run folder", "")
        tasks = [
            asyncio.create_task(self._follow(self._new_segments, self._upload_segments)),
            asyncio.create_task(self._follow(self._new_snapshots, self._upload_snapshots)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        # Its steps count once the first pass of snapshots is over, which may have been the last.
        await self._upload_segments()

    async def _follow(self, new: asyncio.Event, one_pass: Callable[[], Awaitable[None]]) -> None:
        while True:
            is_last = self._patience.is_ending
            new.clear()
            await one_pass()
            if is_last:
                return
            await new.wait()

    # What has to be there before any batch

    async def _begin(self) -> None:
        """``run.json``, frozen parameters and fences; then what the store has already."""
        folder = self._settings.folder
        if self._settings.serves(0):
            await self._upload_constants()
        fences = [path for _, rank, path in folder.fences() if self._settings.serves(rank)]
        for path in [folder.run_file, *fences]:
            await self._create(
                "fences", folder.name(path), await asyncio.to_thread(path.read_bytes)
            )
        self._listing = await self._patience.ask("fences", self._my_listing)
        self._old = await self._spent_here()
        newest = {(f.incarnation, f.rank): f for f in self._listing.files("segment")}
        segments = await self._segments()
        for (incarnation, rank, _, path), after in zip_longest(segments, segments[1:]):
            found = newest.get((incarnation, rank))
            if found is None:
                continue
            if after is not None and after[:2] == (incarnation, rank) and after[2] <= found.step:
                # One that retention removed there may be needed again: this life may have gone
                # back to a step that only the run folder still has.
                if folder.name(path) in self._listing.sizes:
                    self._done.add(path)
                continue
            with suppress(FileNotFoundError):  # collected
                await self._resume(found, path, is_own=(incarnation, rank) == self._me)
        own = newest.get(self._me)
        if own is not None and own.step > self._page.status.durable_step:
            raise self._mismatch(own.name)

    async def _resume(self, found: RunFile, path: Path, *, is_own: bool) -> None:
        """Go on in the segment that holds the newest object's records."""
        size = self._listing.sizes[found.name]
        uploaded = await asyncio.to_thread(uploaded_records, path, found.step, size)
        self._cursors[path] = uploaded.end
        if is_own:
            self._last = max(self._last, uploaded.last)
            await self._compare(found, path, uploaded)

    async def _segments(self) -> list[tuple[int, int, int, Path]]:
        """As `RunFolder.segments`, those that this rank uploads: of another only its dead lives'."""
        found = await asyncio.to_thread(
            lambda: list(self._settings.folder.segments(self._has_segments_of))
        )
        settings = self._settings
        return [s for s in found if settings.serves(s[1]) or s[0] < settings.incarnation]

    def _has_segments_of(self, rank: int) -> bool:
        return rank in self._adopts or self._settings.serves(rank)

    async def _upload_constants(self) -> None:
        """Frozen parameters that fences name, before those fences."""
        folder = self._settings.folder
        there = await self._patience.ask("fences", lambda: self._store.sizes("constants"))
        here = await asyncio.to_thread(Listing.of_folder, folder)
        for name in here.constants():
            if there.get(name) != here.sizes[name]:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._patience.ask("fences", upload)
                self._count(here.sizes[name])

    async def _compare(self, found: RunFile, path: Path, uploaded: Uploaded) -> None:
        """Fences of two lives that went on from one step may be equal; what followed is not."""
        if uploaded.start is None:
            return
        there = await self._read("segments", found.name)
        with path.open("rb") as file:
            file.seek(uploaded.start)
            here = await asyncio.to_thread(file.read, len(there) - HEADER_BYTES)
        if here != there[HEADER_BYTES:]:
            raise self._mismatch(found.name)

    def _mismatch(self, name: str) -> RunMismatch:
        return RunMismatch(
            f"{self._store.url} holds another history: its {name} is not that of "
            f"{self._settings.run}; nothing more is uploaded. Give the store a URL of its own"
        )

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
        ranks = {rank for _, rank, _, _ in self._settings.folder.segments(self._has_segments_of)}
        for rank in {self._settings.rank, *ranks}:
            sizes |= self._store.sizes(f"segments/rank-{rank:04d}")
        return Listing(sizes, {name: written for name, (_, written) in snapshots.items()})

    async def _create(self, task: str, name: str, data: bytes) -> int:
        """Write an object once; returns how much of ``data`` the store has.

        Raises:
            RunMismatch: If another history's object is there.
        """
        sent = len(data) if name.endswith(".seg") else 0
        if await self._patience.ask(task, lambda: self._store.create(name, data), sent=sent):
            return len(data)
        # A request that seemed lost, or an earlier writer's.
        there = await self._read(task, name)
        common = min(len(there), len(data))
        whole = name.endswith(".seg") or len(there) == len(data)
        if there[:common] != data[:common] or not whole:
            raise self._mismatch(name)
        return common

    # Differentials

    async def _upload_segments(self) -> None:
        # Looked at first: what is adopted or uploaded meanwhile is for the next pass.
        is_adopted = self._adopted.is_set()
        base_will_be_there = is_adopted and self._snapshots_passed.is_set()
        segments = await self._segments()
        newest = max((first for *key, first, _ in segments if tuple(key) == self._me), default=-1)
        for incarnation, rank, first, path in segments:
            is_own = (incarnation, rank) == self._me
            # Until its log is adopted, an earlier incarnation's segments may have another writer.
            if path in self._done or path in self._old or not (is_own or is_adopted):
                continue
            await self._upload_segment(incarnation, rank, path, is_own=is_own)
            if not is_own or first < newest:
                self._done.add(path)
        self._is_base_there |= base_will_be_there
        self._publish_step(self._last)

    async def _upload_segment(
        self, incarnation: int, rank: int, path: Path, *, is_own: bool
    ) -> None:
        """What a segment holds and the store lacks; batches that piled up share an object."""
        folder = self._settings.folder
        while True:
            start = self._cursors.get(path, HEADER_BYTES)
            try:
                batch = await asyncio.to_thread(read_batch, path, start)
            except FileNotFoundError:
                return  # collected
            if batch is None:
                return
            name = folder.name(folder.segment(incarnation, rank, batch.first))
            there = await self._create("segments", name, batch.data)
            self._cursors[path] = start + there - HEADER_BYTES
            self._count(there)
            if is_own and there == len(batch.data):
                if batch.first > self._last + 1:  # collected here before the store had it
                    self._needed_snapshot = batch.first - 1
                self._needed_snapshot = max((self._needed_snapshot, *batch.rebases))
                self._publish_step(batch.last)

    def _publish_step(self, last: int) -> None:
        """Own steps count in the store once all that they build on is there."""
        self._last = max(self._last, last)
        if self._is_base_there and self._page.status.remote_snapshot >= self._needed_snapshot:
            self._page.update(remote_step=self._last)

    def _count(self, uploaded: int) -> None:
        self._page.update(remote_bytes=self._page.status.remote_bytes + uploaded)

    # Snapshots

    async def _upload_snapshots(self) -> None:
        settings, folder = self._settings, self._settings.folder
        uploaded = False
        for incarnation, step, path in list(folder.snapshots()):
            if path in self._old:
                continue
            for manifest in sorted(path.glob("rank-*.json")):
                file = RunFile.parse(folder.name(manifest))
                if file is None or not self._settings.serves(file.rank):
                    continue
                try:
                    if not await self._is_there(file, manifest):
                        await self._upload_shard(path, file.rank)
                        uploaded = True
                except FileNotFoundError:
                    continue  # collected
                if incarnation == settings.incarnation and file.rank == settings.rank:
                    newest = max(step, self._page.status.remote_snapshot)
                    self._page.update(remote_snapshot=newest)
                    self._publish_step(newest if settings.has_replica else self._last)
        if uploaded and settings.retention is not None:
            await self._collect()
        if not self._snapshots_passed.is_set():
            self._snapshots_passed.set()
            self._new_segments.set()

    async def _is_there(self, file: RunFile, manifest: Path) -> bool:
        """Whether the store has a shard. An atomic one takes the place of a rolling one there, too.

        The rolling one's manifest goes first: in between there is no such snapshot.
        """
        there = self._listing.sizes.get(file.name)
        # Manifests are compared by their lengths: only a rolling one names a base.
        if there is None or there == (await asyncio.to_thread(manifest.stat)).st_size:
            return there is not None
        listing = await self._patience.ask("snapshots", self._my_listing)
        if file.name not in listing.sizes:
            return False
        if not await asyncio.to_thread(may_be_replaced, self._settings, listing, manifest):
            return True
        if b'"first_base"' not in await self._read("snapshots", file.name):
            return True
        await self._patience.ask("snapshots", lambda: self._store.delete([file.name]))
        return False

    async def _read(self, task: str, name: str) -> bytes:
        return await self._patience.ask(task, lambda: self._store.read(name))

    async def _upload_shard(self, path: Path, rank: int) -> None:
        """A shard and then its manifest, which makes it exist."""
        folder, shard = self._settings.folder, shard_file(path, rank)
        manifest = manifest_file(path, rank)
        content = b""
        # An atomic snapshot may take the place of a rolling one of its step meanwhile.
        while content != (content := await asyncio.to_thread(manifest.read_bytes)):
            # FileNotFoundError, before the store says so.
            size = (await asyncio.to_thread(shard.stat)).st_size
            upload = partial(self._store.upload, folder.name(shard), shard)
            await self._patience.ask("snapshots", upload, sent=size)
        await self._create("snapshots", folder.name(manifest), content)
        sizes = {folder.name(shard): size, folder.name(manifest): len(content)}
        self._listing = replace(self._listing, sizes={**self._listing.sizes, **sizes})
        self._count(size)

    # Retention

    async def _upload_notes(self) -> None:
        """What retention wrote down: rank 0's view replaces what the store has."""
        folder = self._settings.folder
        here = (await asyncio.to_thread(Listing.of_folder, folder)).notes()
        for name in here:
            content = await asyncio.to_thread((folder.root / name).read_bytes)
            if self._notes.get(name) != content:
                upload = partial(self._store.upload, name, folder.root / name)
                await self._patience.ask("retention", upload)
                self._notes[name] = content
        there = await self._patience.ask("retention", lambda: self._store.sizes("pins"))
        unpinned = [name for name in Listing(there).notes() if name not in here]
        await self._patience.ask("retention", lambda: self._store.delete(unpinned))

    async def _collect(self) -> None:
        """Remove from the store what retention no longer needs there, of this rank's."""
        name = await self._patience.ask("retention", self._other_life)
        if name is not None:  # what it needs is not for this life to judge
            raise self._mismatch(name)
        if self._settings.serves(0):
            await self._upload_notes()
        self._listing = await self._patience.ask("retention", self._my_listing)
        gone = await asyncio.to_thread(self._spent, self._listing)
        folder = self._settings.folder
        names = [
            file.name
            for kind in ("manifest", "shard", "segment")  # without its manifests it does not exist
            for file in self._listing.files(kind)
            if self._settings.serves(file.rank) and not gone.isdisjoint(_places(folder, file))
        ]
        await self._patience.ask("retention", lambda: self._store.delete(names))
        left = {n: size for n, size in self._listing.sizes.items() if n not in set(names)}
        self._listing = replace(self._listing, sizes=left)
        self._old = await self._spent_here()

    async def _spent_here(self) -> frozenset[Path]:
        """What of the run folder is not worth uploading any more."""
        here = await asyncio.to_thread(Listing.of_folder, self._settings.folder)
        return await asyncio.to_thread(self._spent, here)

    def _spent(self, listing: Listing) -> frozenset[Path]:
        mine = {f.name for f in listing.files("segment") if self._has_segments_of(f.rank)}
        try:
            return spent(self._settings, self._listing, listing, mine)
        except DamagedFile as error:
            _logger.warning("rank %d: old objects stay: %s", self._settings.rank, error)
            return frozenset()


def _places(folder: RunFolder, file: RunFile) -> set[Path]:
    """The path of a file, and the folder of the snapshot it belongs to."""
    path = folder.root / file.name
    return {path} if file.kind == "segment" else {path.parent}
