"""Tensors of a model that share memory: names decide what they hold, not addresses.

A buffer may be made from a weight, or two names may hold one tensor. What is restored may have
parted since: then the module gets a tensor of its own, and stays apart from what it shared with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lowdiff.model.binding import Attached, Slot
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.state import FROZEN_ITEM


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own, which those of an expanded tensor do not."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def doubtful(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose tensors cannot be written without writing to another name, or not at all."""
    found = {name for name, tensor in tensors.items() if tensor.numel() and not is_whole(tensor)}
    ranges = sorted(
        (str(tensor.device), *_extent(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    widest: tuple[str, int, int, str] | None = None
    for this in ranges:
        device, start, end, name = this
        if widest is not None and device == widest[0] and start < widest[2]:
            found |= {name, widest[3]}
        if widest is None or device != widest[0] or end > widest[2]:
            widest = this
    return [name for name in tensors if name in found]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of its elements, and the first one behind them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def fill(
    attached: Attached, names: Collection[str], value_of: Callable[[str], torch.Tensor]
) -> None:
    """Give tensors of a model their values, by the names of `Attached.tensors`.

    A buffer or frozen parameter that cannot hold its value, or whose memory another name has as well
    with another value, is replaced by a new tensor. Names that had one tensor and get the same bits
    have one tensor again.
    """
    trained = {spec.name for spec in attached.layout.parameters}
    slots: dict[str, Slot] = {**attached.buffer_slots(), **attached.frozen}
    made: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def give_new(name: str, old: torch.Tensor | None, value: torch.Tensor) -> None:
        new = _copied(value, attached.device if old is None else old.device, old)
        if old is not None and old.numel():
            place = (old.device, old.data_ptr(), old.shape, old.stride(), old.dtype)
            earlier = made.setdefault(place, [])
            new = next((tensor for tensor in earlier if has_same_bits(tensor, new)), new)
            earlier.append(new)
        put(slots[name], new, is_parameter=name.startswith(FROZEN_ITEM))

    live = attached.tensors()
    for name in sorted(names, key=trained.__contains__):  # no buffer's bytes stay on a weight
        value, tensor = value_of(name), live.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            give_new(name, tensor, value)
        elif is_whole(tensor):  # else it may hold the bytes once all others do
            with torch.no_grad():
                tensor.copy_(value)  # in place, because other tensors may be views of it
    live = {name: tensor for name, tensor in attached.tensors().items() if name in names}
    for name in doubtful(live):
        if name not in trained and not has_same_bits(live[name], value := value_of(name)):
            give_new(name, live[name], value)


def _copied(value: torch.Tensor, device: torch.device, like: torch.Tensor | None) -> torch.Tensor:
    """``value`` on a device, in the memory format of ``like`` if that has its shape."""
    if like is None or like.shape != value.shape:
        return value.to(device, copy=True)
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


def put(slot: Slot, value: torch.Tensor, *, is_parameter: bool) -> None:
    """Let a module hold ``value``: a parameter stays the same object."""
    part, key = slot
    if is_parameter:
        part.get_parameter(key).data = value
    else:
        setattr(part, key, value)


def part_copies(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Part what a module restored from ``values`` shares, where its names have other bits there.

    A copy of a model shares memory within itself as the model does, and ``load_state_dict`` writes
    one name after the other into it.
    """
    slots: dict[str, tuple[Slot, bool]] = {}
    for prefix, owner in module.named_modules():
        path = f"{prefix}." if prefix else ""
        slots |= {path + key: ((owner, key), True) for key in owner._parameters}
        slots |= {path + key: ((owner, key), False) for key in owner._buffers}
    tensors = [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
    live = {name: tensor for name, tensor in tensors if name in values}
    for name in doubtful(live):
        if not has_same_bits(live[name], value := values[name]):
            new = _copied(value, live[name].device, live[name])
            put(slots[name][0], new, is_parameter=slots[name][1])
