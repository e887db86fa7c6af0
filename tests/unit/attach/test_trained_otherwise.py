"""Unfreezing parts or adding groups in mid-run, and taking the weights of a run into another training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.errors import ConfigError, RunMismatch, UsageError
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop, small_model
from tests.unit.model.test_buffers import Growing, Lazy


def with_head_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def head_only(folder: Path) -> Loop:
    """Trains the last layer of a model whose other layers are frozen."""
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("3."))
    return Loop(folder, model=model, make=with_head_only)


def thaw_in_new_group(loop: Loop) -> None:
    frozen = [p for p in loop.model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    loop.optimizer.add_param_group({"params": frozen, "lr": 0.01})


def thaw_within_the_optimizer(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


def all_in_the_optimizer(folder: Path) -> Loop:
    model = small_model()
    model.get_parameter("0.weight").requires_grad_(False)
    return Loop(folder, model=model)


def new_folder(loop: Loop) -> dict[str, str]:
    loop.checkpointer = lowdiff.Checkpointer(
        loop.folder / "thawed",
        compressor=lowdiff.compressors.TopK(0.1),
        staging=loop.folder / "staging",
    )
    return {}


def same_folder(loop: Loop) -> dict[str, str]:
    return {"restore": "model"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [new_folder, same_folder])
@pytest.mark.parametrize(
    ("make", "thaw", "message"),
    [
        (head_only, thaw_in_new_group, "parameter groups changed after attach"),
        (all_in_the_optimizer, thaw_within_the_optimizer, "was frozen at attach"),
    ],
    ids=["add_param_group", "requires_grad_"],
)
def test_what_the_refusal_advises_works_and_is_resumed(
    tmp_path: Path,
    make: Callable[[Path], Loop],
    thaw: Callable[[Loop], None],
    message: str,
    way: Callable[[Loop], dict[str, str]],
) -> None:
    loop = make(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    committed = loop.weights()
    thaw(loop)
    with pytest.raises(UsageError, match=rf'{message}.* new run folder, .*restore="model"'):
        loop.step(3)
    loop.optimizer.zero_grad()
    loop.checkpointer.close()
    options = way(loop)
    expected = committed if options else loop.weights()  # a forward pass moved batch norm's buffers
    assert loop.attach(**options) == 0
    assert same(loop.weights(), expected)
    for number in loop.checkpointer.steps(4):
        loop.step(number)
    expected = loop.weights()
    loop.die()
    again = make(tmp_path)
    thaw(again)
    way(again)
    assert again.attach() == 4
    assert same(again.weights(), expected)
    again.die()


@pytest.mark.slow
def test_frozen_weights_are_taken_by_one_that_trains_them_with_another_optimizer(
    tmp_path: Path,
) -> None:
    first = head_only(tmp_path)
    with torch.no_grad():
        first.model.get_parameter("0.weight").mul_(2.0)  # not as the second is built
    first.run(3)
    second = Loop(tmp_path, make=lambda p: torch.optim.Adagrad(p, lr=0.1))
    assert second.run(2, restore="model") == 0
    third = Loop(tmp_path, make=lambda p: torch.optim.Adagrad(p, lr=0.1))
    assert third.attach() == 2
    assert same(third.weights(), second.weights())
    third.checkpointer.close()
    fourth = head_only(tmp_path)
    assert fourth.attach(restore="model") == 0
    assert same(fourth.weights(), third.weights())
    fourth.checkpointer.close()


class WithNewHead(nn.Module):
    """The small model under its own names, and one layer more."""

    def __init__(self, width: int = 60) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name, part in small_model().named_children():
            self.add_module(name, part)
        self.add_module("0", nn.Linear(20, width))
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.get_submodule("0")(inputs))
        return outputs


def test_what_the_run_lacks_stays_as_it_was_built_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path)
    first.run(3)
    second = Loop(tmp_path, model=WithNewHead())
    built = second.weights()
    assert second.attach(restore="model") == 0
    for name, value in second.weights().items():
        assert same(value, (built if name.startswith("head.") else first.weights())[name])
    assert "stay as the model was built: head.weight, head.bias" in caplog.text
    second.checkpointer.close()


def test_what_the_model_lacks_or_has_in_another_shape_is_an_error_that_changes_nothing(
    tmp_path: Path,
) -> None:
    Loop(tmp_path, model=WithNewHead()).run(2)
    lacking = Loop(tmp_path)
    built = lacking.weights()
    with pytest.raises(RunMismatch, match=r"head.weight is not in the model; head.bias is not"):
        lacking.attach(restore="model")
    assert same(lacking.weights(), built)
    with pytest.raises(
        RunMismatch, match=r"0.weight is torch.float32 \(60, 20\) there and .*30, 20"
    ):
        Loop(tmp_path, model=WithNewHead(30)).attach(restore="model")


def test_weights_are_taken_into_another_dtype(tmp_path: Path) -> None:
    first = Loop(tmp_path)
    first.run(2)
    second = Loop(tmp_path, model=small_model().to(torch.bfloat16))
    second.attach(restore="model")
    for name, value in second.weights().items():
        assert same(value, first.weights()[name].to(value.dtype))
    second.checkpointer.close()


@pytest.mark.slow
def test_buffers_are_taken_unless_the_model_makes_them_in_another_shape(tmp_path: Path) -> None:
    Loop(tmp_path / "lazy", model=Lazy()).run(3)
    taken = Loop(tmp_path / "lazy", model=Lazy())
    taken.attach(restore="model")
    assert taken.model.get_buffer("table").shape == (3,)
    taken.checkpointer.close()
    Loop(tmp_path / "growing", model=Growing()).run(3)
    made = Loop(tmp_path / "growing", model=Growing())
    made.attach(restore="model")
    assert made.model.get_buffer("table").shape == (2,)
    made.checkpointer.close()


def test_a_step_for_a_run_that_starts_afresh_is_refused(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    with pytest.raises(
        ConfigError, match=r"restore=.none. starts afresh and has no use for step=2"
    ):
        Loop(tmp_path).attach(restore="none", step=2)
