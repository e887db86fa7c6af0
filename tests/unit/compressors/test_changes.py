"""Changes between exchange and optimizer: factors are found from the bits or not claimed, all else is stored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from lowdiff.compressors import CyclicTopK, RandomK, TopK
from lowdiff.compressors.changes import (
    ChangeWarning,
    equal_bits,
    find_factors,
    has_foreign_entries,
    multiply,
)
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.lane import share
from lowdiff.compressors.sections import pieces, shared_parts
from lowdiff.core.layout import layout_of
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Compressor
from lowdiff.types import Payload, Section
from tests.contract.compressors import DTYPES, Patterns, decoded, exact, reduced
from tests.crash.pool import Pool


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


LAYOUT = layout_of(
    [
        ("a", nn.Parameter(torch.zeros(2000))),
        ("b", nn.Parameter(torch.zeros(7))),
        ("c", nn.Parameter(torch.zeros(30, 50, dtype=torch.float64))),
        ("d", nn.Parameter(torch.zeros(1500))),
    ]
)


# Telling whether a gradient has entries that nobody exchanged


@given(
    numel=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_an_entry_that_nobody_exchanged_is_found_wherever_it_is(
    numel: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    places = st.integers(0, numel - 1)
    exchanged = data.draw(st.lists(st.sets(places, max_size=numel), max_size=3))
    others = data.draw(st.sets(places, max_size=4))
    value = data.draw(st.sampled_from([-0.0, 1e-7, -3.0, math.inf, math.nan]))
    gradient = torch.zeros(numel, dtype=dtype)
    known = sorted(set().union(*exchanged))
    gradient[known] = torch.randn(len(known)).to(dtype)
    for place in others:
        gradient[place] = value
    before = exact(gradient).copy()
    positions = [torch.tensor(sorted(own), dtype=torch.int32) for own in exchanged]
    is_foreign = bool(others - set(known)) and bool(exact(torch.tensor([value]).to(dtype)).any())
    assert has_foreign_entries(gradient, positions) == is_foreign
    np.testing.assert_array_equal(exact(gradient), before)


# What ranks store


def changed_behind(rank: int, _: int, compressor: Compressor) -> list[dict[str, Any]]:
    """A pool's job: three steps, of which the first and the last change gradients by hand."""
    residual = RotatingResidual.zeros(compressor.residual_layout(LAYOUT), torch.device("cpu"))
    reducer = compressor.bind(LAYOUT, residual, dist.group.WORLD)
    report = []
    for step in range(1, 4):
        reducer.begin(step)
        rng = np.random.default_rng([step, rank])
        gradients = [
            torch.from_numpy(rng.standard_normal(spec.numel)).to(getattr(torch, spec.dtype))
            for spec in LAYOUT.parameters
        ]
        consumed = reduced(reducer, gradients, [[3, 0, 1], [2]])
        if step == 1:  # noise, the same on all ranks
            noise = torch.randn(2000, generator=torch.Generator().manual_seed(0))
            consumed[0].add_(noise)
        if step == 3:  # one entry, in the range that the last rank answers for
            consumed[0].mul_(0.5)
            consumed[2][-1 if not consumed[2][-1] else consumed[2].eq(0).nonzero()[-1]] = 1e-300
        reducer.consume(consumed)
        payload = reducer.payload()
        residual.settle()
        residual.advance()
        report.append(
            {
                "consumed": [exact(gradient).copy() for gradient in consumed],
                "payload": [(s.name, s.coding, s.data.copy()) for s in payload.sections],
            }
        )
    reducer.close()
    return report


KINDS: dict[str, Compressor] = {
    "topk": TopK(0.05, dense_below=64),
    "cyclic": CyclicTopK(0.05, dense_below=64),
    "randomk": RandomK(0.05, dense_below=64),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["topk", "cyclic", "randomk"])
def test_what_was_changed_by_hand_is_stored_whole_and_nothing_else_is(
    pool: Pool, kind: str, world_size: int
) -> None:
    compressor = KINDS[kind]
    ranks = pool.run(changed_behind, world_size, compressor)
    for step, of_step in enumerate(zip(*ranks, strict=True), 1):
        expected: list[Patterns] = of_step[0]["consumed"]
        payloads = [Payload(tuple(Section(*s) for s in told["payload"])) for told in of_step]
        for block_elements in (97, 5000):
            rebuilt = decoded(compressor, payloads, LAYOUT, block_elements)
            for found, consumed in zip(rebuilt, expected, strict=True):
                np.testing.assert_array_equal(exact(found), consumed)
        whole = [sorted(ranges) for ranges in shared_parts("whole", payloads, LAYOUT)]
        last: list[list[int]] = [[]] * (world_size - 1) + [[2]]
        assert whole == {1: [[0]] * world_size, 2: [[]] * world_size, 3: last}[step]


def test_ranges_that_do_not_fit_together_are_refused() -> None:
    gradients = {0: torch.randn(2000), 2: torch.randn(1500, dtype=torch.float64)}
    payloads = []
    for rank in range(2):
        own = {i: g[slice(*share(g.numel(), rank, 2))] for i, g in gradients.items()}
        payloads.append(Payload(tuple(pieces("whole", LAYOUT, own))))
    for rank, ranges in enumerate(shared_parts("whole", payloads, LAYOUT)):
        for i, gradient in gradients.items():
            mine = gradient[slice(*share(gradient.numel(), rank, 2))]
            np.testing.assert_array_equal(ranges[i].view(exact(mine).dtype), exact(mine))
    with pytest.raises(ReplayMismatch, match="ends before parameter 'a'"):
        shared_parts("whole", payloads[:1], LAYOUT)


def test_a_change_is_said_once_per_parameter(caplog: pytest.LogCaptureFixture) -> None:
    warning = ChangeWarning(LAYOUT)
    for parameters in ([], [2], [2], [0, 2, 3], [3]):
        warning.say(parameters)
    first, second = [record.getMessage() for record in caplog.records]
    assert "the gradient of 'c' was changed" in first
    assert "bytes over all ranks" in first
    assert "the gradient of 'a' and 1 more was changed" in second
