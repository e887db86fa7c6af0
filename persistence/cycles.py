"""Rolling snapshots: an image that reaches its durable place slice by slice, over a cycle of steps.

A slice is a record of the staging log whose meta part says where in the image its bytes belong. The
writer puts them there as they come; once the cycle's last slice and its mark are staged, the image
is checked against the checksums of all slices, and only then gets its name. So whatever got lost on
the way, the death of a writer included, costs the cycle and nothing more.

The idea is a database's fuzzy checkpoint plus redo log (Gray and Reuter, "Transaction Processing",
1993, section 11.3): every block is of its own step, and replay starts each from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crc32c import crc32c

from lowdiff.errors import DamagedFile
from lowdiff.persistence.forms import BadEncoding
from lowdiff.persistence.framing import RecordRef, padded
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.values import decode, encode

#: Tensors of a rolling image: the step of each of its blocks, and its slices with their checksums.
BLOCKS, SLICES, PADDING = "lowdiff/blocks", "lowdiff/slices", "lowdiff/padding"

_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Something to be shared out over a cycle.

    Attributes:
        elements: How many there are.
        element_bytes: Bytes per element, over all tensors that lie beside each other.
        atom: Elements that stay together.
    """

    elements: int
    element_bytes: int
    atom: int


def cut(things: Sequence[Cuttable], parts: int) -> list[list[tuple[int, int, int]]]:
    """Share out things over consecutive parts, balanced by bytes.

    Returns:
        Per part: ``(index of the thing, first element, last element exclusive)``, ascending. No part
        has more bytes than the mean and one atom; some may be empty.
    """
    total = sum(thing.elements * thing.element_bytes for thing in things)
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    part = done = 0
    for index, thing in enumerate(things):
        start = 0
        while start < thing.elements:
            ideal = start + (total * (part + 1) / parts - done) / thing.element_bytes
            below = start + max(0, int(ideal - start)) // thing.atom * thing.atom
            above = min(below + thing.atom, thing.elements)
            stop = below if ideal - below < above - ideal else above
            if part == parts - 1:
                stop = thing.elements
            if stop == start:
                part += 1
                continue
            result[part].append((index, start, stop))
            done += (stop - start) * thing.element_bytes
            start = stop
    return result


@dataclass(frozen=True, slots=True)
class SliceRef:
    """What the meta part of a slice's record says.

    Attributes:
        cycle: Last step of its cycle, which is that of the snapshot.
        number: Its number in the cycle, from 0.
        ranges: ``(offset, bytes)`` of each piece in the image's file, in the order of the body.
    """

    cycle: int
    number: int
    ranges: tuple[tuple[int, int], ...]

    def encode(self) -> bytes:
        """As the meta part of a record."""
        return encode([self.cycle, self.number, [list(piece) for piece in self.ranges]])

    @classmethod
    def decode(cls, data: bytes) -> SliceRef:
        """The inverse of `encode`."""
        cycle, number, ranges = decode(data)
        return cls(cycle, number, tuple((offset, size) for offset, size in ranges))


def slice_checksum(meta: bytes, pieces: Iterable[memoryview | bytes]) -> int:
    """CRC-32C of a slice's record body: what its header holds as well."""
    checksum = crc32c(meta.ljust(padded(len(meta)), b"\0"))
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    return int(checksum)


@dataclass(frozen=True, slots=True)
class CycleMark:
    """Says that all slices of a cycle are staged.

    Attributes:
        step: Last step of the cycle.
        first_base: As `Manifest.first_base`.
        image_bytes: Length of the image.
        slices: ``(offset, bytes)`` of the tensor `SLICES`, which the last slice holds.
        last_meta: Meta part of the last slice.
        last_checksum: Its checksum.
    """

    step: int
    first_base: int
    image_bytes: int
    slices: tuple[int, int]
    last_meta: bytes
    last_checksum: int

    def encode(self) -> bytes:
        """As the meta part of a record, without the step."""
        return encode(
            [
                self.first_base,
                self.image_bytes,
                list(self.slices),
                self.last_meta,
                self.last_checksum,
            ]
        )

    @classmethod
    def of(cls, record: RecordRef) -> CycleMark:
        """The mark in a record."""
        first_base, size, slices, meta, checksum = decode(bytes(record.meta))
        return cls(record.header.step, first_base, size, tuple(slices), meta, checksum)


def encode_slices(slices: Sequence[tuple[bytes, int]]) -> bytes:
    """Content of the tensor `SLICES`: meta part and checksum of every slice but the last."""
    return encode([list(entry) for entry in slices])


def write_slices(partial: Path, records: Sequence[tuple[SliceRef, RecordRef]]) -> None:
    """Put slices of one cycle where they belong; in order.

    Not fsynced: until the cycle is complete they need to outlive the writer, but not the machine,
    because their trainer would die with it and the cycle with the trainer.
    """
    flags = os.O_RDWR | os.O_CREAT
    if records[0][0].number == 0:
        flags |= os.O_TRUNC  # what an earlier attempt at this cycle has left
    descriptor = os.open(partial, flags, 0o666)
    try:
        for ref, record in records:
            start = 0
            for offset, size in ref.ranges:
                piece = record.sections[start : start + size]
                written = 0
                while written < size:
                    written += os.pwrite(descriptor, piece[written:], offset + written)
                start += size
    finally:
        os.close(descriptor)


def complete(partial: Path, mark: CycleMark) -> int:
    """Check an image against its slices, and make it durable.

    Returns:
        CRC-32C of the whole file.

    Raises:
        DamagedFile: If a slice is not there, or not as it was staged; or if it cannot be made
            durable. Then nobody may try again: an fsync succeeds after one that failed, though
            nothing was written.
    """
    try:
        os.truncate(partial, mark.image_bytes)
    except FileNotFoundError as error:
        raise DamagedFile(partial, "no slice of the cycle was written") from error
    view = read_view(partial)
    try:
        _check(view, partial, mark.last_meta, mark.last_checksum)
        offset, size = mark.slices
        for meta, checksum in decode(bytes(view[offset : offset + size])):
            _check(view, partial, meta, checksum)
    except (BadEncoding, TypeError, ValueError) as error:
        raise DamagedFile(partial, f"its list of slices does not decode ({error})") from error
    whole = 0
    for start in range(0, mark.image_bytes, _COPY_BYTES):
        whole = crc32c(view[start : start + _COPY_BYTES], whole)
    with partial.open("rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise DamagedFile(partial, f"it cannot be made durable ({error})") from error
    return int(whole)


def _check(view: memoryview, path: Path, meta: bytes, checksum: int) -> None:
    ref = SliceRef.decode(meta)
    pieces: list[Any] = [view[offset : offset + size] for offset, size in ref.ranges]
    if slice_checksum(meta, pieces) != checksum:
        raise DamagedFile(path, f"slice {ref.number} of the cycle that ends at {ref.cycle} is lost")
