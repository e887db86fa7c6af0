"""Fetch the files that a recovery needs from an object store into a folder.

Names in the store and the fences, which are small, decide what to fetch. Of a long run, only one
snapshot and the differentials after it are read. A folder that already has some files gets the
rest.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TypeVar

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, NotARun, RunMismatch, StoreError
from lowdiff.persistence.files.durable import fsync_directory, make_directory, write_file
from lowdiff.persistence.files.paths import (
    CONSTANTS_NAME,
    JOURNAL_NAME,
    RUN_FILE,
    RunFile,
    RunFolder,
)
from lowdiff.persistence.format.document import parse_json, read_either
from lowdiff.persistence.format.framing import FileHeader, sound_end
from lowdiff.persistence.format.image import Manifest, check_shard, manifest_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.catalog import complete_fences
from lowdiff.persistence.run.fences import Span, lineage, read_run_id
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.types import Fence

_PIECE_BYTES = 16 << 20

#: Number of concurrent requests to a store.
AT_ONCE = 8


def download(
    store: ObjectStore,
    folder: RunFolder,
    names: Sequence[str],
    sizes: Mapping[str, int],
    *,
    together: bool = False,
) -> None:
    """Fetch objects into a run folder that no other process fetches into.

    Each object gets its name as soon as it is complete, so after a kill only the rest is missing.

    Args:
        store: The store.
        folder: Run folder; names of objects are its relative paths.
        names: Names of the objects, in no order.
        sizes: Bytes of each object, by name.
        together: Small objects that would mislead without each other; they get their names last.

    Raises:
        StoreError: If the store does not answer, or an object is gone.
    """
    pieces = [
        (name, start, min(start + _PIECE_BYTES, sizes[name]))
        for name in names
        for start in range(0, max(sizes[name], 1), _PIECE_BYTES)
    ]
    paths = {name: folder.root / name for name in names}
    parents = {path.parent for path in paths.values()}
    for parent in parents:
        make_directory(parent)
        _remove_partials(parent, set(paths.values()))
    partials = {n: p.with_name(f"{p.name}.{os.getpid()}.partial") for n, p in paths.items()}
    missing, lock = Counter(name for name, _, _ in pieces), Lock()

    def bring(piece: tuple[str, int, int]) -> None:
        name, start, stop = piece
        # An empty object needs a request of its own, because stores refuse an empty range.
        whole = start == 0 and stop == sizes[name]
        data = store.read(name) if whole else store.read_range(name, start, stop)
        # Opened without truncation, because other pieces write to the same file.
        with open(os.open(partials[name], os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.seek(start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with lock:
            missing[name] -= 1
            is_complete = not missing[name]
        if is_complete and not together:
            partials[name].replace(paths[name])

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(bring, pieces):
                pass
        for name in names if together else ():
            partials[name].replace(paths[name])
        for parent in parents:
            fsync_directory(parent)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _remove_partials(parent: Path, wanted: Collection[Path]) -> None:
    """Remove files that killed fetches left; files of a fetch that runs on this node stay."""
    for partial in parent.glob("*.partial"):
        name, _, pid = partial.stem.rpartition(".")
        is_fetch = parent / name in wanted and pid.isdecimal()
        if is_fetch and (int(pid) == os.getpid() or not Path("/proc", pid).exists()):
            partial.unlink(missing_ok=True)


def mend(store: ObjectStore, folder: RunFolder, damaged: Mapping[str, int]) -> None:
    """Replace damaged segments by the store's objects, if these hold more.

    Args:
        store: The store.
        folder: Folder of a run that no process writes to.
        damaged: Name of an existing segment -> offset at which its sound bytes end.

    Raises:
        StoreError: If the store does not answer.
        RunMismatch: If the readable part of a segment differs from the store's object.
    """
    for name, sound in damaged.items():
        path, there = folder.root / name, store.read(name)
        try:
            here = path.read_bytes()
        except OSError:
            continue  # the segment may come back
        try:
            good = sound_end(memoryview(there), FileHeader.unpack(there, path))
        except DamagedFile:
            continue
        common = min(sound, good)
        if here[:common] != there[:common]:
            raise different_histories(store, folder, name)
        if good > sound:
            write_file(path, there)


def compare_document(store: ObjectStore, folder: RunFolder, name: str, there: bytes) -> None:
    """Compare ``run.json`` or a fence, which never change, with the store's object.

    Raises:
        DamagedFile: If one of the two is damaged.
        RunMismatch: If they differ.
    """
    path = folder.root / name
    said = parse_json(there, f"{store.url.rstrip('/')}/{name}")
    try:
        found = read_either(path)
    except DamagedFile as error:
        what = f"{error.what}; remove it to take that of {store.url}"
        raise DamagedFile(path, what) from error
    if found != said:
        raise different_histories(store, folder, name)


def different_histories(store: ObjectStore, folder: RunFolder, name: str) -> RunMismatch:
    """Return the error for a file that differs between a run folder and a store."""
    return RunMismatch(
        f"{store.url} and {folder.root} hold different histories: their {name} differs; give the "
        "store a URL of its own, or move the run folder away to go on with what the store holds"
    )


_LOOKS = 3

#: Folders of a run that a store also holds.
_FOLDERS = ("incarnations", "snapshots", "segments", "constants", "pins")

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Listing:
    """Names and sizes of a run's files, in a store or in a folder.

    Attributes:
        sizes: Bytes of every file by its name inside the run.
        written: When a store received an object, in seconds since the epoch; filled for snapshots
            if requested.
    """

    sizes: Mapping[str, int]
    written: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_store(cls, store: ObjectStore) -> Listing:
        """List a store."""
        return cls(store.sizes())

    @classmethod
    def of_folder(cls, folder: RunFolder) -> Listing:
        """List a run folder's files; the folder may be a disk's root with other files in it."""
        paths = [folder.run_file, folder.retention_file]
        for top in (
            folder.root / name for name in _FOLDERS if not (folder.root / name).is_symlink()
        ):
            for parent, _, names in os.walk(top, onerror=_refuse_unreadable):
                paths += (Path(parent, name) for name in names)
        sizes = {}
        for path in paths:
            # The file was a partial one, or retention has removed it.
            with suppress(FileNotFoundError, NotADirectoryError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[folder.name(path)] = status.st_size
        return cls(sizes)

    def files(self, *kinds: str) -> list[RunFile]:
        """Return the files of some kinds, by name; files with other names are not the run's."""
        found = (RunFile.parse(name) for name in sorted(self.sizes))
        return [file for file in found if file is not None and file.kind in kinds]

    def constants(self, fence: Fence | None = None) -> list[str]:
        """Return names of files of frozen parameters: all, or the one that a fence names."""
        found = [name for name in self.sizes if CONSTANTS_NAME.fullmatch(name)]
        return [
            n for n in found if fence is None or n == f"constants/{fence.constants}.safetensors"
        ]

    def journal_files(self) -> list[str]:
        """Return the names of retention's files: ``retention.json`` and pins."""
        return [name for name in self.sizes if JOURNAL_NAME.fullmatch(name)]

    def snapshots(self, fences: Mapping[int, Fence]) -> list[tuple[int, int]]:
        """Return ``(step, incarnation)`` of all snapshots whose manifests are all there."""
        ranks: dict[tuple[int, int], set[int]] = {}
        for file in self.files("manifest"):
            ranks.setdefault((file.step, file.incarnation), set()).add(file.rank)
        return sorted(
            (step, number)
            for (step, number), found in ranks.items()
            if number in fences and found >= set(range(fences[number].world_size))
        )


