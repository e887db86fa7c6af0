"""Putting a recovered state into the live model, optimizers and stateful objects, and seeing it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from lowdiff.core.layout import flat_like, shaped
from lowdiff.errors import RunMismatch
from lowdiff.model.averages import LiveAverage
from lowdiff.model.binding import Attached
from lowdiff.model.items import ABSENT_ITEM, Adapting, ExtraStates, Stateful
from lowdiff.model.sharding import local_of, sharded_as
from lowdiff.model.shared_memory import fill, part_copies
from lowdiff.persistence.format.values import same
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.replay.optimizers import placed, placed_scalar, take_scales_by_groups
from lowdiff.recovery.reshard import tensor_groups
from lowdiff.recovery.state import (
    BUFFER_ITEM,
    EXTRA_ITEM,
    FROZEN_ITEM,
    STATEFUL_ITEM,
    RecoveredState,
    is_aligned,
)
from lowdiff.types import Fence, Layout

_NEW_RUN = (
    "start a new run folder, or take the old weights along: where names and shapes fit, into a new folder with "
    'attach(..., restore_from=RUN) or in the same one with restore="model", which gives the old steps up; else with '
    "`lowdiff recover RUN --out weights.safetensors`"
)


def check_match(attached: Attached, fence: Fence) -> None:
    """Compare a run's description with what is attached.

    Raises:
        RunMismatch: Saying what differs, and how to get the old weights out.
    """
    found = difference(attached, fence)
    if found:
        raise RunMismatch(f"the run was trained with another {found}; {_NEW_RUN}")


def difference(attached: Attached, fence: Fence) -> str | None:
    """Say how what is attached differs from what a run's description names; None if it does not."""
    return _layout_difference(fence.layout, attached.layout) or _optimizer_difference(
        attached, fence
    )


def load_model(state: RecoveredState, items: Mapping[str, bytes], attached: Attached) -> list[str]:
    """Restore parameters, frozen parameters and buffers, each by its own name, bit for bit.

    Training may have filled a buffer that the model is built without, or given it another shape:
    then the module that has it gets a new tensor. So does one whose memory another name has as well,
    with other bytes: names that share memory as the model is built may have parted since.

    Args:
        state: What was recovered.
        items: Those of its items that are this rank's.
        attached: Model and optimizers.

    Returns:
        Which buffers have another shape or dtype in the run than the model was built with.

    Raises:
        RunMismatch: If the model has a tensor that the run does not know, or was built without one
            that the run's model was built with.
    """
    live, slots = attached.constants(), attached.buffer_slots()
    for name in live:
        if name not in items and ABSENT_ITEM + name not in items:
            raise RunMismatch(
                f"{name} is not in the run, whose model had no such tensor; {_NEW_RUN}"
            )
    differences = []
    names = {attached.layout.parameters[i].name for i in attached.parameters}
    known = set(state.fence.names.values())  # as the run's model was built
    for name in [n for n in items if n.startswith((BUFFER_ITEM, FROZEN_ITEM))]:
        value, tensor = state.resolved(name, items), live.get(name)
        is_other = tensor is not None and _form(value) != _form(tensor)
        if name in slots:
            if tensor is not None and is_other and tensor.numel():  # else it was built to be filled
                differences.append(f"{name} is {_form(value)} in the run, built as {_form(tensor)}")
        elif tensor is None and name.startswith(BUFFER_ITEM) and name not in known:
            differences.append(f"{name} is left to the model, which makes it while it trains")
            continue
        elif tensor is None or is_other:
            _refuse(name, tensor, value)
        names.add(name)
    for name in live:
        if ABSENT_ITEM + name in items:
            part, key = slots[name]
            setattr(part, key, None)
    # A rank has got no more than what it trains.
    specs = {s.name: s for s in state.fence.layout.parameters if s.name in state.parameters}

    def value_of(name: str) -> torch.Tensor:
        if name in specs:
            return shaped(state.parameters[name], specs[name])
        found: torch.Tensor = state.resolved(name, items)
        return found

    fill(attached, names, value_of)
    return differences


