"""Listing a run's segments: by their index where it fits the files, else by reading them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.framing import HEADER_BYTES
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.records import RankRecords, Stretch, stretches_of
from lowdiff.persistence.segment_file import SegmentFile
from lowdiff.persistence.segment_index import (
    Sealed,
    is_worth_remembering,
    read_index,
    write_index,
)

#: A file that was changed so recently might be changed again without a later time to show for it.
_SETTLED_NS = 2_000_000_000


def add_segments(
    folder: RunFolder,
    run_id: str,
    records_of: Callable[[int, int], RankRecords],
    damage: list[DamagedFile],
    *,
    use_index: bool,
) -> None:
    """List what a run's segments hold, and keep the index where that saves the next reader much.

    Args:
        folder: The run.
        run_id: Its identity.
        records_of: ``(incarnation, rank)`` -> where to add what is found.
        damage: Gets what fails a check.
        use_index: Whether to believe the index of what it fits, and to write one; otherwise every
            byte is read, and none written.
    """
    for rank, path in folder.segment_folders():
        known = read_index(path, run_id, rank) if use_index else {}
        fits: list[Sealed] = []
        fresh: list[Sealed] = []
        for incarnation, first, name, status in folder.segment_files(path):
            sealed = known.get((incarnation, first))
            if sealed is not None and _fits(sealed, status):
                fits.append(sealed)
                records_of(incarnation, rank).add(_claimed(sealed, path, name))
                continue
            segment = path / name
            try:
                file = SegmentFile(segment)
                header = file.header
                if (header.run_id, header.incarnation, header.rank) != (run_id, incarnation, rank):
                    raise DamagedFile(segment, "it belongs to another run, incarnation or rank")
                stretches = stretches_of(file)
            except FileNotFoundError:
                continue  # a live run's retention was faster
            except DamagedFile as error:
                damage.append(error)
                continue
            for stretch in stretches:
                records_of(incarnation, rank).add(stretch)
            if file.end < file.size:
                what = f"{file.size - file.end} bytes are no record"
                damage.append(DamagedFile(segment, what, offset=file.end))
            fresh += _sealed(file, incarnation, first, stretches)
        if use_index and is_worth_remembering(fresh):
            write_index(path, run_id, rank, [*fits, *fresh])


def _fits(sealed: Sealed, status: os.stat_result) -> bool:
    return (sealed.bytes, sealed.mtime_ns) == (status.st_size, status.st_mtime_ns)


def _claimed(sealed: Sealed, folder: Path, name: str) -> Stretch:
    size = sealed.bytes - HEADER_BYTES
    return Stretch(sealed.first, sealed.last, folder, name, size, sealed.rebases, is_claimed=True)


def _sealed(
    file: SegmentFile, incarnation: int, first: int, stretches: list[Stretch]
) -> Iterator[Sealed]:
    """The file as an entry of the index, if it is whole and at rest, and one sequence of steps."""
    is_settled = time.time_ns() - file.mtime_ns > _SETTLED_NS
    if is_settled and file.end == file.size and len(stretches) == 1:
        (found,) = stretches
        if found.first == first and found.bytes == file.size - HEADER_BYTES:
            yield Sealed(incarnation, first, found.last, file.size, file.mtime_ns, found.rebases)
