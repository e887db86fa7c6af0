"""A parameter's checksum is the same taken whole, or put together from blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.core.digest import Looker, Shift, join
from tests.unit.core.checksums import checksum


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_blocks_shifted_past_what_follows_add_up_to_the_whole(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    total = 0
    for start, stop in pairwise(places):
        (part,) = Shift(len(data) - stop)([crc32c(data[start:stop])]).tolist()
        total ^= part
    assert total == crc32c(data)


@given(values=st.lists(st.binary(max_size=20), max_size=6), rest=st.binary(max_size=3000))
def test_many_are_shifted_as_each_is_alone(values: list[bytes], rest: bytes) -> None:
    shifted = Shift(len(rest))([crc32c(value) for value in values]).tolist()
    assert [part ^ crc32c(rest) for part in shifted] == [crc32c(value + rest) for value in values]


def test_a_shift_past_more_than_4_gib_is_as_two_shifts() -> None:
    far, near = Shift(5 << 30), Shift(3 << 30)
    values = [0, 1, 0xDEADBEEF, 0xFFFFFFFF]
    assert far(values).tolist() == Shift(2 << 30)(near(values).tolist()).tolist()


def test_a_checksum_is_of_the_memory_in_its_own_order() -> None:
    values = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)
    in_memory = values.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    assert checksum(values) == crc32c(in_memory)
    assert checksum(torch.empty(0)) == crc32c(b"") == 0
    assert checksum(torch.tensor(2.5, requires_grad=True)) == crc32c(np.float32(2.5).tobytes())


def test_a_looker_sees_a_tensor_as_it_is_also_when_it_has_moved() -> None:
    moving = torch.nn.Parameter(torch.zeros(1000))
    half = torch.ones(7, dtype=torch.bfloat16)
    looker = Looker({4: moving, 1: half, 7: torch.empty(0)})
    found = {7: checksum(torch.empty(0)), 1: checksum(half), 4: checksum(moving)}
    assert looker.look() == looker.look([7, 1, 4]) == found
    for number in range(1, 20):  # the allocator hands out the same places again
        moving.data = torch.full((1000,), float(number))
        assert looker.look([4]) == {4: checksum(torch.full((1000,), float(number)))}
    moving.data[999] += 1
    half[0] = -1.0
    assert looker.look([4, 1]) == {4: checksum(moving), 1: checksum(half)}


def test_joined_checksums_tell_the_order() -> None:
    assert join([1, 2]) != join([2, 1])
    assert join([]) == 0
    assert join([1, 2]) == crc32c(b"\1\0\0\0\2\0\0\0")
