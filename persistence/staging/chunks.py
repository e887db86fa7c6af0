"""Chunk files of a staging log: which is written next, how long it is, which is reused."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.files.paths import StagingFolder

#: A chunk that is this many times as long as needed is replaced. Lengths vary a little by step.
_TOO_LONG = 1.25


@dataclass(slots=True)
class Chunk:
    """One file of a log.

    Attributes:
        sequence: Its number, which is also its lap.
        file: Its memory.
        asked_bytes: Length that was requested when the chunk was begun; it may be longer.
        last_step: Step of its newest record, -1 for none.
    """

    sequence: int
    file: MappedFile
    asked_bytes: int
    last_step: int = -1


class Chunks:
    """Chunks of one log, oldest first; the newest chunk is being written.

    Chunks are reused and released only in their order, because a reader goes from number to number.
    """

    def __init__(self, folder: StagingFolder, *, chunk_bytes: int, cap_bytes: int) -> None:
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._cap_bytes = cap_bytes
        self._chunks: deque[Chunk] = deque()
        self._is_refused = False
        #: Last step that was dropped before it became durable, -1 for none.
        self.dropped_step = -1
        self._open(0, chunk_bytes)

    @property
    def newest(self) -> Chunk:
        """Return the chunk that is being written."""
        return self._chunks[-1]

    @property
    def bytes_held(self) -> int:
        """Return the bytes of all chunks."""
        return sum(chunk.file.size for chunk in self._chunks)

    def begin(self, size: int, durable_step: int, *, drop: bool) -> bool:
        """Begin a next chunk; at the cap, return False to make the caller wait.

        The second of two chunks may exceed the cap.

        Args:
            size: Least length.
            durable_step: Records up to here may be overwritten.
            drop: Whether to overwrite records that are not durable instead of waiting.

        Returns:
            Whether there is a new chunk; otherwise more steps must become durable first.

        Raises:
            StorageError: If a chunk that is too small could not grow, and no step that becomes
                durable would help. Records that are not durable are unchanged, except for
                `dropped_step`.
        """
        size = max(size, self._chunk_bytes)
        if self._begin(size, durable_step, drop=False):
            return True
        return drop and len(self._chunks) > 1 and self._begin(size, durable_step, drop=True)

    def _begin(self, size: int, durable_step: int, *, drop: bool) -> bool:
        while len(self._chunks) > 1 and (drop or self._chunks[0].last_step <= durable_step):
            can_wait = len(self._chunks) > 2
            if not can_wait or self._fits(size - self._chunks[0].file.size):
                try:
                    self._reuse_oldest(size, durable_step)
                except StorageError as error:
                    if not can_wait or self._is_folder_gone:
                        raise
                    self._warn_refused(error)
                else:
                    return True
            self._take_oldest(durable_step).file.path.unlink(missing_ok=True)
        if len(self._chunks) > 1 and not self._fits(size):
            return False
        try:
            self._open(self.newest.sequence + 1, size)
        except StorageError as error:
            if self._is_folder_gone:
                raise
            # Another process took the memory, so continue with the existing chunks.
            if len(self._chunks) > 1 or self.newest.last_step > durable_step:
                self._warn_refused(error)
                return False
            self._reuse_oldest(size, durable_step)
        return True

    def _fits(self, more: int) -> bool:
        return self.bytes_held + more <= self._cap_bytes

    @property
    def _is_folder_gone(self) -> bool:
        """Return whether the folder was removed; freed memory would not bring it back."""
        return not self._folder.root.is_dir()

    def _warn_refused(self, error: StorageError) -> None:
        if not self._is_refused:
            self._is_refused = True
            Code.STAGING_FULL.warn(
                f"{error}. Until then training waits for free chunks; this is said once",
                rank=self._folder.rank,
            )

    def _reuse_oldest(self, size: int, durable_step: int) -> None:
        """Begin the next chunk in the memory of the oldest; a failure changes nothing."""
        sequence = self.newest.sequence + 1
        file = self._shorter(sequence, size)
        if file is None:
            file = self._chunks[0].file
            if file.size < size:
                # Grow the file in place. Removing it first would release nothing, because readers
                # of the log still map it.
                file = MappedFile(file.path, size)
            file.renamed(self._folder.chunk(sequence))
        self._take_oldest(durable_step)
        self._chunks.append(Chunk(sequence, file, size))

    def _shorter(self, sequence: int, size: int) -> MappedFile | None:
        """Make a new file in place of the oldest, if the oldest is longer than a whole lap needed."""
        file = self._chunks[0].file
        needed = max([size, *(chunk.asked_bytes for chunk in list(self._chunks)[1:])])
        if file.size <= _TOO_LONG * needed:
            return None
        with suppress(StorageError):  # the long file serves as well
            # Not truncated, because readers of the log still map the file.
            shorter = self._new_file(sequence, size)
            file.path.unlink(missing_ok=True)
            return shorter
        return None

    def _take_oldest(self, durable_step: int) -> Chunk:
        oldest = self._chunks.popleft()
        if oldest.last_step > durable_step:
            self.dropped_step = oldest.last_step
        return oldest

    def _open(self, sequence: int, size: int) -> None:
        self._chunks.append(Chunk(sequence, self._new_file(sequence, size), size))

    def _new_file(self, sequence: int, size: int) -> MappedFile:
        path = self._folder.chunk(sequence)
        try:
            return MappedFile(path, size)
        except StorageError:
            path.unlink(missing_ok=True)  # releases what was allocated
            raise
