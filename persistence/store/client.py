"""A run's place in an object store: S3, Google Cloud Storage, Azure, or a folder by its URL.

Requests go through obstore, which reads credentials, region and endpoint from the environment, as
its object_store library documents (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...). A request may take 30
seconds, unless ``AWS_TIMEOUT`` sets another time.
"""

from __future__ import annotations

import asyncio
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

from lowdiff.core.events import Code
from lowdiff.errors import ConfigError, RunMismatch, StoreError
from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import Complaints, StatusPage, WriterStatus

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")

_PART_BYTES = 8 << 20
_MAX_PARTS = 9000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_RETRIES = 4
_PAGE = 1000

#: Delays of a writer before it repeats a request: the first, the longest, after a refusal, and once
#: the trainer is gone.
_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 30.0
_REFUSED_DELAY_SECONDS = 60.0
_LAST_DELAY_SECONDS = 2.0

_Result = TypeVar("_Result")


def is_url(run: str | Path) -> bool:
    """Return whether a run is named by a URL, not by a folder."""
    return isinstance(run, str) and "://" in run


class ObjectStore:
    """Objects under one URL. Calls block; any thread may make them.

    An object is written as a whole or not at all.

    Args:
        url: For example ``s3://bucket/runs/gpt``.
        make: Whether to create the folder of a ``file://`` URL; buckets are never created.

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
        # The client itself retries first, because it repeats one part where this class would repeat
        # the whole object. With `client_options` it would ignore the options of the environment.
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2)}
        retries = {"max_retries": _RETRIES, "backoff": backoff}
        options = {"mkdir": make} if scheme == "file" else {"retry_config": retries}
        try:
            self._store = self._obstore.store.from_url(url, **options)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"store={url!r} cannot be opened: {_first_line(error)}") from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the length in bytes of every object below ``prefix``, a folder."""
        return {name: size for name, (size, _) in self.sizes_and_times(prefix).items()}

    def sizes_and_times(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return `sizes`, and when each object was written, in seconds since the epoch."""

        def listed() -> dict[str, tuple[int, float]]:
            pages = self._obstore.list(self._store, prefix or None, chunk_size=_PAGE)
            return {
                str(found["path"]): (int(found["size"]), found["last_modified"].timestamp())
                for page in pages
                for found in page
            }

        return self._asked(f"listing {prefix or 'it'}", listed)

    def read(self, name: str) -> bytes:
        """Return a whole object."""
        return self._asked(
            f"reading {name}", lambda: bytes(self._obstore.get(self._store, name).bytes())
        )

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``, exclusive; fewer if the object ends before."""
        return self._asked(
            f"reading {name}",
            lambda: bytes(self._obstore.get_range(self._store, name, start=start, end=stop)),
        )

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object in one request; return False if an object of that name exists."""

        def put() -> bool:
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._asked(f"writing {name}", put)

    def upload(self, name: str, path: Path) -> None:
        """Write a file as an object, in parts; replaces an existing object."""
        part = max(_PART_BYTES, -(-path.stat().st_size // _MAX_PARTS))

        def put() -> None:
            self._obstore.put(
                self._store, name, path, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
            )

        self._asked(f"writing {name}", put)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing objects count as removed."""

        def remove() -> None:
            try:
                self._obstore.delete(self._store, list(names))
            except FileNotFoundError:  # only folders report missing objects
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
    """One writer's access to the store of its run; used on the writer's event loop only.

    Attributes:
        store: The store; its calls block.
        complaints: Errors of the writer's tasks with the store.
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
        """Return whether the trainer is gone, after which the store is not waited for much longer."""
        return self._ending.is_set()

    def end(self) -> None:
        """Declare that the trainer is gone."""
        self._ending_since = time.monotonic()
        self._ending.set()

    async def ask(self, task: str, request: Callable[[], _Result], *, sent: int = 0) -> _Result:
        """Repeat a request until it succeeds; once the trainer is gone, for a limited time only.

        A successful request that sends ``sent`` bytes is recorded as a measurement.

        Raises:
            StoreError: If the store did not answer in time after the trainer's end.
        """
        delay, failing_since = _FIRST_DELAY_SECONDS, 0.0
        while True:
            began = time.monotonic()
            try:
                result = await asyncio.to_thread(request)
            except StoreError as error:
                self.complaints.report(task, str(error))
                self._page.update(remote_retries=self._page.status.remote_retries + 1)
                Code.STORE_REQUEST_FAILED.warn(error, rank=self._settings.rank)
                failing_since = failing_since or time.monotonic()
                waited = time.monotonic() - max(failing_since, self._ending_since)
                if self.is_ending and waited > self._settings.store_timeout_seconds:
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
        """Create an object that must not change later.

        Raises:
            RunMismatch: If the object exists with another history's content.
        """
        is_new = await self.ask(task, lambda: self.store.create(name, data))
        # The object may exist: a request seemed lost but arrived, or an earlier writer created it.
        if not is_new and await self.ask(task, lambda: self.store.read(name)) != data:
            raise self.mismatch(name)

    async def upload(self, task: str, name: str, path: Path) -> int:
        """Write a file as an object, replacing an existing one; return its length.

        Raises:
            OSError: If the file cannot be read.
        """
        # Read the file first, so that its own errors are not reported as the store's.
        size = await asyncio.to_thread(_readable_bytes, path)
        await self.ask(task, lambda: self.store.upload(name, path), sent=size)
        self._page.update(remote_bytes=self._page.status.remote_bytes + size)
        return size

    def mismatch(self, name: str) -> RunMismatch:
        """Return the error for an object of another history."""
        return RunMismatch(
            f"{self.store.url} holds another history: its {name} is not that of "
            f"{self._settings.run}; nothing more is uploaded. Give the store a URL of its own"
        )

    async def sleep(self, seconds: float) -> None:
        """Wait before the next request; not for long once the trainer is gone."""
        if self.is_ending:
            await asyncio.sleep(min(seconds, _LAST_DELAY_SECONDS))
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)


def _readable_bytes(path: Path) -> int:
    """Return the length of a file; raise OSError if it is missing or unreadable."""
    with path.open("rb") as file:
        file.read(1)
        return os.fstat(file.fileno()).st_size


def _obstore() -> ModuleType:
    # Imported here, because only runs with a store need obstore.
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ModuleNotFoundError as error:
        raise ConfigError("a run in an object store needs obstore: pip install obstore") from error
    return obstore


def _first_line(error: Exception) -> str:
    """Return the first line of a client's error, which has many lines of debugging."""
    text = str(error)
    code = re.search(r"<Code>([^<]{1,80})</Code>", text)
    line = (text.splitlines() or [type(error).__name__])[0][:300]
    return line if code is None or code[1] in line else f"{line} ({code[1]})"
