"""What takes the place of an attached parameter, module or optimizer is refused before a commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError
from lowdiff.persistence.format.values import same
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS
from tests.unit.loops import Loop, small_model


class Tied(nn.Module):
    """Two layers with one weight, a frozen scale, and a part without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
        self.down.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.act: nn.Module = nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.act(self.up(self.body(inputs)))) * self.scale
        return hidden


def untie(model: Tied) -> None:
    model.down.weight = nn.Parameter(model.up.weight.detach().clone())


def assign_by_state_dict(model: Tied) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def new_head(model: Tied) -> None:
    model.down = nn.Linear(3, 3)


def new_module_with_the_old_bias(model: Tied) -> None:
    new = nn.Linear(3, 3)
    new.bias = model.up.bias
    model.up = new


def new_parameter(model: Tied) -> None:
    model.up.bias = nn.Parameter(torch.zeros(3))


def parametrized(model: Tied) -> None:
    parametrizations.orthogonal(model.body[3])  # type: ignore[index]


def added(model: Tied) -> None:
    model.adapter = nn.Linear(3, 1)


def taken_out(model: Tied) -> None:
    model.down.register_parameter("bias", None)


def frozen_anew(model: Tied) -> None:
    model.scale = nn.Parameter(torch.ones(3), requires_grad=False)


REPLACED: dict[Callable[[Tied], None], str] = {
    untie: r"'down.weight' is not .*that is found as 'up.weight' now",
    assign_by_state_dict: r"'scale' is not .* load_state_dict\(assign=True\)",
    new_head: r"'down.weight' is not",
    new_module_with_the_old_bias: r"'up.weight' is not",
    new_parameter: r"'up.bias' is not",
    parametrized: r"'body.3.weight' is not .*found as 'body.3.parametrizations",
    added: r"parameter 'adapter.weight' was added",
    taken_out: r"'down.bias' is not .*or taken out",
    frozen_anew: r"'scale' is not .*assigned anew",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("replace", "stepped"),
    [*((replace, False) for replace in REPLACED), (untie, True), (new_head, True)],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_what_takes_the_place_of_a_parameter_is_refused_before_the_step_is_committed(
    tmp_path: Path, replace: Callable[[Tied], None], stepped: bool
) -> None:
    model = Tied()
    loop = Loop(tmp_path, model=model)
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    committed = loop.weights()
    message = f'{REPLACED[replace]}.*not committed.*restore="model"'
    if stepped:
        loop.step(3)
        replace(model)
    else:
        replace(model)
        with pytest.raises(UsageError, match=message):
            loop.step(3)
    with pytest.raises(UsageError, match=message):
        loop.checkpointer.commit()
    loop.checkpointer.close()  # which does not commit it either
    again = Loop(tmp_path, model=Tied())
    assert again.attach() == 3
    assert same(again.weights(), committed)
    again.die()


def test_frozen_parameters_may_be_written_and_modules_without_any_be_replaced(
    tmp_path: Path,
) -> None:
    def run(folder: Path, until: int) -> tuple[int, list[dict[str, torch.Tensor]], Loop]:
        model = Tied()
        loop = Loop(folder, model=model)
        resumed, found = loop.attach(), []
        if resumed >= 2:
            model.act = nn.Tanh()
        for number in loop.checkpointer.steps(until):
            if number == 2:
                with torch.no_grad():
                    model.scale.fill_(0.5)
                model.act = nn.Tanh()
            if number == 4:
                assign = {**model.state_dict(), "scale": torch.full((3,), 0.25)}
                model.scale.data = assign["scale"]
            loop.step(number)
            found.append(loop.weights())
        loop.die()
        return resumed, found, loop

    _, whole, _ = run(tmp_path / "whole", 6)
    assert whole[3]["scale"].tolist() == [0.5] * 3
    assert run(tmp_path / "killed", 4)[0] == 0
    resumed, rest, _ = run(tmp_path / "killed", 6)
    assert resumed == 4
    assert same(rest, whole[4:])


def second_optimizer(loop: Loop) -> torch.optim.Optimizer:
    return torch.optim.SGD(loop.model[3].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]


@pytest.mark.cases(1)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_an_optimizer_that_is_not_attached_may_not_step_attached_parameters(
    tmp_path: Path, beside: bool, commits: bool
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    committed = loop.weights()
    new = second_optimizer(loop)
    loop.model.eval()  # leaves the buffers alone
    loop.model(torch.ones(2, 20)).sum().backward()
    if beside:
        loop.optimizer.step()
    message = r"'3.weight' was stepped by a SGD that is not attached"
    with pytest.raises(UsageError, match=message):
        new.step()
    if commits:
        with pytest.raises(UsageError, match=message):
            loop.checkpointer.commit()
    loop.checkpointer.close()
    again = Loop(tmp_path)
    assert again.attach() == 3
    assert same(again.weights(), committed)
    again.die()


class Leading(torch.optim.Optimizer):
    """An optimizer around the attached one, as SAM and Lookahead are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 1.0})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


def test_optimizers_around_the_attached_one_and_those_of_other_models_may_step(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    around = Leading(loop.optimizer)
    other = nn.Linear(2, 2)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    loop.attach()
    for _ in range(3):
        loop.model(torch.ones(2, 20)).sum().backward()
        around.step()
        other(torch.ones(2)).sum().backward()
        of_other.step()
        loop.checkpointer.commit()
    loop.checkpointer.close()
    # Nothing watches after close.
    loop.model(torch.ones(2, 20)).sum().backward()
    second_optimizer(loop).step()


def replaces(rank: int, world_size: int, folder: str, who: str, what: str) -> tuple[str, str, int]:
    """Train; on some ranks something takes the place of what is attached at the fourth step."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.1), staging=f"{folder}/staging"
    )
    resumed = checkpointer.attach(made.model, made.optimizer)
    model: Any = made.model.module
    try:
        for step in checkpointer.steps(6):
            if step == 3 and str(rank) in who:
                if what == "parameter":
                    bias = model.classifier.bias
                    model.classifier.bias = nn.Parameter(bias.detach().clone())
                made.step(step)
                if what == "optimizer":
                    torch.optim.SGD(model.parameters(), lr=0.1).step()
            else:
                made.step(step)
    except RuntimeError as error:  # DDP's own, where it is the first to hear that a rank ended
        testing.kill(checkpointer)
        return type(error).__name__, str(error), resumed
    checkpointer.close()
    return "done", "", resumed


@pytest.mark.slow
@pytest.mark.parametrize(("who", "what"), [("01", "parameter"), ("1", "optimizer")])
def test_every_rank_ends_and_none_commits_it(
    pool: Pool, tmp_path: Path, who: str, what: str
) -> None:
    ended = pool.run(replaces, 2, str(tmp_path), who, what)
    assert ended[1][0] == "UsageError"
    named = {"optimizer": "by a SGD that is not attached", "parameter": "'classifier.bias' is not"}
    assert named[what] in ended[1][1]
    assert ended[0][0] in (["UsageError"] if "0" in who else ["RankLost", "RuntimeError"])
    assert pool.run(replaces, 2, str(tmp_path), "", "") == [("done", "", 3)] * 2
