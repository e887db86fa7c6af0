"""A payload's sections as bytes inside a record's body: raw in staging, coded in segments."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from lowdiff.persistence.files.checked_copy import CheckedCopy
from lowdiff.persistence.format.codec import CODINGS, Codec
from lowdiff.persistence.format.framing import padded
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.types import Layout, Section

#: Name length, coding, item bytes, reserved, number of items, stored bytes.
_HEAD = struct.Struct("<HBBIQQ")
_SIGNED = {"ascending"}


def sections_bytes(sections: Sequence[Section]) -> int:
    """Return the bytes that ``write_sections`` needs."""
    return sum(_size(section, section.data.nbytes) for section in sections)


def max_payload_bytes(layout: Layout) -> int:
    """Return the most bytes that one record's sections may decode to: several times the gradient.

    A float64 gradient that is stored densely, with positions, takes 16 bytes an element.
    """
    return 64 * layout.elements + (1 << 20)


def write_sections(copy: CheckedCopy, sections: Sequence[Section]) -> None:
    """Copy sections, uncoded."""
    padding = b""  # written with the next head, because each write costs a call or two
    for section in sections:
        nbytes = section.data.nbytes
        copy.add(padding + _head(section, nbytes))
        copy.add(section.data)
        padding = bytes(-nbytes % 8)
    copy.add(padding)


def encode_sections(sections: Sequence[Section], codec: Codec) -> bytes:
    """Return sections, each compressed by its coding."""
    parts = []
    for section in sections:
        data = codec.encode(section.coding, section.data)
        parts += [_head(section, len(data)), data, bytes(-len(data) % 8)]
    return b"".join(parts)


def read_sections(source: memoryview, codec: Codec, *, coded: bool) -> tuple[Section, ...]:
    """Parse sections of ``write_sections`` (``coded`` False) or ``encode_sections``.

    Uncoded data stays a view of ``source``.

    Raises:
        BadEncoding: If the bytes are not sections, or would decode to more than the codec's
            ``max_payload_bytes``; nothing is allocated for an excess.
    """
    sections = []
    decoded_bytes = 0
    offset = 0
    while offset < len(source):
        if len(source) - offset < _HEAD.size:
            raise BadEncoding(f"{len(source) - offset} bytes are too few for a section")
        name_bytes, code, item_bytes, _, count, stored = _HEAD.unpack_from(source, offset)
        start = offset + padded(_HEAD.size + name_bytes)
        data = source[start : start + stored]
        if code >= len(CODINGS) or item_bytes not in (1, 2, 4, 8) or len(data) != stored:
            raise BadEncoding(f"a section of coding {code}, item size {item_bytes} is cut short")
        decoded_bytes += coded * count * item_bytes
        if codec.max_payload_bytes is not None and decoded_bytes > codec.max_payload_bytes:
            raise BadEncoding(
                f"sections of {decoded_bytes} bytes, where {codec.max_payload_bytes} are allowed"
            )
        coding = CODINGS[code]
        name_at = offset + _HEAD.size
        try:
            name = bytes(source[name_at : name_at + name_bytes]).decode()
        except UnicodeDecodeError as error:
            raise BadEncoding("a section's name is not text") from error
        dtype = np.dtype(f"{'i' if coding in _SIGNED else 'u'}{item_bytes}")
        if coded:
            array = codec.decode(coding, dtype, count, data)
        elif count * item_bytes == stored:
            array = np.frombuffer(data, dtype)
        else:
            raise BadEncoding(f"section {name!r} holds {stored} bytes for {count} items")
        sections.append(Section(name, coding, array))
        offset = start + padded(stored)
    return tuple(sections)


def _head(section: Section, stored: int) -> bytes:
    name = section.name.encode()
    head = _HEAD.pack(
        len(name),
        CODINGS.index(section.coding),
        section.data.dtype.itemsize,
        0,
        section.data.size,
        stored,
    )
    return (head + name).ljust(padded(len(head) + len(name)), b"\0")


def _size(section: Section, stored: int) -> int:
    return padded(_HEAD.size + len(section.name.encode())) + padded(stored)
