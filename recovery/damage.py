"""Tell the broken bytes of a run that cost steps from those that are only where a process died.

A writer that dies leaves a torn record at the end of its file, and that costs nothing: whoever
takes over writes the same steps again, or no rank had them committed on disk. A broken record with
good ones after it, or one that is whole in length and wrong in content, was once good.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    RECORD_MAGIC,
    FileHeader,
    RecordHeader,
    read_record,
    read_records,
    sound_end,
)
from lowdiff.persistence.format.image import was_removed
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.catalog import Catalog, complete_snapshots
from lowdiff.persistence.run.fences import read_fence
from lowdiff.persistence.staging.status import is_log
from lowdiff.recovery.plan import recoverable, spans_of, was_predicted

_RECORD_START = re.compile(RECORD_MAGIC)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a run.

    Attributes:
        message: One line.
        path: The file, if it is one file.
        offset: Byte in it where the trouble starts.
    """

    message: str
    path: str | None = None
    offset: int | None = None

    @classmethod
    def of(cls, error: DamagedFile, what: str | None = None) -> Finding:
        """An error as a finding, in other words if there are any."""
        where = "" if error.offset is None else f" at byte {error.offset}"
        return cls(
            f"{error.path} is damaged{where}: {what or error.what}", str(error.path), error.offset
        )


def judge(
    folder: RunFolder, catalog: Catalog, *, check_all: bool = False
) -> tuple[list[Finding], list[Finding]]:
    """Return what is damaged, and what only looks unfinished.

    Args:
        folder: The run's folder.
        catalog: All its tiers; damaged snapshots are found only if it was told to check them.
        check_all: Whether to read also what replicas were to apply.

    Returns:
        Failures and notes.
    """
    failures: list[Finding] = []
    notes: list[Finding] = []
    there = folder.segments() if catalog.damage else ()
    segments = {path: (number, rank, first) for number, rank, first, path in there}
    for error in catalog.damage:
        reason = None
        try:
            if was_removed(error.path):
                continue
            if error.path in segments:
                number, rank, first = segments[error.path]
                owner = catalog.run_id, number, rank
                now = _by_now(error, owner)
                if now is not None:
                    reason = _excuse(now, catalog, number, rank, first)
                    # Its bytes were read several times, and a live run's writer may have been at them.
                    now = now if reason else _by_now(now, owner)
                if now is None:
                    continue
                error = now
        except FileNotFoundError:
            continue  # a live run's retention was faster
        except (DamagedFile, OSError):
            pass  # the file cannot be read, or not even be asked for: that stays a failure
        if reason is not None:
            notes.append(Finding.of(error, f"it is cut short; no step is lost ({reason})"))
            continue
        failures.append(Finding.of(error))
    failures += _staging_damage(catalog, check_all=check_all)
    for number, path in _missing_fences(folder, catalog):
        if _left_something(catalog, number):
            failures.append(Finding(f"{path} is missing: incarnation {number} is lost", str(path)))
        else:
            notes.append(Finding(f"incarnation {number} died before it began: no {path}"))
    notes += _unfinished_snapshots(folder, catalog)
    return failures, notes


def refuse_unreadable_newest(catalog: Catalog) -> None:
    """Refuse to pass over the run's newest incarnation unasked, because its fence cannot be read.

    Raises:
        DamagedFile: Naming the fence, what is lost with it, and the ways out.
    """
    number = max(catalog.unreadable, default=-1)
    if number < max(catalog.incarnations, default=0):
        return
    folder = RunFolder(catalog.root)
    fences = {path for n, _, path in folder.fences() if n == number}
    error = next(error for error in catalog.damage if error.path in fences)
    own = {rank: records for (n, rank), records in catalog.records.items() if n == number}
    made = [snapshot.step for snapshot in catalog.snapshots if snapshot.incarnation == number]
    newest = max([*made, *(records.newest for records in own.values())], default=0)
    lost = f", of which there are some up to {newest}," if newest else ""
    older = max((last for _, last in recoverable(catalog)), default=None)
    way_out = "begin another run folder"
    if older is not None:
        way_out = f"give these steps up and go on from an older one by attach(..., step={older})"
    raise DamagedFile(
        error.path,
        f"{error.what}. It is of the run's newest incarnation, {number}: without it none of the steps "
        f"made there{lost} can be recovered. Put the file back from a copy of the run folder, from "
        f"the store, or from another rank's node; or {way_out}",
    ) from error.__cause__