def _refuse_unreadable(error: OSError) -> None:
    """Raise errors other than a missing folder, so that no partial listing passes for a whole one."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def read_store_run_id(store: ObjectStore) -> str | None:
    """Return the identity of the run in a store; None if the store holds no run.

    Raises:
        StoreError: If the store does not answer.
        DamagedFile: If ``run.json`` is damaged.
    """
    try:
        data = store.read(RUN_FILE)
    except StoreError as error:
        # A missing bucket must not pass for an empty store.
        if error.is_missing and not store.sizes():
            return None
        raise
    with TemporaryDirectory(prefix="lowdiff-") as cache:
        folder = RunFolder(Path(cache))
        folder.run_file.write_bytes(data)
        return read_run_id(folder)


def fetch_fences(store: ObjectStore, folder: RunFolder, listing: Listing) -> None:
    """Fetch ``run.json``, all fences and retention's files; compare fences that are there already.

    Raises:
        DamagedFile: If a fence or ``run.json`` is damaged.
        NotARun: If the store holds no run.
        RunMismatch: If folder and store hold different histories.
    """
    if RUN_FILE not in listing.sizes:
        raise NotARun(store.url, "it has no run.json")
    names = [file.name for file in listing.files("fence")]
    here = Listing.of_folder(folder).sizes if folder.root.is_dir() else {}
    small = [RUN_FILE, *names, *listing.journal_files()]
    # Fetch the fences together, because some of them would pass for all.
    missing = [name for name in small if name not in here]
    download(store, folder, missing, listing.sizes, together=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        common = [name for name in [RUN_FILE, *names] if name in here]
        for name, data in zip(common, pool.map(store.read, common), strict=True):
            compare_document(store, folder, name, data)


def fetch_history(store: ObjectStore, folder: RunFolder, step: int | None) -> list[int]:
    """Fetch the files that the recovery of a step needs and that ``folder`` lacks.

    Args:
        store: Store of the run.
        folder: Run folder to fetch into; created if missing.
        step: The step to recover; None for the newest.

    Returns:
        Steps of the snapshots that lie on the run's history, in the store or in the folder.

    Raises:
        NotARun: If the store holds no run.
        RunMismatch: If folder and store hold different histories.
        StoreError: If the store does not answer.
    """
    return _looking_again(store, lambda listing: _fetch_history(store, folder, step, listing))


def fetch_differentials(store: ObjectStore, folder: RunFolder, after: int) -> list[int]:
    """Fetch the differentials after a step for a reader that has the state of that step.

    Fetch no snapshot. Remove from ``folder`` the files that the reader has passed, and the snapshots
    that the store no longer lists, so that ``folder`` stays small however long the run is.

    Args:
        store: Store of the run.
        folder: Temporary folder that only this reader uses; created if missing.
        after: Step of the reader's state.

    Returns:
        Steps of the store's snapshots that lie on the run's history, ascending.

    Raises:
        NotARun: If the store holds no run.
        RunMismatch: If folder and store hold different histories.
        StoreError: If the store does not answer.
    """
    return _looking_again(
        store, lambda listing: _fetch_differentials(store, folder, after, listing)
    )


def _fetch_all(store: ObjectStore, folder: RunFolder, *, with_images: bool) -> None:
    kinds = ("segment", "image", "manifest") if with_images else ("segment", "manifest")

    def bring(listing: Listing) -> None:
        fetch_fences(store, folder, listing)
        here = Listing.of_folder(folder).sizes
        names = [file.name for file in listing.files(*kinds)]
        names += listing.constants() if with_images else []
        download(store, folder, [name for name in names if name not in here], listing.sizes)
        # Fetch these again, because retention may have removed steps in between.
        download(store, folder, listing.journal_files(), listing.sizes)

    _looking_again(store, bring)


def _looking_again(store: ObjectStore, fetch: Callable[[Listing], _Result]) -> _Result:
    """Fetch from a run that may be alive, whose retention may remove objects that were just listed."""
    for _ in range(_LOOKS):
        try:
            return fetch(Listing.of_store(store))
        except StoreError as error:
            if not error.is_missing:
                raise
    return fetch(Listing.of_store(store))


@contextmanager
def temporary_folder() -> Iterator[RunFolder]:
    """Make a run folder to fetch into; it is deleted afterwards."""
    with TemporaryDirectory(prefix="lowdiff-") as cache:
        yield RunFolder(Path(cache) / "run")


@contextmanager
def opened(run: str | Path, *, with_images: bool = True) -> Iterator[RunFolder]:
    """Open the folder of a run; for the URL of a store, fetch the whole run into a temporary one.

    Args:
        run: The run folder, or the URL of its store.
        with_images: Whether to fetch the snapshots' images and the frozen parameters, too.

    Raises:
        NotARun: If the store holds no run.
        StoreError: If the store does not answer.
    """
    if not is_url(run):
        yield RunFolder(Path(run))
        return
    with temporary_folder() as folder:
        _fetch_all(ObjectStore(str(run)), folder, with_images=with_images)
        yield folder


def _fetch_history(
    store: ObjectStore,
    folder: RunFolder,
    step: int | None,
    listing: Listing,
) -> list[int]:
    fetch_fences(store, folder, listing)
    fences = complete_fences(folder, read_run_id(folder))
    passed_over: set[tuple[int, int]] = set()
    while True:
        here = Listing.of_folder(folder)
        snapshots = {*listing.snapshots(fences), *here.snapshots(fences)} - passed_over
        spans = _spans(fences, snapshots)
        owners = {span.incarnation: span for span in spans}
        usable = sorted((s, n) for s, n in snapshots if n in owners and owners[n].holds(s))
        base = max((found for found in usable if step is None or found[0] <= step), default=None)
        if base is None:
            if not usable:
                _fetch_evidence(store, folder, listing, here)
            break
        if _fetch_snapshot(store, folder, base, listing, here):
            constants = listing.constants(fences[base[1]])
            missing = [name for name in constants if name not in here.sizes]
            download(store, folder, missing, listing.sizes)
            _fetch_segments(store, folder, _segments(listing, spans, base[0], step), listing, here)
            break
        passed_over.add(base)
    return [found for found, _ in usable]


def _fetch_differentials(
    store: ObjectStore, folder: RunFolder, after: int, listing: Listing
) -> list[int]:
    fetch_fences(store, folder, listing)
    fences = complete_fences(folder, read_run_id(folder))
    here = Listing.of_folder(folder)
    in_store = listing.snapshots(fences)
    snapshots = {*in_store, *here.snapshots(fences)}
    # A snapshot proves that its incarnation began; without the snapshot this file says so.
    for begun in {folder.begun(number) for _, number in snapshots}:
        if not begun.is_file():
            write_file(begun, b"")
    spans = _spans(fences, snapshots)
    wanted = list(_segments(listing, spans, after, None))
    needed = {*wanted, *_segments(here, spans, after, None)}
    _remove(folder, [f for f in here.files("segment") if f.name not in needed])
    passed = [
        f for f in here.files("image", "manifest") if f.step <= after or f.name not in listing.sizes
    ]
    _remove(folder, passed)
    _fetch_segments(store, folder, wanted, listing, here)
    owners = {span.incarnation: span for span in spans}
    return [step for step, number in in_store if number in owners and owners[number].holds(step)]


def _remove(folder: RunFolder, files: Sequence[RunFile]) -> None:
    """Remove files of a temporary folder, and the folders that become empty."""
    for file in files:
        path = folder.root / file.name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other files are in it
            path.parent.rmdir()


def _fetch_segments(
    store: ObjectStore, folder: RunFolder, names: Iterable[str], listing: Listing, here: Listing
) -> None:
    """Fetch segments that are missing, and mend those that are damaged or shorter than the store's."""
    wanted = list(names)
    download(store, folder, [n for n in wanted if n not in here.sizes], listing.sizes)
    ends = {n: _sound_bytes(folder, n, listing) for n in wanted if n in here.sizes}
    mend(store, folder, {n: end for n, end in ends.items() if end is not None})


