"""Replaying averages of the parameters (EMA, SWA) with torch's own ``AveragedModel``.

An average is determined by the parameters it takes in, so it is not logged: each differential says
whether it was updated, and replay updates it block by block after the optimizer. torch's averages
are element-wise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from lowdiff.errors import UnsupportedOptimizer
from lowdiff.types import AverageStep, Block

#: Name in ``swa_utils`` -> argument of ``AveragedModel`` that takes what it makes.
_MAKERS: Mapping[str, str] = {
    "get_ema_multi_avg_fn": "multi_avg_fn",
    "get_ema_avg_fn": "avg_fn",
    "get_swa_multi_avg_fn": "multi_avg_fn",
    "get_swa_avg_fn": "avg_fn",
}


def rule_of(average: AveragedModel) -> tuple[str, float | None] | None:
    """Function and decay as in `AverageStep`; None if it averages in a way of its own."""
    function = average.multi_avg_fn or average.avg_fn
    if function is None:
        return "", None
    inner = inspect.unwrap(function)
    maker, _, _ = getattr(inner, "__qualname__", "").partition(".<locals>")
    if inner.__module__ != swa_utils.__name__ or maker not in _MAKERS:
        return None
    decay = inspect.getclosurevars(inner).nonlocals.get("decay")
    return maker, None if decay is None else float(decay)


class BlockAverage:
    """One average over the blocks of one unit."""

    def __init__(self, follows: Iterable[tuple[Block, torch.nn.Parameter, torch.Tensor]]) -> None:
        """Follow parameters, each of one block, in tensors of the same shapes."""
        listed = list(follows)
        self.blocks = [(block, average) for block, _, average in listed]
        self._source = torch.nn.ParameterList(parameter for _, parameter, _ in listed)
        self._average = AveragedModel(torch.nn.ParameterList())
        self._average.module = torch.nn.ParameterList(
            torch.nn.Parameter(average, requires_grad=False) for _, _, average in listed
        )

    def update(self, step: AverageStep) -> None:
        """Take the parameters in, as the live run did."""
        if not self.blocks:
            return
        functions = _functions(step)
        self._average.avg_fn = functions.get("avg_fn")
        self._average.multi_avg_fn = functions.get("multi_avg_fn")
        self._average.n_averaged.fill_(step.count)
        self._average.update_parameters(self._source)


def _functions(step: AverageStep) -> dict[str, Callable[..., Any]]:
    if not step.function:
        return {}
    if step.function not in _MAKERS:
        raise UnsupportedOptimizer(
            f"the run averaged its parameters with {step.function!r}, which this lowdiff cannot "
            "replay; recover with the version that trained it, or a later one"
        )
    arguments = {} if step.decay is None else {"decay": step.decay}
    return {_MAKERS[step.function]: getattr(swa_utils, step.function)(**arguments)}