def load_gradients(state: RecoveredState, attached: Attached) -> None:
    """Give zeros to parameters that held a gradient: absent and zero are not the same.

    A gradient that is there stays the same tensor: the script may hold a buffer of which it is a view.
    """
    held = set(state.held)
    for i, parameter in attached.parameters.items():
        if i not in held:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def _in_place(live: object, value: object) -> object:
    """Return the live tensor with a restored value, which the script may hold as well; else the value."""
    if not (isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)):
        return value
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        return value
    with torch.no_grad():
        return live.copy_(value)


def load_optimizers(state: RecoveredState, attached: Attached) -> None:
    """Copy hyper-parameters and optimizer state, bit for bit.

    What an optimizer holds of frozen parameters, which no snapshot does, stays as it is.
    """
    for index, optimizer in enumerate(attached.optimizers):
        recovered = state.optimizers[index]
        given = [bool(group.get("fused")) for group in optimizer.param_groups]
        pairs = zip(optimizer.param_groups, recovered.groups, strict=True)
        for group, hyper in pairs:
            before = dict(group)
            group.clear()
            for key, value in hyper.items():
                group[key] = _in_place(before.get(key), placed(value, attached.device))
            # What the run did not have yet: of a newer PyTorch, or of another scheduler.
            for key, value in {**optimizer.defaults, **before}.items():
                group.setdefault(key, value)
        if given != [bool(group.get("fused")) for group in optimizer.param_groups]:
            take_scales_by_groups(optimizer)
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for i, parameter in attached.parameters.items():
            spec = attached.layout.parameters[i]
            entries = recovered.state.get(spec.name)
            if attached.owner[i] != index or not entries:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = {
                    key: sharded_as(shaped(value.to(parameter.device, copy=True), spec), parameter)
                    if is_aligned(key, value, spec.numel)
                    else placed_scalar(key, value, group_of[parameter], parameter)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in entries.items()
                }


def load_stateful(
    state: RecoveredState, items: Mapping[str, bytes], stateful: Mapping[str, Stateful]
) -> None:
    """Restore one rank's stateful objects.

    Args:
        state: What was recovered.
        items: Those of its items that are this rank's.
        stateful: Name -> live object.
    """
    for name, thing in stateful.items():
        if STATEFUL_ITEM + name in items:
            value = state.resolved(STATEFUL_ITEM + name, items)
            thing.load_state_dict(value)
            if isinstance(thing, torch.nn.Module):  # a copy of the model, an average say
                part_copies(thing, value)


def load_weights(
    state: RecoveredState, items: Mapping[str, bytes], attached: Attached
) -> list[str]:
    """Copy a run's weights, buffers and extra states by name into a model that may train others.

    Buffers that are in no state dict of the run are left alone, as by ``load_state_dict``: the model
    makes them itself, perhaps for another length of its input.

    Args:
        state: What was recovered.
        items: Those of its items that are this rank's.
        attached: Model and optimizers.

    Returns:
        What keeps the value that the model was built with.

    Raises:
        RunMismatch: Naming what the model lacks, or has in another shape.
    """
    live, slots, old = attached.tensors(), attached.buffer_slots(), state.tensors()
    own_names = {name.removeprefix(FROZEN_ITEM): name for name in live}
    made = {name for name, (part, key) in slots.items() if key in part._non_persistent_buffers_set}
    wrong, taken = [], {}  # name here -> name in the run
    elsewhere = {spec.name for spec in attached.layout.parameters} - own_names.keys()
    for name, value in _weights(state, items):
        if name in elsewhere:  # a shard of another rank
            continue
        own = own_names.get(name, name)
        tensor = live.get(own)
        if tensor is None and own not in slots:
            wrong.append(f"{name} is not in the model")
        elif tensor is not None and tensor.shape != value.shape:
            wrong.append(f"{name} is {_form(value)} there and {_form(tensor)} here")
        else:
            taken[own] = name
    if wrong:
        raise RunMismatch(
            f"the run's weights do not fit the model: {'; '.join(wrong)}. Give another form another name; what the "
            "model does not have, leave out by hand, before an attach without restore_from or restore: "
            "weights = lowdiff.recover(RUN).model_state_dict(); "
            "model.load_state_dict({name: weights[name] for name in ...}, strict=False)"
        )

    def weight(own: str) -> torch.Tensor:
        name = taken[own]
        item = name if name.startswith(BUFFER_ITEM) else FROZEN_ITEM + name
        value: torch.Tensor = old[name] if name in old else state.resolved(item, items)
        return value.to(live[own].dtype) if own in live else value

    fill(attached, taken, weight)
    extra = state.resolved(EXTRA_ITEM, items) if EXTRA_ITEM in items else {}
    ExtraStates(attached.module, attached.device).load_state_dict(extra)
    return [name.removeprefix(FROZEN_ITEM) for name in live if name not in taken.keys() | made]