def _fetch_evidence(store: ObjectStore, folder: RunFolder, listing: Listing, here: Listing) -> None:
    """Fetch all differentials of a run without a usable snapshot.

    Staging memory decides what recovery can do with them. Without them, the run would pass for a
    new one and begin at step 0, in the place of the run in the store.
    """
    names = [f.name for f in listing.files("segment") if f.name not in here.sizes]
    download(store, folder, names, listing.sizes)


def _spans(fences: Mapping[int, Fence], snapshots: set[tuple[int, int]]) -> tuple[Span, ...]:
    """Return the lineage of incarnations that outlived their attach."""
    with_snapshot = {number for _, number in snapshots}
    begun = {n: f for n, f in fences.items() if f.parent is not None or n in with_snapshot}
    return lineage(begun)


def _fetch_snapshot(
    store: ObjectStore,
    folder: RunFolder,
    base: tuple[int, int],
    listing: Listing,
    here: Listing,
) -> bool:
    """Fetch a snapshot's missing files, manifests last; return False if a fetched file is damaged."""
    step, incarnation = base
    there = [f for f in listing.files("image", "manifest") if (f.step, f.incarnation) == base]
    missing = [f for f in there if f.name not in here.sizes]
    if any(f.kind == "manifest" for f in missing):
        for kind in ("image", "manifest"):
            download(store, folder, [f.name for f in missing if f.kind == kind], listing.sizes)
    path = folder.snapshot(incarnation, step)
    try:
        for file in missing:
            if file.kind == "manifest":
                check_shard(path, Manifest.read(manifest_file(path, file.rank)))
    except DamagedFile as error:
        Code.DOWNLOAD_DAMAGED.warn(f"{error} of {store.url}; going back to an older snapshot")
        for file in reversed(missing):  # without its manifests it does not exist
            (folder.root / file.name).unlink(missing_ok=True)
        return False
    return True


