"""What protects one rank's steps while a training runs: made when an incarnation begins, ended with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from lowdiff.commit.queue import Queue
from lowdiff.commit.sinks import Sink
from lowdiff.commit.storage import Storage
from lowdiff.model.ranks import Ranks
from lowdiff.step.ddp_hook import Exchanges

if TYPE_CHECKING:
    from lowdiff.commit.session import Session


class Protection:
    """One rank's queue, its processes, and whatever else takes each step. By default nothing else does.

    Args:
        storage: The processes.
        queue: Where steps are staged.
        sinks: What takes them besides.

    Attributes:
        sinks: The queue, and the others.
        saves_live: Whether the live state is saved after a failure.
        exchanges: What is to hear of exchanges of gradients; None for nothing.
    """

    saves_live: ClassVar[bool] = False
    exchanges: Exchanges | None = None

    def __init__(self, storage: Storage, queue: Queue, sinks: Sequence[Sink] = ()) -> None:
        self.storage = storage
        self.queue = queue
        self.sinks: list[Sink] = [queue, *sinks]

    def join(self, ranks: Ranks) -> None:
        """Make what all ranks make at the same time, as process groups are."""

    def begin(self, session: Session) -> None:
        """Begin with a session that has staged its base."""

    def wait_for_base(self, step: int) -> None:
        """Wait until other nodes hold what the incarnation starts from.

        Raises:
            RankLost: If a rank does not tell what it has.
        """

    def watch(self, *, ends_by_signal: bool) -> None:
        """Watch for failures, from the main thread.

        Args:
            ends_by_signal: Whether SIGTERM would end the process if lowdiff had no handler.
        """

    def end_watch(self) -> None:
        """Watch no longer; for any thread; may be repeated."""

    def pause(self) -> AbstractContextManager[None]:
        """Take no time inside for a hang."""
        return nullcontext()

    def save_after_failure(self, why: str) -> None:
        """Save the live state while failures are watched for; what goes wrong is said."""

    def save(self, why: str) -> None:
        """Save the live state, where no last snapshot can be taken."""

    def close(self, *, removes: bool) -> None:
        """Exchange no more with other nodes; may be repeated.

        Args:
            removes: Whether all that was kept for them is in the run folder of all ranks.
        """
