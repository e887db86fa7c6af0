"""The news that ranks tell each other after each step, and what all ranks know from them.

Ranks know together who wants to stop, who lost the run, and whether all are alike.

Data-parallel ranks compute one state, each for itself. Where one computes another (a scheduler that
follows each rank's own loss, code that writes on one rank only, faulty memory, unequal processors)
nothing in training says so, and what ranks checkpoint together is no state that any of them had. So
the ranks' news carry checksums, which are compared before anybody steps again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowdiff.commit.run_lock import RunLock
from lowdiff.core.events import Code
from lowdiff.core.waiting import wait_for_ranks
from lowdiff.errors import RankLost, RanksDiverged, UsageError
from lowdiff.model.ranks import Ranks

#: How long a rank that ends waits for the others' last news.
_CLOSE_SECONDS = 2.0
_SNAPSHOTS_KEPT = 8


@dataclass(frozen=True, slots=True)
class RankNews:
    """News that one rank tells all others after a step; whole numbers, so that it has one size.

    Attributes:
        incarnation: Of the run.
        step: The step that this rank has committed.
        is_preempted: Whether a signal told it to stop soon.
        has_lost_run: Whether another trainer has taken over the run.
        has_storage_error: Whether its durable writing fails.
        owes_snapshot: Whether a snapshot could not be taken and should be.
        can_snapshot: Whether one would not stop its training.
        has_rebased: Whether it found, since the step before, a step that only a snapshot makes recoverable, which it
            takes of this one.
        staged: The newest step that it has staged.
        sure: The newest one that recovery reaches without a snapshot that may not be there on all ranks.
        gap: The newest one that waits for such a snapshot; -1 where none does.
        snapshot: The newest of which its share of a snapshot is durable.
        interval: The tuner's wish, as levels plus one; 0 for none.
        batch: Likewise.
        stepped: Bit ``i`` says whether its optimizer ``i`` stepped.
        consumed: CRC-32C of the hyper-parameters that its optimizers used and left.
        own: Checksum of its share of the parameters; 0 where ranks are not compared.
        other: The same of the share of rank ``watched``, as this rank has it.
        watched: Whose share that is.
        generators: Checksum of its random generators; 0 where items are not compared.
        buffers: The same of its buffers.
        objects: The same of all other items.
        held: The newest step of which it holds all that it keeps for ranks on other nodes; -1 for none.
        copied: The newest of which it holds their shares of a snapshot; -1 for none.
        leads: The newest step to which its newest image in memory leads, by what follows; -1 where none are kept.
    """

    incarnation: int
    step: int
    is_preempted: bool = False
    has_lost_run: bool = False
    has_storage_error: bool = False
    owes_snapshot: bool = False
    can_snapshot: bool = False
    has_rebased: bool = False
    staged: int = -1
    sure: int = -1
    gap: int = -1
    snapshot: int = -1
    interval: int = 0
    batch: int = 0
    stepped: int = 0
    consumed: int = 0
    own: int = 0
    other: int = 0
    watched: int = 0
    generators: int = 0
    buffers: int = 0
    objects: int = 0
    held: int = -1
    copied: int = -1
    leads: int = -1


_KINDS = [bool if field.type == "bool" else int for field in fields(RankNews)]


class News:
    """Exchange news with the other ranks.

    Args:
        group: Of the ranks.
        patience: How long ranks wait for one another; None: as long as the group does.
    """

    def __init__(self, group: dist.ProcessGroup, patience: timedelta | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self._patience = patience
        self._told: RankNews | None = None
        self._coming: tuple[dist.Work, list[torch.Tensor]] | None = None

    def tell(self, news: RankNews) -> None:
        """Send this rank's news; returns at once. What was sent before must have been heard."""
        assert self._coming is None
        assert self._group is not None
        self._told = news
        words = torch.tensor([int(word) for word in astuple(news)], device="cpu")
        all_words = [torch.empty_like(words) for _ in range(self._group.size())]
        work = dist.all_gather(all_words, words, group=self._group, async_op=True)
        assert work is not None
        self._coming = work, all_words

    def hear(self, timeout_seconds: float | None = None) -> tuple[RankNews, ...]:
        """Wait for the news of all ranks, in rank order.

        Args:
            timeout_seconds: How long; by default as long as ranks wait in training.

        Raises:
            RankLost: If a rank ended.
            UsageError: If a rank is at another step.
        """
        assert self._coming is not None
        work, all_words = self._coming
        limit = self._patience if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        try:
            wait_for_ranks(work.wait, *(() if limit is None else (limit,)))
        except RuntimeError as error:
            raise RankLost(error) from error
        heard = tuple(_news(words.tolist()) for words in all_words)
        self._refuse_others(heard)  # again, if this is asked again
        self._coming = None
        return heard

    def peek(self) -> tuple[RankNews, ...] | None:
        """Return the news of all ranks if they are here; for any thread."""
        coming = self._coming
        if coming is None:
            return None
        work, all_words = coming
        if not work.is_completed():
            return None
        try:
            work.wait()  # it is over; `Work.exception`, which PyTorch means to drop, fails in 2.10
        except RuntimeError:
            return None
        return tuple(_news(words.tolist()) for words in all_words)

    def close(self) -> bool:
        """Let go of the group: it ends, and others hear of that, once nothing holds it.

        Returns:
            Whether all ranks have answered what was told, or failed.
        """
        coming, self._group, self._coming = self._coming, None, None
        if coming is None:
            return True
        work, _ = coming
        with suppress(RuntimeError):  # a rank that is only slow answers soon
            wait_for_ranks(work.wait, timedelta(seconds=_CLOSE_SECONDS))
        return bool(work.is_completed())

    def _refuse_others(self, heard: Sequence[RankNews]) -> None:
        assert self._told is not None
        here = self._told.incarnation, self._told.step
        for rank, news in enumerate(heard):
            if (news.incarnation, news.step) != here:
                raise UsageError(
                    f"rank {rank} has committed step {news.step} of incarnation {news.incarnation} "
                    f"while this rank has committed step {here[1]} of incarnation {here[0]}; every "
                    "rank must attach to the same run and commit the same steps"
                )
            if news.stepped != self._told.stepped:
                raise UsageError(
                    f"rank {rank} ended step {news.step} after other optimizer steps than this rank "
                    "(a body without optimizer.step(), or one commit() too many?); every rank must "
                    "attach to the same run and commit the same steps"
                )


