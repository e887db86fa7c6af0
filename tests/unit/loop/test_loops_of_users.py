"""Loops that call the model in their own way: where the first body begins, and what a commit ends."""

from __future__ import annotations

import copy
import io
import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError, WriterFailed
from tests.unit.loops import Loop


class Noisy(nn.Module):
    """Adds noise from the global generator in every mode, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
        self.drawn: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(())
        self.drawn.append(float(noise))
        result: torch.Tensor = self.inner(inputs) + noise
        return result


class Parts(nn.Module):
    """Its forward is never called: the loop calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 20), nn.ReLU())
        self.head = Noisy()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not this way")


class UserLoop(Loop):
    """A loop over a model that is called in one of several ways."""

    def __init__(self, folder: Path, kind: str) -> None:
        torch.manual_seed(0)
        self.noisy = Noisy()
        model: nn.Module = self.noisy
        self.call: Callable[[torch.Tensor], torch.Tensor] = model
        if kind == "a ModuleDict":
            model = nn.ModuleDict({"net": self.noisy})
        elif kind == "parts":
            model = parts = Parts()
            self.noisy = parts.head
            self.call = lambda inputs: parts.head(parts.encoder(inputs))
        elif kind == "evaluation mode":
            model.eval()
        super().__init__(folder, model)

    def step(self, number: int) -> torch.Tensor:
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        loss = self.call(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int, *, close: bool = True) -> None:
        """Attach and train as a script does that iterates over a DataLoader."""
        resumed = self.attach()
        torch.rand(resumed + 3)  # an iterator draws the seed of its workers
        for number in range(resumed, resumed + steps):
            self.step(number)
            self.checkpointer.commit()
        if close:
            self.checkpointer.close()
        else:
            self.die()


