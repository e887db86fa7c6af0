"""Whether all ranks are still alike: equal hyper-parameters, and equal parameters.

Data-parallel ranks compute one state, each for itself. Where one computes another (a scheduler that
follows each rank's own loss, code that writes on one rank only, faulty memory, unequal processors)
nothing in training says so, and what ranks checkpoint together is no state that any of them had. So
the ranks' news carry checksums, which are compared before anybody steps again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lowdiff.commit.news import RankNews
from lowdiff.core.events import Code, log_event, warn
from lowdiff.errors import RankLost, RanksDiverged, WriterFailed
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.status import WriterStatus, read_status
from lowdiff.settings import Settings

_logger = logging.getLogger(__name__)


def say(rank: int, code: Code, text: str, **facts: Any) -> None:
    """Warn of what befell a rank."""
    warn(_logger, code, f"rank {rank}: {text}", rank=rank, **facts)


class StorageErrors:
    """What is wrong with one rank's durable writing, and what the user has heard of it.

    Args:
        folder: Its staging folder; those of other ranks lie beside it.
        rank: The rank.
        settings: Say what an error is to do.
    """

    def __init__(self, folder: StagingFolder, rank: int, settings: Settings) -> None:
        self._folder = folder
        self._rank = rank
        self._raises = settings.on_error == "raise"
        self._degrades = settings.backpressure == "degrade"
        self._of_disk = self._of_replica = ""
        self._told_of: tuple[int, ...] = ()
        self._lost_step = -1
        #: Of the store, as its writer reported it last; empty if all is well.
        self.of_store = ""
        #: Why no full snapshot was taken; empty if none is owed for want of memory.
        self.of_snapshot = ""

    @property
    def any(self) -> bool:
        """Whether there is an error that other ranks should hear of."""
        return bool(self._of_disk or (self._raises and (self.of_store or self.of_snapshot)))

    def report_replica(self, error: str, *, asks: bool) -> None:
        """Say once why a replica asks for an image.

        Args:
            error: What its replica reports; empty if all is well.
            asks: Whether it asks.
        """
        if asks and error != self._of_replica:
            text = f"the replica begins anew with a full snapshot: {error}"
            say(self._rank, Code.REPLICA_ERROR, text, error=error)
        if asks or not error:
            self._of_replica = error if asks else ""

    def report(self, status: WriterStatus, most_at_risk: int) -> None:
        """Say what the writer reports, where that is news.

        Args:
            status: What the writer reports.
            most_at_risk: How many steps may be at risk now.
        """
        rank, error = self._rank, status.error
        if error and error != self._of_disk:
            effect = "training goes on"
            if self._raises:
                effect = "this is an error at the next commit"
            elif not self._degrades:
                effect += f", and waits once {most_at_risk} steps are at risk"
            say(rank, Code.WRITER_ERROR, f"checkpoints are not durable now; {effect}", error=error)
        elif self._of_disk and not error:
            text = f"rank {rank}: checkpoints become durable again"
            log_event(_logger, logging.INFO, "writer_recovered", text, rank=rank)
        self._of_disk = error
        if status.lost_step > self._lost_step:
            self._lost_step = status.lost_step
            if not self._degrades:  # else its trainer dropped it, and has said so
                text = (
                    f"step {status.lost_step} was damaged in staging memory and is not durable; a "
                    "full snapshot follows"
                )
                say(rank, Code.STEP_LOST, text)
        if status.remote_error and status.remote_error != self.of_store:
            text = (
                "nothing reaches the store now; training goes on, and what is durable is uploaded "
                "later"
            )
            say(rank, Code.STORE_ERROR, text, error=status.remote_error)
        self.of_store = status.remote_error

    def skip_lost(self, step: int) -> None:
        """Say nothing of lost steps up to here: the caller has named them."""
        self._lost_step = max(self._lost_step, step)

    def hear(self, ranks: Sequence[int]) -> None:
        """Say, or raise, that durable writing fails on some ranks; on all ranks at the same commit.

        Args:
            ranks: Those that said so with the news of this step.

        Raises:
            WriterFailed: If ``on_error="raise"`` and there are any.
        """
        if ranks and self._raises:
            failure = self.failure(ranks)
            # Said once: the snapshot is owed, and taken when it can be.
            self.of_snapshot = ""
            raise failure
        others = tuple(rank for rank in ranks if rank != self._rank)
        if others and others != self._told_of:
            say(self._rank, Code.OTHER_WRITER_ERROR, str(self.failure(others)))
        self._told_of = others

    def failure(self, ranks: Sequence[int]) -> WriterFailed:
        """What these ranks report, as an error."""
        return WriterFailed(
            "; ".join(
                f"rank {rank} reports: {self._of(rank) or 'trouble with storage, see its output'}"
                for rank in ranks
            )
            + "; nothing committed is lost: mend it, and attach goes on from there"
        )

    def _of(self, rank: int) -> str:
        """What is wrong with a rank, if its page can be seen from here: not that of another node."""
        if rank == self._rank:  # a writer that keeps dying says nothing on its page
            return self.of_snapshot or self._of_disk or self.of_store
        mine = self._folder
        root = mine.root.parent.parent
        page = StagingFolder.of(root, mine.run_id, mine.incarnation, rank).status
        status = read_status(page, WriterStatus)
        return status.error or status.remote_error


class Health:
    """Compares what ranks say of themselves.

    Args:
        names: Names of the parameters in layout order.
        ranks: Asked for every parameter's checksum once, when a share is found to differ.
        raises: Whether ``on_error="raise"``.

    Attributes:
        ranks_apart: Ranks that were found not to be as most are.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks, *, raises: bool) -> None:
        self._names = names
        self._ranks = ranks
        self._raises = raises
        self._failure: RanksDiverged | None = None
        self.ranks_apart: tuple[int, ...] = ()

    def compare(
        self, step: int, heard: Sequence[RankNews], digests: Callable[[], list[int]]
    ) -> bool:
        """Compare what all ranks said after a step; say it once if they are not alike.

        Args:
            step: The step after which they said it.
            heard: By all ranks, in rank order.
            digests: Takes a checksum of every parameter; called on all ranks, or on none.

        Returns:
            Whether they were alike before and are not now.
        """
        apart = _minority([news.consumed for news in heard])
        what = "the hyper-parameters of an optimizer (learning rate, weight decay, ...)"
        if not apart and _shares_differ(heard):
            if self.ranks_apart:
                return False  # which ones is known, and said
            apart, what = self._differing_parameters(digests())
        if not apart:
            return False
        is_news = not self.ranks_apart
        self.ranks_apart = tuple(sorted({*self.ranks_apart, *apart}))
        if is_news:
            error = RanksDiverged(step, apart, what)
            if self._raises:
                self._failure = error
            else:
                text = f"{error}. A full snapshot follows. This is said once"
                say(self._ranks.rank, Code.RANKS_DIVERGED, text, step=step)
        return is_news

    def check(self) -> None:
        """Raise what was found, if that is asked for.

        Raises:
            RanksDiverged: If ``on_error="raise"`` and ranks are not alike.
        """
        if self._failure is not None:
            raise self._failure

    def _differing_parameters(self, own: list[int]) -> tuple[tuple[int, ...], str]:
        """Which ranks hold other parameters than most, and the first of these."""
        try:
            tables: list[list[int]] = self._ranks.gather(own)
        except RuntimeError as error:
            raise RankLost(error) from error
        found: set[int] = set()
        named = ""
        for name, values in zip(self._names, zip(*tables, strict=True), strict=True):
            apart = _minority(values)
            if apart:
                named = named or f"parameter {name!r}"
            found.update(apart)
        # What is alike again by now was written back in between.
        return tuple(sorted(found)), named


def _shares_differ(heard: Sequence[RankNews]) -> bool:
    """Whether a rank holds another share than the rank that answers for it."""
    return any(news.other != heard[news.watched].own for news in heard)


def _minority(values: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose value is not that of most; of equally many, that of the lowest rank counts."""
    most, _ = Counter(values).most_common(1)[0]
    return tuple(rank for rank, value in enumerate(values) if value != most)
