from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.recovery.replay.blocks import chunks, element_units, parameter_blocks, tensor_units
from lowdiff.types import Block, Layout, ParameterSpec

NUMELS = st.one_of(st.integers(0, 5000), st.integers(30_000, 300_000))
THREADS = st.integers(1, 9)
BLOCK_ELEMENTS = st.integers(1, 64).map(lambda n: 64 * n)


def layout(*numels: int) -> Layout:
    specs = []
    offset = 0
    for i, numel in enumerate(numels):
        specs.append(ParameterSpec(f"p{i}", (numel,), (1,), "float32", offset))
        offset += numel
    return Layout(tuple(specs))


def test_chunks_are_those_of_torchs_parallel_for() -> None:
    assert list(chunks(100_000, 3, fused=False)) == [
        (0, 33334),
        (33334, 66668),
        (66668, 100_000),
    ]


@pytest.mark.parametrize(
    ("numel", "expected"), [(0, 0), (1, 1), (32768, 1), (32769, 2), (65536, 2), (65537, 3)]
)
def test_a_small_kernel_stays_on_one_thread(numel: int, expected: int) -> None:
    assert len(list(chunks(numel, 8, fused=False))) == expected


def test_a_fused_kernel_is_one_chunk() -> None:
    assert list(chunks(1_000_000, 8, fused=True)) == [(0, 1_000_000)]


@given(numel=NUMELS, threads=THREADS)
def test_chunks_tile_a_parameter(numel: int, threads: int) -> None:
    found = list(chunks(numel, threads, fused=False))
    assert sum(stop - start for start, stop in found) == numel
    assert len(found) <= threads
    if found:
        assert (found[0][0], found[-1][1]) == (0, numel)
    assert all(before[1] == after[0] for before, after in pairwise(found))


@given(numel=NUMELS, threads=THREADS, block_elements=BLOCK_ELEMENTS, fused=st.booleans())
def test_blocks_tile_a_parameter_inside_its_chunks_and_aligned(
    numel: int, threads: int, block_elements: int, fused: bool
) -> None:
    blocks = list(
        parameter_blocks(7, numel, num_threads=threads, fused=fused, block_elements=block_elements)
    )
    if numel == 0:  # no element, but an optimizer that counts its steps
        assert blocks == [Block(7, 0, 0)]
        return
    edges = list(chunks(numel, threads, fused=fused))
    position = 0
    for block in blocks:
        assert (block.parameter, block.start) == (7, position)
        assert 0 < block.stop - block.start <= block_elements
        chunk = next(c for c in edges if c[0] <= block.start < c[1])
        assert block.stop <= chunk[1]
        assert (block.start - chunk[0]) % 64 == 0
        # A tail may only be where the live run had one: at the chunk's end.
        assert (block.stop - block.start) % 64 == 0 or block.stop == chunk[1]
        is_whole = (block.start, block.stop) == chunk
        assert block.stop - block.start > 1 or is_whole or block_elements == 64
        position = block.stop
    assert position == numel


def test_a_block_size_that_breaks_vectors_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        list(parameter_blocks(0, 10, num_threads=1, fused=False, block_elements=100))


@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    owners=st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=8, max_size=8),
    block_elements=BLOCK_ELEMENTS,
)
def test_units_hold_every_element_once_of_one_optimizer_and_bounded(
    numels: list[int], owners: list[tuple[int, bool]], block_elements: int
) -> None:
    made = layout(*numels)
    units = element_units(made, owners[: len(numels)], num_threads=2, block_elements=block_elements)
    covered = [
        (made.parameters[block.parameter].offset + block.start, block.stop - block.start)
        for unit in units
        for block in unit.blocks
    ]
    assert [start for start, _ in covered] == [
        sum(size for _, size in covered[:i]) for i in range(len(covered))
    ]
    assert sum(size for _, size in covered) == sum(numels)
    for unit in units:
        assert unit.elements <= block_elements
        assert {owners[block.parameter][0] for block in unit.blocks} == {unit.optimizer}


def test_small_parameters_share_a_unit() -> None:
    owners = [(0, False)] * 3
    units = element_units(layout(10, 20, 30), owners, num_threads=1, block_elements=64)
    assert [unit.elements for unit in units] == [60]


def test_coupled_optimizers_take_whole_tensors() -> None:
    units = tensor_units(layout(10, 100_000), [(1, False), (0, True)])
    assert [(unit.optimizer, unit.elements) for unit in units] == [(1, 10), (0, 100_000)]
