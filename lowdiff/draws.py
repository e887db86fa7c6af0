"""Which global random generators were drawn from, where a resumed run should not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lowdiff.capture import random_states
from lowdiff.recovery.state import RNG_ITEM

#: An iterator of a DataLoader draws one number for its workers, and one for a shuffled order. What
#: that moves comes to the same in a resumed run: the generators are restored behind it.
_MOST_SEEDS = 2


class Draws:
    """Watches the global generators from its making on."""

    def __init__(self, device: torch.device) -> None:
        self._readers = {
            name.removeprefix(RNG_ITEM): read for name, read in random_states(device).items()
        }
        self._before: Mapping[str, Any] = {name: read() for name, read in self._readers.items()}

    def names(self) -> list[str]:
        """Generators that were drawn from, but for the seeds of data loaders' iterators."""
        return [
            name
            for name, read in self._readers.items()
            if not _same(self._before[name], read(), may_seed=name == "torch")
        ]


def _same(before: Any, now: Any, *, may_seed: bool) -> bool:
    if not isinstance(before, torch.Tensor):
        return all(np.array_equal(old, new) for old, new in zip(before, now, strict=True))
    generator = torch.Generator()
    for _ in range(_MOST_SEEDS if may_seed else 0):
        if torch.equal(before, now):
            return True
        generator.set_state(before)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        before = generator.get_state()
    return torch.equal(before, now)
