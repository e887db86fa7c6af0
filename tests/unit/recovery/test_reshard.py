"""A state that is divided otherwise has the same elements at the same places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.core.layout import flat, shaped
from lowdiff.persistence.format.values import decode, encode
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.reshard import first_holder, frozen_as, frozen_needed, resharded, whole
from lowdiff.recovery.state import OptimizerState, RecoveredState
from lowdiff.types import Environment, Fence, Layout, OptimizerSpec, ParameterSpec

_ENVIRONMENT = Environment("cpu", "2.13.0", "", "", 1, False, "", "float32", "highest")


def entries(tensor: str, shape: tuple[int, ...], cuts: list[list[int]], offset: int) -> Layout:
    """Entries for the parts between the cuts of each dimension."""
    ranges = [
        list(zip([0, *cut], [*cut, size], strict=True))
        for cut, size in zip(cuts, shape, strict=True)
    ]
    found = []
    places = torch.cartesian_prod(*(torch.arange(len(r)) for r in ranges)).reshape(-1, len(shape))
    for rank, place in enumerate(places.tolist()):
        ends = [ranges[d][i] for d, i in enumerate(place)]
        part = tuple(last - first for first, last in ends)
        start = tuple(first for first, _ in ends)
        name = tensor if part == shape else f"{tensor}@{','.join(map(str, start))}"
        found.append(
            ParameterSpec(
                name,
                part,
                torch.empty(part).stride(),
                "float32",
                offset,
                start,
                tensor,
                shape,
                () if len(places) == 1 else (rank,),
            )
        )
        offset = found[-1].stop
    return Layout(tuple(found))


def joined(layouts: list[Layout]) -> Layout:
    """One layout of several tensors'."""
    offset, found = 0, []
    for spec in (spec for layout in layouts for spec in layout.parameters):
        found.append(replace(spec, offset=offset))
        offset = found[-1].stop
    return Layout(tuple(found))


def optimizer_of(layout: Layout) -> OptimizerSpec:
    return OptimizerSpec("torch.optim.adamw.AdamW", (tuple(s.name for s in layout.parameters),))


def state_of(layout: Layout, wholes: dict[str, torch.Tensor]) -> RecoveredState:
    """A state whose parts are those of whole tensors, and moments their negatives."""
    fence = Fence(
        "0" * 32,
        0,
        None,
        0,
        0,
        1,
        _ENVIRONMENT,
        layout,
        (optimizer_of(layout),),
        {"name": "dense", "settings": {}},
        {},
        "0" * 32,
        "replica",
    )
    state = RecoveredState(3, fence, 3, optimizers=[OptimizerState([{"lr": 0.1}], {})])
    for spec in layout.parameters:
        ends = zip(spec.global_offset, spec.shape, strict=True)
        values = flat(wholes[spec.tensor][tuple(slice(o, o + n) for o, n in ends)].clone())
        state.parameters[spec.name] = values
        state.optimizers[0].state[spec.name] = {"step": torch.tensor(3.0), "exp_avg": -values}
    state.held = tuple(range(len(layout.parameters)))
    return state


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], list[list[int]]]:
    """A shape, and two ways to cut it; parts may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    ways = [
        [sorted(draw(st.lists(st.integers(1, size), max_size=3))) for size in shape]
        for _ in range(2)
    ]
    return shape, ways[0], ways[1]


@pytest.mark.slow
@given(divisions())
def test_any_division_holds_the_same_elements(
    division: tuple[tuple[int, ...], list[list[int]], list[list[int]]],
) -> None:
    shape, old_cuts, new_cuts = division
    # Empty parts at one place are one entry, as in a layout of a run.
    old_cuts, new_cuts = ([sorted(set(c)) for c in cuts] for cuts in (old_cuts, new_cuts))
    wholes = {"w": torch.randn(shape), "b": torch.randn(5)}
    bias = entries("b", (5,), [[]], 0)
    old = joined([entries("w", shape, old_cuts, 0), bias])
    new = joined([entries("w", shape, new_cuts, 0), bias])
    moved = resharded(state_of(old, wholes), new, [optimizer_of(new)])
    expected = state_of(new, wholes)
    assert moved.parameters.keys() == expected.parameters.keys()
    assert moved.held == expected.held
    for name, values in expected.parameters.items():
        assert has_same_bits(moved.parameters[name], values)
        for key, value in expected.optimizers[0].state[name].items():
            assert has_same_bits(moved.optimizers[0].state[name][key], value)
    together = whole(moved)
    for spec in together.fence.layout.parameters:
        assert not spec.is_shard
        assert not spec.ranks
        assert has_same_bits(shaped(together.parameters[spec.name], spec), wholes[spec.tensor])
    assert together.fence.optimizers[0].groups == (("w", "b"),)


def test_what_is_whole_already_stays_as_it_is() -> None:
    layout = joined([entries("w", (3, 2), [[], []], 0), entries("b", (5,), [[]], 0)])
    state = state_of(layout, {"w": torch.randn(3, 2), "b": torch.randn(5)})
    before = dict(state.parameters)
    assert whole(state) is state
    assert all(state.parameters[name] is values for name, values in before.items())


@pytest.mark.slow
@given(divisions())
def test_frozen_shards_are_cut_from_the_items_that_are_needed(
    division: tuple[tuple[int, ...], list[list[int]], list[list[int]]],
) -> None:
    shape, old_cuts, new_cuts = division
    whole_value = torch.randn(shape)
    state = state_of(entries("b", (5,), [[]], 0), {"b": torch.randn(5)})
    old, new = (entries("w", shape, cuts, 0) for cuts in (old_cuts, new_cuts))

    def part(spec: ParameterSpec) -> torch.Tensor:
        ends = zip(spec.global_offset, spec.shape, strict=True)
        return whole_value[tuple(slice(o, o + n) for o, n in ends)].contiguous()

    def sharded(layout: Layout) -> Layout:
        return layout if len(layout.parameters) > 1 else Layout(())

    before, after = sharded(old), sharded(new)
    if before == after:
        return  # nothing is divided anew
    state.fence = replace(state.fence, frozen_shards=before)
    for rank, spec in enumerate(new.parameters):
        needed = frozen_needed(before, after, rank)
        held = {first_holder(spec): encode(part(spec)) for spec in old.parameters}
        state.items = [
            {"frozen/w": data} if (number, "frozen/w") in needed or not before.parameters else {}
            for number, data in held.items()
        ]
        found = state.items[0] | frozen_as(state, after, rank, state.items[0])
        assert has_same_bits(decode(found["frozen/w"]), part(spec))