def _weights(
    state: RecoveredState, items: Mapping[str, bytes]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by their own names, frozen or not, and buffers by item name; one at a time."""
    yield from state.tensors().items()
    kept = set(state.fence.names.values())
    for name in items:
        if name in kept and name.startswith((BUFFER_ITEM, FROZEN_ITEM)):
            yield name.removeprefix(FROZEN_ITEM), state.resolved(name, items)


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _refuse(name: str, tensor: torch.Tensor | None, value: torch.Tensor) -> NoReturn:
    """Say why a buffer or a frozen parameter has no place to be restored to."""
    if tensor is not None:
        raise RunMismatch(
            f"{name} is {_form(tensor)}, but the run holds {_form(value)}; {_NEW_RUN}"
        )
    way = _NEW_RUN
    if name.startswith(BUFFER_ITEM):
        key = name.rpartition(".")[2].removeprefix(BUFFER_ITEM)
        way = f"build the model with register_buffer({key!r}, None) if forward makes it, else {way}"
    raise RunMismatch(f"{name} is in the run and not in the model; {way}")


def check_restored(
    state: RecoveredState,
    items: Mapping[str, bytes],
    attached: Attached,
    averages: Mapping[str, LiveAverage],
) -> None:
    """Compare model, optimizers and replayed averages with what was loaded into them, in one pass.

    Raises:
        RunMismatch: Naming the first that differs.
    """
    differing = chain(
        _unlike_model(state, items, attached),
        _unlike_optimizers(state, attached),
        _unlike_averages(state, averages),
    )
    first = next(differing, None)
    if first is not None:
        raise RunMismatch(
            f"{first} is not what step {state.step} of the run holds, although attach has just "
            "restored it: something that attach called wrote to it, most likely load_state_dict() of "
            "an attached object or a hook of the model or its optimizer; leave what the model and its "
            "optimizers hold to attach. Nothing of the run was changed"
        )


def _unlike_averages(state: RecoveredState, averages: Mapping[str, LiveAverage]) -> Iterator[str]:
    for name, average in averages.items():
        known = state.averages.get(name, {})
        for i, tensor in average.parameters.items():
            spec = state.fence.layout.parameters[i]
            if spec.name in known and not has_same_bits(flat_like(tensor, spec), known[spec.name]):
                yield f"the average of {spec.name!r} in {name!r}"


def _unlike_model(
    state: RecoveredState, items: Mapping[str, bytes], attached: Attached
) -> Iterator[str]:
    for i in attached.parameters:
        spec, local = attached.layout.parameters[i], attached.local(i).detach()
        if not has_same_bits(flat_like(local, spec), state.parameters[spec.name]):
            yield f"parameter {spec.name!r}"
    constants = attached.constants()
    for name, tensor in constants.items():
        if name not in items or not has_same_bits(tensor, state.resolved(name, items)):
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
        for i, parameter in attached.parameters.items():
            if attached.owner[i] != index:
                continue
            spec = attached.layout.parameters[i]
            live = optimizer.state.get(parameter, {})
            known = recovered.state.get(spec.name, {})
            for key in live.keys() | known.keys():
                ours: Any = live.get(key)
                ours = local_of(ours) if isinstance(ours, torch.Tensor) else ours
                theirs: Any = known.get(key)
                if isinstance(ours, torch.Tensor) and is_aligned(key, theirs, spec.numel):
                    ours, theirs = flat_like(ours, spec), theirs.flatten()
                if key not in live or key not in known or not has_same_bits(ours, theirs):
                    yield f"{key!r} of {spec.name!r} {whose}"


def unlike(
    state: RecoveredState, items: Mapping[str, bytes], stateful: Mapping[str, Stateful]
) -> list[str]:
    """Names of stateful objects that do not return the state that they were given.

    A scheduler may have gained attributes since its state was stored, as from one version of PyTorch to the
    next. What it has in addition is no difference. lowdiff's own loaders say themselves what a change of ranks,
    batch size or data leaves of their state.
    """
    return [
        name
        for name, thing in stateful.items()
        if STATEFUL_ITEM + name in items
        and not _is_as_given(thing, state.resolved(STATEFUL_ITEM + name, items))
    ]


def _is_as_given(thing: Stateful, known: Any) -> bool:
    if isinstance(thing, Adapting):
        return thing.holds(known)
    if isinstance(thing, LRScheduler):
        return _holds(thing.state_dict(), known)
    return _is_same_value(thing.state_dict(), known)


def _holds(live: Any, known: Any) -> bool:
    """Whether a scheduler's state holds all of another one, which may lack keys.

    So may the states of schedulers that this one consists of. All other keys further down are data.
    """
    if not (isinstance(live, dict) and isinstance(known, dict)):
        return _is_same_value(live, known)
    if not known.keys() <= live.keys():
        return False
    return all(
        len(live[key]) == len(value) and all(map(_holds, live[key], value))
        if key == "_schedulers"
        else _is_same_value(live[key], value)
        for key, value in known.items()
    )


def _is_same_value(live: Any, known: Any) -> bool:
    """Whether two states are the same, without copying large tensors; the order of keys is free."""
    if isinstance(live, torch.Tensor) and isinstance(known, torch.Tensor):
        return has_same_bits(live, known) if live.layout is known.layout else same(live, known)
    # An average's state is an OrderedDict, and is stored as a plain one.
    if isinstance(live, dict) and isinstance(known, dict):
        return live.keys() == known.keys() and all(
            _is_same_value(value, known[key]) for key, value in live.items()
        )
    if type(live) is not type(known):
        return False
    if type(live) in (list, tuple):
        return len(live) == len(known) and all(map(_is_same_value, live, known))
    return same(live, known)


def _layout_difference(old: Layout, new: Layout) -> str | None:
    """Say how two models differ; how they are divided over ranks is no difference."""
    before = {spec.tensor: spec for spec in old.parameters}
    after = {spec.tensor: spec for spec in new.parameters}
    for name in [*before, *after]:
        if name not in after:
            return f"model: parameter {name!r} is gone"
        if name not in before:
            return f"model: parameter {name!r} is new"
        left, right = before[name], after[name]
        if (left.whole_shape, left.dtype) != (right.whole_shape, right.dtype):
            was, now = (f"{s.dtype} {s.whole_shape}" for s in (left, right))
            return f"model: {name!r} was {was}, now {now}"
        if not (left.is_shard or right.is_shard) and left.strides != right.strides:
            return f"memory format: {name!r} had strides {left.strides}, now {right.strides}"
    return None if [*before] == [*after] else "model: its parameters come in another order"


def _optimizer_difference(attached: Attached, fence: Fence) -> str | None:
    if len(attached.specs) != len(fence.optimizers):
        return f"number of optimizers: {len(fence.optimizers)}, now {len(attached.specs)}"
    for old, new in zip(fence.optimizers, attached.specs, strict=True):
        if old.class_name != new.class_name:
            return f"optimizer: {old.class_name}, now {new.class_name}"
        if tensor_groups(old, fence.layout) != tensor_groups(new, attached.layout):
            return "division of the parameters into optimizer groups"
    return None
