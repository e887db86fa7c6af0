"""Buffers that training makes, drops or gives another shape are restored as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.errors import RunMismatch
from lowdiff.persistence.format.values import same
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop, small_model

Table = torch.Tensor | None


class WithTable(nn.Module):
    """A small model and one buffer, which its forward pass uses and may replace."""

    def __init__(self, table: Table, *, persistent: bool = True) -> None:
        super().__init__()
        self.inner = small_model()
        self.register_buffer("table", table, persistent=persistent)
        self.table: Table

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        with torch.no_grad():
            self.table = self.next_table(inputs, outputs)
        return outputs if self.table is None else outputs - self.table.mean()

    def next_table(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Table:
        return self.table


class Lazy(WithTable):
    """Begins its statistics with the first batch, as codebooks and ActNorm do."""

    def __init__(self) -> None:
        super().__init__(None)

    def next_table(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Table:
        mean = outputs.mean(0)
        return mean if self.table is None else 0.9 * self.table + 0.1 * mean


class Growing(WithTable):
    """Has a table that grows with the input, as rotary ones and masks do."""

    def __init__(self) -> None:
        super().__init__(torch.ones(2), persistent=False)

    def next_table(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Table:
        assert self.table is not None
        return torch.cat([self.table, outputs.mean().view(1)])


class Recurrent(WithTable):
    """Carries a state of the last batch's shape, which some drop; built with one or without."""

    def __init__(self, table: Table = None) -> None:
        super().__init__(table, persistent=False)

    def next_table(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Table:
        own = outputs[: 3 + int(inputs.sum().abs() * 1000) % 4]
        kept = torch.zeros(()) if self.table is None else self.table.mean()
        return None if inputs.sum() < 0 else own + kept


def recurrent_from_zeros() -> Recurrent:
    return Recurrent(torch.zeros(8, 3))


MODELS: list[Callable[[], WithTable]] = [Lazy, Growing, Recurrent, recurrent_from_zeros]
KINDS: dict[str, dict[str, Any]] = {
    "topk": {"snapshot_every": 1000},
    "replica": {"compressor": None, "batch_size": 1},
}


def steps(loop: Loop, until: int) -> dict[int, tuple[torch.Tensor, Table]]:
    """Losses, and the table after each step."""
    found = {}
    for number in loop.checkpointer.steps(until):
        loss, table = loop.step(number), table_of(loop)
        found[number + 1] = loss, None if table is None else table.clone()
    return found


def table_of(loop: Loop) -> Table:
    assert isinstance(loop.model, WithTable)
    return loop.model.table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((make, "topk") for make in MODELS),
        (recurrent_from_zeros, "replica"),
    ],
)
def test_what_training_made_of_a_buffer_is_resumed_bit_for_bit(
    tmp_path: Path, make: Callable[[], WithTable], kind: str
) -> None:
    whole = Loop(tmp_path / "whole", model=make(), settings=KINDS[kind])
    whole.attach()
    expected = steps(whole, 9)
    whole.checkpointer.close()
    found: dict[int, tuple[torch.Tensor, Table]] = {}
    for until in (2, 3, 7, 9):
        loop = Loop(tmp_path, model=make(), settings=KINDS[kind])
        before = max(found, default=0)
        assert loop.attach() == before
        if before:
            assert same(table_of(loop), expected[before][1])
        found |= steps(loop, until)
        loop.die()
    assert same(found, expected)
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    found_weights, weights = recovered.model_state_dict(), whole.weights()
    assert same(sorted(found_weights), sorted(weights))
    assert all(same(found_weights[name], value) for name, value in weights.items())
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert not report.failures
    if isinstance(whole.model, Recurrent):
        assert {table is None for _, table in expected.values()} == {True, False}


def test_a_recurrent_state_that_is_none_survives_a_close(tmp_path: Path) -> None:
    first = Loop(tmp_path, model=recurrent_from_zeros())
    first.attach()
    found = steps(first, 9)
    dropped = max(number for number, (_, table) in found.items() if table is None)
    first.checkpointer.close()
    second = Loop(tmp_path, model=recurrent_from_zeros())
    assert second.attach(step=dropped) == dropped
    assert table_of(second) is None
    second.checkpointer.close()
    # Its snapshot says so as well.
    third = Loop(tmp_path, model=recurrent_from_zeros())
    assert third.attach() == dropped
    assert table_of(third) is None
    third.die()


