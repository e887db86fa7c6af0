"""The staging log: one copy per step on the training thread, and it outlives every process.

A log is a sequence of preallocated chunk files. A record is written body first, header last, so a
reader that finds a valid header and body has a whole record whenever the writer of it died. Chunks
whose records are durable are reused under the next number; their stale records carry an older lap
and therefore do not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.files.checked_copy import CheckedCopy
from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
    RecordRef,
    listed_record,
    padded,
    read_record,
    read_records,
)
from lowdiff.persistence.format.sections import sections_bytes, write_sections
from lowdiff.persistence.staging.chunks import Chunks
from lowdiff.types import Section

_LOOKS = 3


class StagingLog:
    """The trainer's end of one rank's log. Not thread-safe: one thread appends.

    Args:
        folder: Where it lies.
        run_id: Identity of the run.
        world_size: Number of ranks.
        chunk_bytes: Least length of a chunk.
        cap_bytes: Most that all chunks take together.
        is_ring: Whether its records lead on from images that are kept beside it, and become durable by them alone.

    Attributes:
        folder: Where it lies.
        checksum: CRC-32C of the body of the newest record.
    """

    def __init__(
        self,
        folder: StagingFolder,
        *,
        run_id: str,
        world_size: int,
        chunk_bytes: int,
        cap_bytes: int,
        is_ring: bool = False,
    ) -> None:
        self.folder = folder
        self._run_id = run_id
        self._world_size = world_size
        self._is_ring = is_ring
        self._sizes = chunk_bytes, cap_bytes
        # The processes that read the log need these as well.
        self._files = [folder.owner, folder.trainer_lock, folder.trainer_status, folder.status]
        if folder.residual.exists():
            self._files.append(folder.residual)
        if is_ring:
            folder.ring.touch()
            self._files.append(folder.ring)
        self._chunks = Chunks(folder, chunk_bytes=chunk_bytes, cap_bytes=cap_bytes)
        self._offset = 0
        # Sections that were staged ahead of their record, where its body will be.
        self._ahead: CheckedCopy | None = None
        self._usual_bytes = 0
        #: CRC-32C of the newest record's body.
        self.checksum = 0
        self._install()

    @property
    def bytes_held(self) -> int:
        """Bytes of all chunks."""
        return self._chunks.bytes_held

    @property
    def dropped_step(self) -> int:
        """Last step that was dropped before it was durable, -1 for none."""
        return self._chunks.dropped_step

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed files of the folder: nobody finds what is written there now."""
        return not all(map(os.path.exists, (*self._files, self._chunks.newest.file.path)))

    def anew(self) -> StagingLog:
        """An empty log like this one, in a folder that was made anew."""
        chunk_bytes, cap_bytes = self._sizes
        return StagingLog(
            self.folder,
            run_id=self._run_id,
            world_size=self._world_size,
            chunk_bytes=chunk_bytes,
            cap_bytes=cap_bytes,
            is_ring=self._is_ring,
        )

    def append(
        self,
        kind: RecordKind,
        step: int,
        meta: bytes,
        sections: Sequence[Section],
        *,
        durable_step: int,
        rebases: bool = False,
        drop: bool = False,
        expected: int = 0,
    ) -> int | None:
        """Stage one record.

        Args:
            kind: What it is.
            step: Its step; never decreases.
            meta: Encoded scalars.
            sections: Payload, copied.
            durable_step: Records up to here may be overwritten.
            rebases: Whether the step cannot be replayed.
            drop: Whether at the cap the oldest records go, durable or not; see `dropped_step`.
            expected: CRC-32C that its body must have; 0 for any.

        Returns:
            Bytes written, or None if the log is at its cap: wait until more is durable.

        Raises:
            StorageError: If a chunk that is too small could not grow, and nothing becomes durable
                that would help. All that is not durable is as it was, but for `dropped_step`. Also if
                its body is not the one that is expected: then there is no record.
        """
        if self._ahead is not None:
            assert kind is RecordKind.DIFFERENTIAL
            assert not sections
            return self._finish(kind, step, meta, durable_step, rebases=rebases)
        size = HEADER_BYTES + padded(len(meta)) + sections_bytes(sections)
        if not self._reserve(size, durable_step, drop=drop):
            return None
        copy = CheckedCopy(self._body())
        write_sections(copy, sections)
        copy.add(meta.ljust(padded(len(meta)), b"\0"))
        if expected not in (0, copy.checksum):
            raise StorageError(f"the record of step {step} is not equal to the one that it copies")
        self._seal(kind, step, len(meta), copy, rebases=rebases)
        if kind is RecordKind.DIFFERENTIAL:
            self._usual_bytes = size - HEADER_BYTES
        return size

    def append_ahead(self, sections: Sequence[Section], *, durable_step: int) -> bool:
        """Copy sections of the next differential, whose `append` adds the rest; may be repeated.

        Nothing is there for readers until then. False if the log is at its cap.
        """
        if not self._make_room(sections_bytes(sections), durable_step):
            return False
        assert self._ahead is not None
        write_sections(self._ahead, sections)
        return True

    def drop_ahead(self) -> None:
        """Forget what was staged ahead: its differential is given up."""
        self._ahead = None

    def _make_room(self, size: int, durable_step: int) -> bool:
        """Room behind what is staged ahead; in another chunk if need be, where that moves."""
        ahead = self._ahead
        if ahead is None:
            before = b""
            needed = HEADER_BYTES + max(size, self._usual_bytes)
        else:
            needed = HEADER_BYTES + ahead.size + size
            if self._offset + needed <= self._chunks.newest.file.size:
                return True
            before = bytes(self._body()[: ahead.size])  # its chunk may be the one that is reused
        if not self._reserve(needed, durable_step, drop=False):
            return False
        self._ahead = CheckedCopy(self._body())
        if before:
            self._ahead.add(before)
        return True

    def _body(self) -> memoryview:
        """All memory behind the next record's header."""
        return self._chunks.newest.file.view[self._offset + HEADER_BYTES :]

    def _finish(
        self, kind: RecordKind, step: int, meta: bytes, durable_step: int, *, rebases: bool
    ) -> int | None:
        """Make a record of what was staged ahead."""
        if not self._make_room(padded(len(meta)), durable_step):
            return None
        body = self._ahead
        assert body is not None
        body.add(meta.ljust(padded(len(meta)), b"\0"))
        self._ahead = None
        self._usual_bytes = body.size
        self._seal(kind, step, len(meta), body, rebases=rebases)
        return HEADER_BYTES + body.size

    def _seal(
        self,
        kind: RecordKind,
        step: int,
        meta_bytes: int,
        body: CheckedCopy,
        *,
        rebases: bool,
    ) -> None:
        """Put the header before a body: now it is a record."""
        chunk = self._chunks.newest
        header = RecordHeader(
            kind=kind,
            coded=False,
            meta_bytes=meta_bytes,
            body_bytes=body.size,
            body_checksum=body.checksum,
            step=step,
            incarnation=self.folder.incarnation,
            rank=self.folder.rank,
            world_size=self._world_size,
            lap=chunk.sequence,
            rebases=rebases,
        )
        self.checksum = body.checksum
        start = self._offset + HEADER_BYTES
        chunk.file.view[self._offset : start] = header.pack()
        chunk.last_step = step
        self._offset = start + body.size

    def _reserve(self, size: int, durable_step: int, *, drop: bool) -> bool:
        if self._offset + size <= self._chunks.newest.file.size:
            return True
        if not self._chunks.begin(HEADER_BYTES + size, durable_step, drop=drop):
            return False
        self._install()
        return True

    def _install(self) -> None:
        """Write the header of a new chunk."""
        chunk = self._chunks.newest
        # No record may follow the new header by accident: stale ones carry another lap.
        header = FileHeader(
            FileKind.CHUNK,
            self._run_id,
            self.folder.incarnation,
            self.folder.rank,
            self._world_size,
            chunk.sequence,
        )
        chunk.file.view[:HEADER_BYTES] = header.pack()
        self._offset = HEADER_BYTES


