"""Decide which staging folders of dead runs may go, and remove them."""

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
from lowdiff.persistence.retention.collect import passes
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Collected, read_journal
from lowdiff.persistence.run.owner import Owner, is_known, staging_of_run
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import (
    WriterStatus,
    holds_state,
    read_status,
    state_step,
)


@dataclass(frozen=True, slots=True)
class StagingVerdict:
    """Decision about one staging folder.

    Attributes:
        run: Run folder that the staging folder belongs to, if it names one.
        goes: Whether removing the folder loses nothing.
        is_in_use: Whether a trainer or a writer holds the folder; then it always stays.
        reason: Why the folder goes or stays.
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
        staging_root: Folder of all runs' staging folders.
        run: Judge only staging folders of this run folder, which may be deleted by now; None for
            all.
        force: Also remove folders whose steps are nowhere else, but never folders in use.
        dry_run: Only return the decisions.

    Raises:
        NotARun: If ``run`` is no run folder, and no staging folder was made for a run there.
    """
    stages = StagingFolder.all(staging_root)
    for stage in stages if run is None else _made_for(run, list(stages), staging_root):
        with ExitStack() as held:
            try:
                verdict = _judge(stage, held)
            except FileNotFoundError:
                if stage.root.exists():
                    raise
                continue  # the run's next incarnation has adopted the folder
            if force and not verdict.goes and not verdict.is_in_use:
                verdict = _verdict(stage, f"forced, although {verdict.reason}", goes=True)
            if verdict.goes and not dry_run:
                stage.remove()
        if verdict.goes and not dry_run:
            stage.sweep()  # open lock files may have kept the folder
        yield verdict


def _made_for(
    run: Path, stages: Sequence[StagingFolder], staging_root: Path
) -> list[StagingFolder]:
    """Return the staging folders that name a run folder, or that have its run id."""
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
    """Decide about a folder; one that may go stays locked for as long as ``held`` lasts."""
    paths = [stage.trainer_lock, stage.writer_lock]
    if holds_state(stage):
        paths += stage.state_locks
    for lock in map(FileLock, paths):
        if not lock.acquire(f"process {os.getpid()}, clearing staging memory", is_guest=True):
            return _verdict(stage, f"in use by {lock.holder()}", is_in_use=True)
        held.callback(lock.release)
    steps: set[int] = set()
    try:
        # A folder that may hold a step stays.
        for _, record in staged_records(stage, check=False, must_read=True):
            if record.header.kind is RecordKind.DIFFERENTIAL:
                steps.add(record.header.step)
    except StorageError as error:
        return _verdict(stage, f"it may hold steps, but {error}")
    steps.add(state_step(stage))
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
            f"{owner.run} has gone on without incarnation {stage.incarnation} or is another run now"
        )
    except (LowDiffError, OSError) as error:
        is_of_run, left = False, steps
        why = f"{owner.run} does not tell ({error}); was it moved or deleted, or is it not mounted?"
    if not is_of_run:
        return _verdict(stage, f"{_range(steps)} may be here only: {why}")
    if not left:
        return _verdict(stage, f"its steps are all in {owner.run}", goes=True)
    return _verdict(stage, f"{_range(left)} are here only; the next attach goes on from them")


def _left(folder: RunFolder, stage: StagingFolder, steps: Collection[int]) -> Collection[int]:
    """Return those of a staging folder's steps that would be lost with the folder."""
    if not holds_state(stage):
        return only_staged(folder, stage, steps)
    # A state in memory is durable only in snapshots of this or of a later incarnation.
    found = reversed(complete_snapshots(folder, stage.run_id))
    newer = (s for s in found if s.incarnation >= stage.incarnation)
    durable = next((s.step for s in newer if passes(s)), -1)
    return [] if durable >= max(steps) else range(max(durable + 1, min(steps)), max(steps) + 1)


def only_staged(folder: RunFolder, stage: StagingFolder, steps: Collection[int]) -> list[int]:
    """Return a log's steps that are in no segment and that retention has not removed, ascending.

    The end of the newest segment does not suffice: an earlier segment may be damaged, or was not
    fetched from a store because its steps were here. Steps found in a segment are durable on
    return.
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
    # Read retention.json after the segments: retention records a removal before it deletes.
    collected = Collected()
    with suppress(DamagedFile):  # then steps that retention has removed are kept once more
        collected = read_journal(folder, stage.run_id).collected if missing else collected
    return sorted(step for step in missing if not collected.holds(stage.incarnation, step))


def _segments_around(
    folder: RunFolder, stage: StagingFolder, steps: Collection[int]
) -> Iterator[Path]:
    """Yield a log's segments that may hold some of the steps, by their own and the next first step."""
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
    """Return the steps that can be read from a segment; they are durable on return.

    Args:
        path: The segment.
        stage: Staging folder whose log holds the steps.
        wanted: The steps to look for.
        doubtful: Steps that may not be durable where they are found.
    """
    steps: set[int] = set()
    again: list[RecordRef] = []
    # A dead writer's torn first record, a bad disk, or a removal by retention.
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
