"""The residual moves with committed steps only; nothing that was not sent is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors.feedback import NUM_SLOTS, RotatingResidual
from lowdiff.types import Layout, ParameterSpec

LAYOUT = Layout(
    (
        ParameterSpec("a", (4,), (1,), "float32", 0),
        ParameterSpec("b", (2, 3), (3, 1), "bfloat16", 4),
        ParameterSpec("c", (1,), (1,), "float64", 10),
    )
)


def residual() -> RotatingResidual:
    return RotatingResidual.zeros(LAYOUT, torch.device("cpu"))


def write(store: RotatingResidual, parameter: int, value: float) -> None:
    store.pair(parameter)[1].fill_(value)
    store.written(parameter)


def values(store: RotatingResidual) -> dict[int, float]:
    return {i: float(tensor[0]) for i, tensor in store.current().items()}


def test_it_starts_at_zero_with_the_types_of_the_parameters() -> None:
    store = residual()
    assert store.current() == {}
    for i, spec in enumerate(LAYOUT.parameters):
        source, target = store.pair(i)
        assert source.dtype == target.dtype == getattr(torch, spec.dtype)
        assert source.shape == target.shape == (spec.numel,)
        assert not source.any()
        assert source.data_ptr() != target.data_ptr()


def test_what_a_step_wrote_is_what_the_next_one_reads() -> None:
    store = residual()
    for step in range(1, 10):
        source, target = store.pair(0)
        assert source.tolist() == [step - 1] * 4
        target.fill_(step)
        store.written(0)
        store.advance(stepped=True)
        assert values(store) == {0: step}


def test_a_second_backward_pass_of_a_step_goes_on_where_the_first_one_ended() -> None:
    store = residual()
    write(store, 0, 1)
    source, target = store.pair(0)
    assert source.data_ptr() == target.data_ptr()
    assert source.tolist() == [1] * 4
    target.add_(1)
    store.written(0)
    store.advance(stepped=True)
    assert values(store) == {0: 2}
    assert store.slot == 1  # once per commit, not once per backward pass


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    store = residual()
    write(store, 0, 1)
    store.advance(stepped=True)
    slot = store.slot
    write(store, 0, float("nan"))
    write(store, 1, 5)
    store.advance(stepped=False)
    assert (store.slot, values(store)[0]) == (slot, 1)
    assert store.pair(0)[0].tolist() == [1] * 4
    assert not store.pair(1)[0].any()


def test_a_parameter_that_a_step_did_not_use_keeps_its_residual() -> None:
    store = residual()
    write(store, 0, 1)
    write(store, 1, 2)
    store.advance(stepped=True)
    for step in range(7):
        write(store, 0, 10 + step)
        store.advance(stepped=True)
        assert values(store) == {0: 10 + step, 1: 2}
    write(store, 1, 3)
    store.advance(stepped=True)
    assert values(store) == {0: 16, 1: 3}


def test_a_step_without_any_gradient_moves_nothing() -> None:
    store = residual()
    write(store, 0, 1)
    store.advance(stepped=True)
    slot = store.slot
    store.advance(stepped=True)
    assert (store.slot, values(store)) == (slot, {0: 1})


def test_loading_replaces_what_is_given_and_leaves_the_rest() -> None:
    store = residual()
    write(store, 0, 1)
    write(store, 2, 2)
    store.advance(stepped=True)
    store.load([None, torch.full((6,), 3, dtype=torch.bfloat16), torch.tensor([4.0])])
    assert values(store) == {0: 1, 1: 3, 2: 4}
    write(store, 0, 5)
    store.advance(stepped=True)
    assert values(store) == {0: 5, 1: 3, 2: 4}


@pytest.mark.parametrize("stepped", [True, False])
def test_with_the_loss_scale_the_residual_changes_its_unit(stepped: bool) -> None:
    store = residual()
    write(store, 0, 1)
    write(store, 1, 2)
    store.advance(stepped=True)
    before = [t.clone() for t in store.current().values()]
    slots = [store.slot]
    write(store, 0, 100)
    store.advance(stepped=stepped, scale_ratio=0.5)
    assert values(store) == {0: 50 if stepped else 0.5, 1: 1}
    slots.append(store.slot)
    assert slots[0] != slots[1], "the record before still names the old one"
    old = [store._slots[slots[0]][i] for i in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(before, old, strict=True))


def test_without_staging_no_record_can_name_a_slot() -> None:
    assert residual().mark() is None


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=4), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_it_behaves_like_a_dictionary_that_is_copied_at_every_step(
    steps: list[tuple[list[int], bool, bool]],
) -> None:
    store = residual()
    model: dict[int, float] = {}
    earlier: list[tuple[int, dict[int, float]]] = []
    for number, (written, stepped, rescaled) in enumerate(steps, start=1):
        draft = copy.copy(model)
        for parameter in written:
            source, target = store.pair(parameter)
            assert float(source[0]) == draft.get(parameter, 0)
            target.fill_(float(source[0]) + number)
            draft[parameter] = float(target[0])  # bfloat16 rounds
            store.written(parameter)
        ratio = 0.5 if rescaled else 1.0
        store.advance(stepped=stepped, scale_ratio=ratio)
        model = draft if stepped else {**dict.fromkeys(draft, 0.0), **model}
        model = {i: value * ratio for i, value in model.items()}
        assert values(store) == model
        model = values(store)
        # The residual of the step before is still whole: ranks may be one step apart.
        if earlier:
            slot, old = earlier[-1]
            kept = {i: float(store._slots[slot][i][0]) for i in old}
            assert kept == old
        earlier.append((store.slot, model))
    assert NUM_SLOTS == 3
