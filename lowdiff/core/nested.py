"""Tensors inside plain values, such as states and hyper-parameters.

A module of its own, because recovery places such tensors, and training reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: No record holds what is nested deeper.
_MOST_DEPTH = 64
#: Types of which a value never changes.
_UNCHANGING = frozenset({bool, int, float, str, type(None)})


def copied(value: Any) -> Any:
    """Return a value as it is now: schedulers and optimizers write into tensors, arrays, lists and dicts in place."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict or kind is OrderedDict:
        return kind(
            (key, part if type(part) in _UNCHANGING else copied(part))
            for key, part in value.items()
        )
    if kind is list or kind is tuple:
        return kind([copied(part) for part in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def each_tensor(
    value: Any, change: Callable[[str, torch.Tensor], object], path: str = "", depth: int = 0
) -> Any:
    """Return ``value`` with what ``change`` makes of each tensor in it, in an order that encoding keeps.

    Args:
        value: A state; what is nested deeper than a record can hold is left as it is.
        change: Gets the path of a tensor and the tensor.
        path: Of the value.
        depth: Of the value.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if depth > _MOST_DEPTH:
        return value
    if kind is dict or kind is OrderedDict:
        return kind(
            (key, each_tensor(part, change, f"{path}/{key}", depth + 1))
            for key, part in value.items()
        )
    if kind is list or kind is tuple:
        return kind(
            each_tensor(part, change, f"{path}/{i}", depth + 1) for i, part in enumerate(value)
        )
    return value
