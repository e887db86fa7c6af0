"""The residual moves with committed steps only; nothing that was not sent is lost."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors.feedback import (
    NUM_SLOTS,
    ErrorFeedback,
    RotatingResidual,
    Scaled,
    residuals_of,
    views_of,
    zero_slots,
)
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
        store.settle()
        store.advance()
        assert values(store) == {0: step}


def test_a_second_backward_pass_of_a_step_goes_on_where_the_first_one_ended() -> None:
    store = residual()
    write(store, 0, 1)
    source, target = store.pair(0)
    assert source.data_ptr() == target.data_ptr()
    assert source.tolist() == [1] * 4
    target.add_(1)
    store.written(0)
    store.settle()
    store.advance()
    assert values(store) == {0: 2}
    assert store.slot == 1  # once per commit, not once per backward pass


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    store = residual()
    write(store, 0, 1)
    store.settle()
    store.advance()
    slot = store.slot
    write(store, 0, float("nan"))
    write(store, 1, 5)
    store.advance()
    assert (store.slot, values(store)[0]) == (slot, 1)
    assert store.pair(0)[0].tolist() == [1] * 4
    assert not store.pair(1)[0].any()


def test_a_parameter_that_a_step_did_not_use_keeps_its_residual() -> None:
    store = residual()
    write(store, 0, 1)
    write(store, 1, 2)
    store.settle()
    store.advance()
    for step in range(7):
        write(store, 0, 10 + step)
        store.settle()
        store.advance()
        assert values(store) == {0: 10 + step, 1: 2}
    write(store, 1, 3)
    store.settle()
    store.advance()
    assert values(store) == {0: 16, 1: 3}


def test_a_step_without_any_gradient_moves_nothing() -> None:
    store = residual()
    write(store, 0, 1)
    store.settle()
    store.advance()
    slot = store.slot
    store.settle()
    store.advance()
    assert (store.slot, values(store)) == (slot, {0: 1})


def test_loading_replaces_what_is_given_and_leaves_the_rest() -> None:
    store = residual()
    write(store, 0, 1)
    write(store, 2, 2)
    store.settle()
    store.advance()
    store.load([None, torch.full((6,), 3, dtype=torch.bfloat16), torch.tensor([4.0])])
    assert values(store) == {0: 1, 1: 3, 2: 4}
    write(store, 0, 5)
    store.settle()
    store.advance()
    assert values(store) == {0: 5, 1: 3, 2: 4}


def test_what_another_backward_pass_does_after_the_optimizer_leaves_no_trace() -> None:
    store = residual()
    write(store, 0, 1)
    store.settle([0])
    for _ in range(2):
        source, target = store.pair(0)
        assert source.tolist() == [1] * 4
        target.fill_(7)
        assert store.pair(0)[1].tolist() == [7] * 4
        store.written(0)
    store.advance()
    assert values(store) == {0: 1}


def test_only_what_an_optimizer_consumed_becomes_current() -> None:
    store = residual()
    for i in range(3):
        write(store, i, 1)
    store.settle()
    store.advance()
    write(store, 0, 2)
    store.pair(1)[1].fill_(2)
    store.written(1, of=0)
    write(store, 2, 2)
    store.settle([0])
    store.advance()
    assert values(store) == {0: 2, 1: 2, 2: 1}


def test_float16_is_owed_in_float32() -> None:
    layout = Layout((ParameterSpec("a", (2,), (1,), "float16", 0),))
    scale = 2.0**16
    store = RotatingResidual.zeros(residuals_of(layout), torch.device("cpu"), Scaled(scale))
    feedback = ErrorFeedback(store)
    for _ in range(3):
        total = feedback.total(0, torch.full((2,), 2.0**-12, dtype=torch.float16))
        feedback.sent_at(0, torch.tensor([0]), total[:1].half())
        store.settle()
        store.advance()
    assert store.current()[0].tolist() == [0.0, 3 * 2.0**-28]


def test_the_residual_does_not_know_the_loss_scale() -> None:
    scale = 1.0
    plain = residual()
    scaled = RotatingResidual.zeros(LAYOUT, torch.device("cpu"))
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.3])
    for scale in (1.0, 1024.0, 2.0**-20, 8.0):
        scaled.loss_scale = Scaled(scale)
        for store, by in ((plain, 1.0), (scaled, scale)):
            feedback = ErrorFeedback(store)
            feedback.sent(0, feedback.total(0, gradient * by) * 0.25)
            store.settle()
            store.advance()
        assert plain.current()[0].any()
        assert torch.equal(plain.current()[0], scaled.current()[0])


def test_without_staging_no_record_can_name_a_slot() -> None:
    assert residual().mark() is None


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=4), st.sets(st.integers(0, 2))),
        max_size=12,
    )
)
def test_it_behaves_like_a_dictionary_that_is_copied_at_every_step(
    steps: list[tuple[list[int], set[int]]],
) -> None:
    slots = zero_slots(LAYOUT, torch.device("cpu"))
    store = RotatingResidual(slots, LAYOUT)
    model: dict[int, float] = {}
    earlier: list[tuple[int, dict[int, float]]] = []
    for number, (written, consumed) in enumerate(steps, start=1):
        draft = copy.copy(model)
        for parameter in written:
            source, target = store.pair(parameter)
            assert float(source[0]) == draft.get(parameter, 0)
            target.fill_(float(source[0]) + number)
            draft[parameter] = float(target[0])  # bfloat16 rounds
            store.written(parameter)
        store.settle(consumed)
        store.advance()
        model = {i: v if i in consumed else model.get(i, 0.0) for i, v in draft.items()}
        assert values(store) == model
        # The residual of the step before is still whole: ranks may be one step apart.
        if earlier:
            slot, old = earlier[-1]
            kept = {i: float(views_of(slots[slot], LAYOUT)[i][0]) for i in old}
            assert kept == old
        earlier.append((store.slot, model))
    assert NUM_SLOTS == 3
