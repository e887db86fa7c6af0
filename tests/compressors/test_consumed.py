"""A gradient that was left alone since the hook is told by a checksum; nothing is rebuilt for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowdiff.compressors.consumed import Consumed
from lowdiff.layout import layout_of

LAYOUT = layout_of([("w", nn.Parameter(torch.zeros(1000)))])


@pytest.fixture
def exchanged() -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def denormals_kept() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def rebuilds(consumed: Consumed, exchanged: torch.Tensor, gradient: torch.Tensor) -> int:
    """How often what the hook returned is made again."""
    calls = []

    def rebuild() -> torch.Tensor:
        calls.append(1)
        return exchanged[consumed.share(0)].clone()

    consumed.take(0, rebuild, gradient, ())
    return len(calls)


def names(consumed: Consumed) -> list[str]:
    return [section.name for section in consumed.sections()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_was_left_alone_is_neither_rebuilt_nor_stored(
    exchanged: torch.Tensor, dtype: torch.dtype
) -> None:
    consumed, exchanged = Consumed(LAYOUT, 1, 2), exchanged.to(dtype)
    consumed.seal(0, exchanged)
    elsewhere = exchanged.clone()
    elsewhere[0] += 1  # the other rank answers for it
    assert rebuilds(consumed, exchanged, elsewhere) == 0
    assert consumed.parameters == [0]
    assert names(consumed) == []


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_single_bit_is_noticed_and_stored(exchanged: torch.Tensor, bit: int) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    consumed.seal(0, exchanged)
    changed = exchanged.clone()
    changed.view(torch.int32)[123] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert rebuilds(consumed, exchanged, changed) == 1
    assert names(consumed) == ["whole/parameters", "whole/float32"]


def test_a_factor_is_found_as_before(exchanged: torch.Tensor) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    consumed.seal(0, exchanged)
    assert rebuilds(consumed, exchanged, exchanged * 0.3) == 1
    assert names(consumed) == ["changed/parameters", "changed/factors"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_stored_as_it_is(exchanged: torch.Tensor, value: float) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    exchanged[500] = value
    consumed.seal(0, exchanged)
    assert rebuilds(consumed, exchanged, exchanged.clone()) == 0
    assert names(consumed) == ["whole/parameters", "whole/float32"]


def test_a_seal_is_of_its_step_and_of_its_threads_arithmetic(exchanged: torch.Tensor) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    consumed.seal(0, exchanged)
    if torch.set_flush_denormal(True):
        assert rebuilds(consumed, exchanged, exchanged.clone()) == 1
    torch.set_flush_denormal(False)
    consumed.begin()
    assert rebuilds(consumed, exchanged, exchanged.clone()) == 1
