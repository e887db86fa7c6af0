"""Every sample is seen exactly once per epoch, however often the run is killed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UsageError
from lowdiff.loop.dataloader import ResumableLoader
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import Loop


class Noisy(Dataset[Any]):
    """Samples that tell their index, with random augmentation."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(4)


class Indices(Noisy):
    """Samples without augmentation."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), float(index))


def ours(checkpointer: lowdiff.Checkpointer, num_workers: int) -> Any:
    """lowdiff's own loader."""
    return checkpointer.dataloader(Noisy(), batch_size=4, num_workers=num_workers, seed=1)


def masked(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with a part of it hidden, and mixed with itself."""
    inputs = torch.stack([values for _, values in samples])
    mixed = random.random() * inputs + np.random.rand() * inputs.flip(0)
    return torch.tensor([i for i, _ in samples]), mixed * (torch.rand(inputs.shape) > 0.3)


def masking(checkpointer: lowdiff.Checkpointer, num_workers: int) -> Any:
    """lowdiff's own loader with random numbers in what collates a batch."""
    return checkpointer.dataloader(
        Noisy(), batch_size=4, num_workers=num_workers, seed=1, collate_fn=masked
    )


def seeded(checkpointer: lowdiff.Checkpointer, num_workers: int) -> Any:
    """torchdata's loader with a generator of its own."""
    return torchdatas(checkpointer, num_workers, torch.Generator().manual_seed(1))


def torchdatas(
    checkpointer: lowdiff.Checkpointer, num_workers: int, generator: torch.Generator | None = None
) -> Any:
    """torchdata's loader, by default with the global generator as most scripts have it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    # Random augmentation in a worker goes on from its seed: torchdata keeps no generator of it.
    dataset = Noisy() if num_workers == 0 else Indices()
    return checkpointer.dataloader(
        torchdata.StatefulDataLoader(
            dataset, batch_size=4, num_workers=num_workers, shuffle=True, generator=generator
        )
    )


def kill_workers(loader: Any) -> None:
    """End the worker processes as the kernel does: torchdata's take 5 s to end by themselves."""
    iterator: Any = getattr(getattr(loader, "_loader", loader), "_iterator", None)
    if iterator is not None and getattr(iterator, "_workers", None):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
            worker.join()


def life(
    folder: Path, until: int, die_at: int | None, num_workers: int, make: Any = ours
) -> list[Any]:
    """What a process saw: ``(epoch, indices, augmentation)`` of every step it committed."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", compressor=TopK(1.0), staging=folder / "staging", snapshot_every=5
    )
    loader = make(checkpointer, num_workers)
    step = checkpointer.attach(model, optimizer)
    seen: list[Any] = []
    while step < until:
        for indices, inputs in loader:
            loss = model(inputs + torch.rand(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == die_at:
                testing.kill(checkpointer)
                kill_workers(loader)
                return seen
            checkpointer.commit()
            step += 1
            seen.append((loader.epoch, indices.tolist(), inputs.sum().item(), loss.item()))
            if step == until:
                break
    kill_workers(loader)
    checkpointer.close()
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("make", "num_workers"),
    [
        *[
            (ours, 0),
            (ours, 2),
            *(pytest.param(masking, n, marks=pytest.mark.slow) for n in (0, 2)),
        ],
        (torchdatas, 0),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in ((torchdatas, 2), (seeded, 0))),
    ],
)
def test_three_kills_show_the_same_batches_as_none(
    tmp_path: Path, make: Any, num_workers: int
) -> None:
    whole = life(tmp_path / "whole", 18, None, num_workers, make)
    seen: list[Any] = []
    # In mid-epoch, at an epoch's edge (6 batches an epoch), and twice in one epoch.
    for die_at in (3, 6, 9, None):
        seen += life(tmp_path / "killed", 18, die_at, num_workers, make)
    assert seen == whole
    for epoch in range(3):
        samples = [i for e, indices, *_ in seen if e == epoch for i in indices]
        assert sorted(samples) == list(range(23))
    assert whole[0][1] != whole[6][1]  # another order in another epoch


def evaluating(folder: Path, until: int, die_at: int | None, make: Any) -> dict[str, float]:
    """What a life drew for each step, and for the evaluation that follows each epoch."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", compressor=TopK(1.0), staging=folder / "staging", snapshot_every=5
    )
    loader = make(checkpointer, 0)
    step = checkpointer.attach(model, optimizer)
    drawn: dict[str, float] = {}
    while step < until:
        for _, inputs in loader:
            noise = torch.rand(1)
            model(inputs + noise).square().mean().backward()
            optimizer.step()
            checkpointer.commit()
            step += 1
            drawn[f"step {step}"] = noise.item()
            if step == die_at:
                testing.kill(checkpointer)
                return drawn
        drawn[f"epoch {loader.epoch}"] = torch.rand(1).item()
    checkpointer.close()
    return drawn


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [pytest.param(ours, marks=pytest.mark.slow), torchdatas])
def test_what_follows_an_epoch_is_repeated_with_its_random_numbers(
    tmp_path: Path, make: Any
) -> None:
    whole = evaluating(tmp_path / "whole", 18, None, make)
    drawn = evaluating(tmp_path / "killed", 18, 6, make)
    assert len(drawn) == 6  # it died between the last commit of an epoch and what follows
    drawn |= evaluating(tmp_path / "killed", 18, None, make)
    assert drawn == whole
    assert len(drawn) == 18 + 3


