"""What a segment holds: by its footer once it is sealed, else by reading all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.framing import HEADER_BYTES, RecordKind
from lowdiff.persistence.format.segment_file import SegmentFile


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
