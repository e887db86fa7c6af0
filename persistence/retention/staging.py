"""What dead runs left on tmpfs, and which of it may go."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lowdiff.errors import DamagedFile, LowDiffError, NotARun, StorageError
from lowdiff.persistence.files.durable import fsync_directory
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder, entries_of, file_bytes
from lowdiff.persistence.format.framing import RecordKind, RecordRef
from lowdiff.persistence.format.segment_file import SegmentFile, make_durable
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Collected, read_notes
from lowdiff.persistence.run.owner import Owner, is_known, staging_of_run
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import ReplicaStatus, WriterStatus, has_replica, read_status


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
    staging_root: Path, *, run: Path | None = None, force: bool = False, dry_run: bool = False
) -> Iterator[StagingVerdict]:
    """Judge staging folders on this machine, and remove what may go.

    Args:
        staging_root: Where staging folders of all runs live.
        run: Only those of this run folder, which may be deleted by now; None for all.
        force: Remove also what holds steps that are nowhere else. Never what is in use.
        dry_run: Only say what would be done.

    Raises:
        NotARun: If ``run`` is no run folder, and no staging folder was made for one there.
    """
    stages = StagingFolder.all(staging_root)
    for stage in stages if run is None else _made_for(run, list(stages), staging_root):
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
        if verdict.goes and not dry_run:
            stage.sweep()  # the locks may have kept it
        yield verdict


def _made_for(
    run: Path, stages: Sequence[StagingFolder], staging_root: Path
) -> list[StagingFolder]:
    """Those that name a run folder, and those that its run id tells."""
    folder, place = RunFolder(run), os.path.realpath(run)
    named = {s.root for s in stages if (owner := Owner.read(s)) and owner.run == place}
    try:
        known = staging_of_run(staging_root, folder, read_run_id(folder))
    except NotARun:
        if not named:
            raise
        known = []
    named |= {stage.root for stage in known}
    return [stage for stage in stages if stage.root in named]


def _judge(stage: StagingFolder, held: ExitStack) -> StagingVerdict:
    """Decide; a folder that may go is locked for as long as ``held`` lasts."""
    paths = [stage.trainer_lock, stage.writer_lock]
    if has_replica(stage):
        paths.append(stage.replica_lock)
    for lock in map(FileLock, paths):
        if not lock.acquire(f"process {os.getpid()}, clearing staging memory"):
            return _verdict(stage, f"in use by {lock.holder()}", is_in_use=True)
        held.callback(lock.release)
    steps: set[int] = set()
    try:
        # What may hold a step stays.
        for _, record in staged_records(stage, check=False, must_read=True):
            if record.header.kind is RecordKind.DIFFERENTIAL:
                steps.add(record.header.step)
    except StorageError as error:
        return _verdict(stage, f"it may hold steps, but {error}")
    if has_replica(stage):
        steps.add(read_status(stage.replica_status, ReplicaStatus).step)
        steps.discard(-1)
    if not steps:
        return _verdict(stage, "it holds no step", goes=True)
    owner = Owner.read(stage)
    if owner is None:
        return _verdict(stage, f"step {max(steps)} may be here only: no run is named")
    folder = RunFolder(Path(owner.run))
    try:
        is_of_run = read_run_id(folder) == stage.run_id and is_known(stage, folder)
        left = _left(folder, stage, steps) if is_of_run else steps
        why = (
            f"{owner.run} has gone on without this life {stage.incarnation}, or is another run now"
        )
    except (LowDiffError, OSError) as error:
        is_of_run, left = False, steps
        why = f"{owner.run} does not tell ({error}); was it moved or deleted, or is it not mounted?"
    if not is_of_run:
        return _verdict(stage, f"{_range(steps)} may be here only: {why}")
    if not left:
        return _verdict(stage, f"its steps are all in {owner.run}", goes=True)
    return _verdict(stage, f"{_range(left)} are here only; the next attach moves them")


def _left(folder: RunFolder, stage: StagingFolder, steps: Collection[int]) -> Collection[int]:
    """Those of a folder's steps that would be lost with it."""
    if not has_replica(stage):
        return only_staged(folder, stage, steps)
    # Its steps are durable only in snapshots, of this life or of one that went on from it.
    found = complete_snapshots(folder, stage.run_id)
    durable = max((s.step for s in found if s.incarnation >= stage.incarnation), default=-1)
    return [] if durable >= max(steps) else range(max(durable + 1, min(steps)), max(steps) + 1)


def only_staged(folder: RunFolder, stage: StagingFolder, steps: Collection[int]) -> list[int]:
    """Those of a log's steps that are in no segment and that retention has not removed, ascending.

    The newest segment's end says little: one before it may be damaged, or may never have been
    fetched from a store, because the step was here. What is found there is durable on return.
    """
    missing, said = set(steps), read_status(stage.status, WriterStatus).durable_step
    doubtful = {step for step in steps if step > said}
    found = False
    for path in _segments_around(folder, stage, steps):
        there = _made_durable(path, stage, missing, doubtful)
        missing -= there
        found |= bool(there)
    if found:
        fsync_directory(folder.segments_of(stage.rank))
    # Read after the segments: retention says what it is about to remove before it does.
    collected = Collected()
    with suppress(DamagedFile):  # then what it has removed is kept once more
        collected = read_notes(folder, stage.run_id).collected if missing else collected
    return sorted(step for step in missing if not collected.holds(stage.incarnation, step))


def _segments_around(
    folder: RunFolder, stage: StagingFolder, steps: Collection[int]
) -> Iterator[Path]:
    """Segments of a log that may hold one of some steps, by where each and the next begin."""
    own = [
        (first, path)
        for number, _, first, path in folder.segments(lambda rank: rank == stage.rank)
        if number == stage.incarnation
    ]
    for (first, path), (after, _) in pairwise([*own, (max(steps, default=0) + 1, Path())]):
        if first <= max(steps, default=-1) and after > min(steps, default=0):
            yield path


def _made_durable(
    path: Path, stage: StagingFolder, wanted: Collection[int], doubtful: Collection[int]
) -> set[int]:
    """Those of some steps that can be read of a segment; they are durable on return.

    Args:
        path: The segment.
        stage: The log whose steps they are.
        wanted: The steps.
        doubtful: Steps of which nobody knows that they are durable where they are found.
    """
    steps: set[int] = set()
    again: list[RecordRef] = []
    # A dead writer's first, torn record; a bad disk; or retention was faster.
    with suppress(DamagedFile, FileNotFoundError):
        file = SegmentFile(path)
        owner = stage.run_id, stage.incarnation, stage.rank
        while file.header.owner == owner and (record := file.next()):
            if record.header.step in wanted:
                steps.add(record.header.step)
                again += [record] if record.header.step in doubtful else []
    if steps:
        try:
            make_durable(path, file.header, again)
        except FileNotFoundError:
            steps.clear()
    return steps


def _range(steps: Collection[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}"


def _verdict(
    stage: StagingFolder, reason: str, *, goes: bool = False, is_in_use: bool = False
) -> StagingVerdict:
    owner = Owner.read(stage)
    size = sum(map(file_bytes, entries_of(stage.root)))
    return StagingVerdict(
        stage.root, None if owner is None else owner.run, size, goes, is_in_use, reason
    )
