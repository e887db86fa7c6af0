"""Listing a run's segments: by their index where it fits the files, else by reading them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.events import printable
from lowdiff.persistence.framing import HEADER_BYTES, RecordKind
from lowdiff.persistence.paths import RunFolder, segment_numbers
from lowdiff.persistence.records import RankRecords, SegmentHome, Stretch
from lowdiff.persistence.segment_file import SegmentFile
from lowdiff.persistence.segment_index import (
    Sealed,
    forget_index,
    is_worth_remembering,
    read_index,
    write_index,
)

_logger = logging.getLogger(__name__)

#: A file that was changed so recently might be changed again without a later time to show for it.
_SETTLED_NS = 2_000_000_000


def add_segments(
    folder: RunFolder,
    run_id: str,
    records: MutableMapping[tuple[int, int], RankRecords],
    damage: list[DamagedFile],
    *,
    use_index: bool,
) -> None:
    """List what a run's segments hold, and keep the index where that saves the next reader much.

    Args:
        folder: The run.
        run_id: Its identity.
        records: ``(incarnation, rank)`` -> where to add what is found, now and whenever the index
            turns out to be wrong.
        damage: Gets what fails a check, likewise.
        use_index: Whether to believe the index of what it fits, and to write one; otherwise every
            byte is read, and none written.
    """
    for rank, path in folder.segment_folders():
        _RankSegments(path, run_id, rank, records, damage).add(use_index=use_index)


@dataclass(frozen=True, slots=True)
class _RankSegments:
    """One rank's segments, and where what they hold is listed."""

    path: Path
    run_id: str
    rank: int
    records: MutableMapping[tuple[int, int], RankRecords]
    damage: list[DamagedFile]

    def open(self, name: str) -> SegmentFile:
        """One of them, by its name.

        Raises:
            FileNotFoundError: If it is not there.
            DamagedFile: If its header is damaged, or is another's.
        """
        file = SegmentFile(self.path / name)
        incarnation, _ = segment_numbers(name)
        if file.header.owner != (self.run_id, incarnation, self.rank):
            raise DamagedFile(file.path, "it belongs to another run, incarnation or rank")
        return file

    def add(self, *, use_index: bool) -> None:
        """List what they hold."""
        there = list(RunFolder.segment_files(self.path))
        known = read_index(self.path, self.run_id, self.rank, len(there)) if use_index else {}
        fits: list[Sealed] = []
        fresh: list[Sealed] = []
        for incarnation, first, entry in there:
            sealed = known.get((incarnation, first))
            try:
                if sealed is not None and _fits(sealed, entry.stat(follow_symlinks=False)):
                    fits.append(sealed)
                    self._add(incarnation, self._claimed(sealed, entry.name))
                    continue
                file = self.open(entry.name)
                stretches = _stretches_of(file, self)
            except FileNotFoundError:
                continue  # a live run's retention was faster
            except DamagedFile as error:
                self.damage.append(error)
                continue
            for stretch in stretches:
                self._add(incarnation, stretch)
            damage = file.damage()
            if damage is not None:
                self.damage.append(damage)
            fresh += _sealed(file, incarnation, first, stretches)
        if use_index and is_worth_remembering(fresh):
            write_index(self.path, self.run_id, self.rank, [*fits, *fresh])

    def read_all(self) -> None:
        """List what they hold without the index, which is wrong, and goes."""
        what = (
            "the segments in %s do not hold what their index says: it is removed, and all are read"
        )
        _logger.warning(what, self.path)
        forget_index(self.path)
        for (_, rank), own in self.records.items():
            if rank == self.rank:
                own.forget_segments()
        known = [error for error in self.damage if error.path.parent == self.path]
        self.damage[:] = [error for error in self.damage if error.path.parent != self.path]
        start = len(self.damage)
        self.add(use_index=False)
        said = {(error.path, error.offset) for error in known}
        for error in self.damage[start:]:
            if (error.path, error.offset) not in said:
                _logger.warning("%s", printable(str(error)))

    def _add(self, incarnation: int, stretch: Stretch) -> None:
        self.records.setdefault((incarnation, self.rank), RankRecords()).add(stretch)

    def _claimed(self, sealed: Sealed, name: str) -> Stretch:
        size = sealed.bytes - HEADER_BYTES - sealed.footer_bytes
        return Stretch(sealed.first, sealed.last, self, name, size, sealed.rebases, sealed)


def _fits(sealed: Sealed, status: os.stat_result) -> bool:
    return (sealed.bytes, sealed.mtime_ns) == (status.st_size, status.st_mtime_ns)


def _stretches_of(file: SegmentFile, home: SegmentHome) -> list[Stretch]:
    """Everything that a segment holds; reads it to its end."""
    found: list[Stretch] = []
    size = 0
    rebases: list[int] = []
    first = last = -1

    def finish() -> None:
        if first >= 0:
            found.append(Stretch(first, last, home, file.path.name, size, tuple(rebases)))

    while (record := file.next()) is not None:
        header = record.header
        if header.kind is not RecordKind.DIFFERENTIAL:
            continue
        if first < 0 or header.step != last + 1:
            finish()
            first, size, rebases = header.step, 0, []
        last = header.step
        size += record.end - record.offset
        if header.rebases:
            rebases.append(last)
    finish()
    return found


def _sealed(
    file: SegmentFile, incarnation: int, first: int, stretches: list[Stretch]
) -> Iterator[Sealed]:
    """The file as an entry of the index, if it is sealed, whole and at rest."""
    is_settled = time.time_ns() - file.mtime_ns > _SETTLED_NS
    if is_settled and file.trailer is not None and len(stretches) == 1 and file.damage() is None:
        (found,) = stretches
        if found.first == first and found.bytes == file.end - HEADER_BYTES:
            yield Sealed(incarnation, first, found.last, file.size, file.mtime_ns, found.rebases)
