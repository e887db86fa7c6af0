"""An optimizer's own arithmetic in one call that does not hold Python's lock.

``Optimizer.step`` of a default CPU optimizer runs some fifteen kernels, and takes Python's lock
back after each. Two replay workers then wait for one another most of the time. torch writes the
functional form of most optimizers so that TorchScript can compile it: the same kernels in the same
order, run by torch's interpreter with the lock released once. Nothing is fused on the CPU, so the
bits stay; every compiled form is nevertheless compared with the real step before it is used, and
where torch offers none, or it differs, the real step runs.
"""

from __future__ import annotations

import copy
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.jit.frontend import FrontendError

_Step = Callable[[torch.optim.Optimizer], object]

#: One vector body, several tails; and calls enough for the interpreter to have settled on a graph.
_PROBE_ELEMENTS, _PROBE_STEPS = 203, 4
#: Compiled code hands some numbers to kernels as tensors, and for float16 and bfloat16 these are rounded
#: otherwise than plain numbers are: rarely, so that a probe may not see it.
_LEAST_COMPILED_BYTES = 4


class StepChooser:
    """Picks the function that steps an optimizer. May be shared between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: dict[tuple[Any, ...], _Step] = {}

    def choose(self, optimizer: torch.optim.Optimizer) -> _Step:
        """The fastest function that gives the bits of ``optimizer.step()``, without its hooks."""
        # Asked at every step of every block, so it looks no closer than it must: types decide
        # whether compiled code takes its arguments.
        key = (type(optimizer), *(_types(group) for group in optimizer.param_groups))
        found = self._chosen.get(key)
        if found is None:
            with self._lock:  # TorchScript's compiler is not made for two threads
                found = self._chosen[key] = _fastest(optimizer)
        return found


def _types(group: Mapping[str, Any]) -> tuple[Any, ...]:
    # Kernel choices are values, not types. Small parameters of several dtypes may share a unit, and
    # which one comes first says nothing about the others.
    return (
        frozenset({parameter.dtype for parameter in group["params"]}),
        group.get("fused"),
        group.get("foreach"),
        # A momentum of 0 makes no buffer, and then compiled code could not make one either.
        *((type(v), bool(v)) if isinstance(v, (int, float)) else type(v) for v in group.values()),
    )


def _fastest(optimizer: torch.optim.Optimizer) -> _Step:
    # The bare method: hooks and the profiler's record would cost as much as a small block.
    bare: _Step = inspect.unwrap(type(optimizer).step)
    if any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
        return bare
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.is_cpu for p in parameters):
        return bare  # kernels are only queued
    if any(p.element_size() < _LEAST_COMPILED_BYTES for p in parameters):
        return bare
    kind: Any = type(optimizer)
    compiled = _compiled(kind)
    return compiled if compiled is not None and _agree(optimizer, bare, compiled) else bare


@cache
def _compiled(kind: type[Any]) -> _Step | None:
    """``kind.step`` with its arithmetic compiled; None if torch cannot."""
    step = inspect.unwrap(kind.step)
    if not kind.__module__.startswith("torch.optim."):
        return None
    name = step.__module__.rpartition(".")[2]
    functional = inspect.unwrap(step.__globals__.get(name, step))
    single = getattr(functional, "__globals__", {}).get(f"_single_tensor_{name}")
    if not isinstance(functional, types.FunctionType) or single is None:
        return None
    try:
        with warnings.catch_warnings():
            # torch means to give TorchScript up some day; then the real step is what remains.
            warnings.simplefilter("ignore", DeprecationWarning)
            fast = torch.jit.script(single)
    except (FrontendError, RuntimeError):
        return None
    inner = _with_globals(functional, {single.__name__: fast})
    return _with_globals(step, {name: inner})


def _with_globals(function: types.FunctionType, names: Mapping[str, Any]) -> types.FunctionType:
    """A copy of a function that sees other objects under some global names."""
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _agree(optimizer: torch.optim.Optimizer, bare: _Step, compiled: _Step) -> bool:
    """Whether both forms leave the same bits, over steps of made-up gradients."""
    left, right = _small(optimizer), _small(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_PROBE_STEPS):
        for ours, theirs in zip(_parameters(left), _parameters(right), strict=True):
            gradient = torch.randn(_PROBE_ELEMENTS, generator=generator, dtype=torch.float64)
            ours.grad = gradient.to(ours.dtype)
            theirs.grad = gradient.to(ours.dtype)
        with torch.no_grad():
            bare(left)
            try:
                compiled(right)
            except (RuntimeError, TypeError):  # arguments of types that its signature excludes
                return False
    return all(
        _same(ours, theirs) and left.state[ours].keys() == right.state[theirs].keys()
        and all(_same(v, right.state[theirs][k]) for k, v in left.state[ours].items())
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


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return bool(left == right)
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and bytes(left.reshape(-1).view(torch.uint8).numpy())
        == bytes(right.reshape(-1).view(torch.uint8).numpy())
    )