class LogTail:
    """Reads a staging log while it grows, or after its trainer died.

    A record whose body is not what was staged is passed over: what follows it is still of use behind
    a later snapshot, and would otherwise wait for it for ever.

    Args:
        folder: Whose log.
        on_damage: Hears of every record that was passed over.
    """

    def __init__(
        self,
        folder: StagingFolder,
        on_damage: Callable[[RecordHeader], None] = lambda header: None,
    ) -> None:
        self._folder = folder
        self._on_damage = on_damage
        self._sequence = -1
        self._view = memoryview(b"")
        self._header: FileHeader | None = None
        self._offset = 0
        self._num_looks = 0

    @property
    def is_at_damage(self) -> bool:
        """Whether what follows seems damaged; it is passed over if further looks find it so."""
        return self._num_looks > 0

    def next(self) -> RecordRef | None:
        """The next record, or None if it is not there yet."""
        if self._header is None:
            chunks = self._folder.chunks()
            if not chunks or not self._enter(chunks[0][0]):
                return None
        record = self._next_whole()
        while record is None and not self.is_at_damage:
            following = self._following()
            if following is None:
                break
            # The trainer moves on only after its last record here was complete: look once more.
            record = self._next_whole()
            if record is None and not self.is_at_damage:
                if not self._enter(following):
                    break
                record = self._next_whole()
        return record

    def _next_whole(self) -> RecordRef | None:
        """The next record in this chunk, behind damaged ones."""
        record = self._read()
        while record is None and self._passes_damage():
            record = self._read()
        return record

    def _passes_damage(self) -> bool:
        """Whether a record was passed over whose header is whole, and whose body is not.

        The body is written first, but a processor may show the two in another order for a moment.
        """
        assert self._header is not None
        record = listed_record(self._view, self._offset, self._header)
        # A chunk gets another name before it is reused; after that its records need not be whole.
        if record is None or record.is_intact() or not self._folder.chunk(self._sequence).exists():
            self._num_looks = 0
            return False
        self._num_looks += 1
        if self._num_looks < _LOOKS:
            return False
        self._num_looks = 0
        self._offset = record.end
        Code.STAGED_RECORD_DAMAGED.warn(
            f"the record of step {record.header.step} in staging memory was damaged before it was "
            "written",
            rank=self._folder.rank,
        )
        self._on_damage(record.header)
        return True

    def _following(self) -> int | None:
        """Number of the chunk after the current one, if there is one."""
        if self._folder.chunk(self._sequence + 1).exists():
            return self._sequence + 1
        if self._folder.chunk(self._sequence).exists():
            return None
        # Both were reused, so all in them was durable before this reader came.
        later = (n for n, _ in self._folder.chunks() if n > self._sequence)
        return next(later, None)

    def _read(self) -> RecordRef | None:
        assert self._header is not None
        record = read_record(self._view, self._offset, self._header)
        if record is not None:
            self._offset = record.end
        return record

    def _enter(self, sequence: int) -> bool:
        try:
            opened = open_chunk(self._folder, sequence)
        except (FileNotFoundError, DamagedFile):
            return False
        if opened is None:
            return False
        self._view, self._header = opened
        self._sequence, self._offset = sequence, HEADER_BYTES
        return True


