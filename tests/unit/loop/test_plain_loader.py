"""A plain DataLoader that is attached: each batch is seen once, with its bits, however often the run is killed."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UsageError
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped

SIZE = 23
#: Batches of 4 in an epoch.
BATCHES = 6


class Noisy(Dataset[Any]):
    """Samples that tell their index, augmented with all three generators, and which of them were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.loaded.append(index)
        return index, torch.rand(4) + random.random() + np.random.rand()


class Shuffled:
    """A sampler of somebody's own, which draws from Python's generator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(order)


class Buckets:
    """A batch sampler with a state of its own."""

    def __init__(self) -> None:
        self.turn = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.turn)).tolist()
        self.turn += 1
        return iter([order[i : i + 4] for i in range(0, SIZE, 4)])

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turn = state_dict["turn"]


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


#: Name -> options of a DataLoader.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "own generator": lambda: {"batch_size": 4, "shuffle": True, "generator": own()},
    "drop last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "distributed": lambda: {
        "batch_size": 2,
        "sampler": DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=3),
    },
    "replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(Noisy(), replacement=True, generator=own()),
    },
    "weighted": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler(torch.arange(1.0, 24.0).tolist(), SIZE),
    },
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(SIZE))},
    "python's": lambda: {"batch_size": 4, "sampler": Shuffled()},
    "stateful": lambda: {"batch_sampler": Buckets()},
    "no batches": lambda: {"batch_size": None, "sampler": RandomSampler(range(SIZE))},
}


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


class Life:
    """One process of a training: a model with dropout, a loader, and what was trained on."""

    def __init__(self, folder: Path, loader: Any, die_after: int | None = None, **settings: Any):
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run",
            staging=folder / "staging",
            **{"compressor": TopK(1.0), "snapshot_every": 5, **settings},
        )
        self.loader, self.die_after = loader, die_after
        self.seen: list[Any] = []

    def attach(self, **more: Any) -> int:
        self.step = self.checkpointer.attach(self.model, self.optimizer, loader=self.loader, **more)
        return self.step

    def backward(self, batch: Any) -> None:
        indices, inputs = batch
        self.loss = self.model(inputs.float()).square().mean()
        self.loss.backward()
        self.seen.append((torch.as_tensor(indices).tolist(), inputs.sum().item(), self.loss.item()))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def commit(self) -> None:
        if self.step == self.die_after:
            raise Killed
        self.checkpointer.commit()
        self.step += 1
        self.committed = len(self.seen)


class Killed(Exception):
    """The process dies here: a step is made, and not committed."""


Body = Callable[[Life, int], None]


def lives(folder: Path, make: Callable[[], Any], body: Body, until: int, kills: list[int]) -> Any:
    """Train to the end in as many lives as there are kills and one: what was seen, and the weights."""
    seen: list[Any] = []
    for die_after in [*kills, None]:
        seeded()
        life = Life(folder, make(), die_after)
        life.attach()
        life.committed = 0
        try:
            body(life, until)
        except Killed:
            testing.kill(life.checkpointer)
            end_workers(life.loader)
            seen += life.seen[: life.committed]
            continue
        seen += life.seen
        end_workers(life.loader)
        life.checkpointer.close()
    weights = [p.tolist() for p in life.model.parameters()]
    return seen, weights, torch.get_rng_state().tolist()


def end_workers(loader: Any) -> None:
    inner = loader.__dict__["_lowdiff_positions"]._inner
    if inner is not None:
        inner.__dict__["_iterator"] = None


def epochs(life: Life, until: int) -> None:
    """The loop of most scripts."""
    for epoch in range(life.checkpointer.epoch_of(life.loader), 9):
        if isinstance(life.loader.sampler, DistributedSampler):
            life.loader.sampler.set_epoch(epoch)
        for batch in life.loader:
            life.backward(batch)
            life.update()
            life.commit()
            if life.step == until:
                return
        torch.rand(1)


def both(folder: Path, make: Callable[[], Any], body: Body, until: int, kills: list[int]) -> Any:
    """Assert that kills change nothing; returns what was seen."""
    whole = lives(folder / "whole", make, body, until, [])
    assert lives(folder / "killed", make, body, until, kills) == whole
    return whole[0]


WORKERS = [(0, False), (2, False), (2, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers", "is_persistent"),
    [(k, *w) for k in KINDS for w in WORKERS],
)
@pytest.mark.turns(2)
def test_kills_show_the_same_batches_as_none(
    tmp_path: Path, kind: str, num_workers: int, is_persistent: bool
) -> None:
    def make() -> Any:
        options = KINDS[kind]()
        workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": is_persistent}
        return DataLoader(Noisy(), **options, **workers)

    count = len(make())
    # In mid-epoch, at an epoch's edge, after one step more, and twice in one epoch.
    kills = [3, count, count + 1, 2 * count - 1]
    seen = both(tmp_path, make, epochs, 2 * count + 3, kills)
    first, second = ([i for i, *_ in seen[n * count : n * count + count]] for n in (0, 1))
    if kind != "sequential":
        assert first != second


def test_batches_are_skipped_and_not_loaded(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Noisy(), batch_size=4, shuffle=True)

    life = Life(tmp_path, make(), 4)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 9)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, make())
    assert again.attach() == 4
    batches = list(again.loader)
    assert len(batches) == 2
    assert len(again.loader) == BATCHES
    seen = [i for indices, *_ in life.seen[:4] for i in indices]
    assert sorted(seen + again.loader.dataset.loaded) == list(range(SIZE))
    again.checkpointer.close()


def plain() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def with_own() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=own())


def workers() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)


MAKES = [plain, with_own, pytest.param(workers, marks=pytest.mark.slow)]


def zipped(life: Life, until: int) -> None:
    while life.step < until:
        for number, batch in zip(life.checkpointer.steps(until), life.loader, strict=False):
            life.committed = len(life.seen)
            life.backward(batch)
            life.update()
            life.step = number + 1
            if number == life.die_after:
                raise Killed


def accumulating(life: Life, until: int) -> None:
    """Four batches a step; what is left of an epoch makes a step of its own, after the loop."""
    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        waiting = False
        for number, batch in enumerate(life.loader):
            life.backward(batch)
            waiting = True
            if number % 4 == 3:
                life.update()
                life.commit()
                waiting = False
                if life.step == until:
                    return
        if waiting:
            life.update()
            life.commit()
            if life.step == until:
                return


def leaving(life: Life, until: int) -> None:
    """An epoch ends after three steps, with the next batch at hand."""
    state = life.checkpointer.state
    while life.step < until:
        for batch in life.loader:
            if state.get("in_epoch", 0) == 3:
                break
            life.backward(batch)
            life.update()
            state["in_epoch"] = state.get("in_epoch", 0) + 1
            life.commit()
            if life.step == until:
                return
        state["in_epoch"] = 0


def leaving_before(life: Life, until: int) -> None:
    """An epoch ends after three steps, the last of which is committed after the loop."""
    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        for batch in life.loader:
            life.backward(batch)
            life.update()
            if life.step % 3 == 2:
                break
            life.commit()
        life.commit()
        if life.step >= until:
            return


def leaving_steps(life: Life, until: int) -> None:
    """``steps()`` with a break."""
    while life.step < until:
        for number, batch in zip(life.checkpointer.steps(until), life.loader, strict=False):
            life.committed = len(life.seen)
            life.backward(batch)
            life.update()
            life.step = number + 1
            if number == life.die_after:
                raise Killed
            if number % 4 == 3:
                break


def evaluating(life: Life, until: int) -> None:
    """The same loader is evaluated over in every third step, in part every other time."""

    @torch.no_grad()
    def evaluate() -> None:
        for _, inputs in islice(life.loader, 2 if life.step % 2 else None):
            life.model(inputs)

    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        for batch in life.loader:
            life.backward(batch)
            life.update()
            if life.step % 3 == 2:
                evaluate()
            life.commit()
            if life.step == until:
                return
        evaluate()


def nested(life: Life, until: int) -> None:
    """With gradients on, and between two steps of an epoch."""
    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        for batch in life.loader:
            if life.step % 3 == 2:
                for _, inputs in life.loader:
                    life.model(inputs)
            life.backward(batch)
            life.update()
            life.commit()
            if life.step == until:
                return


def pairs(life: Life, until: int) -> None:
    """Two iterations over one loader at a time."""
    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        for batch, other in zip(life.loader, life.loader, strict=True):
            life.backward(batch)
            life.backward(other)
            life.update()
            life.commit()
            if life.step == until:
                return


def next_of(life: Life, batches: Iterator[Any]) -> tuple[Iterator[Any], Any]:
    """Return the next batch and the iterator, which is made anew when it ends."""
    try:
        return batches, next(batches)
    except StopIteration:
        batches = iter(life.loader)
        return batches, next(batches)


def endless(life: Life, until: int) -> None:
    """One iterator, made anew when it ends."""
    batches = iter(life.loader)
    for _ in range(life.step, until):
        batches, batch = next_of(life, batches)
        life.backward(batch)
        life.update()
        life.commit()


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    ("body", "kills"),
    [
        (zipped, [2, 5, 6, 9]),
        (accumulating, [1, 2, 3]),
        (leaving, [2, 3, 4, 6]),
        (leaving_before, [2, 3, 4, 6]),
        (leaving_steps, [3, 4, 5]),
        (evaluating, [2, 3, 6]),
        (nested, [2, 3, 6, 9]),
        (pairs, [2, 6, 8]),
        (endless, [4, 6, 7]),
    ],
)
@pytest.mark.turns(2)
def test_loops_as_people_write_them(
    tmp_path: Path, body: Body, kills: list[int], make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    both(tmp_path, make, body, 14, kills)
    said = caplog.text.replace("LD217", "") if body is leaving else caplog.text
    assert "LD21" not in said.replace("LD219", "")  # these loops do not count batches


@pytest.mark.slow
def test_two_loaders_zipped(tmp_path: Path) -> None:
    """The shorter one begins anew while the longer one goes on."""

    def run(folder: Path, kills: list[int]) -> Any:
        seen: list[Any] = []
        for die_after in [*kills, None]:
            seeded()
            life = Life(folder, with_own(), die_after)
            others = DataLoader(Noisy(), batch_size=8, shuffle=True)
            life.attach(others=others)
            life.committed = 0
            longer, shorter = iter(life.loader), iter(others)
            try:
                while life.step < 14:
                    for name in ("longer", "shorter"):
                        try:
                            batch = next(longer if name == "longer" else shorter)
                        except StopIteration:
                            if name == "longer":
                                longer = iter(life.loader)
                            else:
                                shorter = iter(others)
                            batch = next(longer if name == "longer" else shorter)
                        life.backward(batch)
                    life.update()
                    life.commit()
            except Killed:
                testing.kill(life.checkpointer)
            else:
                life.checkpointer.close()
            seen += life.seen[: life.committed]
        return seen

    assert run(tmp_path / "killed", [2, 3, 6, 10]) == run(tmp_path / "whole", [])


def test_without_lowdiff_the_batches_are_the_same(tmp_path: Path) -> None:
    """Without workers; random numbers in workers are seeded anew for each batch."""
    seeded()
    expected = [(i.tolist(), x.tolist()) for _ in range(2) for i, x in plain()]
    seeded()
    life = Life(tmp_path, plain())
    seeded()
    life.attach()
    assert [(i.tolist(), x.tolist()) for _ in range(2) for i, x in life.loader] == expected
    life.checkpointer.close()


def opened(loader: Any, body: Callable[[Life], None], folder: Path, **kind: Any) -> None:
    life = Life(folder, loader, **kind)
    try:
        body(life)
    finally:
        life.checkpointer.close()


def test_another_epoch_than_that_of_the_run_is_refused(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(
            Noisy(), batch_size=4, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0)
        )

    life = Life(tmp_path, make(), 8)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 12)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, make())
    again.attach()
    assert again.checkpointer.epoch_of(again.loader) == 1
    again.loader.sampler.set_epoch(0)
    with pytest.raises(UsageError, match=r"set_epoch\(1\), but set_epoch\(0\).*epoch_of"):
        next(iter(again.loader))
    again.checkpointer.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dies_at", [3, 6])
def test_other_data_waits_for_the_epoch_s_end(tmp_path: Path, size: int, dies_at: int) -> None:
    life = Life(tmp_path, plain(), dies_at)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 12)
    testing.kill(life.checkpointer)
    data: Any = range(40)
    loader: Any = DataLoader(data, batch_size=size, shuffle=True)
    again = Life(tmp_path, loader)
    again.attach()
    if dies_at == 3:
        with pytest.raises(ConfigError, match=r"after 3 batches, and its sampler draws other"):
            next(iter(loader))
    else:
        assert list(loader) == []
        assert sum(map(len, loader)) == 40
    again.checkpointer.close()


@pytest.mark.slow
def test_an_iterator_from_before_attach_is_refused_and_a_finished_one_is_not(
    tmp_path: Path,
) -> None:
    for number, loader in enumerate((plain(), workers(), persistent())):
        life = Life(tmp_path / str(number), loader)
        list(islice(loader, 2))
        kept = iter(loader)
        next(kept)
        life.attach()
        with pytest.raises(UsageError, match=r"begun before attach.*iter\(loader\) after"):
            next(kept)
        assert len(list(loader)) == BATCHES
        end_workers(loader)
        life.checkpointer.close()


def persistent() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


def test_a_loader_that_is_attached_again_begins_at_the_step_that_is_restored(
    tmp_path: Path,
) -> None:
    loader = with_own()
    life = Life(tmp_path, loader, 4)
    life.attach()
    kept = iter(loader)
    with pytest.raises(Killed):
        epochs(life, 12)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, loader)
    assert again.attach() == 4
    with pytest.raises(UsageError, match="begun before attach"):
        next(kept)
    again.checkpointer.close()


def test_leaving_an_epoch_right_after_commit_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, plain())
    life.attach()
    for _ in range(2):
        for batch in life.loader:
            life.backward(batch)
            life.update()
            life.commit()
            break
    assert life.checkpointer.epoch_of(life.loader) == 2
    life.checkpointer.close()
    assert [r.code for r in caplog.records if r.levelname == "WARNING"] == ["LD216"]  # type: ignore[attr-defined]


def test_a_look_at_the_data_that_takes_the_resumed_position_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, plain(), 3)
    life.attach()
    next(iter(life.loader))
    assert life.checkpointer.epoch_of(life.loader) == 0
    with pytest.raises(Killed):
        epochs(life, 12)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, plain())
    again.attach()
    with torch.no_grad():
        next(iter(again.loader))
    assert not caplog.records or "LD217" not in caplog.text
    next(iter(again.loader))
    next(iter(again.loader))
    assert "LD217" in caplog.text
    again.checkpointer.close()


def test_an_evaluation_with_gradients_on_that_takes_the_resumed_position_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, plain(), 3)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 12)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, plain())
    again.attach()
    again.model.eval()
    for _, inputs in again.loader:
        again.model(inputs)
    again.model.train()
    again.backward(next(iter(again.loader)))
    assert caplog.text.count("LD217") == 1
    again.checkpointer.close()


def across(life: Life, until: int) -> None:
    """Four batches a step, also over the end of an epoch."""
    batches = iter(life.loader)
    while life.step < until:
        for _ in range(4):
            batches, batch = next_of(life, batches)
            life.backward(batch)
        life.update()
        life.commit()


def across_in_evaluation_mode(life: Life, until: int) -> None:
    """As those train who keep all statistics as they are."""
    life.model.eval()
    across(life, until)


def gathering(life: Life, until: int) -> None:
    """Four batches are fetched before the first is trained on."""
    batches = iter(life.loader)
    while life.step < until:
        waiting: list[Any] = []
        while len(waiting) < 4:
            batches, batch = next_of(life, batches)
            waiting.append(batch)
        for batch in waiting:
            life.backward(batch)
        life.update()
        life.commit()


def dropping(life: Life, until: int) -> None:
    """Gradients of what is left at an epoch's end are thrown away."""
    for _ in range(life.checkpointer.epoch_of(life.loader), 9):
        for number, batch in enumerate(life.loader, life.checkpointer.state.get("inside", 0)):
            life.backward(batch)
            if number % 4 == 3:
                life.checkpointer.state["inside"] = number + 1
                life.update()
                life.commit()
                if life.step == until:
                    return
        life.checkpointer.state["inside"] = 0
        life.optimizer.zero_grad()


