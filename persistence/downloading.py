"""Objects of a store become files: several at once, each durable under its name or not at all.

Of what is there already only what is damaged is replaced.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from lowdiff.errors import DamagedFile, RunMismatch
from lowdiff.persistence.durable import (
    fsync_directory,
    make_directory,
    parse_json,
    read_json,
    write_file,
)
from lowdiff.persistence.framing import HEADER_BYTES, FileHeader, read_records
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFolder

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_MOST_CHANGED_BYTES = 8

#: Requests to a store.
AT_ONCE = 8


def download(
    store: ObjectStore,
    folder: RunFolder,
    names: Sequence[str],
    sizes: Mapping[str, int],
    *,
    together: bool = False,
) -> None:
    """Bring objects into a run folder that nobody else fetches into.

    Each has its name as soon as it is complete, so that after a kill only the rest is missing.

    Args:
        store: Where they are.
        folder: Their names are its paths.
        names: Which; in no order.
        sizes: Bytes of each, by name.
        together: Small ones that mean something else without each other: named at the end.

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
        for left in parent.glob("*.seg.*.partial"):  # of a fetch that was killed
            left.unlink(missing_ok=True)
    partials = {n: p.with_name(f"{p.name}.{os.getpid()}.partial") for n, p in paths.items()}
    missing, lock = Counter(name for name, _, _ in pieces), Lock()

    def bring(piece: tuple[str, int, int]) -> None:
        name, start, stop = piece
        # A whole object by itself: an empty range is refused by stores.
        whole = start == 0 and stop == sizes[name]
        data = store.read(name) if whole else store.read_range(name, start, stop)
        # Not opened by `open`, which would truncate what other pieces wrote.
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


def mend(store: ObjectStore, folder: RunFolder, names: Sequence[str]) -> None:
    """Put objects in the place of segments that are damaged here, where they hold more.

    Args:
        store: Where they are.
        folder: Of a run that nobody writes to.
        names: Of segments that are there.

    Raises:
        StoreError: If the store does not answer.
        RunMismatch: If what can be read of a segment is not what the store has.
    """
    for name in names:
        path, there = folder.root / name, store.read(name)
        try:
            here = path.read_bytes()
        except OSError:
            continue  # it may come back
        sound, good = _sound_bytes(here, path), _sound_bytes(there, path)
        common = min(sound, good)
        if here[:common] != there[:common]:
            raise different_histories(store, folder, name)
        if good > sound:
            write_file(path, there)


def mend_document(store: ObjectStore, folder: RunFolder, name: str, there: bytes) -> None:
    """Compare a document with the store's, which takes its place if it is that one with damage.

    Args:
        store: Where it is, too.
        folder: Of a run that nobody writes to.
        name: Of ``run.json`` or a fence, which never change.
        there: What the store has.

    Raises:
        DamagedFile: If the store's is damaged, or too little is left here to say whose it is.
        RunMismatch: If the two are not the same.
    """
    path = folder.root / name
    said = parse_json(there, f"{store.url.rstrip('/')}/{name}")
    try:
        differ = read_json(path) != said
    except DamagedFile as error:
        here = b"" if isinstance(error.__cause__, OSError) else path.read_bytes()
        num_changed = sum(a != b for a, b in zip(here, there, strict=False))
        # Another life's differs in all of its random number.
        if len(here) != len(there) or num_changed > _MOST_CHANGED_BYTES:
            what = f"{error.what}; remove it to take that of {store.url}"
            raise DamagedFile(path, what) from error
        _logger.warning("%s; it is replaced by that of %s", error, store.url)
        write_file(path, there)
    else:
        if differ:
            raise different_histories(store, folder, name)


def different_histories(store: ObjectStore, folder: RunFolder, name: str) -> RunMismatch:
    """The error for a file that a run folder and a store have in common, and that differs."""
    return RunMismatch(
        f"{store.url} and {folder.root} hold different histories: their {name} differs; give the "
        "store a URL of its own, or move the run folder away to go on with what the store holds"
    )


def _sound_bytes(data: bytes, path: Path) -> int:
    """Where the last record of a segment ends that can be read."""
    try:
        header = FileHeader.unpack(data, path)
    except DamagedFile:
        return 0
    ends = [record.end for record in read_records(memoryview(data), header)]
    return max(ends, default=HEADER_BYTES)
