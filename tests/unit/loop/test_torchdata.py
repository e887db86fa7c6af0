"""torchdata's loaders: each batch is seen once, in every epoch, however often a run is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SIZE = 20
#: Of four samples, in an epoch.
BATCHES = 5


def stateful(**options: Any) -> Any:
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(range(SIZE), batch_size=4, **options)


def with_generator(num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(5)
    return stateful(shuffle=True, generator=generator, num_workers=num_workers)


def with_sampler_of_torchdata(num_workers: int) -> Any:
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    sampler = samplers.RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(5))
    return stateful(sampler=sampler, num_workers=num_workers)


def nodes(num_workers: int) -> Any:
    kinds = pytest.importorskip("torchdata.nodes")
    batches = kinds.Batcher(kinds.IterableWrapper(range(SIZE)), 4)
    if num_workers:
        batches = kinds.ParallelMapper(batches, list, num_workers, method="thread")
    # With the default, and version 0.11, the state after a resume at an epoch's end stays as it is for an epoch.
    return kinds.Loader(kinds.Mapper(batches, torch.tensor), restart_on_stop_iteration=False)


class Training:
    """One process: a model, and a loader that is attached by name or through the Checkpointer."""

    def __init__(self, folder: Path, loader: Any, *, is_ours: bool = False) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", compressor=TopK(1.0), snapshot_every=50
        )
        self.loader = self.checkpointer.dataloader(loader) if is_ours else loader
        self.attached = {} if is_ours else {"loader": loader}

    def run(self, until: int, *, dies: bool = False) -> list[list[int]]:
        """Return the samples of the committed steps; the last step is not committed if the process dies."""
        step = self.checkpointer.attach(self.model, self.optimizer, **self.attached)
        seen: list[list[int]] = []
        while step < until:
            for batch in self.loader:
                self.model(batch[:, None].float()).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if dies and step == until - 1:
                    testing.kill(self.checkpointer)
                    return seen
                self.checkpointer.commit()
                step += 1
                seen.append(batch.tolist())
                if step == until:
                    break
        testing.kill(self.checkpointer)
        return seen


@pytest.mark.parametrize(
    ("make", "num_workers"),
    [
        (with_generator, 0),
        (nodes, 0),
        *(
            pytest.param(make, n, marks=pytest.mark.slow)
            for make, n in (
                (with_sampler_of_torchdata, 0),
                (with_generator, 2),
                (with_sampler_of_torchdata, 2),
                (nodes, 2),
            )
        ),
    ],
)
def test_later_epochs_are_those_of_the_uninterrupted_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, num_workers: int
) -> None:
    until = 3 * BATCHES + 2
    is_ours = make is not nodes
    whole = Training(tmp_path / "whole", make(num_workers), is_ours=is_ours).run(until)
    seen: list[list[int]] = []
    # In the middle of an epoch, at its edge, and in the middle of a later one.
    for dies_before in (3, BATCHES + 1, 2 * BATCHES):
        killed = Training(tmp_path / "killed", make(num_workers), is_ours=is_ours)
        seen += killed.run(dies_before, dies=True)
    seen += Training(tmp_path / "killed", make(num_workers), is_ours=is_ours).run(until)
    assert seen == whole
    second = whole[BATCHES : 2 * BATCHES]
    assert sorted(i for batch in second for i in batch) == list(range(SIZE))
    assert "LD309" not in caplog.text


def test_a_stateful_loader_goes_through_the_checkpointer(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"loop over what checkpointer.dataloader\(loader\) returns"
    ):
        Training(tmp_path, stateful(shuffle=True)).run(1)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(SIZE)),
        SubsetRandomSampler(range(SIZE)),
        WeightedRandomSampler([1.0] * SIZE, SIZE),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_torchdata_cannot_resume_is_refused(tmp_path: Path, sampler: Any) -> None:
    said = f"PyTorch's {type(sampler).__name__} draws another order .* attach a plain DataLoader"
    with pytest.raises(ConfigError, match=said):
        Training(tmp_path, stateful(sampler=sampler), is_ours=True).run(1)


class Wrapped(RandomSampler):
    """A sampler that keeps its position itself."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_a_sampler_with_a_state_of_its_own_is_not_refused(tmp_path: Path) -> None:
    assert len(Training(tmp_path, stateful(sampler=Wrapped(range(SIZE))), is_ours=True).run(2)) == 2


def distributed(ranks: int) -> Any:
    data: Any = range(SIZE)
    return stateful(sampler=DistributedSampler(data, ranks, 0))


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_is_refused(tmp_path: Path, before: int, now: int) -> None:
    Training(tmp_path, distributed(before), is_ours=True).run(3, dies=True)
    again = Training(tmp_path, distributed(now), is_ours=True)
    said = f"shared out over {before} ranks, and now it is over {now}"
    with pytest.raises(ConfigError, match=said):
        again.run(4)
    assert len(Training(tmp_path, distributed(before), is_ours=True).run(4)) == 2


def test_another_number_of_ranks_is_welcome_before_the_first_batch(tmp_path: Path) -> None:
    Training(tmp_path, distributed(1), is_ours=True).run(1, dies=True)
    assert len(Training(tmp_path, distributed(2), is_ours=True).run(3)) == 3
