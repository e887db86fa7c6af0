"""Objects of a store become files: several at once, each durable under its name or not at all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from lowdiff.persistence.durable import fsync_directory, make_directory
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFolder

_PIECE_BYTES = 16 << 20

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
