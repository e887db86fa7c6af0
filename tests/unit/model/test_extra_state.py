"""What modules give as ``get_extra_state()`` is checkpointed and restored like all else of the model."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import load as load_distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.model.items import ExtraStates
from lowdiff.persistence.format.values import encode, same
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop, small_model

KINDS: dict[str, dict[str, Any]] = {
    "topk": {"snapshot_every": 3},
    "replica": {"compressor": None, "batch_size": 1},
}


class Plain(nn.Module):
    """A small model without extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


class Counting(Plain):
    """Counts its forward calls, and scales by what it has seen, as fp8 layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.largest = torch.ones(())
        self.history = torch.zeros(2000)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs = super().forward(inputs) * self.largest / (1 + self.calls)
        self.largest = (self.largest + outputs.detach().abs().max()) / 2
        self.history[self.calls] = self.largest
        return outputs

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": [self.largest, self.history]}

    def set_extra_state(self, state: Any) -> None:
        self.calls, (self.largest, self.history) = state["calls"], state["seen"]


class Serialized(nn.Identity):
    """Keeps its extra state as a tensor of bytes, as Transformer Engine does."""

    text = b"new"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.text += b"."
        return input

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.text), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.text = bytes(state.tolist())


def both() -> nn.Module:
    return nn.Sequential(Counting(), Serialized())


def emptied(value: Any) -> Any:
    """What ``torch.distributed.checkpoint`` loads a value into."""
    if isinstance(value, dict):
        return {key: emptied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [emptied(part) for part in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def train(loop: Loop, until: int, **options: Any) -> dict[int, tuple[torch.Tensor, Any]]:
    """Losses and the model's state after each step; left attached."""
    loop.attach(**options)
    return {
        number + 1: (loop.step(number), copy.deepcopy(dict(loop.model.state_dict())))
        for number in loop.checkpointer.steps(until)
    }


def recovered(folder: Path, step: int | None = None) -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging")


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk", "replica"])
def test_extra_state_is_resumed_after_kills_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole = Loop(tmp_path / "whole", model=both(), settings=KINDS[kind])
    expected = train(whole, 7)
    whole.checkpointer.close()
    found: dict[int, tuple[torch.Tensor, Any]] = {}
    for until in (2, 5, 7):
        loop = Loop(tmp_path, model=both(), settings=KINDS[kind])
        found |= train(loop, until)
        loop.die()
    assert same(found, expected)
    state = recovered(tmp_path)
    assert same(state.model_state_dict(), expected[7][1])
    both().load_state_dict(state.model_state_dict(), strict=True)
    assert not verify(tmp_path / "run", tmp_path / "staging").failures


def test_the_average_of_such_a_model_is_resumed(tmp_path: Path) -> None:
    ends: list[dict[str, Any]] = []
    for until in (3, 5):
        loop = Loop(tmp_path, model=both())
        average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        loop.attach(average=average)
        if ends:
            assert same(dict(average.state_dict()), ends[-1])
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            average.update_parameters(loop.model)
        ends.append(copy.deepcopy(dict(average.state_dict())))
        loop.die()


def test_a_model_without_extra_state_has_no_item_for_it(tmp_path: Path) -> None:
    Loop(tmp_path, model=Plain()).run(2)
    state = recovered(tmp_path)
    assert list(state.fence.stateful) == ["checkpointer.state"]
    known = {*state.items[0], *state.fence.names.values()}
    assert {name.partition("/")[0] for name in known - set(state.parameters)} == {
        "buffer",
        "rng",
        "stateful",
    }
    assert state.stateful == {}