def test_ranks_share_an_epoch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = []
    for rank in range(3):
        loader = ResumableLoader(Noisy(), batch_size=4, seed=2)
        loader.share(rank, 3)
        loaders.append(loader)
    samples = [i for loader in loaders for indices, _ in loader for i in indices.tolist()]
    assert sorted(samples) == list(range(23))
    assert {len(loader) for loader in loaders} == {2}


def early(rank: int, world_size: int, folder: str) -> tuple[int, list[int]]:
    """A pool's job: the loader is there before the process group, which a launcher may form late."""
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(1.0), staging=f"{folder}/staging"
    )
    with mock.patch.object(dist, "is_initialized", return_value=False):
        loader = checkpointer.dataloader(Noisy(), batch_size=4)
    model = wrapped(torch.nn.Linear(4, 1))
    checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    found = len(loader), samples_of(loader)
    checkpointer.close()
    return found


def test_ranks_that_met_after_the_loader_was_built_share_an_epoch_out(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(early, 2, str(tmp_path))
    assert first[0] == second[0] == 3
    assert sorted({*first[1], *second[1]}) == list(range(23))
    assert len(first[1]) + len(second[1]) == 23


def samples_of(loader: Iterable[Any]) -> list[int]:
    """Indices of the rest of its epoch."""
    return [i for indices, *_ in loader for i in indices.tolist()]


def interrupted(batches: int, **options: Any) -> tuple[list[int], dict[str, int]]:
    """The samples of so many batches of an epoch, and the position after them."""
    loader = ResumableLoader(Noisy(), batch_size=4, **options)
    seen = [i for _, (indices, _) in zip(range(batches), loader, strict=False) for i in indices]
    return list(map(int, seen)), loader.state_dict()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 2}, "seed=2 instead of 1 now"),
        ({"shuffle": False}, "shuffle=False instead of True"),
    ],
)
def test_another_seed_or_order_waits_for_the_epoch_s_end(other: dict[str, Any], said: str) -> None:
    _, position = interrupted(3, seed=1)
    loader = ResumableLoader(Noisy(), batch_size=4, **{"seed": 1, **other})
    with pytest.raises(ConfigError, match=said):
        loader.load_state_dict(position)


class Longer(Noisy):
    """More data came in."""

    def __len__(self) -> int:
        return 40


