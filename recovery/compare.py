"""Bitwise comparison of two recovered states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.core.memory import bits
from lowdiff.persistence.format.values import same
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Fence

#: Compared at once: what that takes in double precision stays small.
_PIECE_ELEMENTS = 1 << 18


def differences(left: RecoveredState, right: RecoveredState) -> Iterator[str]:
    """Name everything in which two states differ by at least one bit, parameters first.

    Between lives that were set up otherwise only parameters and optimizer state are compared: objects,
    averages, ranks, generators and hyper-parameters may have begun anew.
    """
    yield from _mapping("parameter", left.parameters, right.parameters)
    for index, (mine, theirs) in enumerate(zip(left.optimizers, right.optimizers, strict=True)):
        for name in sorted(set(mine.state) | set(theirs.state)):
            yield from _mapping(
                f"optimizer {index}, {name}:", mine.state.get(name, {}), theirs.state.get(name, {})
            )
    if _setup(left.fence) != _setup(right.fence):
        return
    for index, (mine, theirs) in enumerate(zip(left.optimizers, right.optimizers, strict=True)):
        if not same(mine.groups, theirs.groups):
            yield f"optimizer {index}: hyper-parameters"
    for name in sorted(set(left.averages) | set(right.averages)):
        yield from _mapping(
            f"average {name}:", left.averages.get(name, {}), right.averages.get(name, {})
        )
    for rank, (ours, others) in enumerate(zip(left.items, right.items, strict=True)):
        yield from _mapping(f"rank {rank}: item", ours, others)
    if left.held != right.held:
        yield f"parameters that hold a gradient tensor ({left.held} against {right.held})"


def _setup(fence: Fence) -> tuple[object, ...]:
    """Facts that two lives share if one goes on with everything that the other had."""
    return (fence.stateful, fence.averages, fence.names, fence.world_size, fence.environment)


def _mapping(what: str, left: dict[str, Any], right: dict[str, Any]) -> Iterator[str]:
    for key in sorted(set(left) | set(right)):
        if key not in left or key not in right:
            yield f"{what} {key} (only on one side)"
        elif not has_same_bits(left[key], right[key]):
            yield f"{what} {key}{_first_difference(left[key], right[key])}"


def has_same_bits(left: Any, right: Any) -> bool:
    """Whether two entries are equal down to types and bits.

    Tensors are compared where they are, and not copied for it if they are contiguous.
    """
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return same(left, right)
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(_bits(left), _bits(right).to(left.device))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As numbers of its own width: byte by byte a comparison takes three times as long.
    width = INT_OF_BYTES.get(tensor.element_size(), torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(width)


def _first_difference(left: Any, right: Any) -> str:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return ""
    if left.shape != right.shape or left.dtype != right.dtype:
        return f" ({left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)})"
    unequal = (left != right).reshape(-1)
    count = int(unequal.count_nonzero())
    if not count:
        return " (differs in the bits of NaN or of a zero's sign)"
    at = int(unequal.view(torch.uint8).argmax())  # of equal ones the first
    mine, theirs = left.reshape(-1)[at].item(), right.reshape(-1)[at].item()
    ulps = largest_ulps(left, right)
    far = "" if ulps is None else f"; at most {ulps} units in the last place apart"
    return f" ({count} elements; the first, {at}: {mine!r} against {theirs!r}{far})"


def largest_difference(left: RecoveredState, right: RecoveredState) -> float:
    """Largest absolute difference of an element of the parameters that both hold.

    Infinite where just one value is not a number, or infinite.
    """
    largest = 0.0
    for name in left.parameters.keys() & right.parameters.keys():
        pairs = zip(
            left.parameters[name].split(_PIECE_ELEMENTS),
            right.parameters[name].split(_PIECE_ELEMENTS),
            strict=True,
        )
        for ours, others in pairs:
            unequal = (ours != others) & ~(ours.isnan() & others.isnan())
            if bool(unequal.any()):
                apart = float((ours[unequal].double() - others[unequal].double()).abs().max())
                largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest


def largest_ulps(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """The largest distance of two elements in units in the last place.

    None where a value is not finite, or not a floating-point number at all, or one of a single byte,
    of which formats differ.

    Args:
        left: Any shape, dtype and device.
        right: The same shape and dtype.
    """
    ours, others = (side.detach().cpu().contiguous().reshape(-1) for side in (left, right))
    if not ours.is_floating_point() or ours.element_size() == 1:
        return None
    integers, furthest = INT_OF_BYTES[ours.element_size()], 0
    pieces = (side.split(_PIECE_ELEMENTS) for side in (ours, others))
    for mine, theirs in zip(*pieces, strict=True):
        unequal = mine.view(integers) != theirs.view(integers)
        if bool(unequal.any()):
            a, b = mine[unequal], theirs[unequal]
            if not bool(a.isfinite().all() and b.isfinite().all()):
                return None
            furthest = max(furthest, _furthest(a.view(integers), b.view(integers)))
    return furthest


def _furthest(left: torch.Tensor, right: torch.Tensor) -> int:
    """Largest distance between bit patterns, counted in the order of the numbers they stand for."""
    a, b = _ordered(left), _ordered(right)
    high, low = bits(torch.maximum(a, b)), bits(torch.minimum(a, b))
    # Unsigned, or the distance of two of 64 bits could overflow.
    return int((high - low).max())


def _ordered(patterns: torch.Tensor) -> torch.Tensor:
    """Bit patterns as integers in the order of the numbers; both zeros are one."""
    lowest = -(1 << (8 * patterns.element_size() - 1))
    wide = patterns.long()
    return torch.where(wide >= 0, wide, lowest - wide)
