"""Differentials of one rank in one incarnation: which steps exist, and each record on demand.

For segments, only stretches of steps are kept in memory, so memory does not grow with the number of
differentials. Steps that a footer lists are read and their checksums compared before they are used.
If they cannot be read, the segment is listed again by its records. The same holds for a step in a
replica's queue, of which only the header was read: if its record is torn, the step is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.framing import HEADER_BYTES, RecordKind, RecordRef, StoredRecord
from lowdiff.persistence.format.segment_file import SegmentFile


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps in one segment.

    Attributes:
        first: First step.
        last: Last step, inclusive.
        owner: Run, incarnation and rank of the segment.
        bytes: Bytes of these records with framing; None if not counted.
        rebases: Steps that cannot be replayed, ascending.
        by_footer: Whether only the footer lists these steps; the records were not read.
    """

    first: int
    last: int
    path: Path
    owner: tuple[str, int, int]
    bytes: int | None
    rebases: tuple[int, ...]
    by_footer: bool

    def part(self, first: int, last: int) -> Stretch:
        """Return a part of these steps."""
        if (first, last) == (self.first, self.last):
            return self
        inside = tuple(step for step in self.rebases if first <= step <= last)
        return replace(self, first=first, last=last, bytes=None, rebases=inside)


def list_segment(
    path: Path, owner: tuple[str, int, int], *, check: bool
) -> tuple[list[Stretch], DamagedFile | None]:
    """List the records of a segment, and report other bytes in it as damage.

    Args:
        path: The segment.
        owner: Run, incarnation and rank that the segment must have.
        check: Whether to read also a sealed segment and compare every checksum.

    Raises:
        FileNotFoundError: If the segment does not exist.
        DamagedFile: If its header is damaged or belongs to another owner.
    """
    file = SegmentFile(path)
    if file.header.owner != owner:
        raise DamagedFile(path, "it belongs to another run, incarnation or rank")
    footer = None if check else file.footer
    if footer is None:
        return list(_read(file, owner)), file.damage()
    first, size = file.header.sequence, footer.end - HEADER_BYTES
    last = first + len(footer.offsets) - 1
    return [Stretch(first, last, path, owner, size, tuple(footer.rebases), True)], None


def _read(file: SegmentFile, owner: tuple[str, int, int]) -> Iterator[Stretch]:
    """Yield everything that a segment holds, reading it to its end."""
    size, first, last = 0, -1, -1
    rebases: list[int] = []
    while True:
        record = file.next()
        if first >= 0 and (record is None or record.header.step != last + 1):
            yield Stretch(first, last, file.path, owner, size, tuple(rebases), False)
            size, first, rebases = 0, -1, []
        if record is None:
            return
        if record.header.kind is RecordKind.DIFFERENTIAL:
            last = record.header.step
            first = last if first < 0 else first
            size += record.end - record.offset
            rebases += [last] if record.header.rebases else []