def gap_after(catalog: Catalog, last: int) -> Finding | None:
    """Why replay does not lead beyond ``last``; None if that is no loss.

    It may end before a step that retention removed or a replica used up (LowDiff+), before one
    that only a snapshot leads to, and before lost ones in whose place a later one was predicted.
    """
    step = last + 1
    if was_predicted(catalog, step):
        return None
    owner = next((span for span in spans_of(catalog) if span.owns(step)), None)
    if owner is None:
        return Finding(f"step {step} belongs to no incarnation that can be read")
    number = owner.incarnation
    ranks = range(owner.world_size)
    lacking = next((rank for rank in ranks if step not in catalog.of(number, rank)), None)
    keeps_none = not catalog.incarnations[number].logs_steps
    if lacking is None or keeps_none or catalog.collected.holds(number, step):
        return None
    path, reason = _place_of(catalog, number, lacking, step)
    return Finding(f"step {step} of rank {lacking} is lost: {path} {reason}", str(path))


def lost_after(catalog: Catalog, last: int) -> Finding | None:
    """The step after the newest recoverable one, if a rank that lacks it has later ones."""
    step = last + 1
    is_missed = any(
        step not in records and records.newest > step
        for span in spans_of(catalog)
        if span.owns(step)
        for records in (catalog.of(span.incarnation, rank) for rank in range(span.world_size))
    )
    return gap_after(catalog, last) if is_missed else None


def _by_now(error: DamagedFile, owner: tuple[str, int, int]) -> DamagedFile | None:
    """Look again at a segment that a live run's writer may have been at; None if it is whole."""
    if error.offset is None:
        return error
    try:
        file = SegmentFile(error.path)
        now = file.damage()
    except DamagedFile:
        return error
    return now if file.header.owner == owner else error


def _excuse(error: DamagedFile, catalog: Catalog, number: int, rank: int, first: int) -> str | None:
    """Why a broken segment costs no step; None if it does."""
    file = SegmentFile(error.path) if error.offset else None
    if file is not None and file.damage() is not None and file.is_cut_in_footer:
        return "its writer died while it sealed the file, whose records can all be read"
    view = read_view(error.path)
    offset = error.offset or 0
    step = first
    if offset:
        header = FileHeader.unpack(view, error.path)
        step = max((r.header.step for r in read_records(view, header)), default=first - 1) + 1
        if next(_records_after(view, offset, header), None) is not None:
            return None
    if not _is_cut_short(view[offset:]):
        return None
    own = catalog.of(number, rank)
    if step in own:
        return f"step {step} is stored elsewhere too"
    spans = spans_of(catalog)
    if not any(span.incarnation == number and span.owns(step) for span in spans):
        return f"step {step} of incarnation {number} is void: a later one went on before it"
    newest = max((last for _, last in recoverable(catalog)), default=-1)
    if step <= newest or own.newest > step:
        return None
    return f"its writer died; the newest recoverable step is {newest}"


def _records_after(view: memoryview, offset: int, file: FileHeader) -> Iterator[int]:
    """Places beyond ``offset`` where a valid record of the file starts."""
    for match in _RECORD_START.finditer(view, offset + 1):
        if read_record(view, match.start(), file) is not None:
            yield match.start()


def _is_cut_short(rest: memoryview) -> bool:
    """Whether bytes look like an interrupted write: too few of them, or zeros towards the end."""
    data = bytes(rest)
    header = RecordHeader.unpack(data[:HEADER_BYTES])
    return (
        len(data) < HEADER_BYTES
        or not any(data[-HEADER_BYTES:])
        or (header is not None and HEADER_BYTES + header.body_bytes > len(data))
    )