@pytest.mark.cases(1)
@pytest.mark.parametrize("body", [across, across_in_evaluation_mode, gathering, dropping])
def test_an_epoch_that_ends_within_a_step_is_no_look_at_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: Body
) -> None:
    both(tmp_path, plain, body, 4, [1])
    assert "LD21" not in caplog.text.replace("LD219", "")  # nor do these


class Failing(Noisy):
    """Its sixth sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 6:
            raise OSError("unreadable")
        return super().__getitem__(index)


def failing(life: Life, until: int) -> None:
    """A batch that cannot be loaded is left out."""
    batches = iter(life.loader)
    while life.step < until:
        try:
            batch = next(batches)
        except OSError:
            continue
        except StopIteration:
            batches = iter(life.loader)
            continue
        life.backward(batch)
        life.update()
        life.commit()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_that_fails_to_load_is_counted(tmp_path: Path, num_workers: int) -> None:
    def make() -> Any:
        return DataLoader(Failing(), batch_size=4, num_workers=num_workers)

    both(tmp_path, make, failing, 8, [2, 4])


@pytest.mark.slow
def test_a_copy_of_a_hooked_loader_is_a_plain_one(tmp_path: Path) -> None:
    life = Life(tmp_path, plain())
    life.attach()
    for other in (copy.copy(life.loader), copy.deepcopy(life.loader)):
        assert type(other) is DataLoader
        assert len(list(other)) == BATCHES
    assert type(pickle.loads(pickle.dumps(life.loader))) is DataLoader
    assert isinstance(life.loader, DataLoader)
    life.checkpointer.close()


class Opened(Noisy):
    """Each worker opens its file by itself."""

    handle = 0

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), float(self.handle))


def open_file(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Opened)
    assert len(info.dataset) == SIZE
    info.dataset.handle = number + 1


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_init_fn_finds_the_user_s_dataset(tmp_path: Path, context: str) -> None:
    loader = DataLoader(
        Opened(),
        batch_size=4,
        num_workers=2,
        worker_init_fn=open_file,
        multiprocessing_context=context,
    )
    life = Life(tmp_path, loader)
    life.attach()
    assert [inputs[0, 0].item() for _, inputs in loader] == [1.0, 2.0] * 3
    life.checkpointer.close()


class Own(DataLoader[Any]):
    """A loader that hands out something else."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(Stream()), "IterableDataset .* StatefulDataLoader of torchdata"),
        (lambda: DataLoader(Noisy(), in_order=False), "in_order=False hands batches out"),
        (lambda: Own(Noisy()), "Own has an __iter__ of its own"),
        (
            lambda: DataLoader(Noisy(), sampler=iter([1, 2])),
            "list_iterator is an iterator, .* whose __iter__ returns a new iterator",
        ),
    ],
)
def test_what_cannot_be_skipped_is_refused(
    tmp_path: Path, loader: Callable[[], Any], said: str
) -> None:
    life = Life(tmp_path, loader())
    with pytest.raises(ConfigError, match=said):
        life.attach()
    assert type(life.loader) in (DataLoader, Own)