def _news(words: Sequence[int]) -> RankNews:
    values: list[Any] = [kind(word) for kind, word in zip(_KINDS, words, strict=True)]
    return RankNews(*values)


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
        self, step: int, heard: Sequence[RankNews], digests: Callable[[], Mapping[int, int]]
    ) -> bool:
        """Compare what all ranks said after a step; say it once if they are not alike.

        Args:
            step: The step after which they said it.
            heard: By all ranks, in rank order.
            digests: Takes a checksum of every parameter that this rank trains, by layout index; called on all
                ranks, or on none.

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
                Code.RANKS_DIVERGED.warn(text, rank=self._ranks.rank, step=step)
        return is_news

    def check(self) -> None:
        """Raise what was found, if that is asked for.

        Raises:
            RanksDiverged: If ``on_error="raise"`` and ranks are not alike.
        """
        if self._failure is not None:
            raise self._failure

    def _differing_parameters(self, own: Mapping[int, int]) -> tuple[tuple[int, ...], str]:
        """Find the ranks that hold other parameters than most, and the first of these parameters."""
        try:
            pairs = self._ranks.gather([list(pair) for pair in own.items()])
        except RuntimeError as error:
            raise RankLost(error) from error
        found: set[int] = set()
        named = ""
        tables = [dict(theirs) for theirs in pairs]
        for index, name in enumerate(self._names):
            holders = [rank for rank, table in enumerate(tables) if index in table]
            apart = [holders[i] for i in _minority([tables[rank][index] for rank in holders])]
            if apart:
                named = named or f"parameter {name!r}"
            found.update(apart)
        # What is alike again by now was written back in between.
        return tuple(sorted(found)), named


class Agreement:
    """One rank's view of what all ranks told each other after the step they committed last.

    Args:
        ranks: All of them.
        lock: This rank's hold on the run.
        health: Compares them.

    Attributes:
        health: The same.
        is_alone: Whether there is one rank, which tells and hears nothing.
        was_told_to_stop: Whether this rank was told to stop soon.
    """

    def __init__(self, ranks: Ranks, lock: RunLock, health: Health) -> None:
        self.health = health
        self._ranks = ranks
        self.is_alone = ranks.world_size == 1
        self._heard: tuple[RankNews, ...] | None = None
        #: Of the step before.
        self._settled: tuple[RankNews, ...] | None = None
        self._news: News | None = None
        if not self.is_alone:
            assert ranks.group is not None
            self._news = News(ranks.group, ranks.patience)
        self._lock = lock
        self.was_told_to_stop = self._all_stop = self._has_lost_run = False
        self._acted_step = -1
        #: Of each rank: the steps of its last snapshots. They may be a few apart where one was put off.
        self._snapshots = [deque[int](maxlen=_SNAPSHOTS_KEPT) for _ in range(ranks.world_size)]

    @property
    def is_preempted(self) -> bool:
        """Whether a rank was told to stop soon; turns true at the same commit on all ranks."""
        return self._all_stop or (self.is_alone and self.was_told_to_stop)

    @property
    def has_lost_run(self) -> bool:
        """Whether another machine has taken over the run, as far as this rank knows."""
        return self._has_lost_run or self._lock.is_lost()

    def note(self, incarnation: int, step: int) -> None:
        """Leave word of a committed step for whoever trains the run after this process."""
        self._lock.tell(incarnation, step)

    def stop(self) -> None:
        """Tell the other ranks, with the next news, to stop soon; for any thread."""
        self.was_told_to_stop = True

    def tell(self, news: RankNews) -> None:
        """Say how this rank stands after a step."""
        assert self._news is not None
        self._news.tell(news)

    def peek(self) -> tuple[RankNews, ...] | None:
        """Return the newest news that are here of all ranks, of the last two steps; for any thread.

        A rank that dies in its optimizer's step leaves no news of this step.
        """
        newest = self._heard or (None if self._news is None else self._news.peek())
        return self._settled if newest is None else newest

    def close(self) -> None:
        """Tell and hear no more."""
        if self._news is not None and not self._news.close():
            self._ranks.abandon()

    def hear(self, timeout_seconds: float | None = None) -> tuple[tuple[RankNews, ...], bool]:
        """Wait, once, for what all ranks said.

        Returns:
            What they said, and whether it is heard for the first time; a single process hears nothing.

        Raises:
            RankLost: If a rank ended.
            UsageError: If a rank is at another step.
        """
        if self._news is None:
            return (), False
        is_new = self._heard is None
        if self._heard is None:
            self._heard = self._news.hear(timeout_seconds)
        return self._heard, is_new

    def refuse_lost_run(self, heard: Sequence[RankNews]) -> None:
        """See that no rank has lost the run, as all ranks know it; a single process looks by itself.

        Raises:
            RunInUse: If one has; on all ranks.
        """
        is_told = any(news.has_lost_run for news in heard)
        self._has_lost_run |= self._lock.is_lost() if self.is_alone else is_told
        if self._has_lost_run:
            raise self._lock.taken_over()

    def acts_after(self, step: int) -> bool:
        """Whether to act on the news of ``step``: once, also where the commit that hears them is repeated."""
        is_new, self._acted_step = step > self._acted_step, max(step, self._acted_step)
        return is_new

    def joint_snapshot(self, heard: Sequence[RankNews]) -> int:
        """Return the newest step of which every rank has said, by now, that its share of a snapshot is durable; else -1.

        It matters where a rank tells of a gap; else it is -1 as well.
        """
        for news, told in zip(heard, self._snapshots, strict=True):
            if news.snapshot not in told:
                told.append(news.snapshot)
        if all(news.gap < 0 for news in heard):
            return -1  # nobody asks
        return max(set.intersection(*map(set, self._snapshots)), default=-1)

    def settle(self, heard: Sequence[RankNews]) -> None:
        """Be done with the news of a step: all ranks commit on the same, so all know who is to stop."""
        self._heard, self._settled = None, tuple(heard)
        self._all_stop |= any(news.is_preempted for news in heard)


def _shares_differ(heard: Sequence[RankNews]) -> bool:
    """Whether a rank holds another share than the rank that answers for it."""
    return any(news.other != heard[news.watched].own for news in heard)


def _minority(values: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose value is not that of most; of equally many, that of the lowest rank counts."""
    most, _ = Counter(values).most_common(1)[0]
    return tuple(rank for rank, value in enumerate(values) if value != most)
