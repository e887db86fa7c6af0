"""Whether all ranks still hold the same parameters.

Data-parallel ranks compute one state, each for itself. Where one computes another (faulty memory,
unequal processors, code that changes parameters on one rank only) nothing in training says so, and
what ranks checkpoint together is no state that any of them had. So each tells the others, on the
back of the gradients' exchange, a checksum of one rotating slice of its parameters.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from lowdiff.attached import Attached
from lowdiff.digests import Digester
from lowdiff.errors import RanksDiverged
from lowdiff.events import log_event

_logger = logging.getLogger(__name__)

#: Where the checksum lies in a rank's note.
_SHIFT, _BITS = 24, 32
_MASK = (1 << _BITS) - 1


class Divergence:
    """Compares this rank's parameters with those of the others.

    Args:
        attached: Whose parameters. Those of an accelerator are not compared, because a checksum
            of them would make the host wait.
        digester: Computes the checksums.
        rank: This rank.
        raises: Whether ``on_error="raise"``.
    """

    def __init__(self, attached: Attached, digester: Digester, rank: int, *, raises: bool) -> None:
        self._attached = attached
        self._digester = digester
        self._rank = rank
        self._raises = raises
        #: Ranks whose parameters were not those of most.
        self.ranks: tuple[int, ...] = ()

    def note(self, step: int) -> int:
        """What this rank tells the others of its parameters after a step, as bits of its note."""
        if self._attached.device.type != "cpu":
            return 0
        value = self._digester.digest(self._attached.parameters, step, 0, 1).value
        return ((value ^ value >> _BITS) & _MASK) << _SHIFT

    def heed(self, step: int, notes: Sequence[int]) -> None:
        """Compare what all ranks told; says it once, or raises, if they are not the same.

        Args:
            step: The step after which they took the checksums.
            notes: Of all ranks, in their order; empty if nothing was exchanged.

        Raises:
            RanksDiverged: If ``on_error="raise"`` and they differ; on all ranks.
        """
        told = [note >> _SHIFT & _MASK for note in notes]
        if len(set(told)) < 2:
            return
        most, _ = Counter(told).most_common(1)[0]  # of equally many, that of the lowest rank
        others = tuple(rank for rank, value in enumerate(told) if value != most)
        is_news = not self.ranks
        self.ranks = tuple(sorted({*self.ranks, *others}))
        start, _ = self._digester.slice_of(step, 0, 1)
        around = next(spec.name for spec in self._attached.layout.parameters if start < spec.stop)
        error = RanksDiverged(step, others, told.index(most), around)
        if self._raises:
            raise error
        if is_news:
            text = f"rank {self._rank}: {error}. This is said once"
            log_event(_logger, logging.WARNING, "ranks_diverged", text, rank=self._rank, step=step)
