"""What callbacks of a framework keep, to be attached: averages of the weights, and states of the usual protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves


def averages_of(callbacks: Iterable[object]) -> dict[str, Any]:
    """Name to attach it by -> each average that callbacks keep, which is replayed; also in lists and dicts of theirs."""
    kept = (leaf for callback in callbacks for leaf in tree_leaves(vars(callback)))
    averages = (leaf for leaf in kept if isinstance(leaf, AveragedModel))
    return {f"average{i}": average for i, average in enumerate(averages)}


def stateful_of(callbacks: Iterable[object]) -> dict[str, Any]:
    """Name to attach it by -> each callback with ``state_dict()`` and ``load_state_dict()``."""
    return {f"callback{i}": made for i, made in enumerate(callbacks) if isinstance(made, Stateful)}
