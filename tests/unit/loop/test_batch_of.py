"""A loop that counts the batches of an epoch: a resumed run goes on with its count, and says that it must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError
from lowdiff.persistence.format.values import same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

_CODE = "LD219"
_EPOCHS, _BATCHES = 3, 7
DATA = TensorDataset(torch.arange(14.0).unsqueeze(1))


class Killed(Exception):
    """What ends a life."""


class Training:
    """Accumulates two batches to a step, with rates by the number of the batch: both count inside an epoch."""

    def __init__(self, folder: Path, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", compressor=TopK(0.5)
        )
        self.loader: Any
        objects: dict[str, Any] = {}
        if kind == "own":
            self.loader = self.checkpointer.dataloader(DATA, batch_size=2)
        elif kind == "torchdata":
            loaders = pytest.importorskip("torchdata.stateful_dataloader")
            self.loader = self.checkpointer.dataloader(
                loaders.StatefulDataLoader(DATA, batch_size=2, shuffle=True)
            )
        else:
            sampler: Any = DistributedSampler(DATA, 1, 0) if kind == "distributed" else None
            self.loader = objects["loader"] = DataLoader(
                DATA, batch_size=2, shuffle=sampler is None, sampler=sampler
            )
        self.begun = self.checkpointer.attach(self.model, self.optimizer, **objects)
        self.seen: list[tuple[int, int]] = []

    def epochs(self) -> Iterator[int]:
        if hasattr(self.loader, "epoch"):
            while self.loader.epoch < _EPOCHS:
                yield self.loader.epoch
        else:
            yield from range(self.checkpointer.epoch_of(self.loader), _EPOCHS)

    def run(self, killed_at: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
        for epoch in self.epochs():
            start = self.checkpointer.batch_of(self.loader)
            for i, (inputs,) in enumerate(self.loader, start=start):
                self.seen.append((epoch, i))
                if (epoch, i) == killed_at:
                    testing.kill(self.checkpointer)
                    raise Killed
                self.model(inputs).square().mean().backward()
                if i % 2 == 1 or i == _BATCHES - 1:
                    for group in self.optimizer.param_groups:
                        group["lr"] = 0.01 / (1 + epoch * _BATCHES + i)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.checkpointer.commit()
        self.checkpointer.close()
        return self.model.state_dict()


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["plain", "own", "distributed", "torchdata"])
def test_a_resumed_count_gives_the_same_bits(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Training(tmp_path / "whole", kind).run()
    for killed_at in ((0, 3), (1, 5)):
        with pytest.raises(Killed):
            Training(tmp_path / "killed", kind).run(killed_at)
    found = Training(tmp_path / "killed", kind)
    assert same(dict(found.run()), dict(expected))
    assert found.seen[0] == (1, 4)
    assert _CODE not in caplog.text


@pytest.mark.parametrize("kind", ["plain", "own"])
def test_a_loop_that_does_not_ask_is_told_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        Training(tmp_path, kind).run((1, 5))
    assert _CODE not in caplog.text
    again = Training(tmp_path, kind)
    for _ in again.epochs():
        for (inputs,) in again.loader:
            again.model(inputs).square().mean().backward()
            again.optimizer.step()
            again.checkpointer.commit()
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith(_CODE))
    assert "its first 4 batch(es) are left out" in line
    assert "enumerate(loader, start=checkpointer.batch_of(loader))" in line
    again.checkpointer.close()


@pytest.mark.parametrize("kind", ["plain", "own"])
def test_an_epoch_from_its_beginning_is_no_matter(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        Training(tmp_path, kind).run((1, 0))
    again = Training(tmp_path, kind)
    with torch.no_grad():  # a look
        assert len([*again.loader]) == _BATCHES
    seen = [len([*again.loader]) for _ in again.epochs()]
    assert seen[-1] == _BATCHES
    assert _CODE not in caplog.text
    testing.kill(again.checkpointer)


def test_a_loader_that_was_not_attached_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, "plain")
    with pytest.raises(UsageError, match="was not attached"):
        training.checkpointer.batch_of(DataLoader(DATA))
    training.checkpointer.close()


class Stream(IterableDataset[torch.Tensor]):
    """Data of unknown length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0).unsqueeze(1))


def test_a_loader_without_a_length_counts_as_well(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "staging")
    loader = checkpointer.dataloader(loaders.StatefulDataLoader(Stream(), batch_size=2))
    model = nn.Linear(1, 1)
    checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert checkpointer.batch_of(loader) == 0
    next(iter(loader))
    assert checkpointer.batch_of(loader) == 1
    checkpointer.close()
