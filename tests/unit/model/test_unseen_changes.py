"""What changes unseen, or is not restored, is recovered as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop
from tests.unit.model.test_large_state import frozen_loop


class Old:
    """A large tensor in an object that takes it back."""

    def __init__(self, value: float) -> None:
        self.values = torch.full((2000,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


class Other(Old):
    """Another class: starts afresh."""


class Forgetful(Old):
    """Does not take its tensor back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what is there."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("first", "second"), [(Old, Other), (None, Old), (Forgetful, Forgetful)])
def test_an_object_that_did_not_get_its_tensor_back_is_recovered_as_it_is(
    tmp_path: Path, first: type[Old] | None, second: type[Old]
) -> None:
    before = Loop(tmp_path, settings={"snapshot_every": 1000})
    before.attach(**({} if first is None else {"thing": first(1.0)}))
    for number in before.checkpointer.steps(3):
        before.step(number)
    before.die()
    loop, thing = Loop(tmp_path, settings={"snapshot_every": 1000}), second(2.0)
    assert loop.attach(thing=thing) == 3
    for number in loop.checkpointer.steps(6):
        loop.step(number)
    loop.die()
    for step in (4, 6):
        found = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert torch.equal(found.stateful["thing"]["values"], thing.values)


@pytest.mark.parametrize("way", ["assigned", "in place"])
def test_frozen_parameters_written_through_data_are_exact_at_every_step(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = frozen_loop(tmp_path, snapshot_every=4)
    loop.attach()
    bias = loop.model.get_parameter("0.bias")
    live = {}
    for number in loop.checkpointer.steps(9):
        loop.step(number)
        if way == "assigned":
            bias.data = bias.data * 0.9 + 1.0
        else:
            bias.data.mul_(0.9).add_(1.0)
        live[number + 1] = loop.weights()
    loop.checkpointer.close()
    for step, expected in live.items():
        found = lowdiff.recover(tmp_path / "run", step)
        assert same(dict(found.model_state_dict()), expected)
    assert ("written through .data" in caplog.text) == (way == "in place")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "transposed", "a view with holes", "half width"])
def test_a_target_network_that_is_copied_through_data_now_and_then_is_exact(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Loop:
        loop = frozen_loop(tmp_path, snapshot_every=1000)
        part = loop.model.get_submodule("0")
        if form == "transposed":
            weight = torch.randn(20, 500).t()
        elif form == "a view with holes":
            weight = torch.randn(1000, 40)[::2, ::2]
        else:
            weight = torch.randn(500, 20)
        part.weight = torch.nn.Parameter(weight, requires_grad=False)
        if form == "half width":
            target = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16), requires_grad=False)
            part.register_parameter("target", target)
        return loop

    for resumed, written, until in ((0, 6, 8), (8, 14, 16)):  # every life trusts versions again
        loop = make()
        assert loop.attach() == resumed
        live = {}
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            if number + 1 == written:
                for parameter in loop.model.get_submodule("0").parameters():
                    parameter.data.mul_(0.5).add_(1.0)
            live[number + 1] = loop.weights()
        loop.die()
        for step, expected in live.items():
            found = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
            assert same(dict(found.model_state_dict()), expected), step
    assert caplog.text.count("written through .data") == 2


def test_complex_buffers_are_refused_by_name(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.model.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedModel, match="'turns' is complex"):
        loop.attach()


def sparse() -> torch.Tensor:
    """An adjacency matrix."""
    return torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sparse, r"'odd' has layout torch\.sparse_coo, .*indices and values"),
        (lambda: torch.zeros(3, device="meta"), r"'odd' is on the meta device"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), r"'odd' is float8_e4m3fn, .*uint8"),
    ],
)
@pytest.mark.parametrize("kind", ["buffer", "frozen parameter"])
def test_tensors_that_snapshots_cannot_hold_are_refused_by_name(
    tmp_path: Path, kind: str, make: Callable[[], torch.Tensor], message: str
) -> None:
    loop = Loop(tmp_path)
    if kind == "buffer":
        loop.model.register_buffer("odd", make())
    else:
        loop.model.register_parameter("odd", torch.nn.Parameter(make(), requires_grad=False))
    with pytest.raises(UnsupportedModel, match=message):
        loop.attach()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.uint32, torch.uint64)),
    ],
)
def test_unsigned_tensors_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    def make() -> Loop:
        loop = Loop(tmp_path)
        loop.model.register_buffer("count", torch.tensor([0, 1]).to(dtype))
        table = torch.tensor([-1, -2, 3, 4]).to(torch.int64).view(dtype)
        table = torch.nn.Parameter(table, requires_grad=False)
        loop.model.register_parameter("table", table)
        return loop

    first, live = make(), {}
    first.attach()
    for number in first.checkpointer.steps(7):  # a snapshot after five
        first.step(number)
        first.model.get_buffer("count").copy_(torch.tensor([number, -number]).to(dtype))
        live[number + 1] = first.weights()
    first.die()
    for step, expected in live.items():
        found = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert same(dict(found.model_state_dict()), expected)
    again = make()
    assert again.attach() == 7
    assert same(again.weights(), live[7])
    again.checkpointer.close()


def test_a_model_with_another_hook_is_refused_before_anything_begins() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from lowdiff.step.ddp_hook import HookState, registered

    wrapped: Any = SimpleNamespace(_comm_hooks=[(fp16_compress_hook, None)])
    with pytest.raises(ConfigError, match="fp16_compress_hook"):
        registered(wrapped, HookState())
