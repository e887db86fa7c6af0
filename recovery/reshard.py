"""A state whose parameters are divided otherwise: over other ranks, or not at all.

Elements are only moved: every value keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowdiff.core.layout import by_tensor, flat_like, in_a_row, shaped, torch_dtype
from lowdiff.persistence.format.values import encode
from lowdiff.recovery.state import (
    FROZEN_ITEM,
    OptimizerState,
    RecoveredState,
    decode_item,
    is_aligned,
)
from lowdiff.types import Layout, OptimizerSpec, ParameterSpec


def whole(state: RecoveredState) -> RecoveredState:
    """Put the shards of every tensor together; a state that has none as it is.

    Memory: the state, and one tensor more. The given state must not be used any more.
    """
    _put_frozen_together(state)
    return whole_trained(state)


def whole_beside(state: RecoveredState, *, has_optimizers: bool = True) -> RecoveredState:
    """Put the shards of every tensor together, and leave the state as it is; tensors that are not divided are shared.

    Memory: where there are shards, the state again.

    Args:
        state: It may be used on.
        has_optimizers: Whether the result has what optimizers and averages keep.
    """
    return whole(
        replace(
            state,
            parameters=dict(state.parameters),
            optimizers=[
                OptimizerState(o.groups, dict(o.state) if has_optimizers else {})
                for o in state.optimizers
            ],
            items=[dict(items) for items in state.items],
            residuals=[dict(residual) for residual in state.residuals],
            averages={n: dict(v) for n, v in state.averages.items()} if has_optimizers else {},
        )
    )


def whole_trained(state: RecoveredState) -> RecoveredState:
    """Put the shards of every trained tensor together; see `whole`."""
    layout = state.fence.layout
    if not any(spec.is_shard or spec.ranks for spec in layout.parameters):
        return state
    wholes = in_a_row(whole_spec(parts[0]) for parts in by_tensor(layout).values())
    optimizers = [replace(o, groups=tensor_groups(o, layout)) for o in state.fence.optimizers]
    return resharded(state, wholes, optimizers)


def _put_frozen_together(state: RecoveredState) -> None:
    """Give every rank's items the whole of each frozen parameter that was sharded, in place."""
    for tensor, parts in by_tensor(state.fence.frozen_shards).items():
        data = encode(whole_tensor(parts, frozen_values(state, parts)))
        for items in state.items:
            items[FROZEN_ITEM + tensor] = data
    state.fence = replace(state.fence, frozen_shards=Layout(()))


