"""One rank's differentials of one incarnation: which steps there are, and each when it is wanted.

Of segments only the stretches of steps are kept, so that what is in memory does not grow with the
number of differentials. What a footer lists is read, and its checksums compared, before anything is
made of it; where it cannot be read, what the segment does hold is listed in its place. So it is with a
step that a replica was to apply, of which only the header was read: torn, it is listed no more.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowdiff.core.events import Code, printable, warn
from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.framing import HEADER_BYTES, RecordKind, RecordRef, StoredRecord
from lowdiff.persistence.format.segment_file import SegmentFile

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps in one segment.

    Attributes:
        first: First step.
        last: Last step, inclusive.
        owner: Run, incarnation and rank whose segment it is.
        bytes: Of these records, framing included; None if nobody has counted.
        rebases: Those that cannot be replayed, ascending.
        by_footer: Whether only a footer says so: the records were not read.
    """

    first: int
    last: int
    path: Path
    owner: tuple[str, int, int]
    bytes: int | None
    rebases: tuple[int, ...]
    by_footer: bool

    def part(self, first: int, last: int) -> Stretch:
        """Some of its steps."""
        if (first, last) == (self.first, self.last):
            return self
        inside = tuple(step for step in self.rebases if first <= step <= last)
        return replace(self, first=first, last=last, bytes=None, rebases=inside)