def test_a_loader_is_attached_once_and_asked_for_its_epoch_after_that(tmp_path: Path) -> None:
    life = Life(tmp_path, plain())
    with pytest.raises(ConfigError, match="others is attached by another name"):
        life.attach(others=life.loader)
    with pytest.raises(UsageError, match="not attached"):
        life.checkpointer.epoch_of(life.loader)


def test_the_next_step_s_batch_is_refused_before_the_body_is_committed(tmp_path: Path) -> None:
    life = Life(tmp_path, plain())
    life.attach()
    swapped = zip(life.loader, life.checkpointer.steps(10), strict=False)
    for _ in range(2):
        batch, _ = next(swapped)
        life.backward(batch)
        life.update()
    with pytest.raises(UsageError, match=r"zip\(checkpointer\.steps"):
        next(swapped)
    life.checkpointer.close()


def rank_life(rank: int, world_size: int, folder: str, until: int, die_after: int | None) -> Any:
    """A pool's job: a life of one of two ranks."""
    seeded()
    data = Noisy()
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    life = Life(
        Path(folder),
        DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=1)),
        die_after,
    )
    life.model, life.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    life.attach()
    life.committed = 0
    try:
        epochs(life, until)
    except Killed:
        testing.kill(life.checkpointer)
        return life.seen[: life.committed], None
    weights = [p.tolist() for p in model.parameters()]
    life.checkpointer.close()
    return life.seen, weights


