"""The order of batches that Accelerate's loaders hand out, and the numbers that loading them draws.

These loaders fetch a batch while the one before is trained with; the Trainer of Transformers uses them as well. An
epoch that is resumed draws its order again, and passes over the indices of the batches that were consumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from lowdiff.errors import ConfigError, RunMismatch

Generators = dict[str, Any]


class Place(Protocol):
    """The place of a training in its data."""

    #: The epoch that the next batch belongs to.
    epoch: int

    @property
    def is_restored(self) -> bool:
        """Whether the generators are those that the run needs now."""
        ...

    @property
    def num_workers(self) -> int:
        """Processes that load batches; without them this process does, between the steps."""
        ...

    def seed(self, epoch: int, number: int) -> int:
        """Return a seed for loading a batch of this rank."""
        ...

    def restore_generators(self) -> None:
        """Set the generators to those of the last commit, once."""
        ...


class Kept:
    """A value that is a stateful object.

    Attributes:
        value: It.
    """

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a value."""
        self.value = state_dict["value"]


class BatchOrder:
    """The order of an epoch, and the numbers that loading its batches draws.

    The Trainer's loader fetches a batch while the one before is trained with, and without worker processes this draws
    from the generators of the training: a collator that masks tokens, say. So the generators are kept as they were
    when the epoch's order was drawn, and before the batch that is fetched but not consumed. Worker processes are given
    a seed for each batch.

    Attributes:
        at_epoch: Generators of process and samplers when the epoch began; a stateful object.
        ahead: Generators before the fetched batch, None where loading it drew nothing; a stateful object.
    """

    def __init__(self, training: Place) -> None:
        self.at_epoch, self.ahead = Kept(), Kept()
        self._training = training
        self._loader: Any = None
        self._watched = ""
        self._samplers: list[Any] = []
        self._requested = 0
        self._before: Generators | None = None
        #: A loader, and its own generator while another takes its place.
        self._hidden: list[tuple[Any, torch.Generator | None]] = []
        #: Of the epoch that is resumed: how many batches to pass over, and the generators before the next.
        self._passed, self._first, self._is_fetched = 0, None, False

    def take(self, loader: Any) -> None:
        """Watch a loader's order.

        Raises:
            ConfigError: If its place cannot be found again.
        """
        refuse_loader(loader)
        base = getattr(loader, "base_dataloader", loader)
        # DataLoader sets a sampler but once; the watched one hands out the same batches.
        name = "sampler" if isinstance(base.sampler, BatchSampler) else "batch_sampler"
        watched = WatchedBatches(getattr(base, name), self._seed, self)
        object.__setattr__(base, name, watched)
        self._loader, self._samplers = base, list(_chain(base))
        self._watched = name

    def leave(self) -> None:
        """Give the loader its own sampler back."""
        watched = getattr(self._loader, self._watched)
        object.__setattr__(self._loader, self._watched, watched.watched)

    def _seed(self, number: int) -> int | None:
        training = self._training
        return training.seed(training.epoch, number) if training.num_workers else None

    def restore(self, consumed: int) -> None:
        """Take what ``attach`` has restored; the seeds count from now on."""
        if self.at_epoch.value is not None:
            _set_samplers(self._samplers, self.at_epoch.value["samplers"])
        kept = self.ahead.value
        self._passed, self._is_fetched, self._first = (
            consumed,
            kept["is_fetched"],
            kept["generators"],
        )

    def begin_epoch(self, generators: Generators | None) -> None:
        """Note how an epoch begins."""
        self.at_epoch.value = {"generators": generators, "samplers": _read_samplers(self._samplers)}
        self.ahead.value = {"is_fetched": False, "generators": None}
        self._requested = 0

    def begin_workers(self, loader: Any = None) -> None:
        """Start persistent workers in a later epoch than the first without drawing their seed.

        They have lived since the first epoch in a run that nobody kills, which drew it there.

        Args:
            loader: That takes the place of the watched one, to pass over batches.
        """
        base = self._loader if loader is None else getattr(loader, "base_dataloader", loader)
        if base.persistent_workers and base._iterator is None:
            self._hidden, base.generator = [(base, base.generator)], torch.Generator()

    def repeat_epoch(self) -> None:
        """Let the loader draw the order of the epoch that is resumed."""
        kept = self.at_epoch.value
        _set_samplers(self._samplers, kept["samplers"])
        set_generators(kept["generators"])
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._training.epoch)
        self._requested = 0

    def note_request(self, number: int) -> None:
        """Prepare for the loading of a batch; called before each, in this process.

        Args:
            number: Of the batch in its epoch; the number of batches where there is no other.
        """
        training = self._training
        self._requested = number + 1
        if training.num_workers:
            return
        if not training.is_restored:
            if number == self._passed and self._is_fetched:
                if self._first is not None:
                    set_generators(self._first)
            elif number >= self._passed:
                training.restore_generators()
        if number >= self._passed or training.is_restored:
            self._before = read_generators()

    def note_end(self, count: int) -> None:
        """There is no other batch to load."""
        if not self._training.num_workers and count > self._passed:
            self._training.restore_generators()

    def note_fetched(self, consumed: int) -> None:
        """Keep the generators before the batch that was fetched ahead of the one just handed out."""
        while self._hidden:
            loader, generator = self._hidden.pop()
            loader.generator = generator
        is_fetched = self._requested > consumed
        generators = None
        if is_fetched and not self._training.num_workers:
            generators = None if _equal(self._before, read_generators()) else self._before
        self.ahead.value = {"is_fetched": is_fetched, "generators": generators}


