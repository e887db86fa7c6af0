"""What the ranks of a run know together: who wants to stop, who lost the run, whether all are alike."""

from __future__ import annotations

from collections.abc import Sequence

from lowdiff.commit.health import Health
from lowdiff.commit.news import News, RankNews
from lowdiff.commit.run_lock import RunLock
from lowdiff.model.ranks import Ranks


class Agreement:
    """One rank's view of what all ranks told each other after the step they committed last.

    Args:
        ranks: All of them.
        lock: This rank's hold on the run.
        health: Compares them.

    Attributes:
        health: The same.
        is_alone: Whether there is one rank, which tells and hears nothing.
    """

    def __init__(self, ranks: Ranks, lock: RunLock, health: Health) -> None:
        self.health = health
        self.is_alone = ranks.world_size == 1
        self._heard: tuple[RankNews, ...] | None = None
        self._news = News(None if self.is_alone else ranks.group)
        self._lock = lock
        self._was_told_to_stop = self._all_stop = self._has_lost_run = False
        self._acted_step = -1

    @property
    def is_preempted(self) -> bool:
        """Whether a rank was told to stop soon; turns true at the same commit on all ranks."""
        return self._all_stop or (self.is_alone and self._was_told_to_stop)

    @property
    def was_told_to_stop(self) -> bool:
        """Whether this rank was."""
        return self._was_told_to_stop

    @property
    def has_lost_run(self) -> bool:
        """Whether another machine has taken over the run, as far as this rank knows."""
        return self._has_lost_run or self._lock.is_lost()

    def stop(self) -> None:
        """Tell the other ranks, with the next news, to stop soon; for any thread."""
        self._was_told_to_stop = True

    def tell(self, news: RankNews) -> None:
        """Say how this rank stands after a step."""
        self._heard = None
        self._news.tell(news)

    def hear(self, timeout_seconds: float | None = None) -> tuple[tuple[RankNews, ...], bool]:
        """Wait, once, for what all ranks said.

        Returns:
            What they said, and whether it is heard for the first time.

        Raises:
            RankLost: If a rank ended.
            UsageError: If a rank is at another step.
        """
        is_new = self._heard is None
        if self._heard is None:
            self._heard = self._news.hear(timeout_seconds)
        return self._heard, is_new

    def refuse_lost_run(self, heard: Sequence[RankNews]) -> None:
        """See that no rank has lost the run.

        Raises:
            RunInUse: If one has; on all ranks.
        """
        self._has_lost_run |= any(news.has_lost_run for news in heard)
        if self._has_lost_run:
            raise self._lock.taken_over()

    def acts_after(self, step: int) -> bool:
        """Whether to act on the news of ``step``: once, also where the next commit is repeated."""
        is_new, self._acted_step = step > self._acted_step, max(step, self._acted_step)
        return is_new

    def settle(self, heard: Sequence[RankNews]) -> None:
        """Take it that all ranks know who was told to stop: they commit on the same news."""
        self._all_stop |= any(news.is_preempted for news in heard)
