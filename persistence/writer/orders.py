"""Orders of the trainer to its writer process: bytes on its stdin."""

from __future__ import annotations

import os
import sys
import threading
import time

from lowdiff.persistence.staging.settings import WriterSettings

#: Word: nothing more will be staged.
END = b"."
#: Word: from now on, make each step durable as soon as it is staged, also in an incomplete batch.
WRITE_THROUGH = b"!"

#: Largest batch size of a word, whose single byte holds the exponent of a power of two.
MAX_TOLD_BATCH_SIZE = 1 << 12


def batch_size_word(batch_size: int) -> bytes:
    """Return the word for a batch size that is a power of two, up to ``MAX_TOLD_BATCH_SIZE``."""
    level = batch_size.bit_length() - 1
    assert 1 << level == batch_size <= MAX_TOLD_BATCH_SIZE
    return bytes([level])


def told_batch_size(said: bytes) -> int | None:
    """Return the last batch size among some words; None if there is none."""
    levels = [word for word in said if 1 << word <= MAX_TOLD_BATCH_SIZE]
    return 1 << levels[-1] if levels else None


class Orders:
    """Words that the trainer sends through the pipe to stdin. One thread reads them.

    Attributes:
        batch_size: Differentials per durable write.
        write_through: Whether an incomplete batch is written at once.
        trainer_gone: Set when nothing more will be staged; for any thread.
        died_at: Monotonic time at which the trainer's death was seen; None while it lives, and after
            it said that nothing more will be staged.
    """

    def __init__(self, settings: WriterSettings) -> None:
        self._trainer_pid = settings.trainer_pid
        self.batch_size = settings.batch_size
        self.write_through = False
        self.trainer_gone = threading.Event()
        self.died_at: float | None = None
        os.set_blocking(sys.stdin.fileno(), False)

    def read(self) -> bool:
        """Read new words; return whether nothing more will be staged, or whether the trainer died."""
        if not self.trainer_gone.is_set():
            try:
                said = os.read(sys.stdin.fileno(), 64)
                has_died = not said
            except BlockingIOError:
                said, has_died = b"", False
            if WRITE_THROUGH in said:
                self.write_through = True
            self.batch_size = told_batch_size(said) or self.batch_size
            # Forked DataLoader workers may hold the pipe open after the trainer's death.
            has_died |= os.getppid() != self._trainer_pid
            if END in said:
                self.trainer_gone.set()
            elif has_died:
                self.died_at = time.monotonic()
                self.trainer_gone.set()
        return self.trainer_gone.is_set()
