"""An optimizer's own kernels over lists of tensors, where they have the bits of those tensor by tensor.

A default CPU optimizer goes from tensor to tensor and runs some fifteen kernels for each; Python takes
longer than the kernels where tensors are small, and two replay workers wait for each other's hold of
Python's lock. With ``foreach=True`` torch makes one call for each kernel and all tensors, and on a CPU
that call runs the very kernels of the loop. Of the classes in `_SAME_BITS` it also runs them in the same
order; whether that holds for the hyper-parameters at hand, and in the torch at hand, is tried on small
tensors before lists are used.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lowdiff.core import devices
from lowdiff.recovery.compare import has_same_bits

_Step = Callable[[torch.optim.Optimizer], object]

#: Others compute some factor in another order, or as a tensor, where they step lists.
_SAME_BITS = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop", "SGD")
)
#: How torch and Python say that lists do not take a rate that is a tensor, `differentiable` and the like.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: One vector body, several tails; and steps enough for every kind of state to be there and be used.
_PROBE_ELEMENTS, _PROBE_STEPS = 203, 4
#: For narrower elements a number that is handed over as a tensor is rounded otherwise than a plain one:
#: rarely, so that a probe may not see it.
_LEAST_ELEMENT_BYTES = 4


class StepChooser:
    """Picks the function that steps an optimizer. May be shared between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: dict[tuple[Any, ...], _Step] = {}

    def choose(self, optimizer: torch.optim.Optimizer) -> _Step:
        """Return the fastest function that gives the bits of ``optimizer.step()``, without its hooks."""
        # Asked at every step of every block, so it looks no closer than it must: types decide
        # whether lists are taken.
        key = (type(optimizer), *(_types(group) for group in optimizer.param_groups))
        found = self._chosen.get(key)
        if found is None:
            with self._lock:  # one probe of each kind is enough
                found = self._chosen.get(key)
                if found is None:
                    found = self._chosen[key] = _fastest(optimizer)
        return found


def _types(group: Mapping[str, Any]) -> tuple[Any, ...]:
    # Kernel choices are values, not types. Small parameters of several dtypes may share a unit, and
    # which one comes first says nothing about the others.
    return (
        frozenset({parameter.dtype for parameter in group["params"]}),
        group.get("fused"),
        group.get("foreach"),
        *map(_type, group.values()),
    )


def _type(value: object) -> object:
    if isinstance(value, (int, float)):
        return type(value), bool(value)  # a momentum of 0 makes no buffer
    return tuple(map(type, value)) if isinstance(value, (tuple, list)) else type(value)


def _fastest(optimizer: torch.optim.Optimizer) -> _Step:
    # The bare method: hooks and the profiler's record would cost as much as a small block.
    bare: _Step = inspect.unwrap(type(optimizer).step)
    if type(optimizer) not in _SAME_BITS:
        return bare
    if any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
        return bare
    parameters = _parameters(optimizer)
    if not all(devices.may_look(p) for p in parameters):
        return bare  # torch chooses lists by itself there
    if any(p.element_size() < _LEAST_ELEMENT_BYTES for p in parameters):
        return bare
    by_lists = partial(_by_lists, bare)
    candidates = (partial(_adam_by_lists, by_lists), by_lists)
    return next((c for c in candidates if _agree(optimizer, bare, c)), bare)


def _by_lists(bare: _Step, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer as if it had been made with ``foreach=True``."""
    chosen = [group["foreach"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["foreach"] = True
    try:
        bare(optimizer)
    finally:
        for group, choice in zip(optimizer.param_groups, chosen, strict=True):
            group["foreach"] = choice


def _adam_by_lists(otherwise: _Step, optimizer: torch.optim.Optimizer) -> None:
    """Step Adam or AdamW as usually set, without what torch does around their kernels.

    In torch that takes as long as the kernels of a small unit, and holds Python's lock meanwhile.

    Args:
        otherwise: Steps any other optimizer, one that is set otherwise, or one whose state is yet to be made.
        optimizer: Which.
    """
    if not _is_usual_adam(optimizer):
        otherwise(optimizer)
        return
    for group in optimizer.param_groups:
        rate, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            continue
        gradients = [p.grad for p in parameters]
        states = [optimizer.state[p] for p in parameters]
        averages, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1)
        counts = [step.item() for step in steps]
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        elif decay:
            gradients = [*torch._foreach_add(gradients, parameters, alpha=decay)]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, group["eps"])
        sizes = [-(rate / (1 - beta1**count)) for count in counts]
        torch._foreach_addcdiv_(parameters, averages, roots, sizes)


def _is_usual_adam(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    flags = ("amsgrad", "maximize", "capturable", "differentiable")
    for group in optimizer.param_groups:
        numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
        if any(group[flag] for flag in flags) or not {*map(type, numbers)} <= {float, int}:
            return False
    return all(p.grad is None or optimizer.state.get(p) for p in _parameters(optimizer))


def _agree(optimizer: torch.optim.Optimizer, bare: _Step, other: _Step) -> bool:
    """Whether both functions leave the same bits, over steps of made-up gradients."""
    left, right = _small(optimizer), _small(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_PROBE_STEPS):
        for ours, theirs in zip(_parameters(left), _parameters(right), strict=True):
            gradient = torch.randn(_PROBE_ELEMENTS, generator=generator, dtype=torch.float64)
            ours.grad = gradient.to(ours.dtype)
            theirs.grad = gradient.to(ours.dtype)
        try:
            with torch.no_grad():
                bare(left)
                other(right)
        except _REFUSALS:
            return False
    return all(
        has_same_bits(ours, theirs) and left.state[ours].keys() == right.state[theirs].keys()
        and all(has_same_bits(v, right.state[theirs][k]) for k, v in left.state[ours].items())
        for ours, theirs in zip(_parameters(left), _parameters(right), strict=True)
    )  # fmt: skip


def _small(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer over small parameters, two of each dtype a group, always the same."""
    generator = torch.Generator().manual_seed(1)
    made = copy.copy(optimizer)
    made.state = copy.copy(optimizer.state)
    made.state.clear()
    made.param_groups = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [
                torch.nn.Parameter(
                    torch.randn(_PROBE_ELEMENTS, generator=generator).to(dtype),
                    requires_grad=False,
                )
                for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"])
                for _ in range(2)
            ],
        }
        for group in optimizer.param_groups
        if group["params"]
    ]
    return made


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
