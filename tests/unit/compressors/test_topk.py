"""TopK: what is stored of a step is, block by block, the gradient that the optimizer consumed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors import TopK
from lowdiff.core.layout import torch_dtype
from lowdiff.persistence.format.codec import Codec
from lowdiff.types import Block
from tests.unit.compressors.topk_rank import (
    Rank,
    a_layout,
    assert_split,
    clipped_by,
    decoded,
    exact,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("density", "dense_below", "numel", "kept"),
    [
        (0.01, 1024, 1023, 1023),
        (0.01, 1024, 1024, 11),
        (0.01, 0, 1000, 10),
        (0.01, 0, 1001, 11),
        (0.01, 0, 1, 1),
        (1e-9, 0, 1000, 1),
        (1.0, 0, 1000, 1000),
        (0.5, 10, 0, 0),
        (0.5, 0, 0, 0),
    ],
)
def test_at_least_the_density_is_kept_and_small_parameters_whole(
    density: float, dense_below: int, numel: int, kept: int
) -> None:
    assert TopK(density, dense_below).kept(numel) == kept


# A run of one process


@pytest.mark.slow
@given(
    sizes=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(DTYPES)), min_size=1, max_size=5),
    density=st.floats(0.001, 1),
    dense_below=st.sampled_from([0, 30, 1024]),
    block_elements=st.integers(1, 250),
    coefficients=st.lists(
        st.sampled_from([1.0, 0.37, 0.0, 1024.0, math.nan]), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**31),
)
def test_blocks_of_any_size_decode_to_the_gradient_consumed_bit_for_bit(
    sizes: list[tuple[int, torch.dtype]],
    density: float,
    dense_below: int,
    block_elements: int,
    coefficients: list[float],
    seed: int,
) -> None:
    layout, compressor = a_layout(*sizes), TopK(density, dense_below)
    rank, generator = Rank(compressor, layout), torch.Generator().manual_seed(seed)
    by_dtype = [[i for i, _ in layout.of_dtype(dtype)] for dtype in layout.dtypes]
    for step, coefficient in enumerate(coefficients):
        gradients = [torch.randn(n, generator=generator).to(dtype) for n, dtype in sizes]
        if coefficient == 0.0:  # what clipping by an infinite norm does
            gradients[0][:1] = math.inf
        rank.reducer.begin(step)
        owed = rank.owed()
        averaged = rank.backward(gradients, by_dtype)
        for i, gradient in enumerate(gradients):
            assert_split(compressor, gradient, owed[i], averaged[i], rank.residual.pair(i)[1])
        consumed = [clipped_by(coefficient)(gradient) for gradient in averaged]
        rank.reducer.consume(consumed)
        rank.residual.settle()
        rank.residual.advance()
        rebuilt = decoded(compressor, [rank.reducer.payload()], layout, block_elements)
        assert [exact(t) for t in rebuilt] == [exact(t) for t in consumed]


def test_over_many_steps_every_entry_gets_its_turn() -> None:
    layout = a_layout((2000, torch.float64))
    rank, generator = Rank(TopK(0.01), layout), torch.Generator().manual_seed(0)
    gradient = 0.5 + torch.rand(2000, generator=generator, dtype=torch.float64)
    came_out = torch.zeros(2000, dtype=torch.float64)
    for step in range(300):
        rank.reducer.begin(step)
        came_out += rank.backward([gradient])[0]
        rank.residual.settle()
        rank.residual.advance()
    torch.testing.assert_close(came_out + rank.owed()[0], 300 * gradient)
    assert came_out.gt(0).all()


def test_a_payload_is_ascending_positions_in_the_layout_and_their_bit_patterns() -> None:
    layout = a_layout((2000, torch.float32), (3, torch.bfloat16), (3000, torch.float32))
    rank = Rank(TopK(0.01), layout)
    rank.reducer.begin(1)
    gradients = rank.backward([torch.randn(spec.numel) for spec in layout.parameters[::2]][:1])
    assert gradients[0].count_nonzero() == 20
    rank.reducer.begin(2)
    generator = torch.Generator().manual_seed(0)
    averaged = rank.backward(
        [
            torch.randn(spec.numel, generator=generator).to(torch_dtype(spec.dtype))
            for spec in layout.parameters
        ]
    )
    rank.reducer.consume(averaged)
    payload = rank.reducer.payload()
    described = [(s.name, s.coding, str(s.data.dtype), s.data.size) for s in payload.sections]
    assert described == [
        ("indices/bfloat16", "ascending", "int64", 3),
        ("values/bfloat16", "planes", "uint16", 3),
        ("indices/float32", "ascending", "int64", 20 + 30),
        ("values/float32", "planes", "uint32", 20 + 30),
    ]
    indices = payload.sections[2].data
    assert (np.diff(indices) > 0).all()
    assert ((indices < 2000) | ((indices >= 2003) & (indices < 5003))).all()
    assert payload.sections[0].data.tolist() == [2000, 2001, 2002]
    for section in payload.sections:
        coded = Codec().encode(section.coding, section.data)
        back = Codec().decode(section.coding, section.data.dtype, section.data.size, coded)
        np.testing.assert_array_equal(back, section.data)


# NaN and Inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_everywhere_after_clipping_is_reproduced(dtype: torch.dtype, bad: float) -> None:
    layout, compressor = a_layout((2000, dtype), (1500, dtype), (9, dtype)), TopK(0.01)
    rank, generator = Rank(compressor, layout), torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator).to(dtype) for n in (2000, 1500, 9)]
    gradients[0][1234] = bad
    rank.reducer.begin(1)
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, averaged in zip(parameters, rank.backward(gradients), strict=True):
        parameter.grad = averaged
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    consumed = [parameter.grad for parameter in parameters]
    assert all(g is not None for g in consumed)
    rank.reducer.consume(consumed)
    rebuilt = decoded(compressor, [rank.reducer.payload()], layout, 333)
    for found, expected in zip(rebuilt, consumed, strict=True):
        assert expected is not None
        assert exact(found) == exact(expected)
    if math.isnan(bad):
        assert all(bool(t.isnan().all()) for t in rebuilt)
    rank.residual.settle()
    rank.residual.advance()
    assert all(bool(t.isfinite().all()) for t in rank.owed()), "training goes on after it"


# Decoding


def test_blocks_outside_of_a_payload_stay_zero_and_neighbours_are_not_touched() -> None:
    layout, compressor = a_layout((2000, torch.float32), (2000, torch.bfloat16)), TopK(0.01)
    rank = Rank(compressor, layout)
    rank.reducer.begin(1)
    averaged = rank.backward([torch.randn(2000), torch.randn(2000).bfloat16()])
    rank.reducer.consume([averaged[0], None])
    payload = rank.reducer.payload()
    out = torch.zeros(2000, dtype=torch.bfloat16)
    compressor.decoder([payload], layout)(Block(1, 0, 2000), out)
    assert not out.any()
    around = torch.full((30,), 7.0)
    compressor.decoder([payload], layout)(Block(0, 100, 110), around[10:20].zero_())
    assert exact(around[:10]) == exact(around[20:]) == exact(torch.full((10,), 7.0))
    assert exact(around[10:20]) == exact(averaged[0][100:110])


def test_the_order_of_payloads_does_not_matter_and_none_is_no_gradient() -> None:
    layout, compressor = a_layout((5000, torch.float32)), TopK(0.01)
    final, payloads = torch.zeros(5000), []
    ranks = [Rank(compressor, layout) for _ in range(3)]
    gradients = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    for rank, gradient in zip(ranks, gradients, strict=True):
        rank.reducer.begin(1)
        final += rank.backward([gradient])[0] / 3
    for rank in ranks:  # each stores the final values at its own positions
        rank.reducer.consume([final])
        payloads.append(rank.reducer.payload())
    assert len(np.unique(np.concatenate([p.sections[0].data for p in payloads]))) > 140
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 2, 0]):
        rebuilt = decoded(compressor, [payloads[i] for i in order], layout, 777)
        assert exact(rebuilt[0]) == exact(final)
    assert not decoded(compressor, [], layout, 777)[0].any()