def test_another_dataset_waits_for_the_epoch_s_end() -> None:
    _, position = interrupted(3)
    with pytest.raises(ConfigError, match=r"middle of epoch 0, .* length=40 instead of 23"):
        ResumableLoader(Longer(), batch_size=4).load_state_dict(position)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_is_over_stays_so_whatever_is_different_now(drop_last: bool) -> None:
    _, position = interrupted(5 if drop_last else 6, drop_last=drop_last)
    for dataset, batch_size, seed in ((Longer(), 4, 2), (Noisy(), 5, 0)):
        loader = ResumableLoader(dataset, batch_size=batch_size, seed=seed)
        loader.load_state_dict(position)
        assert samples_of(loader) == []
        assert loader.epoch == 1
        assert len(samples_of(loader)) == len(dataset)


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        ResumableLoader(Stream(), batch_size=1)
    with pytest.raises(ConfigError, match="lowdiff sets generator to make"):
        ResumableLoader(Noisy(), batch_size=1, generator=torch.Generator())
    with pytest.raises(ConfigError, match="in_order=False hands batches out as they come"):
        ResumableLoader(Noisy(), batch_size=1, num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="Endless has no length"):
        ResumableLoader(Endless(), batch_size=1)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        ResumableLoader(Noisy(), batch_size=0)
    model = torch.nn.Linear(4, 1)
    with lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(1.0), staging=tmp_path / "staging"
    ) as checkpointer:
        with pytest.raises(ConfigError, match="at least 1, got None"):
            checkpointer.dataloader(Noisy())
        with pytest.raises(
            ConfigError, match="DataLoader does not know its position; attach it as it is"
        ):
            checkpointer.dataloader(DataLoader(Noisy(), batch_size=4))
        with pytest.raises(ConfigError, match="has its batch_size and options already"):
            checkpointer.dataloader(DataLoader(Noisy(), batch_size=4), shuffle=True)
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError, match="before attach"):
            checkpointer.dataloader(Noisy(), batch_size=1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_out_of_order_is_refused(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(Noisy(), batch_size=4, in_order=False)
    with pytest.raises(ConfigError, match="in_order=False hands batches out as they come"):
        lowdiff.Checkpointer(tmp_path / "run").dataloader(loader)


class Broken(Noisy):
    """Samples of which one cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 9:
            raise OSError("sample 9 cannot be read")
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_goes_on_behind_a_sample_that_cannot_be_read(num_workers: int) -> None:
    loader = ResumableLoader(Broken(), batch_size=4, shuffle=False, num_workers=num_workers)
    first: list[list[int]] = []
    failures = 0
    while loader.epoch < 2 and failures < 3:
        try:
            first += [indices.tolist()[:1] for indices, _ in loader]
        except OSError:
            failures += 1
    assert (loader.epoch, failures) == (2, 2)
    assert first == [[12], [16], [20]] * 2  # a list that an error broke off is not added


def test_the_position_after_a_sample_that_cannot_be_read_is_behind_it() -> None:
    loader = ResumableLoader(Broken(), batch_size=4, shuffle=False)
    batches = iter(loader)
    assert [next(batches)[0][0] for _ in range(2)] == [0, 4]
    with pytest.raises(OSError, match="sample 9"):
        next(batches)
    resumed = ResumableLoader(Broken(), batch_size=4, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert [int(indices[0]) for indices, _ in resumed] == [12, 16, 20]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_sample_that_cannot_be_read_ends_an_epoch_of_a_stateful_loader(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    checkpointer = lowdiff.Checkpointer(tmp_path)
    loader = checkpointer.dataloader(torchdata.StatefulDataLoader(Broken(), batch_size=4))
    failures = 0
    while loader.epoch < 2 and failures < 3:
        try:
            list(loader)
        except OSError:
            failures += 1
    assert (loader.epoch, failures) == (2, 2)


def test_an_iteration_without_gradients_leaves_the_position_as_it_is() -> None:
    loader = ResumableLoader(Indices(), batch_size=4, seed=1)
    undisturbed = [indices.tolist() for indices, _ in loader]
    loader = ResumableLoader(Indices(), batch_size=4, seed=1)
    with torch.no_grad():
        next(iter(loader))  # a look at the shape
    seen: list[Any] = []
    for indices, _ in loader:
        seen.append(indices.tolist())
        with torch.no_grad():
            assert [looked.tolist() for looked, _ in loader] == undisturbed
    assert seen == undisturbed
    assert (loader.epoch, loader.consumed) == (1, 0)


def test_an_evaluation_may_last_over_steps(tmp_path: Path) -> None:
    """One batch of a validation set after every step."""
    loop = Loop(tmp_path)
    loader = loop.checkpointer.dataloader(Noisy(), batch_size=4)
    loop.attach()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step in range(2 * len(loader)):
        loop.step(step)
        with torch.no_grad():
            next(batches)
        loop.checkpointer.commit()
    assert loader.epoch == 0
    loop.checkpointer.close()


@pytest.mark.slow
def test_a_training_with_batches_that_do_not_count_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loader = loop.checkpointer.dataloader(Noisy(), batch_size=4)
    loop.attach()
    with torch.no_grad():
        batches = iter(loader)
    next(batches)
    loop.step(0)
    loop.checkpointer.commit()
    with pytest.raises(UsageError, match="is an evaluation, whose batches do not count"):
        next(batches)
    loop.checkpointer.close()