def open_chunk(folder: StagingFolder, sequence: int) -> tuple[memoryview, FileHeader] | None:
    """Map a chunk; None while its header is not that of this lap.

    Raises:
        FileNotFoundError: If it is not there.
        DamagedFile: If it cannot be read, so that it is not known what is in it.
    """
    path = folder.chunk(sequence)
    view = read_view(path)
    try:
        header = FileHeader.unpack(view, path)
    except DamagedFile:
        return None
    found = (*header.owner, header.sequence)
    is_of_log = found == (folder.run_id, folder.incarnation, folder.rank, sequence)
    return (view, header) if is_of_log else None


def staged_records(
    folder: StagingFolder, *, check: bool = True, must_read: bool = False
) -> Iterator[tuple[Path, RecordRef]]:
    """Every whole record of a log that is no longer written to, with the chunk it lies in.

    Args:
        folder: Whose log.
        check: Whether bodies are compared with their checksums; else only headers are read.
        must_read: Whether a chunk that cannot be read is an error; else it is passed over.

    Raises:
        FileNotFoundError, DamagedFile: If a chunk cannot be read that must be. What fails a check
            instead is none, as everywhere.
    """
    for sequence, path in folder.chunks():
        try:
            opened = open_chunk(folder, sequence)
        except (FileNotFoundError, DamagedFile):
            if must_read:
                raise
            continue
        if opened is not None:
            view, header = opened
            for record in read_records(view, header, check=check, past_damage=True):
                yield path, record