def frozen_as(
    state: RecoveredState, layout: Layout, rank: int, items: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Divide frozen parameters as another layout does; what a rank holds of them then, as items.

    Args:
        state: With the shards that `frozen_needed` lists.
        layout: Of all ranks, of those that are to be sharded.
        rank: Whose part.
        items: Those that the rank goes on with; frozen parameters that were not sharded are among them.
    """
    found = {}
    for target, sources in _frozen_targets(state.fence.frozen_shards, layout, rank):
        name = FROZEN_ITEM + target.tensor
        if sources:
            values = frozen_values(state, sources)
        elif name in items:
            sources = [whole_spec(target)]
            values = {sources[0].name: flat_like(decode_item(name, items[name]), sources[0])}
        else:  # the model that takes them says what it misses
            continue
        found[name] = encode(shaped(_cut(target, sources, values), target))
    return found


def frozen_needed(old: Layout, new: Layout | None, rank: int) -> frozenset[tuple[int, str]]:
    """Return rank and item of the old shards that a rank's new ones are cut from; None for no change."""
    targets = _frozen_targets(old, new, rank) if new not in (None, old) else ()
    return frozenset(
        (first_holder(part), FROZEN_ITEM + part.tensor) for _, parts in targets for part in parts
    )


def _frozen_targets(
    old: Layout, new: Layout, rank: int
) -> Iterator[tuple[ParameterSpec, list[ParameterSpec]]]:
    """Yield what a rank is to hold, and the old shards that overlap it; none where it was not sharded."""
    before, after = by_tensor(old), by_tensor(new)
    for tensor in dict.fromkeys([*before, *after]):
        parts = before.get(tensor, [])
        for target in after.get(tensor) or [whole_spec(parts[0])]:
            is_other = (
                parts and parts[0].whole_shape != target.whole_shape
            )  # whoever takes it says so
            if not is_other and (not target.ranks or rank in target.ranks):
                # One at least, which tells the dtype of a shard without elements.
                near = [part for part in parts if _overlap(target, part)[0] is not None]
                yield target, near or parts[:1]


def frozen_values(state: RecoveredState, parts: Sequence[ParameterSpec]) -> dict[str, torch.Tensor]:
    """Return the shards of a frozen parameter, flat, from the items of the ranks that hold them."""
    name = FROZEN_ITEM + parts[0].tensor
    values = {}
    for part in parts:
        held = decode_item(name, state.items[first_holder(part)][name])
        values[part.name] = flat_like(held, part)
    return values


def first_holder(part: ParameterSpec) -> int:
    """Return the first of the ranks that hold a part of a tensor."""
    return part.ranks[0] if part.ranks else 0


def whole_tensor(
    parts: Sequence[ParameterSpec], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a tensor of its logical shape; one that is not divided shares its memory.

    Args:
        parts: All of the tensor's.
        values: Flat, by name.
    """
    spec = whole_spec(parts[0])
    return shaped(_cut(spec, parts, values), spec)


def whole_spec(part: ParameterSpec) -> ParameterSpec:
    """Describe the tensor that an entry is a part of; it lies at offset 0."""
    if not part.is_shard:
        return replace(part, offset=0, ranks=())
    strides, size = [], 1
    for length in reversed(part.whole_shape):
        strides.append(size)
        size *= max(length, 1)
    return ParameterSpec(part.tensor, part.whole_shape, tuple(reversed(strides)), part.dtype, 0)


def tensor_groups(optimizer: OptimizerSpec, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Return the tensors of each of an optimizer's groups, whose members may be shards."""
    tensor_of = {spec.name: spec.tensor for spec in layout.parameters}
    return tuple(
        tuple(dict.fromkeys(tensor_of.get(name, name) for name in names))
        for names in optimizer.groups
    )


def resharded(
    state: RecoveredState, layout: Layout, optimizers: Sequence[OptimizerSpec]
) -> RecoveredState:
    """Divide a whole state as another layout does.

    Memory: the state, and the parts of one tensor more. The given state must not be used any more.

    Args:
        state: With all parts of each tensor.
        layout: Of the same tensors; one that the state lacks is left out.
        optimizers: As `Fence.optimizers`, of that layout.
    """
    old, new = by_tensor(state.fence.layout), by_tensor(layout)
    made = replace(
        state,
        fence=replace(state.fence, layout=layout, optimizers=tuple(optimizers)),
        parameters={},
        optimizers=[OptimizerState(o.groups, {}) for o in state.optimizers],
        averages={name: {} for name in state.averages},
        held=_held(state, layout),
        # What a rank owes belongs to the shards that it had.
        residuals=[{} for _ in state.residuals],
    )
    for tensor, targets in new.items():
        sources = old.get(tensor, [])
        for spec in targets if sources else ():
            made.parameters[spec.name] = _cut(spec, sources, state.parameters)
            for name, followed in state.averages.items():
                if sources[0].name in followed:
                    made.averages[name][spec.name] = _cut(spec, sources, followed)
            for before, after in zip(state.optimizers, made.optimizers, strict=True):
                entries = _entries(spec, sources, before)
                if entries:
                    after.state[spec.name] = entries
        for source in sources:
            state.parameters.pop(source.name, None)
            for held in (*state.averages.values(), *(o.state for o in state.optimizers)):
                held.pop(source.name, None)  # type: ignore[attr-defined]
    return made


def _held(state: RecoveredState, layout: Layout) -> tuple[int, ...]:
    held = {state.fence.layout.parameters[i].tensor for i in state.held}
    return tuple(i for i, spec in enumerate(layout.parameters) if spec.tensor in held)


def _entries(
    spec: ParameterSpec, sources: Sequence[ParameterSpec], optimizer: OptimizerState
) -> dict[str, Any]:
    """What an optimizer keeps of a part: its elements, and the numbers that all parts have alike."""
    parts = [s for s in sources if s.numel] or list(sources[:1])
    keys = optimizer.state.get(parts[0].name, {})
    found: dict[str, Any] = {}
    for key, value in keys.items():
        values = {s.name: optimizer.state.get(s.name, {}).get(key) for s in parts}
        if all(is_aligned(key, values[s.name], s.numel) for s in parts):
            found[key] = _cut(spec, parts, values)
        else:
            found[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def _cut(
    spec: ParameterSpec, sources: Sequence[ParameterSpec], values: Mapping[str, Any]
) -> torch.Tensor:
    """Put a part together, flat, from the parts that overlap it."""
    place = spec.global_offset, spec.shape, spec.strides
    same = next((s for s in sources if (s.global_offset, s.shape, s.strides) == place), None)
    if same is not None:
        own: torch.Tensor = values[same.name]
        return own
    first = values[sources[0].name]
    made = torch.empty(spec.numel, dtype=first.dtype if first.numel() else torch_dtype(spec.dtype))
    target = shaped(made, spec)
    for source in sources:
        here, there = _overlap(spec, source)
        if here is not None and source.numel:
            target[here] = shaped(values[source.name], source)[there]
    return made


def _overlap(
    left: ParameterSpec, right: ParameterSpec
) -> tuple[tuple[slice, ...] | None, tuple[slice, ...]]:
    """The common range of two parts of a tensor, in each; None where there is none."""
    here, there = [], []
    for start, size, other, length in zip(
        left.global_offset, left.shape, right.global_offset, right.shape, strict=True
    ):
        first, last = max(start, other), min(start + size, other + length)
        if first >= last:
            return None, ()
        here.append(slice(first - start, last - start))
        there.append(slice(first - other, last - other))
    return tuple(here), tuple(there)
