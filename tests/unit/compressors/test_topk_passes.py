"""Top-k with several backward passes, skipped steps and absent gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lowdiff.compressors import TopK
from tests.unit.compressors.topk_rank import Rank, a_layout, assert_split, decoded, exact


def test_a_second_backward_pass_replaces_the_selection_and_loses_nothing() -> None:
    layout = a_layout((2000, torch.float32))
    compressor = TopK(0.01)
    rank, generator = Rank(compressor, layout), torch.Generator().manual_seed(0)
    first, second = (torch.randn(2000, generator=generator) for _ in range(2))
    rank.reducer.begin(1)
    sent = rank.backward([first])[0]
    owed = rank.residual.pair(0)[1].clone()
    # DDP accumulates: its second bucket holds the first average plus the new gradient.
    accumulated = sent + second
    final = rank.backward([accumulated])[0]
    assert_split(compressor, accumulated, owed, final, rank.residual.pair(0)[1])
    assert exact(rank.residual.pair(0)[1] + final) == exact(accumulated + owed)
    rank.reducer.consume([final])
    payload = rank.reducer.payload()
    assert payload.sections[0].data.size == 20
    assert exact(decoded(compressor, [payload], layout, 64)[0]) == exact(final)


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.01), TopK(0.01, value_dtype=torch.bfloat16), TopK(0.01, value_bits=2)],
    ids=str,
)
def test_a_second_pass_whose_average_is_dropped_leaves_the_first_ones_in_the_log(
    compressor: TopK,
) -> None:
    layout = a_layout((2000, torch.float32))
    rank, generator = Rank(compressor, layout), torch.Generator().manual_seed(0)
    first, second = (torch.randn(2000, generator=generator) for _ in range(2))
    rank.reducer.begin(1)
    sent = rank.backward([first])[0]
    rank.backward([second])
    rank.reducer.consume([sent])
    rebuilt = decoded(compressor, [rank.reducer.payload()], layout, 64)[0]
    assert exact(rebuilt) == exact(sent)


def test_a_skipped_step_leaves_the_residual_for_the_next() -> None:
    layout = a_layout((2000, torch.float32))
    rank, generator = Rank(TopK(0.01), layout), torch.Generator().manual_seed(0)
    rank.reducer.begin(1)
    rank.backward([torch.randn(2000, generator=generator)])
    rank.residual.settle()
    rank.residual.advance()
    owed = rank.owed()[0]
    rank.reducer.begin(2)
    rank.backward([torch.full((2000,), math.inf)])  # overflow: the scaler skips the optimizer
    rank.residual.advance()
    assert rank.reducer.payload().sections == ()
    assert exact(rank.owed()[0]) == exact(owed)
    rank.reducer.begin(3)
    gradient = torch.randn(2000, generator=generator)
    sent = rank.backward([gradient])[0]
    assert_split(TopK(0.01), gradient, owed, sent, rank.residual.pair(0)[1])
    assert sent.isfinite().all()


def test_a_parameter_that_the_step_did_not_use_keeps_what_it_is_owed() -> None:
    # DDP drops the average of a parameter that no rank used: what was sent would be lost.
    layout = a_layout((2000, torch.float32))
    rank = Rank(TopK(0.01), layout)
    rank.reducer.begin(1)
    rank.backward([torch.randn(2000, generator=torch.Generator().manual_seed(0))])
    rank.residual.settle()
    rank.residual.advance()
    owed = rank.owed()[0]
    for zeros in (torch.zeros(2000), -torch.zeros(2000)):
        rank.reducer.begin(2)
        assert not rank.backward([zeros])[0].any()
        rank.residual.settle()
        rank.residual.advance()
        assert torch.equal(rank.owed()[0], owed)


def test_absent_gradients_are_in_no_payload_and_optimizers_consume_one_by_one() -> None:
    layout = a_layout((2000, torch.float32), (2000, torch.float32), (2000, torch.float32))
    compressor = TopK(0.01)
    rank = Rank(compressor, layout)
    rank.reducer.begin(1)
    averaged = rank.backward([torch.randn(2000) for _ in range(3)])
    rank.reducer.consume([None, None, averaged[2]])
    rank.reducer.consume([averaged[0], None, None])
    payload = rank.reducer.payload()
    indices = payload.sections[0].data
    assert indices.size == 40
    assert (np.diff(indices) > 0).all()
    assert not ((indices >= 2000) & (indices < 4000)).any()
    rebuilt = decoded(compressor, [payload], layout, 100)
    assert exact(rebuilt[0]) == exact(averaged[0])
    assert not rebuilt[1].any()
    assert exact(rebuilt[2]) == exact(averaged[2])


def test_a_gradient_that_no_hook_saw_is_stored_whole() -> None:
    layout = a_layout((2000, torch.float32))
    compressor = TopK(0.01)
    rank = Rank(compressor, layout)
    rank.reducer.begin(1)
    gradient = torch.randn(2000)
    rank.reducer.consume([gradient])
    rebuilt = decoded(compressor, [rank.reducer.payload()], layout, 100)
    assert exact(rebuilt[0]) == exact(gradient)


def test_a_new_step_forgets_the_last_one() -> None:
    layout = a_layout((2000, torch.float32))
    rank = Rank(TopK(0.01), layout)
    rank.reducer.begin(1)
    rank.reducer.consume(rank.backward([torch.randn(2000)]))
    rank.reducer.begin(2)
    assert rank.reducer.payload().sections == ()
