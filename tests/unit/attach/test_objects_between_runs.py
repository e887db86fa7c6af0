"""Stateful objects that come, go or change between runs: what goes on, and what is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import lowdiff
from tests.unit.loops import Loop


class Warmup:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Cooldown(Warmup):
    """Another class."""


def live(folder: Path, until: int, **objects: Warmup) -> dict[str, int]:
    """One life; what each object had counted when it began."""
    loop = Loop(folder)
    loop.attach(**objects)
    counts = {name: thing.count for name, thing in objects.items()}
    for number in loop.checkpointer.steps(until):
        loop.step(number)
        for thing in objects.values():
            thing.count += 1
    loop.checkpointer.close()
    return counts


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned about since this was last asked."""
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_objects_that_are_new_renamed_replaced_or_left_out_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 3, warm=Warmup(), other=Warmup())
    assert warnings(caplog) == []  # all is new where a run begins
    assert live(tmp_path, 4, renamed=Warmup(), other=Cooldown()) == {"renamed": 0, "other": 0}
    (said,) = warnings(caplog)
    assert said.startswith("LD307: resuming at step 3: ")
    assert "renamed is new and starts afresh" in said
    assert "other is tests.unit.attach.test_objects_between_runs.Cooldown instead of" in said
    assert "warm was not attached again, and its state is left out" in said
    assert set(lowdiff.recover(tmp_path / "run", 3).stateful) == {"renamed", "other"}
    assert live(tmp_path, 5, renamed=Warmup(), other=Cooldown()) == {"renamed": 1, "other": 1}
    assert warnings(caplog) == []


class Early(Warmup):
    """Takes a state only before it was asked for one, as torchdata's node loader does."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False

    def state_dict(self) -> dict[str, Any]:
        self.was_asked = True
        return {"count": self.count, "table": torch.full((3000,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.was_asked:
            self.count = state["count"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["log", "gradients", "replica", "survivors"])
def test_objects_are_given_their_state_before_they_are_asked_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    compressor = {} if strategy == "log" else {"compressor": None, "strategy": strategy}
    for resumed, until in ((0, 3), (3, 5), (5, 6)):
        loop = Loop(tmp_path, settings=compressor)
        thing = Early()
        assert loop.attach(early=thing) == thing.count == resumed
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            thing.count += 1
        loop.checkpointer.close()
    assert "LD309" not in caplog.text


class DistributedOfOne(DistributedSampler[Any]):
    """For one process without a group."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, num_replicas=1, rank=0)


def loaded(folder: Path, until: int, make: Callable[[lowdiff.Checkpointer], Any]) -> list[int]:
    """One life with a loader of lowdiff's; the samples of its steps."""
    loop = Loop(folder)
    data = make(loop.checkpointer)
    attached = {"loader": data} if isinstance(data, DataLoader) else {}
    step = loop.attach(**attached)
    samples: list[int] = []
    while step < until:
        for (batch,) in data:
            loop.step(step)
            loop.checkpointer.commit()
            samples += batch.tolist()
            step += 1
            if step == until:
                break
    loop.checkpointer.close()
    return samples


def ours(size: int, batch_size: int) -> Callable[[lowdiff.Checkpointer], Any]:
    return lambda checkpointer: checkpointer.dataloader(
        TensorDataset(torch.arange(size)), batch_size=batch_size
    )


def plain(size: int, sampler: type[Sampler[int]]) -> Callable[[lowdiff.Checkpointer], Any]:
    data = TensorDataset(torch.arange(size))
    return lambda _: DataLoader(data, batch_size=6, sampler=sampler(data))  # type: ignore[call-arg]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("before", "until", "after"),
    [
        (ours(24, 6), 3, ours(24, 4)),  # in the middle of an epoch
        (ours(24, 6), 3, ours(24, 5)),  # rounded down
        (ours(24, 6), 4, ours(30, 5)),  # an epoch is over, so the data may be other
        (plain(24, RandomSampler), 4, plain(30, DistributedOfOne)),
    ],
)
def test_other_ranks_batches_and_data_are_no_fault_of_a_loader_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, until: int, after: Any
) -> None:
    seen = loaded(tmp_path, until, before)
    seen += loaded(tmp_path, until + 2, after)
    assert set(seen) >= set(range(20))
    # An epoch that goes on says so.
    assert [line for line in warnings(caplog) if not line.startswith("LD219")] == []


def test_a_class_that_is_found_in_another_module_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for resumed, module in enumerate(["__main__", "__mp_main__", "train", "package.train"]):
        monkeypatch.setattr(Warmup, "__module__", module)
        assert live(tmp_path, resumed + 1, warm=Warmup()) == {"warm": resumed}
    assert warnings(caplog) == []


def test_a_loader_that_is_not_made_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path)
    first.checkpointer.dataloader(TensorDataset(torch.arange(3)), batch_size=1)
    first.run(2)
    Loop(tmp_path).run(3)
    assert "dataloader0 was not attached again" in caplog.text
