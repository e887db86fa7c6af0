"""Views of tensors' memory: without a copy, without a mark, and valid while they are held."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from lowdiff.core.memory import array_of, bits, byte_view
from lowdiff.errors import UsageError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_a_view_shares_memory_and_leaves_the_storage_resizable(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, dtype=dtype)
    view = byte_view(tensor)
    assert bytes(view) == bytes(tensor.view(torch.uint8).flatten().tolist())
    view[:] = bytes(tensor.nbytes)
    assert not tensor.to(torch.float32).any()
    assert tensor.untyped_storage().resizable()


def test_a_view_is_in_memory_order_and_of_the_tensor_alone() -> None:
    rows = torch.arange(12, dtype=torch.int64).reshape(4, 3)
    assert array_of(rows[1:3].t()).tolist() == [3, 4, 5, 6, 7, 8]
    assert bits(rows[3]).tolist() == [9, 10, 11]


def test_of_nothing_there_is_an_empty_view() -> None:
    empty = torch.empty(0)
    assert len(byte_view(empty)) == len(bits(empty)) == 0
    assert empty.untyped_storage().resizable()
    empty.resize_(4)


def test_a_view_outlives_its_tensor() -> None:
    """Also where the tensor gets other memory, as a parameter by ``.data``."""
    parameter = torch.nn.Parameter(torch.full((1 << 16,), 3.0))
    array = bits(parameter.detach()).view(np.float32)
    parameter.data = torch.zeros(1 << 16)
    gc.collect()
    others = [torch.zeros(1 << 16) for _ in range(20)]  # would lie where it was freed
    assert (array == 3.0).all()
    assert len(others) == 20


def test_memory_that_was_given_back_is_named() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(
        UsageError, match=r"has 0 bytes of memory and needs 32: its storage was freed"
    ):
        byte_view(tensor)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(UsageError, match="has 16 bytes of memory and needs 32"):
        byte_view(tensor)