class Compiled(nn.Module):
    """Like ``torch.compile(inner)``, which takes seconds to import its compiler."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._orig_mod(inputs)
        return outputs


def test_keys_are_those_of_the_users_own_modules_under_each_name_a_module_has(
    tmp_path: Path,
) -> None:
    inner = Counting()
    inner.late = Serialized()
    inner.again = inner.late
    loop = Loop(tmp_path, model=Compiled(nn.Sequential(Compiled(inner))))
    train(loop, 2)
    loop.die()
    keys = ["0._extra_state", "0.late._extra_state", "0.again._extra_state"]
    weights = recovered(tmp_path).model_state_dict()
    assert [key for key in weights if "_extra_state" in key] == keys
    inner = Counting()
    inner.late = inner.again = Serialized()
    plain = Loop(tmp_path, model=nn.Sequential(inner))
    assert plain.attach() == 2
    assert inner.calls == 2
    plain.checkpointer.close()
    assert same(plain.model.state_dict()["0._extra_state"], weights["0._extra_state"])


def test_keys_under_ddp_are_those_without(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loop = Loop(tmp_path, model=DistributedDataParallel(both()))
        train(loop, 2)
        loop.checkpointer.close()
    finally:
        dist.destroy_process_group()
    model = both()
    model.load_state_dict(recovered(tmp_path).model_state_dict(), strict=True)
    assert model.state_dict()["0._extra_state"]["calls"] == 2


@pytest.mark.slow
def test_a_run_whose_modules_had_none_goes_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path, model=nn.Sequential(Plain(), nn.Identity())).run(2)
    found = train(loop := Loop(tmp_path, model=both()), 4)
    loop.die()
    assert "model.get_extra_state() is new and starts afresh" in warnings(caplog)
    assert found[4][1]["0._extra_state"]["calls"] == 2
    assert "0._extra_state" not in recovered(tmp_path, 1).model_state_dict()
    assert same(recovered(tmp_path, 3).model_state_dict(), found[3][1])
    again = Loop(tmp_path, model=both())
    assert again.attach() == 4
    again.checkpointer.close()
    assert same(dict(again.model.state_dict()), found[4][1])


def test_modules_that_come_and_go_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path, model=nn.Sequential(Plain(), Serialized(), Serialized())).run(2)
    assert warnings(caplog) == ""
    loop = Loop(tmp_path, model=nn.Sequential(Counting(), Serialized()))
    found = train(loop, 3)
    loop.checkpointer.close()
    assert "keep what they were built with: 0._extra_state" in warnings(caplog)
    assert "which are left out: 2._extra_state" in warnings(caplog)
    assert found[3][1]["0._extra_state"]["calls"] == 1
    assert "0._extra_state" not in recovered(tmp_path, 2).model_state_dict()
    assert same(recovered(tmp_path, 3).model_state_dict(), found[3][1])


def test_taking_only_the_model_along_takes_its_extra_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path, model=nn.Sequential(Counting(), nn.Identity()))
    first.run(3)
    second = Loop(tmp_path, model=both())
    assert second.attach(restore="model") == 0
    assert second.model.state_dict()["0._extra_state"]["calls"] == 3
    assert "keep what they were built with: 1._extra_state" in warnings(caplog)
    second.checkpointer.close()
    assert same(recovered(tmp_path).model_state_dict(), dict(second.model.state_dict()))


def test_extra_state_is_part_of_the_model_and_no_object_that_was_attached(tmp_path: Path) -> None:
    Loop(tmp_path, model=both()).run(1)
    assert recovered(tmp_path).stateful == {}
    taken: dict[str, Any] = {"model.get_extra_state()": nn.Linear(1, 1)}
    with pytest.raises(ConfigError, match=r"'model.get_extra_state\(\)' is the name of"):
        Loop(tmp_path, model=both()).attach(**taken)


def test_a_value_that_cannot_be_stored_names_the_module(tmp_path: Path) -> None:
    class Buffered(Serialized):
        def get_extra_state(self) -> Any:
            return {"file": io.BytesIO()}

    model = nn.Sequential(Plain(), Buffered())
    with pytest.raises(ConfigError, match=r"'1\._extra_state'.*'file'.*BytesIO cannot be stored"):
        Loop(tmp_path, model=model).attach()


def test_a_module_that_could_not_take_its_state_back_is_refused(tmp_path: Path) -> None:
    class Reporting(nn.Identity):
        def get_extra_state(self) -> str:
            return "version 3"

    model = nn.Sequential(Plain(), Reporting())
    with pytest.raises(ConfigError, match=r"Reporting .* 1\._extra_state could not be restored"):
        Loop(tmp_path, model=model).attach()


def test_tensors_go_back_to_the_device_that_they_were_on() -> None:
    model, meta = Counting(), torch.device("meta")
    model.largest = model.largest.to(meta)
    states = ExtraStates(model, meta)
    found = states.state_dict()
    found["_extra_state"]["value"]["seen"] = [torch.ones(()), torch.ones(2000)]  # as recovered
    states.load_state_dict(found)
    assert (model.largest.device, model.history.device) == (meta, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_exported_models_load_strictly_and_what_only_tensors_hold_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, model=both())
    expected = train(loop, 3)[3][1]
    loop.checkpointer.close()
    state = recovered(tmp_path)
    content = torch.load(export(state, tmp_path / "x.pt"), weights_only=True)
    assert same(content["model"], expected)
    assert content["stateful"] == {}
    both().load_state_dict(content["model"], strict=True)
    into = {"model": {key: emptied(value) for key, value in expected.items()}}
    load_distributed(into, checkpoint_id=export(state, tmp_path / "x"), no_dist=True)
    assert same(into["model"], expected)
    assert warnings(caplog) == ""
    weights = load_file(export(state, tmp_path / "x.safetensors"))
    assert "lacks these extra states: 0._extra_state; give a name ending in .pt" in warnings(caplog)
    found = both().load_state_dict(weights, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0._extra_state"], [])
    assert same(weights["1._extra_state"], expected["1._extra_state"])


@pytest.mark.parametrize("value", [[1], {"0._extra_state": {}}, {"0._extra_state": 3}])
def test_states_that_no_model_has_written_are_damage(tmp_path: Path, value: Any) -> None:
    Loop(tmp_path, model=both()).run(1)
    state = recovered(tmp_path)
    state.items[0]["stateful/model.get_extra_state()"] = encode(value)
    with pytest.raises(DamagedFile, match="not the states of modules"):
        state.model_state_dict()
