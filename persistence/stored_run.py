"""A run's objects in its store: asked for until the store answers, and never another history's."""

from __future__ import annotations

from collections.abc import Sequence

from lowdiff.errors import RunMismatch, StorageError
from lowdiff.persistence.measurements import Recorder
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.own_threads import OwnThreads
from lowdiff.persistence.patience import Patience
from lowdiff.persistence.status import StatusPage
from lowdiff.persistence.writer_settings import WriterSettings

#: One for segments and one for snapshots: each makes one request after the other.
_NUM_THREADS = 2


class StoredRun:
    """One writer's way to the store of its run. Lives on the writer's event loop.

    Attributes:
        store: The store itself; its calls block.
        patience: Asks it.
        threads: Where what blocks is called.
    """

    def __init__(self, settings: WriterSettings, page: StatusPage, recorder: Recorder) -> None:
        assert settings.store is not None
        self._settings = settings
        self._page = page
        self.store = ObjectStore(settings.store, make=True)
        self.threads = OwnThreads("upload", _NUM_THREADS)
        self.patience = Patience(settings, page, recorder, self.threads)

    async def read(self, task: str, name: str) -> bytes:
        """A whole object."""
        return await self.patience.ask(task, lambda: self.store.read(name))

    async def create(self, task: str, name: str, data: bytes) -> int:
        """Write an object once; returns how much of ``data`` the store has.

        Raises:
            RunMismatch: If another history's object is there.
        """
        sent = len(data) if name.endswith(".seg") else 0
        if await self.patience.ask(task, lambda: self.store.create(name, data), sent=sent):
            return len(data)
        # A request that seemed lost, or an earlier writer's.
        there = await self.read(task, name)
        common = min(len(there), len(data))
        whole = name.endswith(".seg") or len(there) == len(data)
        if there[:common] != data[:common] or not whole:
            raise self.mismatch(name)
        return common

    def mismatch(self, name: str) -> RunMismatch:
        """What to raise where an object is another history's."""
        return RunMismatch(
            f"{self.store.url} holds another history: its {name} is not that of "
            f"{self._settings.run}; nothing more is uploaded. Give the store a URL of its own"
        )

    def count(self, uploaded: int) -> None:
        """Bytes that the store has got."""
        self._page.update(remote_bytes=self._page.status.remote_bytes + uploaded)


def check_read(unread: Sequence[str]) -> None:
    """After a pass over files, all of which had their turn.

    Args:
        unread: What is `unreadable` among them.

    Raises:
        StorageError: If there is any: they are to be tried again.
    """
    if unread:
        raise StorageError(f"{'; '.join(unread)}; what does not build on that is uploaded")


def unreadable(name: str, error: OSError) -> str:
    """What to say of a file."""
    return f"{name} cannot be read ({error.strerror or error!r})"