def _segments(
    listing: Listing, spans: Sequence[Span], base_step: int, step: int | None
) -> Iterator[str]:
    """Return names of segments with a valid step after ``base_step``, up to ``step``."""
    owners = {span.incarnation: span for span in spans}
    by_owner: dict[tuple[int, int], list[RunFile]] = {}
    for file in listing.files("segment"):
        by_owner.setdefault((file.incarnation, file.rank), []).append(file)
    for (incarnation, _), files in by_owner.items():
        span = owners.get(incarnation)
        if span is None:
            continue
        ends = [following.step - 1 for following in files[1:]]
        for file, last in zip(files, [*ends, None], strict=True):
            stop = min((x for x in (step, span.last) if x is not None), default=file.step)
            if file.step <= stop and (last is None or last > max(base_step, span.base)):
                yield file.name


def _sound_bytes(folder: RunFolder, name: str, listing: Listing) -> int | None:
    """Return where the sound records of a segment end; None if it is as complete as in the store."""
    file = RunFile.parse(name)
    assert file is not None
    owner = read_run_id(folder), file.incarnation, file.rank
    try:
        segment = SegmentFile(folder.root / name)
        is_damaged = segment.damage() is not None or segment.header.owner != owner
    except (DamagedFile, FileNotFoundError):
        return 0
    return segment.end if is_damaged or segment.size < listing.sizes[name] else None
