"""What a rank's sealed segments hold, remembered: a cache, which may be deleted at any time.

Every entry names the length and the time of the last change of the file that it is about, and counts
for nothing beside a file that has others. ``docs/format.md`` specifies every field. Whoever writes
an index replaces it whole: of two that do so at once one wins, and what the other knew is read
again from the segments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from crc32c import crc32c

from lowdiff.persistence.durable import replaced
from lowdiff.persistence.framing import FORMAT_VERSION, HEADER_BYTES
from lowdiff.persistence.paths import segment_name
from lowdiff.persistence.segment_file import footer_bytes

_logger = logging.getLogger(__name__)

INDEX_NAME = "index"
_MAGIC = b"LOWDIFX\n"
_HEADER = struct.Struct("<8sHHIQQ16sI8xI")
_ENTRY = np.dtype(
    [
        ("incarnation", "<u4"),
        ("num_rebases", "<u4"),
        ("first", "<u8"),
        ("last", "<u8"),
        ("bytes", "<u8"),
        ("mtime_ns", "<u8"),
    ]
)
_MAX_BYTES = 256 << 20
#: Retention removes files, and leaves their entries until the writer adds some.
_SPARE_ENTRIES = 4096
#: By then whoever wrote a partial file is dead.
_PARTIAL_SECONDS = 3600.0
#: Below this, reading the segments takes no time that anybody notices.
_WORTH_RECORDS, _WORTH_BYTES = 4096, 64 << 20
assert _HEADER.size == 64


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment that is whole and sealed: its records follow each other up to its footer.

    Attributes:
        first: Step of its first record.
        last: Step of its last.
        bytes: Length of the file.
        mtime_ns: When it was last changed.
        rebases: Its steps that cannot be replayed, ascending.
    """

    incarnation: int
    first: int
    last: int
    bytes: int
    mtime_ns: int
    rebases: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """What its name says."""
        return self.incarnation, self.first

    @property
    def footer_bytes(self) -> int:
        """Length of what follows its records."""
        return footer_bytes(self.last - self.first + 1, len(self.rebases))


def is_worth_remembering(segments: Iterable[Sealed]) -> bool:
    """Whether reading these takes longer than it should."""
    found = list(segments)
    records = sum(sealed.last - sealed.first + 1 for sealed in found)
    return records >= _WORTH_RECORDS or sum(sealed.bytes for sealed in found) >= _WORTH_BYTES


def read_index(
    folder: Path, run_id: str, rank: int, num_segments: int
) -> Mapping[tuple[int, int], Sealed]:
    """What the index in a rank's folder of segments claims; nothing if there is none to rely on.

    ``num_segments`` is how many the folder holds: one with far more entries is a stranger's, or is
    of files that are gone, and reading it takes longer than it saves.
    """
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= _MAX_BYTES else b""
        most = _SPARE_ENTRIES + 4 * num_segments
        return {sealed.key: sealed for sealed in _decoded(data, run_id, rank, most)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, struct.error) as error:
        _logger.info("the index in %s is passed over: %s", folder, error)
        return {}


def write_index(folder: Path, run_id: str, rank: int, segments: Iterable[Sealed]) -> None:
    """Replace the index, as far as that is possible: the folder may be read-only, or the disk full.

    It has no room for files from before 1970.
    """
    fitting = (sealed for sealed in segments if sealed.mtime_ns >= 0)
    data = _encoded(sorted(fitting, key=lambda sealed: sealed.key), run_id, rank)
    if len(data) > _MAX_BYTES:
        return
    try:
        _sweep(folder)
        with replaced(folder / INDEX_NAME) as file:
            file.write(data)
    except OSError as error:
        _logger.info("no index is kept in %s: %s", folder, error)


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed while they wrote."""
    for partial in folder.glob(f"{INDEX_NAME}.*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > _PARTIAL_SECONDS:
                partial.unlink()


def add_to_index(folder: Path, run_id: str, rank: int, sealed: Iterable[Sealed]) -> None:
    """Add entries, as far as that is possible; those whose files retention has removed go."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(folder))
        known = {**read_index(folder, run_id, rank, len(names)), **{s.key: s for s in sealed}}
        there = (s for s in known.values() if segment_name(s.incarnation, s.first) in names)
        write_index(folder, run_id, rank, there)


def forget_index(folder: Path) -> None:
    """Remove an index that is wrong, if that is possible."""
    with contextlib.suppress(OSError):
        (folder / INDEX_NAME).unlink(missing_ok=True)


def _encoded(segments: Sequence[Sealed], run_id: str, rank: int) -> bytes:
    entries = np.array(
        [(s.incarnation, len(s.rebases), s.first, s.last, s.bytes, s.mtime_ns) for s in segments],
        _ENTRY,
    )
    rebases = np.array([step for sealed in segments for step in sealed.rebases], "<u8")
    body = entries.tobytes() + rebases.tobytes()
    counts = (rank, len(entries), len(rebases))
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, *counts, bytes.fromhex(run_id), crc32c(body), 0)
    return head[:-4] + struct.pack("<I", crc32c(head[:-4])) + body


def _decoded(data: bytes, run_id: str, rank: int, most: int) -> list[Sealed]:
    """Parse and check.

    Raises:
        ValueError: If it is not the index of this rank of this run.
        struct.error: If it is shorter than its header.
    """
    magic, version, _, owner, num_entries, num_rebases, run, body_crc, head_crc = (
        _HEADER.unpack_from(data)
    )
    body = memoryview(data)[_HEADER.size :]
    if magic != _MAGIC or head_crc != crc32c(data[: _HEADER.size - 4]):
        raise ValueError("its header fails its checksum")
    if (version, owner, run.hex()) != (FORMAT_VERSION, rank, run_id):
        raise ValueError("it belongs to another version, run or rank")
    if num_entries > most:
        raise ValueError(f"it has {num_entries} entries, more than this folder gives reason for")
    size = _ENTRY.itemsize * num_entries
    if len(body) != size + 8 * num_rebases or crc32c(body) != body_crc:
        raise ValueError("it fails its checksum")
    steps = np.frombuffer(body[size:], "<u8").tolist()
    found, start = [], 0
    for incarnation, count, first, last, length, mtime_ns in np.frombuffer(
        body[:size], _ENTRY
    ).tolist():
        rebases = tuple(steps[start : start + count])
        start += count
        fits = HEADER_BYTES * (last - first + 2) <= length and last < 1 << 63
        if not first <= last or not fits or any(not first <= step <= last for step in rebases):
            raise ValueError("an entry is impossible")
        found.append(Sealed(incarnation, first, last, length, mtime_ns, rebases))
    return found
