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

from lowdiff.agreement import Ranks
from lowdiff.commit.news import RankNews
from lowdiff.errors import RankLost, RanksDiverged
from lowdiff.events import log_event

_logger = logging.getLogger(__name__)


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

    def part(self, step: int, heard: Sequence[RankNews], digests: Callable[[], list[int]]) -> bool:
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
                rank = self._ranks.rank
                text = f"rank {rank}: {error}. A full snapshot follows. This is said once"
                log_event(_logger, logging.WARNING, "ranks_diverged", text, rank=rank, step=step)
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
