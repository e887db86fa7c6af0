"""A run's place in an object store: S3, Google Cloud Storage, Azure, or a folder by its URL.

The store is spoken to through obstore, which reads credentials, region and endpoint from the
environment, as its object_store library documents (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``AWS_ALLOW_HTTP``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...); so does
the time a request may take, 30 seconds unless ``AWS_TIMEOUT`` says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from urllib.parse import urlsplit

from lowdiff.core.events import Code, warn
from lowdiff.errors import ConfigError, RunMismatch, StoreError
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import Complaints, StatusPage, WriterStatus

_logger = logging.getLogger(__name__)

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")

_PART_BYTES = 8 << 20
_MAX_PARTS = 9000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_RETRIES = 4
_PAGE = 1000

#: How long a writer waits before it asks again: at first and at most, after a refusal, and once its
#: trainer is gone.
_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 30.0
_REFUSED_DELAY_SECONDS = 60.0
_LAST_DELAY_SECONDS = 2.0

_Result = TypeVar("_Result")


def is_url(run: str | Path) -> bool:
    """Whether a run is named by a URL, not by a folder."""
    return isinstance(run, str) and "://" in run


class ObjectStore:
    """Objects under one URL. Calls block; any thread may make them.

    An object is written as a whole or not at all.

    Args:
        url: For example ``s3://bucket/runs/gpt``.
        make: Whether to make the folder of a ``file://`` URL; buckets are never made.

    Raises:
        ConfigError: If the URL cannot work, or obstore is not installed.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        self.url = url
        self._obstore = _obstore()
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            raise ConfigError(
                f"store={url!r}: the URL of a store begins with one of "
                f"{', '.join(f'{name}://' for name in SCHEMES)}"
            )
        # The first retries are the client's, which repeats one part where this class would have to
        # begin the object again. Given `client_options`, it would ignore those of the environment.
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2)}
        retries = {"max_retries": _RETRIES, "backoff": backoff}
        options = {"mkdir": make} if scheme == "file" else {"retry_config": retries}
        try:
            self._store = self._obstore.store.from_url(url, **options)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"store={url!r} cannot be opened: {_first_line(error)}") from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Length in bytes of every object whose name lies under ``prefix``, a folder."""
        return {name: size for name, (size, _) in self.sizes_and_times(prefix).items()}

    def sizes_and_times(self, prefix: str) -> dict[str, tuple[int, float]]:
        """As `sizes`, and when each object was written: seconds since the epoch."""

        def listed() -> dict[str, tuple[int, float]]:
            pages = self._obstore.list(self._store, prefix or None, chunk_size=_PAGE)
            return {
                str(found["path"]): (int(found["size"]), found["last_modified"].timestamp())
                for page in pages
                for found in page
            }

        return self._asked(f"listing {prefix or 'it'}", listed)

    def read(self, name: str) -> bytes:
        """A whole object."""
        return self._asked(
            f"reading {name}", lambda: bytes(self._obstore.get(self._store, name).bytes())
        )

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop``, exclusive; fewer where the object ends before."""
        return self._asked(
            f"reading {name}",
            lambda: bytes(self._obstore.get_range(self._store, name, start=start, end=stop)),
        )

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object in one request, unless one of that name exists: then False."""

        def put() -> bool:
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._asked(f"writing {name}", put)

    def upload(self, name: str, path: Path) -> None:
        """Write a file as an object, in parts, in place of what is there."""
        part = max(_PART_BYTES, -(-path.stat().st_size // _MAX_PARTS))

        def put() -> None:
            self._obstore.put(
                self._store, name, path, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
            )

        self._asked(f"writing {name}", put)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed."""

        def remove() -> None:
            try:
                self._obstore.delete(self._store, list(names))
            except FileNotFoundError:  # only folders say so
                for name in names if len(names) > 1 else ():
                    self.delete([name])

        if names:
            self._asked(f"deleting {names[0]}", remove)

    def _asked(self, doing: str, request: Callable[[], _Result]) -> _Result:
        exceptions = self._obstore.exceptions
        refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        try:
            return request()
        except (exceptions.BaseError, OSError) as error:
            missing = isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error)
            raise StoreError(
                self.url,
                doing,
                _first_line(error),
                is_missing=missing,
                is_refused=missing or isinstance(error, refusals),
            ) from error


class StoreClient:
    """One writer's way to the store of its run. Lives on the writer's event loop.

    Attributes:
        store: The store itself; its calls block.
        complaints: What keeps which task from the store.
    """

    def __init__(
        self, settings: WriterSettings, page: StatusPage[WriterStatus], recorder: Recorder
    ) -> None:
        assert settings.store is not None
        self._settings = settings
        self._page = page
        self._recorder = recorder
        self.store = ObjectStore(settings.store, make=True)
        self.complaints = Complaints(page, "remote_error")
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
                result = await asyncio.to_thread(request)
            except StoreError as error:
                self.complaints.report(task, str(error))
                self._page.update(remote_retries=self._page.status.remote_retries + 1)
                warn(_logger, Code.STORE_REQUEST_FAILED, "rank %d: %s", self._settings.rank, error)
                failing_since = failing_since or time.monotonic()
                waited = time.monotonic() - max(failing_since, self._ending_since)
                if self.is_ending and waited > self._settings.store_patience_seconds:
                    raise
                longest = _REFUSED_DELAY_SECONDS if error.is_refused else delay
                await self.sleep(longest * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
            else:
                self.complaints.report(task, "")
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
        size = await asyncio.to_thread(_readable_bytes, path)
        await self.ask(task, lambda: self.store.upload(name, path), sent=size)
        self._page.update(remote_bytes=self._page.status.remote_bytes + size)
        return size

    def mismatch(self, name: str) -> RunMismatch:
        """What to raise where an object is another history's."""
        return RunMismatch(
            f"{self.store.url} holds another history: its {name} is not that of "
            f"{self._settings.run}; nothing more is uploaded. Give the store a URL of its own"
        )

    async def sleep(self, seconds: float) -> None:
        """Wait before another attempt; not for long when the trainer is gone."""
        if self.is_ending:
            await asyncio.sleep(min(seconds, _LAST_DELAY_SECONDS))
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)


def _readable_bytes(path: Path) -> int:
    """Length of a file; `OSError` if it is not there, or nobody may read it."""
    with path.open("rb") as file:
        file.read(1)
        return os.fstat(file.fileno()).st_size


def _obstore() -> ModuleType:
    # Only runs with a store need it.
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ModuleNotFoundError as error:
        raise ConfigError("a run in an object store needs obstore: pip install obstore") from error
    return obstore


def _first_line(error: Exception) -> str:
    """What a client says, without its many lines of debugging."""
    text = str(error)
    code = re.search(r"<Code>([^<]{1,80})</Code>", text)
    line = (text.splitlines() or [type(error).__name__])[0][:300]
    return line if code is None or code[1] in line else f"{line} ({code[1]})"
