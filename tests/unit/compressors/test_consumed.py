"""A gradient that was left alone since the hook is told by a checksum; nothing is rebuilt for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from lowdiff.compressors import Cast, PowerSGD
from lowdiff.compressors.consumed import Consumed
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.core.layout import layout_of
from lowdiff.types import Block

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_stored_as_it_is(
    exchanged: torch.Tensor, value: float, dtype: torch.dtype
) -> None:
    consumed, exchanged = Consumed(LAYOUT, 0, 1), exchanged.to(dtype)
    exchanged[500] = value
    consumed.seal(0, exchanged)
    assert rebuilds(consumed, exchanged, exchanged.clone()) == 0
    assert [name.split("/")[0] for name in names(consumed)] == ["whole", "whole"]


def test_what_is_always_changed_is_not_sealed_until_it_is_left_alone_once(
    exchanged: torch.Tensor,
) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    found = []
    for factor in (0.3, 0.3, 1.0, 1.0):
        consumed.begin()
        consumed.seal(0, exchanged)
        found.append(rebuilds(consumed, exchanged, exchanged * factor))
    assert found == [1, 1, 1, 0]


def test_a_step_that_is_tried_again_forgets_what_the_first_try_stored(
    exchanged: torch.Tensor,
) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    consumed.seal(0, exchanged)
    rebuilds(consumed, exchanged, exchanged.flip(0))
    assert names(consumed) == ["whole/parameters", "whole/float32"]
    rebuilds(consumed, exchanged, exchanged.clone())
    assert names(consumed) == []


class FailingExchange:
    """A group of one whose second exchange breaks off behind the first of its parameters."""

    def __init__(self, reducer: RepresentedReducer[torch.Tensor]) -> None:
        self.average = reducer.average

    def __call__(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        first = min(gradients)
        self.average({first: gradients[first]}, buffer)
        raise MemoryError


@pytest.mark.parametrize("compressor", [PowerSGD(1, dense_below=10), Cast(torch.bfloat16)])
def test_an_exchange_that_breaks_off_leaves_no_seal_of_the_one_before(
    compressor: PowerSGD | Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of([(name, nn.Parameter(torch.zeros(40, 50))) for name in "ab"])
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
    reducer = compressor.bind(layout, residual, None)
    reducer.begin(1)

    def exchange() -> list[torch.Tensor]:
        buffer = torch.randn(4000)
        views = list(buffer.split(2000))
        reducer.reduce([0, 1], views, buffer).wait()
        return views

    averaged = exchange()
    monkeypatch.setattr(reducer, "average", FailingExchange(reducer))
    with pytest.raises((MemoryError, RuntimeError)):
        exchange()
    reducer.consume(averaged)
    payload = reducer.payload()
    out = torch.zeros(2000)
    compressor.decoder([payload], layout)(Block(0, 0, 2000), out)
    assert torch.equal(out, averaged[0]), "not the factors of the exchange that broke off"


def test_a_seal_is_of_its_step_and_of_its_threads_arithmetic(exchanged: torch.Tensor) -> None:
    consumed = Consumed(LAYOUT, 0, 1)
    consumed.seal(0, exchanged)
    if torch.set_flush_denormal(True):
        assert rebuilds(consumed, exchanged, exchanged.clone()) == 1
    torch.set_flush_denormal(False)
    consumed.begin()
    assert rebuilds(consumed, exchanged, exchanged.clone()) == 1
