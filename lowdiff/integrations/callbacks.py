"""What callbacks of a framework keep: averages of the weights, which are attached and replayed."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves


def averages_of(callbacks: Iterable[object]) -> dict[str, AveragedModel]:
    """Name to attach it by -> each average that callbacks keep, also in lists and dicts of theirs."""
    kept = (leaf for callback in callbacks for leaf in tree_leaves(vars(callback)))
    averages = (leaf for leaf in kept if isinstance(leaf, AveragedModel))
    return {f"average{i}": average for i, average in enumerate(averages)}
