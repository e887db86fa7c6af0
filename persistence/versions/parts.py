"""Parts of a version: safetensors files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.image import ImageEntry, header_of, image_header

#: A part has no more bytes of tensors than this, unless one tensor has.
PART_BYTES = 256 << 20

Piece = tuple[ImageEntry, memoryview]


def divided(tensors: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield tensors part by part."""
    part: list[Piece] = []
    size = 0
    # Widest items first keeps every tensor aligned to its own size.
    for entry, data in sorted(tensors, key=lambda own: (-own[0].item_bytes, own[0].name)):
        if part and size + len(data) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append((entry, data))
        size += len(data)
    if part:
        yield part


def pieces_of(part: list[Piece], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return a part's file, in pieces."""
    header = image_header([entry for entry, _ in part], {"format": "pt", **metadata})
    return [header, *(data for _, data in part)]


def read_part(data: bytearray, place: str) -> Iterator[Piece]:
    """Yield the tensors of a part's file.

    Raises:
        DamagedFile: If it is none.
    """
    view = memoryview(data)
    try:
        header = header_of(view)
    except (EOFError, ValueError, LookupError, TypeError) as error:
        raise DamagedFile(place, f"no part of a version ({error})") from error
    offset = header.bytes
    for entry in header.entries:
        yield entry, view[offset : offset + entry.nbytes]
        offset += entry.nbytes


def metadata_of(data: bytearray, place: str) -> dict[str, str]:
    """Return what a safetensors file says of itself.

    Raises:
        DamagedFile: If it says nothing that is text.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        told = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (ValueError, RecursionError, AttributeError) as error:
        raise DamagedFile(place, "its header is no JSON") from error
    if type(told) is not dict or not all(type(text) is str for text in told.values()):
        raise DamagedFile(place, "its metadata is no text")
    return told