class RankRecords(Mapping[int, StoredRecord]):
    """Step -> record, in ascending order; reading one may raise `DamagedFile`. One thread at a time.

    The BASE record of an incarnation is stored under its base step. Large because it is a mapping, which
    has many methods, over records of three places.
    """

    def __init__(self, damage: list[DamagedFile] | None = None) -> None:
        """Begin without records.

        Args:
            damage: List that receives records found damaged when they are read.
        """
        self._damage = [] if damage is None else damage
        self._staged: dict[int, StoredRecord] = {}
        self._intact: set[int] = set()  # staged steps whose checksum was compared
        self._listed: list[Stretch] = []
        self._stretches: list[Stretch] = []  # without steps that an earlier stretch has
        self._ranges: list[tuple[int, int]] | None = None
        self._rebases: list[int] | None = None
        self._open: SegmentFile | None = None
        self._confirmed: dict[tuple[Path, int], int] = {}

    def stage(self, found: StoredRecord, *, is_checked: bool) -> None:
        """Add a record from staging, unless its step is there; add staging before segments.

        Args:
            found: The record.
            is_checked: Whether its body was compared with its checksum.
        """
        step = found.record.header.step
        if step not in self._staged or not self._is_intact(step):
            self._staged[step] = found
            if is_checked:
                self._intact.add(step)
        self._ranges = self._rebases = None

    def add(self, stretch: Stretch) -> None:
        """Add those steps of a segment that no other segment has."""
        self._listed.append(stretch)
        self._insert(stretch)
        self._ranges = self._rebases = None

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and (
            step in self._staged or next(self._overlapping(step, step), None) is not None
        )

    def __getitem__(self, step: int) -> StoredRecord:
        staged = self._staged.get(step)
        if staged is not None and self._is_intact(step):
            return staged
        stretch = next(self._overlapping(step, step), None)
        if stretch is None and staged is not None:
            raise DamagedFile(staged.path, f"step {step} fails its checksum")
        if stretch is None:
            raise KeyError(step)
        record = self._record(stretch, step)
        if record is None:
            raise DamagedFile(stretch.path, f"step {step} should be in it and is not")
        return StoredRecord(record, stretch.path, may_change=False)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Return unbroken ranges of steps, ends included, ascending."""
        if self._ranges is None:
            staged = ((step, step) for step in self._staged)
            self._ranges = joined([*((s.first, s.last) for s in self._stretches), *staged])
        return self._ranges

    @property
    def newest(self) -> int:
        """Return the last step; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def begins(self) -> int | None:
        """Return the step that the first differential begins from; None without records."""
        if not self.ranges:
            return None
        first = self.ranges[0][0]
        staged = self._staged.get(first)
        is_base = staged is not None and staged.record.header.kind is RecordKind.BASE
        return first if is_base else first - 1

    @property
    def num_differentials(self) -> int:
        """Return the number of steps without the base."""
        kinds = (found.record.header.kind for found in self._staged.values())
        return len(self) - sum(kind is not RecordKind.DIFFERENTIAL for kind in kinds)

    def unbroken(self, step: int) -> int:
        """Return the last step of the unbroken sequence after ``step``; ``step`` if there is none."""
        index = bisect_right(self.ranges, (step + 1, 1 << 63)) - 1
        return max(step, self.ranges[index][1]) if index >= 0 else step

    def rebases(self, first: int, last: int) -> list[int]:
        """Return the steps from ``first`` to ``last`` that cannot be replayed, ascending."""
        if self._rebases is None:
            own = {step for step, found in self._staged.items() if found.record.header.rebases}
            there = {step for s in self._stretches for step in s.rebases}
            self._rebases = sorted(own | (there - self._staged.keys()))
        start, stop = bisect_left(self._rebases, first), bisect_right(self._rebases, last)
        return self._rebases[start:stop]

    def only_staged(self, first: int, last: int) -> set[int]:
        """Return the steps from ``first`` to ``last`` that are in no segment."""
        within = (step for step in self._staged if first <= step <= last)
        return {step for step in within if next(self._overlapping(step, step), None) is None}

    def framed_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the records from ``first`` to ``last``, preferably as in segments."""
        total = sum(self._staged[step].framed_bytes for step in self.only_staged(first, last))
        for stretch in list(self._overlapping(first, last)):
            part = stretch.part(max(first, stretch.first), min(last, stretch.last))
            if part.bytes is not None:
                total += part.bytes
            else:
                found = (self._record(part, step) for step in range(part.first, part.last + 1))
                total += sum(r.end - r.offset for r in found if r is not None)
        return total

    def confirm(self, first: int, last: int) -> bool:
        """Read the steps from ``first`` to ``last`` that are known only from footers and headers.

        Returns:
            Whether all are there. Missing steps are not listed any more.
        """
        staged = [step for step in self._staged if first <= step <= last]
        torn = [step for step in staged if not self._is_intact(step)]
        for stretch in list(self._overlapping(first, last)):
            stop, key = min(last, stretch.last), (stretch.path, stretch.first)
            # A segment that a live run's retention removed is noticed when one of its steps is
            # read.
            is_new = stretch.by_footer and self._confirmed.get(key, -1) < stop
            if is_new and stretch.path.exists():
                if not self._holds(stretch, stop):
                    self._read_again(stretch)
                    return False
                self._confirmed[key] = stop
        return not torn

    def _holds(self, stretch: Stretch, last: int) -> bool:
        """Return whether a segment holds the steps of a stretch up to ``last``."""
        rebases = set(stretch.rebases)
        for step in range(stretch.first, last + 1):
            record = self._record(stretch, step)
            if record is None or record.header.rebases != (step in rebases):
                return False
        return True

    def _read_again(self, wrong: Stretch) -> None:
        """List the readable records of a segment whose footer lists more."""
        try:
            found, damage = list_segment(wrong.path, wrong.owner, check=True)
        except FileNotFoundError:
            return
        except DamagedFile as error:
            found, damage = [], error
        if damage is not None:
            self._damage.append(damage)
            Code.RECORD_DAMAGED.warn(damage)
        at = next(i for i, stretch in enumerate(self._listed) if stretch.path == wrong.path)
        self._listed[at : at + 1] = found
        self._stretches, self._ranges, self._rebases, self._open = [], None, None, None
        for stretch in self._listed:
            self._insert(stretch)

    def _is_intact(self, step: int) -> bool:
        """Return whether a staged record has its checksum; forget the record otherwise."""
        if step not in self._intact:
            found = self._staged[step]
            if not found.record.is_intact():
                del self._staged[step]
                self._ranges = self._rebases = None
                if found.path.exists():  # otherwise a live trainer has reused the memory
                    what = f"step {step} fails its checksum"
                    self._damage.append(DamagedFile(found.path, what, offset=found.record.offset))
                    Code.RECORD_DAMAGED.warn(self._damage[-1])
                return False
            self._intact.add(step)
        return True

    def _record(self, stretch: Stretch, step: int) -> RecordRef | None:
        """Read a step of a stretch from its segment; None if the step or the segment is gone."""
        try:
            if self._open is None or self._open.path != stretch.path:
                self._open = SegmentFile(stretch.path)
            found = self._open.record(step)
        except (DamagedFile, FileNotFoundError):
            return None
        return found if found and found.header.kind is RecordKind.DIFFERENTIAL else None

    def _overlapping(self, first: int, last: int) -> Iterator[Stretch]:
        index = bisect_left(self._stretches, first, key=lambda stretch: stretch.last)
        while index < len(self._stretches) and self._stretches[index].first <= last:
            yield self._stretches[index]
            index += 1

    def _insert(self, stretch: Stretch) -> None:
        """Insert those steps of a stretch that no other stretch has."""
        start = stretch.first
        for other in list(self._overlapping(stretch.first, stretch.last)):
            if start < other.first:
                insort(self._stretches, stretch.part(start, other.first - 1), key=_first)
            start = max(start, other.last + 1)
        if start <= stretch.last:
            insort(self._stretches, stretch.part(start, stretch.last), key=_first)


def _first(stretch: Stretch) -> int:
    return stretch.first


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges as unbroken ranges of steps, ends included, ascending."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def shared_ranges(
    ranks: Sequence[RankRecords], first: int, last: int = 1 << 63
) -> list[tuple[int, int]]:
    """Return the ranges of steps, from ``first`` to ``last``, of which every rank has a record."""
    found = [(first, last)]
    for records in ranks:
        found = [
            (max(a, c), min(b, d)) for a, b in found for c, d in records.ranges if a <= d and c <= b
        ]
    return found


def reach(ranks: Sequence[RankRecords], step: int, limit: int | None = None) -> int:
    """Return how far an unbroken sequence of replayable steps leads from ``step``.

    Args:
        ranks: Records of all ranks.
        step: Step where the sequence begins.
        limit: Last step of interest.
    """
    if not ranks:
        return step if limit is None else limit
    last = min(records.unbroken(step) for records in ranks)
    last = last if limit is None else min(last, limit)
    ends = [set(records.rebases(step + 1, last)) for records in ranks]
    return min(set.intersection(*ends), default=last + 1) - 1
