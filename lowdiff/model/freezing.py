"""Which attached parameters are frozen at the end of a step: a part of it that scripts set by hand.

Layers may be attached while they train and frozen afterwards, for some steps or for good. A script that does so by
the step's number does it in a resumed run as well. One that freezes when it starts, and thaws when an epoch
begins, does not: the first resumed step then trains other layers than the step before, which is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowdiff.core.events import Code
from lowdiff.persistence.format.values import decode, encode

#: Of a list of names; there is no such item in a step without frozen ones.
LAYERS_ITEM = "loop/frozen"
_MOST_SAID = 3


class FrozenLayers:
    """Reads which parameters are frozen.

    Args:
        parameters: By name, of what this rank trains.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: bytes | None = None

    def read(self) -> dict[str, bytes]:
        """The item as it is now; empty if none is frozen."""
        names = [name for name, p in self._parameters.items() if not p.requires_grad]
        return {LAYERS_ITEM: encode(names)} if names else {}

    def expect(self, items: Mapping[str, bytes]) -> None:
        """The first step from now on follows one with these items."""
        self._before = items.get(LAYERS_ITEM, b"")

    def compare(self, items: Mapping[str, bytes]) -> None:
        """Say once if the first step of a resumed run froze other parameters than the step before.

        Args:
            items: Of that first step.
        """
        before, self._before = self._before, None
        now = items.get(LAYERS_ITEM, b"")
        if before is None or before == now:
            return
        then, here = ({*decode(data)} if data else set() for data in (before, now))
        changes = [
            f"{what}: {', '.join(names[:_MOST_SAID])}{' and more' if names[_MOST_SAID:] else ''}"
            for what, names in (
                ("trained before and frozen now", sorted(here - then)),
                ("frozen before and trained now", sorted(then - here)),
            )
            if names
        ]
        Code.FROZEN_OTHERWISE.warn(
            f"the first step after attach did not train the same parameters as the step before it; {'; '.join(changes)}. "
            "If the script freezes or thaws in this very step, all is well. Else an uninterrupted run had trained "
            "on as before: freeze and thaw by the step's number, module.requires_grad_(step >= 1000)"
        )
