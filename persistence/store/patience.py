"""A run's objects in its store: asked for until the store answers, and never another history's.

How often, how long, and what is said meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lowdiff.errors import DamagedFile, RunMismatch, StorageError, StoreError
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.status import Complaints, StatusPage, WriterStatus
from lowdiff.persistence.store.client import ObjectStore, OwnThreads
from lowdiff.persistence.writer.settings import WriterSettings

_logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 30.0
_REFUSED_DELAY_SECONDS = 60.0
_LAST_DELAY_SECONDS = 2.0
#: One for segments and one for snapshots: each makes one request after the other.
_NUM_THREADS = 2

_Result = TypeVar("_Result")


class StoreClient:
    """One writer's way to the store of its run. Lives on the writer's event loop.

    Attributes:
        store: The store itself; its calls block.
        threads: Where what blocks is called.
    """

    def __init__(
        self, settings: WriterSettings, page: StatusPage[WriterStatus], recorder: Recorder
    ) -> None:
        assert settings.store is not None
        self._settings = settings
        self._page = page
        self._recorder = recorder
        self.store = ObjectStore(settings.store, make=True)
        self.threads = OwnThreads("upload", _NUM_THREADS)
        self._complaints = Complaints(page, "remote_error")
        self._ending = asyncio.Event()
        self._ending_since = 0.0

    @property
    def is_ending(self) -> bool:
        """Whether the trainer is gone, so that a store is not waited for much longer."""
        return self._ending.is_set()

    def end(self) -> None:
        """The trainer is gone."""
        self._ending_since = time.monotonic()
        self._ending.set()

    async def ask(self, task: str, request: Callable[[], _Result], *, sent: int = 0) -> _Result:
        """Ask until the store does it; once the trainer is gone, for a while only.

        The request that succeeds is a measurement if it sent something, the bytes of ``sent``.

        Raises:
            StoreError: If the store stayed away too long after the trainer's end.
        """
        delay, failing_since = _FIRST_DELAY_SECONDS, 0.0
        while True:
            began = time.monotonic()
            try:
                result = await self.threads.run(request)
            except StoreError as error:
                self.report(task, str(error))
                self._page.update(remote_retries=self._page.status.remote_retries + 1)
                _logger.warning("rank %d: %s", self._settings.rank, error)
                failing_since = failing_since or time.monotonic()
                waited = time.monotonic() - max(failing_since, self._ending_since)
                if self.is_ending and waited > self._settings.store_patience_seconds:
                    raise
                longest = _REFUSED_DELAY_SECONDS if error.is_refused else delay
                await self.sleep(longest * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
            else:
                self.report(task, "")
                if sent:
                    self._recorder.observe(f"{task}_upload_seconds", time.monotonic() - began)
                    self._recorder.observe(f"{task}_upload_bytes", sent)
                    self._recorder.publish()
                return result

    async def create(self, task: str, name: str, data: bytes) -> None:
        """Write an object once.

        Raises:
            RunMismatch: If another history's object is there.
        """
        is_new = await self.ask(task, lambda: self.store.create(name, data))
        # Else by a request that seemed lost, or an earlier writer's.
        if not is_new and await self.ask(task, lambda: self.store.read(name)) != data:
            raise self.mismatch(name)

    async def upload(self, task: str, name: str, path: Path) -> int:
        """Write a file as an object, in place of what is there; returns its length.

        Raises:
            OSError: If the file cannot be read.
        """
        # What is wrong with the file, before the store says so.
        size = await self.threads.run(_readable_bytes, path)
        await self.ask(task, lambda: self.store.upload(name, path), sent=size)
        self.count(size)
        return size

    def mismatch(self, name: str) -> RunMismatch:
        """What to raise where an object is another history's."""
        return RunMismatch(
            f"{self.store.url} holds another history: its {name} is not that of "
            f"{self._settings.run}; nothing more is uploaded. Give the store a URL of its own"
        )

    def count(self, uploaded: int) -> None:
        """Bytes that the store has got."""
        self._page.update(remote_bytes=self._page.status.remote_bytes + uploaded)

    async def sleep(self, seconds: float) -> None:
        """Wait before another attempt; not for long when the trainer is gone."""
        if self.is_ending:
            await asyncio.sleep(min(seconds, _LAST_DELAY_SECONDS))
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)

    def report(self, task: str, error: str) -> None:
        """Publish what keeps a task from the store, or, with no text, that nothing does."""
        self._complaints.report(task, error)


def _readable_bytes(path: Path) -> int:
    """Length of a file; `OSError` if it is not there, or nobody may read it."""
    with path.open("rb") as file:
        file.read(1)
        return os.fstat(file.fileno()).st_size


def check_read(unread: Sequence[str]) -> None:
    """After a pass over files, all of which had their turn.

    Args:
        unread: What is `unreadable` among them.

    Raises:
        StorageError: If there is any: they are to be tried again.
    """
    if unread:
        raise StorageError(f"{'; '.join(unread)}; what does not build on that is uploaded")


def unreadable(name: str, error: OSError | DamagedFile) -> str:
    """What to say of a file."""
    why = error.what if isinstance(error, DamagedFile) else error.strerror or repr(error)
    return f"{name} cannot be read ({why})"