def _staging_damage(catalog: Catalog, *, check_all: bool) -> Iterator[Finding]:
    """Staged records that fail their checksum and have good ones behind them.

    Of a copy only where the rank's own memory is gone: else nothing of it is needed.
    """
    there = {(stage.incarnation, stage.rank) for stage in catalog.staging}
    copies = [c for c in catalog.copies if (c.incarnation, c.rank) not in there]
    for stage in (*catalog.staging, *copies):
        if not (is_log(stage) or check_all):
            continue  # what of it is used is compared then
        for _, path in stage.chunks():
            view = None
            try:
                view = read_view(path)
                header = FileHeader.unpack(view, path)
            except FileNotFoundError:
                continue  # adopted by a new writer, or reused by a live trainer
            except DamagedFile as error:
                if view is None or any(view[:HEADER_BYTES]):
                    yield Finding.of(error)
                continue
            end = sound_end(view, header)
            # Between the looks a live trainer may have written on, or reused the chunk.
            if (
                _is_broken(view, end, header)
                and sound_end(view, header) == end
                and view[:HEADER_BYTES] == header.pack()
            ):
                what = "a record is broken that was whole once"
                yield Finding.of(DamagedFile(path, what, offset=end))


def _is_broken(view: memoryview, end: int, file: FileHeader) -> bool:
    """Whether what is no record was one: its header, written last, holds, or good ones follow."""
    header = RecordHeader.unpack(view[end : end + HEADER_BYTES])
    own = header is not None and (header.incarnation, header.rank, header.lap) == (
        file.incarnation,
        file.rank,
        file.sequence,
    )
    return own or next(_records_after(view, end, file), None) is not None


def _missing_fences(folder: RunFolder, catalog: Catalog) -> Iterator[tuple[int, Path]]:
    """Incarnations that do not count, because the fence of some rank is not there."""
    fences, damaged = list(folder.fences()), {error.path for error in catalog.damage}
    parents = (fence.parent for fence in catalog.incarnations.values())
    numbers = {*(number for number, _, _ in fences), *(number for number, _ in catalog.records)}
    for number in sorted(numbers.union(parent for parent in parents if parent is not None)):
        own = {rank: path for n, rank, path in fences if n == number}
        if number not in catalog.incarnations and not damaged.intersection(own.values()):
            world_size = read_fence(own[min(own)]).world_size if own else 1
            missing = next((rank for rank in range(world_size) if rank not in own), None)
            if missing is not None:
                yield number, folder.fence(number, missing)


def _left_something(catalog: Catalog, number: int) -> bool:
    """Whether an incarnation staged anything or was continued: its fences were once complete."""
    return (
        any(incarnation == number for incarnation, _ in catalog.records)
        or any(snapshot.incarnation == number for snapshot in catalog.snapshots)
        or any(fence.parent == number for fence in catalog.incarnations.values())
    )


def _unfinished_snapshots(folder: RunFolder, catalog: Catalog) -> Iterator[Finding]:
    # Those that a live run has completed by now were not before.
    seen = {s.folder for s in (*catalog.snapshots, *complete_snapshots(folder, catalog.run_id))}
    seen |= {error.path.parent for error in catalog.damage}
    for _, step, path in folder.snapshots():
        if path not in seen:
            yield Finding(f"{path} is not complete: it does not count as a snapshot of step {step}")


def _place_of(catalog: Catalog, number: int, rank: int, step: int) -> tuple[Path, str]:
    """Return the place of a missing differential, and what is wrong there."""
    folder = RunFolder(catalog.root)
    broken = [
        (first, path)
        for incarnation, owner, first, path in folder.segments()
        if (incarnation, owner) == (number, rank)
        and first <= step
        and any(error.path == path for error in catalog.damage)
    ]
    if broken:
        return max(broken)[1], "is damaged before it"
    return folder.segment(number, rank, step), "is missing"