def list_segment(
    path: Path, owner: tuple[str, int, int], *, check: bool
) -> tuple[list[Stretch], DamagedFile | None]:
    """List what a segment holds, and say what else is in it that is no record.

    Args:
        path: The segment.
        owner: Run, incarnation and rank that it must be of.
        check: Whether to read a sealed one, too, and to compare every checksum.

    Raises:
        FileNotFoundError: If it is not there.
        DamagedFile: If its header is damaged, or is another's.
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
    """Everything that a segment holds, read to its end."""
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

    The BASE record of an incarnation stands under its base step.
    """

    def __init__(self, damage: list[DamagedFile] | None = None) -> None:
        """Begin with none.

        Args:
            damage: Gets what turns out to be damaged when it is read.
        """
        self._damage = [] if damage is None else damage
        self._staged: dict[int, StoredRecord] = {}
        self._intact: set[int] = set()  # those in staging that were compared with their checksum
        self._listed: list[Stretch] = []
        self._stretches: list[Stretch] = []  # the same, without what others have as well
        self._ranges: list[tuple[int, int]] | None = None
        self._rebases: list[int] | None = None
        self._open: SegmentFile | None = None
        self._confirmed: dict[tuple[Path, int], int] = {}

    def stage(self, found: StoredRecord, *, is_checked: bool) -> None:
        """Add a record from staging, which comes before segments, unless its step is there.

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
        """Add those steps of a segment's that no other segment has."""
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
        return StoredRecord(record, stretch.path, staged=False)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Unbroken ranges of steps, ends included, ascending."""
        if self._ranges is None:
            staged = ((step, step) for step in self._staged)
            self._ranges = joined([*((s.first, s.last) for s in self._stretches), *staged])
        return self._ranges

    @property
    def newest(self) -> int:
        """The last step; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def begins(self) -> int | None:
        """The step that the first differential begins from; None without records."""
        if not self.ranges:
            return None
        first = self.ranges[0][0]
        staged = self._staged.get(first)
        is_base = staged is not None and staged.record.header.kind is RecordKind.BASE
        return first if is_base else first - 1

    @property
    def num_differentials(self) -> int:
        """Steps, without the base."""
        kinds = (found.record.header.kind for found in self._staged.values())
        return len(self) - sum(kind is not RecordKind.DIFFERENTIAL for kind in kinds)

    def unbroken(self, step: int) -> int:
        """Last step of the unbroken sequence after ``step``; that itself if there is none."""
        index = bisect_right(self.ranges, (step + 1, 1 << 63)) - 1
        return max(step, self.ranges[index][1]) if index >= 0 else step

    def rebases(self, first: int, last: int) -> list[int]:
        """Steps from ``first`` to ``last`` that cannot be replayed, ascending."""
        if self._rebases is None:
            own = {step for step, found in self._staged.items() if found.record.header.rebases}
            there = {step for s in self._stretches for step in s.rebases}
            self._rebases = sorted(own | (there - self._staged.keys()))
        start, stop = bisect_left(self._rebases, first), bisect_right(self._rebases, last)
        return self._rebases[start:stop]

    def only_staged(self, first: int, last: int) -> set[int]:
        """Steps from ``first`` to ``last`` that are in no segment."""
        within = (step for step in self._staged if first <= step <= last)
        return {step for step in within if next(self._overlapping(step, step), None) is None}

    def framed_bytes(self, first: int, last: int) -> int:
        """Length of the records from ``first`` to ``last``, in segments where they are there."""
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
        """Read the steps from ``first`` to ``last`` that only footers and headers list.

        Returns:
            Whether all are there. What is not is listed no more.
        """
        staged = [step for step in self._staged if first <= step <= last]
        torn = [step for step in staged if not self._is_intact(step)]
        for stretch in list(self._overlapping(first, last)):
            stop, key = min(last, stretch.last), (stretch.path, stretch.first)
            # A segment that a live run's retention removed is missed where a step of it is read.
            is_new = stretch.by_footer and self._confirmed.get(key, -1) < stop
            if is_new and stretch.path.exists():
                if not self._holds(stretch, stop):
                    self._read_again(stretch)
                    return False
                self._confirmed[key] = stop
        return not torn

    def _holds(self, stretch: Stretch, last: int) -> bool:
        """Whether a segment holds the steps of a stretch up to one."""
        rebases = set(stretch.rebases)
        for step in range(stretch.first, last + 1):
            record = self._record(stretch, step)
            if record is None or record.header.rebases != (step in rebases):
                return False
        return True

    def _read_again(self, wrong: Stretch) -> None:
        """List what can be read of a segment, whose footer says more."""
        try:
            found, damage = list_segment(wrong.path, wrong.owner, check=True)
        except FileNotFoundError:
            return
        except DamagedFile as error:
            found, damage = [], error
        if damage is not None:
            self._damage.append(damage)
            warn(_logger, Code.RECORD_DAMAGED, "%s", printable(str(damage)))
        at = next(i for i, stretch in enumerate(self._listed) if stretch.path == wrong.path)
        self._listed[at : at + 1] = found
        self._stretches, self._ranges, self._rebases, self._open = [], None, None, None
        for stretch in self._listed:
            self._insert(stretch)

    def _is_intact(self, step: int) -> bool:
        """Whether a record in staging has its checksum; else it is forgotten."""
        if step not in self._intact:
            found = self._staged[step]
            if not found.record.is_intact():
                del self._staged[step]
                self._ranges = self._rebases = None
                if found.path.exists():  # else a live trainer has reused its memory
                    what = f"step {step} fails its checksum"
                    self._damage.append(DamagedFile(found.path, what, offset=found.record.offset))
                    warn(_logger, Code.RECORD_DAMAGED, "%s", printable(str(self._damage[-1])))
                return False
            self._intact.add(step)
        return True

    def _record(self, stretch: Stretch, step: int) -> RecordRef | None:
        """A step of a stretch as its segment has it now; None if it has not, or is gone."""
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
        """Put in those steps of a stretch that no other has."""
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
    """Unbroken ranges of steps, ends included, ascending, of what some cover together."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def reach(shards: Sequence[RankRecords], step: int, limit: int | None = None) -> int:
    """How far an unbroken sequence of steps that can be replayed leads from ``step``.

    Args:
        shards: Of all ranks.
        step: Where it begins.
        limit: Last step of interest.
    """
    if not shards:
        return step if limit is None else limit
    last = min(records.unbroken(step) for records in shards)
    last = last if limit is None else min(last, limit)
    ends = [set(records.rebases(step + 1, last)) for records in shards]
    return min(set.intersection(*ends), default=last + 1) - 1