@pytest.mark.slow
def test_two_ranks_see_the_same_batches(pool: Pool, tmp_path: Path) -> None:
    # A pool's processes may have no workers: tests/crash/launch/test_loading.py has them.
    def run(name: str, kills: list[int]) -> list[Any]:
        seen: list[list[Any]] = [[], []]
        for die_after in [*kills, None]:
            found = pool.run(rank_life, 2, str(tmp_path / name), 15, die_after)
            for mine, (more, _) in zip(seen, found, strict=True):
                mine += more
        return [seen, [weights for _, weights in found]]

    whole = run("whole", [])
    assert run("killed", [2, 6, 7, 11]) == whole
    first = sorted(i for rank in whole[0] for indices, *_ in rank[:6] for i in indices)
    assert set(first) == set(range(SIZE))


def indices_of(seen: list[Any]) -> list[int]:
    return [i for indices, *_ in seen for i in indices]


@pytest.mark.slow
def test_an_epoch_goes_on_over_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    def life(world_size: int, until: int, die_after: int | None) -> list[list[Any]]:
        found = pool.run(rank_life, world_size, str(tmp_path), until, die_after)
        return [seen for seen, _ in found]

    # Of 23 samples, two a rank and step: 4 are trained on, then 2, 2, 8, and 7 are left for two ranks.
    lives = [(2, 9, 1), (1, 9, 2), (1, 9, 3), (2, 9, 5), (2, 7, None)]
    trained = [life(*kind) for kind in lives]
    assert [sum(map(len, seen)) for seen in trained] == [2, 1, 1, 4, 4]
    epoch = indices_of([batch for seen in trained for rank in seen for batch in rank])
    assert len(epoch) == 24  # one rank repeats a sample
    assert sorted({*epoch}) == list(range(SIZE))
    following = life(2, 8, None)
    assert [len(rank) for rank in following] == [1, 1]
    assert len({*indices_of(following[0] + following[1])}) == 4


