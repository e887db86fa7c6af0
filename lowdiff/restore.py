"""Putting a recovered state into the live model, optimizers and stateful objects."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowdiff.attached import Attached
from lowdiff.capture import Stateful
from lowdiff.errors import RunMismatch
from lowdiff.layout import shaped
from lowdiff.persistence.values import same
from lowdiff.recovery.optimizers import placed_scalar
from lowdiff.recovery.state import STATEFUL_ITEM, RecoveredState, is_aligned
from lowdiff.types import Fence, Layout

_NEW_RUN = (
    "start a new run folder, or take the old weights along with "
    "`lowdiff recover RUN --out weights.safetensors`"
)


def check_match(attached: Attached, fence: Fence) -> None:
    """Compare a run's description with what is attached.

    Raises:
        RunMismatch: Saying what differs, and how to get the old weights out.
    """
    difference = _layout_difference(fence.layout, attached.layout) or _optimizer_difference(
        attached, fence
    )
    if difference:
        raise RunMismatch(f"the run was trained with another {difference}; {_NEW_RUN}")


def load_parameters(state: RecoveredState, attached: Attached) -> None:
    """Copy parameters, bit for bit."""
    tensors = state.tensors()
    with torch.no_grad():
        for spec, parameter in zip(attached.layout.parameters, attached.parameters, strict=True):
            parameter.copy_(tensors[spec.name])


def load_gradients(state: RecoveredState, attached: Attached) -> None:
    """Give zeros to parameters that held a gradient: absent and zero are not the same."""
    held = set(state.held)
    for i, parameter in enumerate(attached.parameters):
        parameter.grad = torch.zeros_like(parameter) if i in held else None


def load_optimizers(state: RecoveredState, attached: Attached) -> list[str]:
    """Copy hyper-parameters and optimizer state, bit for bit.

    Returns:
        Where the constructor's hyper-parameters differed from the restored ones, which win.
    """
    differences = []
    for index, optimizer in enumerate(attached.optimizers):
        recovered = state.optimizers[index]
        pairs = zip(optimizer.param_groups, recovered.groups, strict=True)
        for number, (group, hyper) in enumerate(pairs):
            differences += [
                f"{key}={value!r} of group {number} (given: {group[key]!r})"
                for key, value in hyper.items()
                if key in group and not same(group[key], value)
            ]
            kept = group["params"]
            group.clear()
            group.update(hyper, params=kept)
            for key, value in optimizer.defaults.items():
                group.setdefault(key, value)  # the run's PyTorch did not have it yet
        optimizer.state.clear()
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for i, parameter in enumerate(attached.parameters):
            spec = attached.layout.parameters[i]
            entries = recovered.state.get(spec.name)
            if attached.owner[i] == index and entries:
                optimizer.state[parameter] = {
                    key: shaped(value.to(parameter.device, copy=True), spec)
                    if is_aligned(key, value, spec.numel)
                    else placed_scalar(key, value, group_of[parameter], parameter)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in entries.items()
                }
    return differences


def load_items(
    state: RecoveredState,
    items: Mapping[str, bytes],
    constants: Mapping[str, torch.Tensor],
    stateful: Mapping[str, Stateful],
) -> None:
    """Restore buffers, frozen parameters and stateful objects of one rank.

    Args:
        state: What was recovered.
        items: Those of its items that are this rank's.
        constants: Item name -> live tensor.
        stateful: Name -> live object.

    Raises:
        RunMismatch: If a buffer is new or has another shape.
    """
    with torch.no_grad():
        for name, tensor in constants.items():
            if name not in items:
                raise RunMismatch(
                    f"{name} is not in the run, whose model had no such tensor; {_NEW_RUN}"
                )
            value = state.resolved(name, items)
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise RunMismatch(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but the run holds "
                    f"{value.dtype} {tuple(value.shape)}; {_NEW_RUN}"
                )
            tensor.copy_(value)
    for name, thing in stateful.items():
        if STATEFUL_ITEM + name in items:
            thing.load_state_dict(state.resolved(STATEFUL_ITEM + name, items))


def _layout_difference(old: Layout, new: Layout) -> str | None:
    before = {spec.name: spec for spec in old.parameters}
    after = {spec.name: spec for spec in new.parameters}
    for name in [*before, *after]:
        if name not in after:
            return f"model: parameter {name!r} is gone"
        if name not in before:
            return f"model: parameter {name!r} is new"
        left, right = before[name], after[name]
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"model: {name!r} was {left.dtype} {left.shape}, now {right.dtype} {right.shape}"
        if left.strides != right.strides:
            return f"memory format: {name!r} had strides {left.strides}, now {right.strides}"
    return None if old == new else "model: its parameters come in another order"


def _optimizer_difference(attached: Attached, fence: Fence) -> str | None:
    if len(attached.specs) != len(fence.optimizers):
        return f"number of optimizers: {len(fence.optimizers)}, now {len(attached.specs)}"
    for old, new in zip(fence.optimizers, attached.specs, strict=True):
        if old.class_name != new.class_name:
            return f"optimizer: {old.class_name}, now {new.class_name}"
        if old.groups != new.groups:
            return "division of the parameters into optimizer groups"
    return None
