"""What dead runs left on tmpfs, and which of it may go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lowdiff.errors import LowDiffError, NotARun
from lowdiff.persistence.catalog import complete_snapshots, last_segment
from lowdiff.persistence.fences import read_run_id
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.ownership import Owner
from lowdiff.persistence.paths import RunFolder, StagingFolder, file_bytes
from lowdiff.persistence.replica_status import has_replica, read_replica_status
from lowdiff.persistence.staging import staged_records


@dataclass(frozen=True, slots=True)
class StagingVerdict:
    """What is to become of one staging folder.

    Attributes:
        run: The run folder it is for, if it says so.
        goes: Whether nothing is lost with it.
        is_in_use: Whether a trainer or a writer holds it: then it stays, come what may.
        reason: Why it goes or stays.
    """

    path: Path
    run: str | None
    bytes: int
    goes: bool
    is_in_use: bool
    reason: str


def clear_staging(
    staging_root: Path, *, force: bool = False, dry_run: bool = False
) -> Iterator[StagingVerdict]:
    """Judge every staging folder on this machine, and remove what may go.

    Args:
        staging_root: Where staging folders of all runs live.
        force: Remove also what holds steps that are nowhere else. Never what is in use.
        dry_run: Only say what would be done.
    """
    for stage in StagingFolder.all(staging_root):
        with ExitStack() as held:
            try:
                verdict = _judge(stage, held)
            except FileNotFoundError:
                if stage.root.exists():
                    raise
                continue  # the run's next life has adopted it
            if force and not verdict.goes and not verdict.is_in_use:
                verdict = _verdict(stage, f"forced, although {verdict.reason}", goes=True)
            if verdict.goes and not dry_run:
                stage.remove()
        yield verdict


def _judge(stage: StagingFolder, held: ExitStack) -> StagingVerdict:
    """Decide; a folder that may go is locked for as long as ``held`` lasts."""
    paths = [stage.trainer_lock, stage.writer_lock]
    if has_replica(stage):
        paths.append(stage.replica_lock)
    for lock in map(FileLock, paths):
        if not lock.acquire(f"process {os.getpid()}, clearing staging memory"):
            return _verdict(stage, f"in use by {lock.holder()}", is_in_use=True)
        held.callback(lock.release)
    steps = [
        record.header.step
        for _, record in staged_records(stage, check=False)  # what may hold a step stays
        if record.header.kind is RecordKind.DIFFERENTIAL
    ]
    if has_replica(stage):
        steps.append(read_replica_status(stage.replica_status).step)
    if max(steps, default=-1) < 0:
        return _verdict(stage, "it holds no step", goes=True)
    owner = Owner.read(stage)
    if owner is None:
        return _verdict(stage, f"step {max(steps)} may be here only: no run is named")
    folder = RunFolder(Path(owner.run))
    try:
        if read_run_id(folder) != stage.run_id:
            return _verdict(stage, f"{owner.run} is another run now", goes=True)
    except NotARun:
        if _is_surely_gone(owner):
            return _verdict(stage, f"{owner.run} is gone", goes=True)
        return _verdict(stage, f"{owner.run} is not there; is its file system mounted?")
    except (LowDiffError, OSError) as error:
        return _verdict(stage, f"the run cannot be read: {error}")
    found = last_segment(folder, stage.incarnation, stage.rank)
    durable = -1 if found is None else found[1]
    if has_replica(stage):
        # Its steps are durable only in snapshots, of this life or of one that went on from it.
        found_there = complete_snapshots(folder, stage.run_id)
        durable = max(
            (s.step for s in found_there if s.incarnation >= stage.incarnation), default=-1
        )
    if durable >= max(steps):
        return _verdict(stage, f"its steps are all in {owner.run}", goes=True)
    first = max(durable + 1, min(steps))
    return _verdict(
        stage, f"steps {first} to {max(steps)} are here only; the next attach moves them"
    )


def _is_surely_gone(owner: Owner) -> bool:
    """Whether a run folder was deleted: its parent is there, on the same file system."""
    try:
        return Path(owner.run).parent.stat().st_dev == owner.run_place[0]
    except (OSError, IndexError):
        return False


def _verdict(
    stage: StagingFolder, reason: str, *, goes: bool = False, is_in_use: bool = False
) -> StagingVerdict:
    owner = Owner.read(stage)
    size = sum(map(file_bytes, stage.root.iterdir()))
    return StagingVerdict(
        stage.root, None if owner is None else owner.run, size, goes, is_in_use, reason
    )