def test_a_buffer_that_fits_is_restored_in_place_because_of_its_views(tmp_path: Path) -> None:
    class Viewed(WithTable):
        def __init__(self) -> None:
            super().__init__(torch.zeros(4))
            assert self.table is not None
            self.view = self.table[:2]

        def next_table(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Table:
            assert self.table is not None
            return self.table.add_(1.0)

    Loop(tmp_path, model=Viewed()).run(3)
    model = Viewed()
    Loop(tmp_path, model=model).run(3)
    assert model.view.tolist() == [3.0, 3.0]


class Layers(nn.Module):
    """Two parts with one table, which either shares from the start or is given when it grows."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first = WithTable(torch.ones(2), persistent=False)
        self.second = WithTable(self.first.table if shared else torch.ones(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.first.table is not None
        self.first.table = self.second.table = torch.cat([self.first.table, torch.rand(1)])
        outputs: torch.Tensor = self.first(inputs) + self.second(inputs)
        return outputs


@pytest.mark.parametrize("shared", [True, False])
def test_tables_that_are_shared_before_they_grow_or_only_then_are_both_restored(
    tmp_path: Path, shared: bool
) -> None:
    loop = Loop(tmp_path, model=Layers(shared=shared))
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    loop.die()
    again = Loop(tmp_path, model=Layers(shared=shared))
    assert again.attach() == 3
    expected = loop.model.get_buffer("first.table")
    found = [again.model.get_buffer(f"{name}.table") for name in ("first", "second")]
    assert len(expected) == 5
    assert all(torch.equal(table, expected) for table in found)
    assert (found[0] is found[1]) == shared
    again.die()


def test_another_shape_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Loop(tmp_path, model=Growing()).run(3)
    Loop(tmp_path, model=Growing()).run(3)
    assert (
        "buffer/table is torch.float32 (5,) in the run, built as torch.float32 (2,)" in caplog.text
    )


def test_a_buffer_that_the_runs_model_was_built_with_is_missed(tmp_path: Path) -> None:
    built = small_model()
    built.register_buffer("table", torch.ones(2))
    Loop(tmp_path, model=built).run(3)
    with pytest.raises(RunMismatch, match=r"buffer/table is in the run and not in the model"):
        Loop(tmp_path).attach()


class Making(nn.Module):
    """A model whose forward registers a buffer, as caches of masks and angles are made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(3), persistent=False)
        result: torch.Tensor = self.inner(inputs) * self.cache
        return result


def test_a_buffer_that_forward_registers_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = Loop(tmp_path, model=Making())
    killed.attach()
    for number in killed.checkpointer.steps(3):
        killed.step(number)
    killed.die()
    again = Loop(tmp_path, model=Making())
    assert again.attach() == 3
    assert "buffer/cache is left to the model" in caplog.text
    again.step(3)
    again.die()


class Turning(nn.Module):
    """A buffer that keeps its bytes and changes its shape."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.register_buffer("table", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.table = self.table.reshape((2, 3) if self.table.dim() == 1 else (6,))
        result: torch.Tensor = self.inner(inputs) + self.table.sum()
        return result


def test_a_shape_of_the_same_bytes_is_another_value(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=Turning())
    loop.run(7)
    for step in range(1, 8):
        state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert state.model_state_dict()["table"].shape == ((2, 3) if step % 2 else (6,))
    assert verify(tmp_path / "run", tmp_path / "staging").ok


def test_a_buffer_that_only_the_model_has_is_refused(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    loop = Loop(tmp_path)
    loop.model.register_buffer("table", torch.ones(2))
    with pytest.raises(RunMismatch, match="buffer/table is not in the run"):
        loop.attach()


def test_a_buffer_whose_elements_share_memory_is_resumed(tmp_path: Path) -> None:
    def expanded() -> WithTable:
        return WithTable(torch.ones(1).expand(4))

    first = Loop(tmp_path, model=expanded())
    first.run(3)
    second = Loop(tmp_path, model=expanded())
    second.run(5)
    assert same(dict(lowdiff.recover(tmp_path / "run", 5).model_state_dict()), second.weights())


class Counting(nn.Module):
    """Counts its calls, also those of an evaluation, in tensors that it replaces."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        result: torch.Tensor = self.inner(inputs)
        return result


class Histogram:
    """A metric as large as is logged apart, whose tensor every update replaces."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2048)

    def update(self, outputs: torch.Tensor) -> None:
        self.counts = self.counts + outputs.mean()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"].clone()


def test_what_an_evaluation_in_inference_mode_made_is_read_like_the_rest(tmp_path: Path) -> None:
    loop, metric = Loop(tmp_path, model=Counting()), Histogram()
    frozen = nn.Linear(2, 2)
    with torch.inference_mode():
        frozen.weight = nn.Parameter(frozen.weight.clone(), requires_grad=False)
    frozen.bias.requires_grad_(False)
    assert frozen.weight.is_inference()
    loop.model.frozen = frozen
    loop.attach(metric=metric)
    expected = {}
    for number in loop.checkpointer.steps(4):
        loop.step(number)
        with torch.inference_mode():
            metric.update(loop.model.eval()(torch.ones(2, 20)))
        loop.model.train()
        expected[number + 1] = {**loop.weights(), "counts": metric.counts.clone()}
    assert loop.model.get_buffer("calls").is_inference()
    loop.checkpointer.close()
    for step, values in expected.items():
        state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert same({**state.model_state_dict(), **state.stateful["metric"]}, values)


@pytest.mark.parametrize("view", [lambda z: z.conj().imag, torch._neg_view], ids=["conj", "neg"])
def test_a_buffer_whose_sign_is_a_mark_keeps_its_sign(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for until in (2, 4):
        loop = Loop(tmp_path)
        source = torch.tensor([1 + 2j, 3 + 4j])
        held = view(source if view is not torch._neg_view else source.imag)
        loop.model.register_buffer("held", held)
        loop.run(until)
        assert loop.model.get_buffer("held").tolist() == [-2.0, -4.0]
    assert lowdiff.recover(tmp_path / "run").model_state_dict()["held"].tolist() == [-2.0, -4.0]
