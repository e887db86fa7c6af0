"""A run's place in an object store: S3, Google Cloud Storage, Azure, or a folder by its URL.

The store is spoken to through obstore, which reads credentials, region and endpoint from the
environment, as its object_store library documents (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``AWS_ALLOW_HTTP``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...); so does
the time a request may take, 30 seconds unless ``AWS_TIMEOUT`` says otherwise.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lowdiff.errors import ConfigError, StoreError

_ThreadResult = TypeVar("_ThreadResult")


class OwnThreads:
    """A few threads beside those that an event loop's ``asyncio.to_thread`` shares."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[..., _ThreadResult], *arguments: object) -> _ThreadResult:
        """Call it in a thread.

        If this is cancelled, it waits for the call's end all the same: no thread can be stopped, and
        nobody may begin the same again beside it.
        """
        loop = asyncio.get_running_loop()
        result = loop.run_in_executor(self._executor, partial(call, *arguments))
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await asyncio.wait([result])
            raise

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False)


SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")

_PART_BYTES = 8 << 20
_MAX_PARTS = 9000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_RETRIES = 4
_PAGE = 1000

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
        return self._listed(prefix, lambda found: int(found["size"]))

    def sizes_and_times(self, prefix: str) -> dict[str, tuple[int, float]]:
        """As `sizes`, and when each object was written: seconds since the epoch."""
        return self._listed(
            prefix, lambda found: (int(found["size"]), found["last_modified"].timestamp())
        )

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

    def _listed(
        self, prefix: str, read: Callable[[Mapping[str, Any]], _Result]
    ) -> dict[str, _Result]:
        def listed() -> dict[str, _Result]:
            pages = self._obstore.list(self._store, prefix or None, chunk_size=_PAGE)
            return {str(found["path"]): read(found) for page in pages for found in page}

        return self._asked(f"listing {prefix or 'it'}", listed)

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
