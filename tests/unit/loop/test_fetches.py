"""Batches that a loop asks for ahead of their step are named; all other loops are left in peace."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK

#: In an epoch, of two samples each.
BATCHES = 5


class Training:
    """A model whose steps are made and committed one by one, on a loader of some kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", compressor=TopK(1.0), snapshot_every=50
        )
        data: Any = TensorDataset(torch.arange(2.0 * BATCHES))
        if kind == "attached":
            self.loader: Any = DataLoader(data, batch_size=2)
        elif kind == "ours":
            self.loader = self.checkpointer.dataloader(data, batch_size=2, shuffle=False)
        else:
            torchdata = pytest.importorskip("torchdata.stateful_dataloader")
            stateful = torchdata.StatefulDataLoader(data, batch_size=2)
            self.loader = self.checkpointer.dataloader(stateful)
        attached = {"loader": self.loader} if kind == "attached" else {}
        self.step = self.checkpointer.attach(self.model, self.optimizer, **attached)
        self.trained: list[float] = []

    def backward(self, batch: Any) -> None:
        self.model(batch[0][:, None]).square().mean().backward()
        self.trained += batch[0].tolist()

    def train(self, *batches: Any) -> None:
        for batch in batches:
            self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.checkpointer.commit()


def ahead(distance: int) -> Callable[[Training], None]:
    """Return an epoch in which batches wait for their step in a list."""

    def epoch(training: Training) -> None:
        batches = iter(training.loader)
        waiting = deque(batch for _, batch in zip(range(distance), batches, strict=False))
        while waiting:
            batch = waiting.popleft()
            following = next(batches, None)
            if following is not None:
                waiting.append(following)
            training.train(batch)

    return epoch


def on_thread(training: Training) -> None:
    """An epoch that a thread loads into a queue."""
    waiting: queue.Queue[Any] = queue.Queue(1)

    def load() -> None:
        for batch in training.loader:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=load)
    thread.start()
    while (batch := waiting.get()) is not None:
        training.train(batch)
    thread.join()


def straight(training: Training) -> None:
    for batch in training.loader:
        training.train(batch)


def accumulating(training: Training) -> None:
    """Two batches a step, and what is left makes a step behind the loop."""
    waiting = []
    for batch in training.loader:
        waiting.append(batch)
        if len(waiting) == 2:
            training.train(*waiting)
            waiting = []
    training.train(*waiting)


def looking(training: Training) -> None:
    """The first batch of each epoch is a look at the data."""
    batches = iter(training.loader)
    next(batches)
    for batch in batches:
        training.train(batch)


def leaving(training: Training) -> None:
    """An epoch is left early, with the next batch at hand."""
    for number, batch in enumerate(training.loader):
        if number == 3:
            break
        training.train(batch)


def finishing(training: Training) -> None:
    """A step without a batch follows each epoch."""
    straight(training)
    training.train(torch.ones(1, 2))


def evaluating_on_thread(training: Training) -> None:
    """Another thread evaluates while this one trains."""

    def evaluate() -> None:
        with torch.no_grad():
            list(training.loader)

    for batch in training.loader:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        training.train(batch)


def all_on_thread(training: Training) -> None:
    thread = threading.Thread(target=straight, args=(training,))
    thread.start()
    thread.join()


def warmed_up(training: Training) -> None:
    """The first step of an epoch takes two batches, as all others."""
    batches: Iterator[Any] = iter(training.loader)
    training.train(next(batches), next(batches))
    training.train(next(batches), next(batches))
    training.train(next(batches))
    assert next(batches, None) is None


KINDS = ["attached", pytest.param("ours", marks=pytest.mark.slow)]
KINDS.append(
    pytest.param(
        "torchdata",
        marks=[
            pytest.mark.slow,
            pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
        ],
    )
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("epoch", "said"),
    [
        (ahead(1), "LD218: 1 more batch(es) were asked for before the first commit"),
        (ahead(2), "LD218: 2 more batch(es)"),
        (on_thread, "LD218: a batch was asked for on thread 'Thread-"),
    ],
    ids=["one", "two", "thread"],
)
def test_batches_that_are_asked_for_ahead_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, epoch: Any, said: str
) -> None:
    training = Training(tmp_path, kind)
    for _ in range(3):
        epoch(training)
    testing.kill(training.checkpointer)
    assert training.trained == [*map(float, range(2 * BATCHES))] * 3
    assert said in caplog.text
    assert caplog.text.count("LD218") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "epoch",
    [
        straight,
        accumulating,
        looking,
        leaving,
        finishing,
        evaluating_on_thread,
        all_on_thread,
        warmed_up,
    ],
)
def test_other_loops_are_not_accused_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, epoch: Any
) -> None:
    if (kind, epoch) == ("torchdata", evaluating_on_thread):
        pytest.skip("it has one iterator at a time")
    training = Training(tmp_path, kind)
    for _ in range(3):
        epoch(training)
    testing.kill(training.checkpointer)
    assert "LD218" not in caplog.text


def test_a_batch_that_is_kept_in_the_state_is_trained_on_after_a_kill(tmp_path: Path) -> None:
    """The way out that the warning names."""

    def life(folder: Path, until: int) -> list[float]:
        training = Training(folder, "attached")
        state, batches = training.checkpointer.state, iter(training.loader)
        if "batch" not in state:
            state["batch"] = next(batches)
        for _ in range(training.step, until):
            batch, state["batch"] = state["batch"], next(batches, None)
            training.train(batch)
        testing.kill(training.checkpointer)
        return training.trained

    whole = life(tmp_path / "whole", BATCHES)
    assert life(tmp_path / "killed", 3) + life(tmp_path / "killed", BATCHES) == whole
    assert len(whole) == 2 * BATCHES
