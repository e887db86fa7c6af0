"""The factors between exchange and optimizer: found from the bits, or not claimed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lowdiff.compressors.changes import equal_bits, find_factors, multiply
from tests.contract.compressors import DTYPES


def values(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    seed=st.integers(0, 10_000),
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    exponent=st.floats(-4, 3),
)
@example(seed=1, numel=68, dtype=torch.bfloat16, exponent=0.05859375)  # a power of two
def test_one_unknown_factor_is_found(
    seed: int, numel: int, dtype: torch.dtype, exponent: float
) -> None:
    before = values(seed, numel, dtype)
    after = before.clone().mul_(torch.tensor(10**exponent, dtype=torch.float64).to(dtype))
    if not bool(after.isfinite().all()):
        return
    factors = find_factors(before, after)
    assert factors is not None
    assert len(factors) <= 1
    assert equal_bits(multiply(before.clone(), factors), after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 1e-3, 0.0])
def test_pytorchs_clipping_is_found(dtype: torch.dtype, max_norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(500, dtype=dtype)) for _ in range(3)]
    for i, parameter in enumerate(parameters):
        parameter.grad = values(i, 500, dtype)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, own in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        factors = find_factors(own, parameter.grad)
        assert factors
        assert equal_bits(multiply(own, factors), parameter.grad)


def test_two_factors_are_found_if_the_first_is_known() -> None:
    before = values(0, 3000, torch.float32)
    unscale, clip = torch.tensor(1 / 3000), torch.tensor(0.123)
    after = before * unscale * clip
    assert find_factors(before, after) is None, "two roundings are not one"
    found = find_factors(before, after, [(float(unscale),)])
    assert found is not None
    assert found[0] == float(unscale)
    assert find_factors(before, after, [(float(unscale), float(clip))]) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_changes_are_not_taken_for_a_factor(dtype: torch.dtype) -> None:
    before = values(0, 1000, dtype)
    one_bit = before * 0.5
    one_bit[777] = torch.nextafter(one_bit[777], torch.tensor(math.inf, dtype=dtype))
    assert find_factors(before, one_bit) is None
    assert find_factors(before, before + 0.5) is None
    assert find_factors(torch.zeros_like(before), before) is None
    assert find_factors(before, before.flip(0)) is None


def test_few_entries_among_many_zeros_tell_the_factor() -> None:
    before = torch.zeros(100_000)
    before[[12_345, 99_998]] = torch.tensor([0.7, -3.1])
    after = before * torch.tensor(0.123)
    found = find_factors(before, after)
    assert found is not None
    assert equal_bits(multiply(before, found), after)


def test_nothing_done_is_no_factor_and_the_sign_of_zero_counts() -> None:
    before = values(0, 1000, torch.float32)
    assert find_factors(before, before.clone()) == ()
    zeros = torch.zeros(5)
    assert find_factors(zeros, zeros.clone()) == ()
    assert find_factors(zeros, -zeros) is None
