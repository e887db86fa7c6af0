"""Remove files that a policy no longer keeps.

A process that removes files holds the run's retention lock alone. A process that must not lose a
file between looking and acting (an attach, a pin) shares the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, RunInUse
from lowdiff.persistence.files.durable import fsync_directory, remove_folder
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, entries_of, file_bytes
from lowdiff.persistence.format.image import check_shard, shard_file
from lowdiff.persistence.retention.plan import (
    CollectionPlan,
    Inventory,
    Removal,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.run.catalog import SnapshotSet, begun_fences, complete_snapshots
from lowdiff.persistence.run.fences import lineage, read_fence, require_run
from lowdiff.persistence.run.journal import read_pins, write_collected
from lowdiff.types import Retention

#: Errors of the system if the disk, or the user's quota, is full.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def retention_locked(
    folder: RunFolder, *, timeout_seconds: float, shared: bool = False
) -> Iterator[None]:
    """Hold the run's retention lock.

    Args:
        folder: The run folder.
        timeout_seconds: How long to wait for other holders.
        shared: Whether to keep files from being removed, instead of removing some.

    Raises:
        RunInUse: If other processes hold the lock for longer.
        FileNotFoundError: If the run is gone.
    """
    lock = FileLock(folder.retention_lock)
    # Parents are not created: where a run was unmounted, no part of it may appear in its place.
    lock.path.parent.mkdir(exist_ok=True)
    if not lock.acquire(
        f"process {os.getpid()}, removing old files",
        timeout_seconds=timeout_seconds,
        shared=shared,
    ):
        raise RunInUse(folder.root, lock.holder(), timeout_seconds)
    try:
        yield
    finally:
        lock.release()


def collect(folder: RunFolder, run_id: str, policy: Retention) -> None:
    """Remove the files of every rank that the policy does not keep; several ranks may do so at once.

    Raises:
        RunInUse: If the lock is held elsewhere, as during an attach; try again later.
        DamagedFile: If a fence or a pin is damaged, so that it is unknown which files must stay.
        RunMismatch: If the folder now holds another run.
    """
    with retention_locked(folder, timeout_seconds=5.0):
        require_run(folder, run_id)
        inventory = take_inventory(folder, run_id)
        pins = read_pins(folder, run_id)
        plan = plan_collection(inventory, policy, pins, now_seconds=time.time())
        carry_out(folder, run_id, plan)


def check_snapshots(folder: RunFolder, run_id: str) -> dict[Path, bool | None]:
    """Read and check the images of all snapshots.

    For a large model this takes minutes, so call it before taking the retention lock: an attach, or
    a training loop that pins a step, would wait for the lock.

    Returns:
        Snapshot folder -> whether all images have their lengths and checksums; None if one of them
        cannot be read.
    """
    return {s.folder: passes(s) for s in complete_snapshots(folder, run_id)}


def take_inventory(
    folder: RunFolder, run_id: str, *, checked: Mapping[Path, bool | None] | None = None
) -> Inventory:
    """List the files that retention decides about.

    A snapshot counts if all its manifests are there and its images have the recorded lengths. A
    snapshot that is there but cannot be read does not count, and a warning says that it stays.

    Args:
        folder: The run folder.
        run_id: Identity of the run.
        checked: Result of `check_snapshots`; only snapshots that passed count. New snapshots come
            after all that passed, where nothing is removed. A new snapshot before them (one adopted
            from a dead incarnation) may be the base of a pinned step, so a warning says that it
            stays.

    Raises:
        DamagedFile: If a fence is damaged.
    """
    fences = begun_fences(folder, run_id)
    newest = max(fences, default=-1)
    beginning = [read_fence(path) for number, _, path in folder.fences() if number > newest]
    damage: list[DamagedFile] = []
    whole = {
        snapshot.folder: snapshot
        for snapshot in complete_snapshots(folder, run_id, damage)
        if _has_lengths(snapshot)
    }
    unreadable = {error.path.parent: error.what for error in damage}
    if checked is not None:
        unknown = {path: s for path, s in whole.items() if checked.get(path) is None}
        whole = {path: s for path, s in whole.items() if checked.get(path)}
        newest_whole = max((s.step for s in whole.values()), default=-1)
        for path, snapshot in unknown.items():
            if path in checked:
                unreadable[path] = "one of its images cannot be read"
            elif snapshot.step <= newest_whole:
                unreadable[path] = "it appeared while the others were checked"
    for path, why in sorted(unreadable.items()):
        Code.SNAPSHOT_UNREADABLE.warn(
            f"old files stay: {path} may be needed, but {why}; it and the older files that may be "
            "needed instead stay until it can be read or you delete it",
        )
    return Inventory(
        spans=lineage(fences),
        snapshots=tuple(
            StoredSnapshot(
                incarnation,
                step,
                path,
                bytes=sum(file_bytes(file) for file in entries_of(path)),
                complete=path in whole,
                written_seconds=_written_seconds(path)
                if path in whole or path in unreadable
                else 0.0,
                unreadable=path in unreadable,
            )
            for incarnation, step, path in folder.snapshots()
        ),
        segments=tuple(
            StoredSegment(incarnation, rank, first, path, file_bytes(path))
            for incarnation, rank, first, path in folder.segments()
        ),
        bases=tuple(fence.last_of_parent for fence in beginning if fence.parent is not None),
    )


def carry_out(folder: RunFolder, run_id: str, plan: CollectionPlan) -> None:
    """Remove the files of a plan; a crash midway leaves nothing that looks like damage.

    Removed steps are recorded before they are deleted. A snapshot's manifests are deleted before
    its tensors, because a snapshot without manifests does not exist. On a full disk, snapshots go
    first: this makes room to record the differentials that are deleted afterwards.
    """
    if not plan.removals:
        return
    is_noted = True
    try:
        write_collected(folder, run_id, plan.collected)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        is_noted = False
    for removal in plan.removals:
        if removal.is_snapshot:
            _remove_snapshot(removal)
    if not is_noted:
        write_collected(folder, run_id, plan.collected)
    for removal in plan.removals:
        if not removal.is_snapshot:
            removal.path.unlink(missing_ok=True)
    _remove_unused_constants(folder)


def _remove_unused_constants(folder: RunFolder) -> None:
    """Remove frozen parameters that neither a snapshot nor the newest incarnation uses."""
    in_use = {incarnation for incarnation, _, _ in folder.snapshots()}
    fences = [(number, read_fence(path).constants) for number, _, path in folder.fences()]
    newest = max((number for number, _ in fences), default=-1)
    needed = {found for number, found in fences if number in in_use or number >= newest}
    for content_hash, path in folder.all_constants():
        if content_hash not in needed:
            path.unlink(missing_ok=True)


def _remove_snapshot(removal: Removal) -> None:
    with contextlib.suppress(FileNotFoundError):  # another rank's writer may remove it as well
        for manifest in RunFolder.manifests(removal.path):
            manifest.unlink(missing_ok=True)
        fsync_directory(removal.path)  # after a power failure, manifests alone must not reappear
        remove_folder(removal.path)


def _has_lengths(snapshot: SnapshotSet) -> bool:
    return all(
        file_bytes(shard_file(snapshot.folder, manifest.rank)) == manifest.bytes
        for manifest in snapshot.manifests
    )


def passes(snapshot: SnapshotSet) -> bool | None:
    """Return whether all images have their lengths and checksums; None if one cannot be read."""
    if not _has_lengths(snapshot):
        return False
    try:
        for manifest in snapshot.manifests:
            check_shard(snapshot.folder, manifest)
    except DamagedFile as error:
        return None if error.is_unreadable else False
    return True


def _written_seconds(snapshot: Path) -> float:
    """Return when the last manifest was written; 0 if manifests are being removed."""
    with contextlib.suppress(FileNotFoundError):
        return max((f.stat().st_mtime for f in RunFolder.manifests(snapshot)), default=0.0)
    return 0.0
