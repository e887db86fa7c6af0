"""The sum of a tensor's words is the same by every way, in any cut, and shows what changed."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.core.memory import byte_view
from lowdiff.core.sums import MODULUS, Sums, sums_on, unsigned
from lowdiff.core.sums.host import host_sum
from lowdiff.core.sums.plain import ROW, plain_sums
from tests.docs.blocks import ROOT
from tests.unit.compressors.flat.test_selection import needs_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = [
    *(torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int64, torch.complex128),
]
#: Elements: none, one, around a word of half widths, and around one and several rows.
LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 300, ROW - 1, ROW, ROW + 1, 9 * ROW + 5])


def by_triton() -> Sums:
    """The kernel in Triton's interpreter: several programs for a tensor."""
    needs_triton()
    from lowdiff.core.sums.kernels import TritonSums

    return TritonSums(rows=2, chunk=512)


def by_torch() -> Sums:
    return plain_sums


WAYS = [by_torch, by_triton]


def by_definition(data: bytes) -> int:
    """As docs/format.md has it."""
    outputs: list[int] = []
    state = 0
    words = struct.unpack(f"<{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))
    for _ in range(ROW + len(words) // ROW + 1):
        state = (state + 0x9E3779B97F4A7C15) % MODULUS
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
        outputs.append((z ^ z >> 31) | 1)
    total = 0
    for j, word in enumerate(words):
        total += outputs[ROW + j // ROW] * outputs[j % ROW] * word
    return total % MODULUS


def tensor_of(kind: torch.dtype, count: int, seed: int) -> torch.Tensor:
    size = torch.empty((), dtype=kind).element_size()
    generator = torch.Generator().manual_seed(seed)
    most = 2 if kind == torch.bool else 256
    drawn = torch.randint(0, most, (count * size,), generator=generator, dtype=torch.uint8)
    return drawn.view(kind)


@pytest.mark.parametrize("make", WAYS)
@given(
    drawn=st.lists(st.tuples(st.sampled_from(KINDS), LENGTHS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_every_way_gives_the_sum_of_the_definition(
    make: Any, drawn: list[tuple[torch.dtype, int]], seed: int
) -> None:
    tensors = [tensor_of(kind, count, seed + i) for i, (kind, count) in enumerate(drawn)]
    expected = [by_definition(bytes(byte_view(tensor))) for tensor in tensors]
    assert [host_sum(byte_view(tensor)) for tensor in tensors] == expected
    assert unsigned(make()(tensors)) == expected


@pytest.mark.parametrize("make", WAYS)
@given(
    kind=st.sampled_from(KINDS),
    count=LENGTHS,
    cuts=st.lists(st.integers(0, 10 * ROW), max_size=4),
    seed=st.integers(0, 99),
)
def test_sums_of_blocks_add_up_wherever_they_are_cut(
    make: Any, kind: torch.dtype, count: int, cuts: list[int], seed: int
) -> None:
    whole = tensor_of(kind, count, seed)
    places = sorted({0, count, *(min(cut, count) for cut in cuts)})
    blocks = [whole[start:stop] for start, stop in pairwise(places)] or [whole]
    size = whole.element_size()
    of_host = [
        host_sum(byte_view(b), start * size) for b, start in zip(blocks, places, strict=False)
    ]
    of_way = unsigned(make()(blocks, places[: len(blocks)]))
    expected = host_sum(byte_view(whole))
    assert sum(of_host) % MODULUS == sum(of_way) % MODULUS == expected


@given(
    data=st.binary(min_size=1, max_size=200),
    at=st.integers(0, 10_000),
    bit=st.integers(0, 7),
    pages=st.integers(0, 40_000),
)
def test_a_flipped_bit_shows_wherever_it_is(data: bytes, at: int, bit: int, pages: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    assert host_sum(memoryview(bytes(changed)), pages) != host_sum(memoryview(data), pages)


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-126, float("nan")]), min_size=2),
    ends=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    kind=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    gap=st.sampled_from([0, 1, ROW, 2 * ROW]),
)
def test_elements_that_change_places_show(
    values: list[float], ends: tuple[int, int], kind: torch.dtype, gap: int
) -> None:
    before = torch.tensor(values, dtype=kind)
    before = torch.cat([before, torch.zeros(gap, dtype=kind), before])
    one, other = (end % len(values) for end in ends)
    other += gap + len(values)
    swapped, shifted = before.clone(), before.roll(1)
    swapped[one], swapped[other] = before[other], before[one]
    sums = [host_sum(byte_view(tensor)) for tensor in (before, swapped, shifted)]
    are_same = [bytes(byte_view(t)) == bytes(byte_view(before)) for t in (swapped, shifted)]
    assert [sums[0] == found for found in sums[1:]] == are_same


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_other_signs_show(kind: torch.dtype) -> None:
    before = torch.randn(3 * ROW).to(kind)
    for changed in (-before, before.abs(), torch.where(torch.arange(3 * ROW) < 2, -before, before)):
        assert host_sum(byte_view(changed)) != host_sum(byte_view(before))


def test_sums_are_those_that_the_format_lists() -> None:
    words = np.arange(1, ROW + 3, dtype=np.uint32)
    found = [
        host_sum(memoryview(data).cast("B"))
        for data in (
            b"",
            b"\1",
            struct.pack("<f", -0.0),
            struct.pack("<f", float("nan")),
            struct.pack("<2H", 0x3F80, 0xBF80),
            struct.pack("<d", 1.0),
            words.tobytes(),
        )
    ]
    page = ROOT.joinpath("docs", "format.md").read_text(encoding="utf-8")
    assert [f"{number:016x}" for number in found] == re.findall(
        r"`([0-9a-f]{16})` \|$", page, re.MULTILINE
    )


def test_a_cpu_is_left_to_pytorch() -> None:
    assert sums_on(torch.device("cpu")) is plain_sums
