"""Bitwise comparison of two recovered states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lowdiff.layout import INT_OF_BYTES
from lowdiff.persistence.values import same
from lowdiff.recovery.state import RecoveredState

#: Compared at once: what that takes in double precision stays small.
_PIECE_ELEMENTS = 1 << 20


def differences(left: RecoveredState, right: RecoveredState) -> Iterator[str]:
    """Name everything in which two states differ by at least one bit, parameters first."""
    yield from _mapping("parameter", left.parameters, right.parameters)
    for index, (mine, theirs) in enumerate(zip(left.optimizers, right.optimizers, strict=True)):
        if not same(mine.groups, theirs.groups):
            yield f"optimizer {index}: hyper-parameters"
        for name in sorted(set(mine.state) | set(theirs.state)):
            yield from _mapping(
                f"optimizer {index}, {name}:", mine.state.get(name, {}), theirs.state.get(name, {})
            )
    for name in sorted(set(left.averages) | set(right.averages)):
        yield from _mapping(
            f"average {name}:", left.averages.get(name, {}), right.averages.get(name, {})
        )
    for rank, (ours, others) in enumerate(zip(left.items, right.items, strict=True)):
        yield from _mapping(f"rank {rank}: item", ours, others)
    if left.held != right.held:
        yield f"parameters that hold a gradient tensor ({left.held} against {right.held})"


def _mapping(what: str, left: dict[str, Any], right: dict[str, Any]) -> Iterator[str]:
    for key in sorted(set(left) | set(right)):
        if key not in left or key not in right:
            yield f"{what} {key} (only on one side)"
        elif not same(left[key], right[key]):
            yield f"{what} {key}{_first_difference(left[key], right[key])}"


def _first_difference(left: Any, right: Any) -> str:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return ""
    if left.shape != right.shape or left.dtype != right.dtype:
        return f" ({left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)})"
    unequal = (left != right).reshape(-1).nonzero()
    if not len(unequal):
        return " (differs in the bits of NaN or of a zero's sign)"
    at = int(unequal[0])
    mine, theirs = left.reshape(-1)[at].item(), right.reshape(-1)[at].item()
    ulps = distance(left, right)[1]
    far = "" if ulps is None else f"; at most {ulps} units in the last place apart"
    return f" ({len(unequal)} elements; the first, {at}: {mine!r} against {theirs!r}{far})"


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


def distance(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int | None]:
    """Number of elements with other bits, and the largest distance in units in the last place.

    None for the distance where a value is not finite, or not a floating-point number at all.

    Args:
        left: Any shape, dtype and device.
        right: The same shape and dtype.
    """
    ours, others = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    if not ours.is_floating_point():
        return int((ours != others).sum()), None
    integers = INT_OF_BYTES[ours.element_size()]
    a, b = ours.view(integers), others.view(integers)
    unequal = a != b
    count = int(unequal.sum())
    if not count:
        return 0, 0
    if not bool(ours[unequal].isfinite().all() and others[unequal].isfinite().all()):
        return count, None
    ordered = [_ordered(values[unequal]) for values in (a, b)]
    return count, max(abs(x - y) for x, y in zip(*ordered, strict=True))


def _ordered(patterns: torch.Tensor) -> list[int]:
    """Bit patterns as integers in the order of the numbers; Python's do not overflow."""
    lowest = -(1 << (8 * patterns.element_size() - 1))
    return [p if p >= 0 else lowest - p for p in patterns.tolist()]
