"""Replica groups exchange their own part of a layout; a step of all of them decodes in the whole layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.grouped import GroupedReducer, decoding
from lowdiff.core.layout import cut_out, replica_groups, trained_by
from lowdiff.types import Block, Layout, ParameterSpec
from tests.contract.compressors import FAMILY, as_named, exact

_SHAPES = ((30, 40), (7,), (0,), (900,), (20, 50))
#: Two ranks, each alone with its shards.
_RANKS = ((0,), (1,), (0,), (1,), (0,))


def sharded() -> Layout:
    """A layout of which each of two ranks trains a part."""
    specs, offset = [], 0
    for i, (shape, ranks) in enumerate(zip(_SHAPES, _RANKS, strict=True)):
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        specs.append(ParameterSpec(f"p{i}", shape, strides, "float32", offset, ranks=ranks))
        offset = specs[-1].stop
    return Layout(tuple(specs))


def test_the_parts_of_a_layout_begin_at_0_and_know_their_places() -> None:
    layout = sharded()
    groups = replica_groups(layout)
    assert {ranks: part.indices for ranks, part in groups.items()} == {
        (0,): (0, 2, 4),
        (1,): (1, 3),
    }
    part = groups[(1,)]
    assert [spec.offset for spec in part.layout.parameters] == [0, 7]
    assert all(spec.ranks == () for spec in part.layout.parameters)
    assert part.own([1, 3]) == {0, 1}
    assert trained_by(layout, 1) == part


def test_a_layout_that_all_ranks_train_is_one_part() -> None:
    layout = cut_out(sharded(), [0, 2, 4]).layout
    assert replica_groups(layout).keys() == {()}
    assert trained_by(layout, 5).layout is layout


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_every_compressor_decodes_what_each_group_consumed(name: str) -> None:
    compressor, layout = FAMILY[name], sharded()
    consumed: list[torch.Tensor | None] = [None] * len(_SHAPES)
    payloads = []
    for rank in (0, 1):
        part = trained_by(layout, rank)
        kept = compressor.residual_layout(part.layout)
        residual = RotatingResidual.zeros(kept, torch.device("cpu"))
        with as_named(name):
            reducer = GroupedReducer(compressor.bind(part.layout, residual, None), part, {})
        reducer.begin(stamp_of(0, 1))
        sizes = [layout.parameters[i].numel for i in part.indices]
        # As FSDP does, leave room between the gradients.
        buffer = torch.zeros(sum(sizes) + 3 * len(sizes))
        gradients, start = [], 0
        for size in sizes:
            gradients.append(buffer[start : start + size])
            start += size + 3
            values = np.random.default_rng([rank, start]).standard_normal(size)
            gradients[-1].copy_(torch.from_numpy(values))
        reducer.reduce(part.indices, gradients, buffer).wait()
        own = dict(zip(part.indices, gradients, strict=True))
        reducer.consume([own.get(i) for i in range(len(_SHAPES))])
        payloads.append(reducer.payload())
        for i, gradient in own.items():
            consumed[i] = gradient.clone()
        reducer.close()
    decode = decoding(compressor, layout)(payloads)
    for i, (spec, expected) in enumerate(zip(layout.parameters, consumed, strict=True)):
        assert expected is not None
        out = torch.zeros(spec.numel)
        for first in range(0, spec.numel, 300):
            last = min(first + 300, spec.numel)
            decode(Block(i, first, last), out[first:last])
        assert (exact(out) == exact(expected)).all(), spec.name
