"""Bodies of ``steps()``: what comes before the first, what leaves one, and when batches are fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.errors import UsageError
from tests.unit.loop.test_dataloader import Indices, Noisy, ours, torchdatas
from tests.unit.loops import Loop


class Dropping(Loop):
    """A loop that draws numbers in every body."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        super().__init__(folder, model)
        self.losses: list[float] = []

    def update(self, inputs: torch.Tensor) -> None:
        """Forward, backward, optimizer step."""
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["steps", "dataloader"])
def test_a_training_pass_before_the_loop_does_not_use_the_generators_up(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a learning rate finder, or to compile the model."""

    def bodies(loop: Dropping, loader: Any, resumed: int, until: int) -> Iterator[torch.Tensor]:
        if way == "steps":
            for number in loop.checkpointer.steps(until):
                yield torch.full((4, 4), float(number))
        else:
            for _, inputs in islice(loader, until - resumed):
                yield inputs
                loop.checkpointer.commit()

    def train(folder: Path, lives: tuple[int, ...]) -> list[float]:
        losses = []
        for until in lives:
            loop = Dropping(folder)
            loader = ours(loop.checkpointer, 0)
            resumed = loop.attach()
            if resumed:  # the uninterrupted run does so before its generators are seeded
                loop.model(torch.ones(4, 4)).sum().backward()
                loop.optimizer.zero_grad()
            torch.manual_seed(3)
            for inputs in bodies(loop, loader, resumed, until):
                loop.update(inputs)
            losses += loop.losses
            loop.die()
        return losses

    assert train(tmp_path / "two", (2, 5)) == train(tmp_path / "whole", (5,))
    assert "random generators" not in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [ours, pytest.param(torchdatas, marks=pytest.mark.slow)])
def test_zipped_behind_steps_a_loader_leaves_no_batch_out(tmp_path: Path, make: Any) -> None:
    def train(folder: Path, lives: tuple[int, ...]) -> list[Any]:
        seen = []
        for until in lives:
            torch.manual_seed(3)
            loop = Dropping(folder)
            loader = make(loop.checkpointer, 0)
            step = loop.attach()
            while step < until:
                for number, (indices, inputs) in zip(
                    loop.checkpointer.steps(until), loader, strict=False
                ):
                    loop.update(inputs)
                    seen.append((number, indices.tolist(), loop.losses[-1]))
                    step = number + 1
            loop.die()
        return seen

    assert train(tmp_path / "killed", (3, 6, 8, 14)) == train(tmp_path / "whole", (14,))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [ours, torchdatas])
def test_a_batch_that_is_fetched_before_the_body_is_committed_is_refused(
    tmp_path: Path, make: Any
) -> None:
    loop = Dropping(tmp_path)
    loader = make(loop.checkpointer, 0)
    loop.attach()
    swapped = zip(loader, loop.checkpointer.steps(10), strict=False)
    for _ in range(2):  # the first body may have had both of its batches before
        (_, inputs), _ = next(swapped)
        loop.update(inputs)
    with pytest.raises(UsageError, match=r"after optimizer\.step\(\).*zip\(checkpointer\.steps"):
        next(swapped)
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


def test_a_body_may_go_on_with_its_loader_after_its_step(tmp_path: Path) -> None:
    """To see how the step did on the next batch, say: all of it belongs to the body."""
    loop = Dropping(tmp_path)
    loader = ours(loop.checkpointer, 0)
    loop.attach()
    batches = iter(loader)
    for _ in loop.checkpointer.steps(2):
        loop.update(next(batches)[1])
        next(batches)
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


def test_a_body_may_look_at_other_data_after_its_step(tmp_path: Path) -> None:
    loop = Dropping(tmp_path)
    loader = ours(loop.checkpointer, 0)
    others = loop.checkpointer.dataloader(Indices(), batch_size=4, shuffle=False)
    loop.attach()
    endless = iter(others)
    for _, (_, inputs) in zip(loop.checkpointer.steps(3), loader, strict=False):
        loop.update(inputs)
        next(endless)
        with torch.no_grad():
            for _, values in islice(others, 2):
                loop.model(values)
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 3


def test_a_body_may_take_a_whole_epoch(tmp_path: Path) -> None:
    loop = Dropping(tmp_path)
    loader = ours(loop.checkpointer, 0)
    loop.attach()
    for _ in loop.checkpointer.steps(2):
        for number, (_, inputs) in enumerate(loader):
            loop.model(inputs).square().mean().backward()
            if number == len(loader) - 1:
                loop.optimizer.step()
    loop.checkpointer.close()
    assert (loader.epoch, lowdiff.recover(tmp_path / "run").step) == (2, 2)


@pytest.mark.parametrize("end", ["nothing", "commit"])
def test_a_body_that_was_left_by_break_is_committed_once_by_the_next_loop(
    tmp_path: Path, end: str
) -> None:
    loop = Dropping(tmp_path)
    loop.attach()
    for _ in loop.checkpointer.steps(10):
        loop.update(torch.ones(4, 4))
        break
    if end == "commit":
        loop.checkpointer.commit()
    numbers = []
    for number in loop.checkpointer.steps(3):
        loop.update(torch.ones(4, 4))
        numbers.append(number)
    assert numbers == [1, 2]
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 3


class Four(Noisy):
    """An epoch of one batch."""

    def __len__(self) -> int:
        return 4


def one_batch(loop: Loop, kind: str) -> Any:
    """A loader of lowdiff's own or of torchdata."""
    if kind == "ours":
        return loop.checkpointer.dataloader(Four(), batch_size=4)
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return loop.checkpointer.dataloader(torchdata.StatefulDataLoader(Four(), batch_size=4))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["ours", "torchdata"])
def test_a_loader_s_first_batch_ends_a_body_that_was_left(tmp_path: Path, kind: str) -> None:
    """Where a loader is zipped in front of ``steps()``, each epoch's end drops the body."""
    loop = Dropping(tmp_path)
    loader = one_batch(loop, kind)
    loop.attach()
    for _ in range(3):
        for (_, inputs), _ in zip(loader, loop.checkpointer.steps(10), strict=False):
            loop.update(inputs)
    loop.die()
    again = Dropping(tmp_path)
    loader = one_batch(again, kind)
    assert again.attach() == 2  # the last body was not committed
    assert loader.epoch == 2
    assert len(list(loader)) == 1
    again.checkpointer.close()


