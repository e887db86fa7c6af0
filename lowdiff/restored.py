"""Seeing that the live objects hold what was recovered, by name and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lowdiff.attached import Attached
from lowdiff.averages import LiveAverage
from lowdiff.capture import Stateful
from lowdiff.errors import RunMismatch
from lowdiff.layout import flat_like
from lowdiff.persistence.values import same
from lowdiff.recovery.state import (
    BUFFER_ITEM,
    FROZEN_ITEM,
    STATEFUL_ITEM,
    RecoveredState,
    is_aligned,
)
from lowdiff.shared_memory import same_bits
from lowdiff.types import ParameterSpec


def check_restored(state: RecoveredState, items: Mapping[str, bytes], attached: Attached) -> None:
    """Compare model and optimizers with the state that was loaded into them, in one pass.

    Raises:
        RunMismatch: Naming the first that differs.
    """
    _refuse_difference(state.step, _unlike_model(state, items, attached))
    _refuse_difference(state.step, _unlike_optimizers(state, attached))


def check_averages(state: RecoveredState, averages: Mapping[str, LiveAverage]) -> None:
    """Compare averages of the parameters that replay goes on with.

    Raises:
        RunMismatch: Naming the first that differs.
    """

    def differing() -> Iterator[str]:
        for name, average in averages.items():
            known = state.averages.get(name, {})
            for i, tensor in average.parameters.items():
                spec = state.fence.layout.parameters[i]
                if spec.name in known and not same_bits(flat_like(tensor, spec), known[spec.name]):
                    yield f"the average of {spec.name!r} in {name!r}"

    _refuse_difference(state.step, differing())


def _refuse_difference(step: int, names: Iterator[str]) -> None:
    first = next(names, None)
    if first is not None:
        raise RunMismatch(
            f"{first} is not what step {step} of the run holds, although attach has just restored "
            "it: something that attach called wrote to it, most likely load_state_dict() of an "
            "attached object or a hook of the model or its optimizer; leave what the model and its "
            "optimizers hold to attach. Nothing of the run was changed"
        )


def _unlike_model(
    state: RecoveredState, items: Mapping[str, bytes], attached: Attached
) -> Iterator[str]:
    for spec, parameter in zip(attached.layout.parameters, attached.parameters, strict=True):
        if not same_bits(flat_like(parameter.detach(), spec), state.parameters[spec.name]):
            yield f"parameter {spec.name!r}"
    constants = attached.constants()
    for name, tensor in constants.items():
        if name not in items or not same_bits(tensor, state.resolved(name, items)):
            yield _worded(name)
    for name in items:
        # One that forward registers is left to the model.
        is_absent = name in attached.frozen or name in attached.buffer_slots()
        if is_absent and name not in constants:
            yield _worded(name)


def _worded(item: str) -> str:
    kind = "frozen parameter" if item.startswith(FROZEN_ITEM) else "buffer"
    return f"{kind} {item.removeprefix(FROZEN_ITEM).removeprefix(BUFFER_ITEM)!r}"


def _unlike_optimizers(state: RecoveredState, attached: Attached) -> Iterator[str]:
    for index, (optimizer, recovered) in enumerate(
        zip(attached.optimizers, state.optimizers, strict=True)
    ):
        whose = f"of optimizer {index} ({type(optimizer).__name__})"
        pairs = zip(optimizer.param_groups, recovered.groups, strict=True)
        for number, (group, hyper) in enumerate(pairs):
            for key, value in hyper.items():
                if key not in group or not same(group[key], value):
                    yield f"{key!r} of group {number} {whose}"
        for i, spec in enumerate(attached.layout.parameters):
            if attached.owner[i] != index:
                continue
            live = optimizer.state.get(attached.parameters[i], {})
            known = recovered.state.get(spec.name, {})
            for key in live.keys() | known.keys():
                if (
                    key not in live
                    or key not in known
                    or not _is_same_entry(key, live[key], known[key], spec)
                ):
                    yield f"{key!r} of {spec.name!r} {whose}"


def _is_same_entry(key: str, live: Any, known: Any, spec: ParameterSpec) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(known, torch.Tensor):
        return same(live, known)
    if is_aligned(key, known, spec.numel):
        return same_bits(flat_like(live, spec), known.flatten())
    return same_bits(live, known)


def unlike(
    state: RecoveredState, items: Mapping[str, bytes], stateful: Mapping[str, Stateful]
) -> list[str]:
    """Names of stateful objects that do not return the state that they were given."""
    return [
        name
        for name, thing in stateful.items()
        if STATEFUL_ITEM + name in items
        and not _is_same_value(thing.state_dict(), state.resolved(STATEFUL_ITEM + name, items))
    ]


def _is_same_value(live: Any, known: Any) -> bool:
    """Whether two states are the same, without copying large tensors; the order of keys is free."""
    if isinstance(live, torch.Tensor) and isinstance(known, torch.Tensor):
        return same_bits(live, known) if live.layout is known.layout else same(live, known)
    if type(live) is not type(known):
        return False
    if isinstance(live, dict):
        return live.keys() == known.keys() and all(
            _is_same_value(value, known[key]) for key, value in live.items()
        )
    if type(live) in (list, tuple):
        return len(live) == len(known) and all(map(_is_same_value, live, known))
    return same(live, known)