def of_ranks(world_size: int, batch_size: int, *, shuffle: bool = True, **more: Any) -> Any:
    """The loader of the first of some ranks."""
    sampler: Any = DistributedSampler(Noisy(), world_size, 0, shuffle=shuffle, seed=1)
    return DataLoader(Noisy(), batch_size=batch_size, sampler=sampler, **more)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ranks", "size"), [(1, 4), (2, 4), (4, 3)])
def test_a_rank_gets_its_share_of_what_is_left(
    tmp_path: Path, ranks: int, size: int, num_workers: int
) -> None:
    life = Life(tmp_path, of_ranks(2, 2), 3)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 9)
    testing.kill(life.checkpointer)
    whole = indices_of([(i.tolist(),) for i, _ in of_ranks(1, 4)])
    again = Life(tmp_path, of_ranks(ranks, size, num_workers=num_workers))
    again.attach()
    rest = [i.tolist() for i, _ in again.loader]
    # Twelve samples were trained on.
    assert indices_of([(i,) for i in rest]) == whole[12::ranks]
    assert all(len(batch) == size for batch in rest[:-1])
    assert again.checkpointer.epoch_of(again.loader) == 1
    end_workers(again.loader)
    again.checkpointer.close()


def test_other_data_is_not_shared_out_anew(tmp_path: Path) -> None:
    life = Life(tmp_path, of_ranks(2, 2), 3)
    life.attach()
    with pytest.raises(Killed):
        epochs(life, 9)
    testing.kill(life.checkpointer)
    again = Life(tmp_path, of_ranks(1, 2, shuffle=False))
    again.attach()
    with pytest.raises(ConfigError, match="its sampler draws other indices now"):
        next(iter(again.loader))
    again.checkpointer.close()