class Adversaries(Loop):
    """Two networks with an optimizer each."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
        super().__init__(folder, nn.ModuleList(self.parts))
        self.optimizers = [
            torch.optim.AdamW(self.parts[0].parameters()),
            torch.optim.SGD(self.parts[1].parameters(), lr=0.1),
        ]

    def attach(self, **options: Any) -> int:
        return self.checkpointer.attach(self.model, self.optimizers, **options)

    def backward(self) -> None:
        self.parts[1](self.parts[0](torch.ones(2, 4))).sum().backward()

    def leave_between_steps(self) -> None:
        """Leave a body by break when one of the optimizers has stepped."""
        for _ in self.checkpointer.steps(10):
            self.backward()
            self.optimizers[0].step()
            break


SAID = r"optimizer 0 \(AdamW\) stepped and optimizer 1 \(SGD\) did not"


def test_a_body_that_was_left_between_two_optimizers_is_named_by_the_next_loop(
    tmp_path: Path,
) -> None:
    loop = Adversaries(tmp_path)
    loop.attach()
    loop.leave_between_steps()
    for _ in loop.checkpointer.steps(10):
        with pytest.raises(UsageError, match=rf"stepped twice.*step 1; so far {SAID}.*by break"):
            loop.optimizers[0].step()
        break
    loop.checkpointer.commit()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 1


def test_a_body_that_was_left_between_two_optimizers_is_named_by_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Adversaries(tmp_path)
    loop.attach()
    loop.leave_between_steps()
    loop.checkpointer.close()
    assert re.search(rf"LD405: no last snapshot is taken: .*{SAID}.*call commit\(\)", caplog.text)
    assert lowdiff.recover(tmp_path / "run").step == 0
