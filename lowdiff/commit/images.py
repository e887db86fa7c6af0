"""Full snapshots of one rank on their way from its own memory to staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowdiff.commit.storage import Look, Trainer
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.image import ImageFile, ImageTensor


class Images:
    """The full snapshots of one rank; one at a time lies in staging.

    Attributes:
        step: Step of the last staged snapshot, -1 before the first.
        is_owed: Whether one could not be taken and should be.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.step = -1
        self.is_owed = False
        self._trainer = trainer
        self._file = ImageFile(trainer.folder.snapshot)
        self._retry_step, self._retry_after = -1, 1

    def stage(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> bool:
        """Copy a snapshot and tell the processes of it.

        Returns:
            False where there is no memory for it: then it is owed.

        Raises:
            StorageError: If there is no memory for a required one.
        """
        trainer = self._trainer
        with trainer.counters.timed(trainer.counters.snapshot_seconds):
            try:
                size, checksum = self._file.stage(tensors(), torch.get_num_threads())
            except StorageError as error:
                # Ranks that wait for this one must hear of it first: with the next exchange.
                if required or (trainer.raises and not trainer.tells_first):
                    raise
                self._owe_for(error, step)
                return False
            trainer.page.update(image=ImageMark(step, size, checksum))
        self.step = step
        self.is_owed = False
        self._retry_after = 1
        trainer.errors.of_snapshot = ""
        trainer.counters.snapshots += 1
        return True

    def begin_anew(self, durable_snapshot: int) -> None:
        """Owe a snapshot, because staging was removed, and with it one that is not durable."""
        self.step = min(self.step, durable_snapshot)
        self.is_owed = True

    def release(self) -> None:
        """Keep none mapped: whoever removes its file has the memory back."""
        self._file.release()

    def is_ready(self, step: int, look: Look) -> bool:
        """Whether one after ``step`` finds its memory free, and the writer is well."""
        is_free = look.writer.durable_snapshot >= self.step
        return self.may_retry(step) and not look.writer.error and is_free

    def may_retry(self, step: int) -> bool:
        """Whether one that found no memory may be tried again after ``step``."""
        return step >= self._retry_step

    def _owe_for(self, error: StorageError, step: int) -> None:
        # Each try costs the ranks that have the memory a snapshot.
        self._retry_step = step + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._trainer.settings.snapshot_every)
        if not self.is_owed:
            Code.SNAPSHOT_PUT_OFF.warn(f"no full snapshot now: {error}", rank=self._trainer.rank)
        self.is_owed = True
        self._trainer.errors.of_snapshot = str(error)
