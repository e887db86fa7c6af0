"""Gradients that something changed between their exchange and the optimizer.

Noise, decay by hand, centralising and the like leave entries that no rank exchanged, or values that no
factor explains. Such a gradient is stored whole for that step: every rank stores the range that it
answers for (`lane.share`), under the sections ``whole/parameters`` and ``whole/DTYPE``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from lowdiff.compressors.sections import shared_parts
from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.types import Bits, Layout, Payload

_logger = logging.getLogger(__name__)


def has_foreign_entries(gradient: torch.Tensor, exchanged: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient has an entry that is not +0.0 where nobody exchanged one.

    Args:
        gradient: Flat, on the CPU; its content is as before on return.
        exchanged: Positions in it; they may overlap.
    """
    patterns = gradient.view(INT_OF_BYTES[gradient.element_size()])
    places = [where.long() for where in exchanged if where.numel()]
    kept = [(where, patterns.index_select(0, where)) for where in places]
    # Filling the exchanged places with zeros for a moment takes no memory of the gradient's size.
    for where, _ in kept:
        patterns.index_fill_(0, where, 0)
    found = bool(patterns.count_nonzero())
    for where, values in kept:
        patterns.index_copy_(0, where, values)
    return found


def whole_ranges(payloads: Sequence[Payload], layout: Layout) -> list[dict[int, Bits]]:
    """Each rank's stored ranges of whole gradients: layout index -> bit patterns.

    Raises:
        ReplayMismatch: If the sections do not fit together.
    """
    return shared_parts("whole", payloads, layout, lambda i: layout.parameters[i].numel)


class ChangeWarning:
    """Tells the user once per parameter that its gradient is changed, and what that costs."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._told: set[int] = set()

    def say(self, parameters: Sequence[int]) -> None:
        """Name those of the parameters (layout indices) that were not named before."""
        news = [i for i in parameters if i not in self._told]
        if not news:
            return
        self._told.update(news)
        specs = [self._layout.parameters[i] for i in news]
        more = f" and {len(news) - 1} more" if len(news) > 1 else ""
        _logger.warning(
            "the gradient of %r%s was changed between its exchange and optimizer.step() by more than "
            "a factor; each step that does so stores such gradients whole, %s bytes over all ranks. "
            "Clip with checkpointer.clip_grad_norm_(...), and put other changes into the loss or the "
            "optimizer. This is said once per parameter",
            specs[0].name,
            more,
            f"{sum(spec.nbytes for spec in specs):,}",
        )