KINDS = ["called", "a ModuleDict", "parts", "evaluation mode"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_loop_with_commit_draws_what_the_uninterrupted_one_drew(
    tmp_path: Path, kind: str
) -> None:
    whole = UserLoop(tmp_path / "whole", kind)
    whole.train(6)
    assert len(set(whole.noisy.drawn)) == 6
    first, second, third = (UserLoop(tmp_path / "killed", kind) for _ in range(3))
    first.train(2, close=False)
    second.train(1)
    third.train(3)
    assert first.noisy.drawn + second.noisy.drawn + third.noisy.drawn == whole.noisy.drawn
    for name, value in whole.weights().items():
        assert torch.equal(third.weights()[name], value), name


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_never_commits_is_refused_at_its_second_step(tmp_path: Path, kind: str) -> None:
    loop = UserLoop(tmp_path, kind)
    loop.attach()
    loop.step(0)
    weights = {name: value.detach().clone() for name, value in loop.model.named_parameters()}
    with pytest.raises(UsageError, match=r"add one line, checkpointer\.commit\(\), after"):
        loop.step(1)
    for name, value in loop.model.named_parameters():
        assert torch.equal(weights[name], value), name
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 1


def test_an_evaluation_with_gradients_on_does_not_take_the_place_of_the_first_body(
    tmp_path: Path,
) -> None:
    def train(folder: Path, steps: int) -> list[float]:
        loop = UserLoop(folder, "called")
        resumed = loop.attach()
        loop.model.eval()
        loop.call(torch.zeros(8, 20))  # somebody forgot no_grad
        loop.model.train()
        torch.rand(resumed + 3)
        for number in range(resumed, resumed + steps):
            loop.step(number)
            loop.checkpointer.commit()
        loop.checkpointer.close()
        return loop.noisy.drawn[1:]

    whole = train(tmp_path / "whole", 4)
    assert train(tmp_path / "two", 2) + train(tmp_path / "two", 2) == whole


def test_generators_that_no_forward_pass_restored_are_left_alone_by_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    UserLoop(tmp_path, "called").train(2)
    loop = UserLoop(tmp_path, "called")
    loop.attach()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loop.checkpointer.commit()
    assert torch.equal(torch.get_rng_state(), before)
    assert "random generators were not restored" in caplog.text
    loop.checkpointer.commit()
    assert caplog.text.count("random generators were not restored") == 1
    loop.checkpointer.close()


def test_a_fresh_loop_has_nothing_to_restore_and_is_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = UserLoop(tmp_path, "called")
    loop.attach()
    loop.checkpointer.commit()
    loop.checkpointer.close()
    assert "random generators" not in caplog.text


def test_no_hook_remains_after_the_first_step_of_a_resumed_run(tmp_path: Path) -> None:
    def hooked(loop: UserLoop) -> set[str]:
        return {name for name, part in loop.model.named_modules() if part._forward_pre_hooks}

    for life in range(2):
        loop = UserLoop(tmp_path, "parts")
        loop.attach()
        assert hooked(loop) >= ({"", "encoder", "head"} if life else set())
        loop.step(0)
        assert hooked(loop) == set()
        loop.checkpointer.close()


def test_a_recomputed_forward_pass_begins_nothing(tmp_path: Path) -> None:
    """Reentrant checkpointing runs it in the backward pass, with generators of its own."""

    def train(folder: Path) -> list[float]:
        loop = UserLoop(folder, "a ModuleDict")
        loop.call = lambda inputs: checkpoint(
            loop.noisy, inputs.requires_grad_(), use_reentrant=True
        )
        loop.train(2)
        return loop.noisy.drawn

    train(tmp_path)
    drawn = train(tmp_path)
    assert drawn[0::2] == drawn[1::2]  # else the gradients would be those of another pass


@pytest.mark.parametrize("part", ["the model", "a part"])
def test_a_copy_of_the_model_begins_nothing(tmp_path: Path, part: str) -> None:
    loop = UserLoop(tmp_path, "a ModuleDict")
    loop.attach()
    twin = copy.deepcopy(loop.model if part == "the model" else loop.noisy)
    saved = io.BytesIO()
    torch.save(twin, saved)
    saved.seek(0)
    for other in (twin, torch.load(saved, weights_only=False)):
        steps = loop.checkpointer.stats()["steps"]
        loop.step(steps)
        net = next(iter(other.children())) if part == "the model" else other
        net(torch.zeros(8, 20)).sum().backward()
        assert loop.checkpointer.stats()["steps"] == steps
        loop.checkpointer.commit()
        assert loop.checkpointer.stats()["steps"] == steps + 1
    loop.checkpointer.close()


class Doubled(nn.Module):
    """Something to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs * self.weight


@pytest.mark.slow
def test_parts_that_were_compiled_in_place_train_on(tmp_path: Path) -> None:
    part = Doubled()
    part.compile(backend="eager", fullgraph=True)
    loop = Loop(tmp_path, nn.ModuleDict({"net": part}))
    loop.attach()
    for _ in range(2):
        part(torch.ones(8, 20)).sum().backward()
        loop.optimizer.step()
        loop.checkpointer.commit()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


def test_a_forward_pass_between_update_and_first_commit_ends_no_step_twice(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        loop = UserLoop(tmp_path, "called")
        resumed = loop.attach()
        for number in range(resumed, resumed + 3):
            loop.step(number)
            loop.call(torch.zeros(8, 20))  # the loss after the update
            loop.checkpointer.commit()
            assert loop.checkpointer.stats()["steps"] == number + 1 - resumed
        loop.checkpointer.close()
        assert lowdiff.recover(tmp_path / "run").step == resumed + 3


@pytest.mark.cases(2)
@pytest.mark.parametrize("lives", [(4,), (1, 3), (0, 4)])
def test_seeding_after_attach_holds_where_a_run_begins(
    tmp_path: Path, lives: tuple[int, ...]
) -> None:
    torch.manual_seed(17 + 3)
    noise = [float(torch.randn(())) for _ in range(4)]
    drawn = []
    for steps in lives:
        loop = UserLoop(tmp_path, "called")
        resumed = loop.attach()
        torch.manual_seed(17 + 3)  # with the rank, say, so that dropout differs
        for number in loop.checkpointer.steps(resumed + steps):
            loop.step(number)
        drawn += loop.noisy.drawn
        loop.die()
    assert drawn == noise


def test_a_new_run_draws_what_it_would_draw_without_lowdiff(tmp_path: Path) -> None:
    def drawn(attach: Callable[[], object]) -> list[float]:
        for seed in (0, 7):  # the same again for one generator, another for the others
            torch.manual_seed(0)
            random.seed(seed)
            np.random.seed(seed)
            if seed == 0:
                attach()
        torch.rand(3)  # an iterator draws the seed of its workers
        loop.call(torch.zeros(8, 20)).sum().backward()
        return [loop.noisy.drawn[-1], float(torch.rand(1)), random.random(), np.random.rand()]

    loop = UserLoop(tmp_path, "called")
    expected = drawn(lambda: None)
    assert drawn(loop.attach) == expected
    loop.die()


def test_a_commit_inside_steps_is_refused_before_it_leaves_steps_out(tmp_path: Path) -> None:
    loop = UserLoop(tmp_path, "called")
    loop.attach()
    bodies = []

    def train() -> None:
        with loop.checkpointer:
            for number in loop.checkpointer.steps(until=10):
                bodies.append(number)
                loop.step(number)
                loop.checkpointer.commit()

    with pytest.raises(UsageError, match=r"body of step 0 in steps\(\) called commit\(\).*take"):
        train()
    assert bodies == [0]
    again = UserLoop(tmp_path, "called")
    assert again.attach() == 1
    for number in again.checkpointer.steps(until=3):
        again.step(number)
        if number == 1:
            again.checkpointer.commit()
            break  # nothing is left out then
    again.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


def test_an_error_of_the_training_comes_out_when_the_disk_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: Callable[..., None]
) -> None:
    limits(abandon_seconds=0.5, finish_seconds=5.0)
    loop = UserLoop(tmp_path, "called")
    caplog.set_level(logging.WARNING)
    loop.attach()
    writer = loop.checkpointer.stats()["writer_pid"]
    folder = tmp_path / "run"

    def train() -> None:
        with loop.checkpointer:
            for number in loop.checkpointer.steps(10):
                loop.step(number)
                if number == 1:
                    folder.rename(tmp_path / "away")
                    folder.touch()
                if number == 3:
                    raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        train()
    assert "did not finish within 1 s" in caplog.text
    os.kill(writer, signal.SIGKILL)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    again = UserLoop(tmp_path, "called")
    assert again.attach() == 3
    again.checkpointer.close()


@pytest.mark.timeout(60)
@pytest.mark.cases(1)
@pytest.mark.parametrize("backpressure", ["degrade", "block"])
@pytest.mark.parametrize("strategy", ["gradients", "log"])
def test_close_ends_though_the_disk_takes_nothing(
    tmp_path: Path, limits: Callable[..., None], strategy: str, backpressure: str
) -> None:
    limits(abandon_seconds=0.5, finish_seconds=2.0)
    settings = {"strategy": strategy, "backpressure": backpressure, "snapshot_every": 4}
    compressor = {} if strategy == "log" else {"compressor": None}
    loop = Loop(tmp_path, settings=settings | compressor)
    loop.attach()
    folder = tmp_path / "run"
    folder.rename(tmp_path / "away")
    folder.touch()
    for number in range(6):
        loop.step(number)
        loop.checkpointer.commit()
    with pytest.raises(WriterFailed):
        loop.checkpointer.close()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    again = Loop(tmp_path, settings=settings | compressor)
    assert again.attach() == 6
    again.checkpointer.close()


@pytest.mark.cases(3)
@pytest.mark.parametrize("commits", ["steps", "commit"])
@pytest.mark.parametrize(
    ("clears", "warns"),
    [
        ("before forward", False),
        ("before backward", False),
        ("never", True),
        ("never, and steps without a backward pass", True),
    ],
)
def test_gradients_of_a_skipped_step_matter_only_if_the_next_body_uses_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, commits: str, clears: str, warns: bool
) -> None:
    """A loop leaves out the step of a bad batch, and clears its gradients at the top of a body."""
    loop = Loop(tmp_path)
    loop.attach()

    def body(number: int) -> None:
        if clears == "before forward":
            loop.optimizer.zero_grad()
        if number == 3 and "without a backward" in clears:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            return
        for part in range(2):  # gradients are accumulated within a body
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
            loss = loop.model(inputs).square().mean()
            if part == 0 and clears == "before backward":
                loop.optimizer.zero_grad()
            loss.backward()
        if number != 2:
            loop.optimizer.step()
            if "never" in clears:
                loop.optimizer.zero_grad()

    if commits == "steps":
        for number in loop.checkpointer.steps(5):
            body(number)
    else:
        for number in range(5):
            body(number)
            loop.checkpointer.commit()
    assert caplog.text.count("step 3 ended without a step of optimizer 0") == warns
    loop.checkpointer.close()


def test_gradients_of_another_optimizer_are_not_in_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both turns of a body were left out; each turn of the next clears its own gradients first."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(0.5), staging=tmp_path / "staging"
    ) as checkpointer:
        checkpointer.attach(model, optimizers)
        for number in checkpointer.steps(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                own = [p for group in optimizer.param_groups for p in group["params"]]
                model(torch.ones(2, 4)).sum().backward(inputs=own)
                if number != 1:
                    optimizer.step()
    assert "ended without a step of optimizer" not in caplog.text


def test_a_step_under_inference_mode_is_refused_before_it_changes_anything(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    weights = loop.weights()
    loop.model(torch.ones(8, 20)).sum().backward()
    with pytest.raises(UsageError, match=r"under torch\.inference_mode"), torch.inference_mode():
        loop.optimizer.step()
    assert torch.equal(loop.weights()["0.weight"], weights["0.weight"])
    assert not loop.optimizer.state
    loop.optimizer.step()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 1
