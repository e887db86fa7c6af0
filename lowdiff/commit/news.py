"""What ranks tell each other once a step: one small value, all-gathered on a group of lowdiff's own.

Each rank tells its news when it has committed a step, and waits for the others' before its next
optimizer step. When they have come, every rank holds the step: it is committed. Nothing rides on the
exchange of gradients, so all strategies and all compressors share this one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowdiff.errors import RankLost, UsageError


@dataclass(frozen=True, slots=True)
class RankNews:
    """What one rank tells all others after a step; whole numbers, so that it has one size.

    Attributes:
        incarnation: Of the run.
        step: The step that this rank has committed.
        is_preempted: Whether a signal told it to stop soon.
        has_lost_run: Whether another trainer has taken over the run.
        has_storage_error: Whether its durable writing fails.
        owes_snapshot: Whether a snapshot could not be taken and should be.
        can_snapshot: Whether one would not stop its training.
        has_rebased: Whether only its snapshot of the step can be recovered.
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
    """

    incarnation: int
    step: int
    is_preempted: bool = False
    has_lost_run: bool = False
    has_storage_error: bool = False
    owes_snapshot: bool = False
    can_snapshot: bool = False
    has_rebased: bool = False
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


_KINDS = [bool if field.type == "bool" else int for field in fields(RankNews)]


class News:
    """Tells and hears; what a single process tells is what it hears."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._told: RankNews | None = None
        self._coming: tuple[dist.Work, list[torch.Tensor]] | None = None

    def tell(self, news: RankNews) -> None:
        """Send this rank's news; returns at once. What was sent before must have been heard."""
        assert self._coming is None
        self._told = news
        if self._group is None:
            return
        words = torch.tensor([int(word) for word in astuple(news)], device="cpu")
        all_words = [torch.empty_like(words) for _ in range(self._group.size())]
        work = dist.all_gather(all_words, words, group=self._group, async_op=True)
        assert work is not None
        self._coming = work, all_words

    def hear(self, timeout_seconds: float | None = None) -> tuple[RankNews, ...]:
        """Wait for the news of all ranks, in rank order.

        Args:
            timeout_seconds: How long; by default as long as the process group waits.

        Raises:
            RankLost: If a rank ended.
            UsageError: If a rank is at another step.
        """
        assert self._told is not None
        if self._coming is None:
            return (self._told,)
        work, all_words = self._coming
        try:
            if timeout_seconds is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise RankLost(error) from error
        self._coming = None
        heard = tuple(_news(words.tolist()) for words in all_words)
        self._refuse_others(heard)
        return heard

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
