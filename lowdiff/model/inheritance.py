"""Items of a rank that died before it had staged them: as another rank has them, where that is right."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lowdiff.persistence.format.values import encode
from lowdiff.recovery.state import BUFFER_ITEM, RNG_ITEM


def inherited(
    now: Mapping[str, bytes],
    before: Mapping[str, bytes],
    theirs_before: Mapping[str, bytes],
    *,
    seed: tuple[str, int, int],
    takes_buffers: bool,
) -> tuple[dict[str, bytes] | None, str]:
    """Rebuild the items of a dead rank at a step, from a survivor's and its own of the step before.

    What both had alike at the step before, they have alike. DDP overwrites buffers by those of rank 0
    before the next forward pass. Generators are drawn anew. Anything else is lost.

    Args:
        now: The survivor's items at the step.
        before: Its items at the step before.
        theirs_before: The dead rank's items at the step before.
        seed: Run, rank and step: from these the generators are drawn anew.
        takes_buffers: Whether the dead rank's buffers are overwritten before their next use.

    Returns:
        The items, and what the user should know of them; None, and why, where something is lost.
    """
    found: dict[str, bytes] = {}
    redrawn = []
    for name in sorted({*now, *theirs_before}):
        if before.get(name) == theirs_before.get(name):
            if name in now:
                found[name] = now[name]
        elif name.startswith(RNG_ITEM):
            found[name] = encode(_drawn_anew(name, seed), name=name)
            redrawn.append(name.removeprefix(RNG_ITEM))
        elif takes_buffers and name.startswith(BUFFER_ITEM) and name in now:
            found[name] = now[name]
        else:
            return None, f"it alone had {name}"
    if redrawn:
        names = " and ".join(redrawn)
        return found, f"its random generators ({names}) are seeded anew from run, rank and step"
    return found, ""


def _drawn_anew(name: str, seed: tuple[str, int, int]) -> Any:
    """State of a generator that is seeded by what identifies its rank and step."""
    number = zlib.crc32(repr((name, *seed)).encode())
    kind = name.removeprefix(RNG_ITEM)
    if kind == "python":
        return random.Random(number).getstate()
    if kind == "numpy":
        return np.random.RandomState(number).get_state(legacy=False)
    if kind == "cuda":  # its seed, and how far it has come
        return torch.tensor([number, 0], dtype=torch.int64).view(torch.uint8)
    return torch.Generator().manual_seed(number).get_state()