class WatchedBatches(BatchSampler):
    """A loader's batch sampler that tells when the next batch is asked for, and seeds worker processes."""

    def __init__(
        self, sampler: Any, seed: Callable[[int], int | None], order: BatchOrder | None = None
    ) -> None:
        """Watch a sampler.

        Args:
            sampler: Whose batches are handed out.
            seed: What a worker process loads a batch with, by its number in the epoch; None where this process
                loads it, with its own generators.
            order: Told of every batch.
        """
        self.watched = sampler
        self._seed, self._order = seed, order

    def __getattr__(self, name: str) -> Any:
        if name == "watched":  # while it is copied
            raise AttributeError(name)
        return getattr(self.watched, name)

    def __len__(self) -> int:
        return len(self.watched)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for count, indices in enumerate(self.watched, 1):
            if self._order is not None:
                self._order.note_request(count - 1)
            seed = self._seed(count - 1)
            yield indices if seed is None else _SeededBatch(indices, seed)
        if self._order is not None:
            self._order.note_end(count)


class _SeededBatch:
    """Indices of a batch on their way to a worker process, which seeds its generators when it receives them.

    The batch is then loaded the same way whichever worker does it, and whatever it loaded before.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Any, tuple[Any, int]]:
        return _received, (self._indices, self._seed)


def _received(indices: Any, seed: int) -> Any:
    """Seed the generators of a worker process; return the indices that it will load next."""
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
    return indices


def _chain(loader: Any) -> Iterator[Any]:
    """Yield a loader and the samplers that it reads, each once."""
    waiting, seen = [loader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, WatchedBatches):
            yield part
        for name in ("batch_sampler", "sampler", "watched"):
            waiting.append(getattr(part, name, None))


def _read_samplers(samplers: Sequence[Any]) -> list[dict[str, Any]]:
    """Seeds and generators of samplers."""
    found = []
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        seed = getattr(sampler, "initial_seed", None)
        found.append(
            {
                "generator": generator.get_state()
                if isinstance(generator, torch.Generator)
                else None,
                "seed": seed if isinstance(seed, int) else None,
            }
        )
    return found


def _set_samplers(samplers: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore seeds and generators of samplers.

    Raises:
        RunMismatch: If they are other samplers.
    """
    if len(samplers) != len(states):
        raise RunMismatch(
            f"the training loader has {len(samplers)} samplers and had {len(states)}, so its order is another; keep "
            "the earlier loader until the epoch is over"
        )
    for sampler, state in zip(samplers, states, strict=True):
        if state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        if state["generator"] is not None:
            if sampler.generator is None:
                sampler.generator = torch.Generator()
            sampler.generator.set_state(state["generator"])


def read_generators() -> Generators:
    """The global random generators of this process."""
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(states: Generators) -> None:
    """Set the global random generators of this process."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _equal(before: Any, now: Any) -> bool:
    """Whether two states of generators are the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
    if isinstance(before, torch.Tensor):
        return torch.equal(before, now)
    if isinstance(before, np.ndarray):
        return np.array_equal(before, now)
    return bool(before == now)


def refuse_loader(loader: Any) -> None:
    """Check that a loader's place can be found again without loading what was consumed.

    Raises:
        ConfigError: Saying what to change.
    """
    reason = ""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        reason = "an IterableDataset does not reveal its place; take a dataset with __getitem__ and __len__"
    elif isinstance(loader, DataLoaderDispatcher):
        reason = "dispatch_batches=True has one process load all batches; leave it out"
    elif not isinstance(getattr(loader, "base_dataloader", loader), DataLoader):
        reason = f"a {type(loader).__name__} is no DataLoader; let get_train_dataloader return one"
    elif getattr(loader, "use_stateful_dataloader", False):
        reason = "use_stateful_dataloader=True keeps a place of its own; leave it out"
    elif not getattr(loader, "in_order", True):
        reason = "dataloader_in_order=False hands batches out as they come; leave it out"
    elif loader.batch_sampler is None:
        reason = "a DataLoader with batch_size=None has no batches to count; give it a batch_size"
    if reason:
        raise ConfigError(f"this loader cannot be resumed: {reason}")
