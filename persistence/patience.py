"""Asking an object store until it does it: how often, how long, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from lowdiff.errors import StoreError
from lowdiff.persistence.measurements import Recorder
from lowdiff.persistence.own_threads import OwnThreads
from lowdiff.persistence.status import Complaints, StatusPage
from lowdiff.persistence.writer_settings import WriterSettings

_logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 30.0
_REFUSED_DELAY_SECONDS = 60.0
_LAST_DELAY_SECONDS = 2.0

_Result = TypeVar("_Result")


class Patience:
    """Of one writer, with one store. Lives on the writer's event loop."""

    def __init__(
        self, settings: WriterSettings, page: StatusPage, recorder: Recorder, threads: OwnThreads
    ) -> None:
        self._settings = settings
        self._page = page
        self._recorder = recorder
        self._threads = threads
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
                result = await self._threads.run(request)
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
