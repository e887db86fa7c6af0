"""Data loaders that know which batches were consumed, and draw each sample the same way again."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lowdiff.errors import ConfigError, UsageError
from lowdiff.loop.fetches import Body, Count, Fetches
from lowdiff.model.items import Stateful
from lowdiff.persistence.format.values import same

_NUM_SEEDS = 2**63


class _Epochs(ABC):
    """Common part of loaders: a batch belongs to the step in which it is handed out.

    Attributes:
        epoch: Epochs completed.
        consumed: Batches of the current epoch on this rank that were handed out, or failed.
        count: Tells where the loop's own count begins.
    """

    def __init__(
        self, before_batch: Callable[[], None] | None, body: Callable[[], Body] | None
    ) -> None:
        """Remember how to ask for the loop's position.

        Args:
            before_batch: Called before the first batch is fetched, which is where a step begins.
            body: Returns the loop's position. Between a step and its commit it is too early to
                fetch the next step's batch, which would belong to the previous step.
        """
        self.epoch = self.consumed = 0
        self.count = Count()
        self._left_out = 0
        self._before_batch = before_batch or (lambda: None)
        self._fetches = Fetches(body or Body)

    def _in_time(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches.

        Raises:
            UsageError: If a body of ``steps()`` fetches the next step's batch.
        """
        self._before_batch()
        watch = self._fetches.begin()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                watch.ended()
                return
            except Exception:  # of the dataset: the loop may catch it and begin another iteration
                self._batch_failed()
                raise
            watch.batch_came()
            yield batch

    def _tell_left_out(self) -> None:
        """Say how many batches of the epoch the first iteration of a resumed run leaves out."""
        number, self._left_out = self._left_out, 0
        self.count.goes_on(number)

    @abstractmethod
    def _batch_failed(self) -> None:
        """Count a batch that could not be loaded, which the next iteration would meet again."""


class ResumableLoader(_Epochs):
    """One epoch per iteration; an interrupted epoch goes on after its last consumed batch.

    The position counts batches handed out, not batches drawn by prefetching workers, and batches
    whose samples raised an error. The order of an epoch is a permutation made from ``(seed,
    epoch)``, and random augmentation of a sample from ``(seed, epoch, index)``, so neither depends
    on where an epoch was resumed.

    An iteration that begins while gradients are off is an evaluation: it takes the whole epoch, and
    leaves the position as it is.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        before_batch: Callable[[], None] | None = None,
        body: Callable[[], Body] | None = None,
        **options: Any,
    ) -> None:
        """Set up the loader.

        Args:
            dataset: Map-style dataset, the same on every rank.
            batch_size: Samples per batch and rank.
            shuffle: Whether each epoch has an order of its own.
            drop_last: Whether an incomplete last batch is left out.
            seed: Seed of orders and augmentation. In the middle of an epoch, a run resumes only
                with the seed and the ``shuffle`` that the epoch was begun with.
            before_batch: See `_Epochs`.
            body: See `_Epochs`.
            options: Further arguments of ``torch.utils.data.DataLoader``.

        Raises:
            ConfigError: If the dataset has no length, or lowdiff sets an option itself.
        """
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "an IterableDataset does not reveal its position; pass "
                "checkpointer.dataloader(...) a StatefulDataLoader of torchdata instead"
            )
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"a {type(dataset).__name__} has no length, so its samples cannot be put in an "
                "order; give it a __len__"
            )
        if batch_size is None or batch_size < 1:
            raise ConfigError(f"batch_size counts samples, at least 1, got {batch_size}")
        own = {"sampler", "batch_sampler", "generator", "worker_init_fn"} & set(options)
        if own:
            raise ConfigError(f"lowdiff sets {min(own)} to make the loader resumable; leave it out")
        refuse_out_of_order(options.get("in_order", True))
        super().__init__(before_batch, body)
        self._dataset = dataset
        self._samples: Sized = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._seed, self._shuffle = int(seed) % _NUM_SEEDS, bool(shuffle)
        self._options = options
        # The group may be formed later; `attach` then sets the ranks.
        joined = dist.is_available() and dist.is_initialized()
        self.share(dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1)

    def share(self, rank: int, world_size: int) -> None:
        """Hand out this rank's batches; ``attach`` calls this with the ranks."""
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank; before ``attach``, of the known ranks."""
        count = len(self._samples)
        return count // self._stride if self._drop_last else -(-count // self._stride)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of the current epoch that were not consumed yet.

        Raises:
            UsageError: From the iterator, if a body of ``steps()`` fetches the next step's batch, or
                if gradients are on between the batches of an evaluation, and a step is made.
        """
        return self._rest_of_epoch() if torch.is_grad_enabled() else self._evaluation()

    def _rest_of_epoch(self) -> Iterator[Any]:
        self._tell_left_out()
        batches = self._load(self._batches()[self.consumed :])
        # Without workers, collating a batch may draw from the step's generators. The same holds for
        # code after an epoch without remaining batches.
        for batch in self._in_time(batches):
            self.consumed += 1
            yield batch
        self.epoch += 1
        self.consumed = 0

    def _evaluation(self) -> Iterator[Any]:
        begun = self._fetches.body()
        for batch in self._load(self._batches()):
            yield batch
            # With gradients off whoever asks goes on evaluating, with an iteration that lasts over steps.
            if self._fetches.body() != begun and torch.is_grad_enabled():
                raise UsageError(
                    "an iteration over checkpointer.dataloader(...) that began while gradients were "
                    "off is an evaluation, whose batches do not count, but a step was made between "
                    "its batches; begin the iteration with gradients on: "
                    "with torch.enable_grad(): batches = iter(loader)"
                )

    def _load(self, indices: list[list[int]]) -> Iterator[Any]:
        loader = DataLoader(
            _SeededSamples(self._dataset, self._seed, self.epoch),
            batch_sampler=indices,
            generator=torch.Generator().manual_seed(mixed_seed(self._seed, self.epoch)),
            **self._options,
        )
        # Building the iterator draws a seed from the CPU generator, which fails under another default
        # device. Forked workers keep the default device under which they start.
        is_usual = torch.get_default_device().type == "cpu"
        with nullcontext() if is_usual else torch.device("cpu"):
            return iter(loader)

    def _batch_failed(self) -> None:
        self.consumed += 1

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, and the settings that define the epoch's order."""
        return {
            "epoch": self.epoch,
            "samples": self.consumed * self._stride,
            "is_over": 0 < len(self) <= self.consumed,
            "length": len(self._samples),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Set the position; with another world size, it is rounded down to whole batches.

        Raises:
            ConfigError: If the position is inside an epoch that was begun with another order.
        """
        self.epoch, self.consumed = state_dict["epoch"], self._consumed_by(state_dict)
        self._left_out = 0 if state_dict["is_over"] else self.consumed
        if state_dict["samples"] and not state_dict["is_over"]:
            now = self.state_dict()
            changed = [
                f"{name}={now[name]} instead of {state_dict[name]}"
                for name in ("length", "seed", "shuffle")
                if now[name] != state_dict[name]
            ]
            if changed:
                raise ConfigError(
                    f"the run is in the middle of epoch {self.epoch}, and its data has "
                    f"{', '.join(changed)} now, so its unseen samples are unknown; keep the earlier "
                    "settings until that epoch is over"
                )

    def _consumed_by(self, state_dict: Mapping[str, int]) -> int:
        """Return the batches of this rank that a state counts as consumed."""
        if state_dict["is_over"]:
            return len(self)  # so changed settings do not matter
        return state_dict["samples"] // self._stride

    def holds(self, state_dict: Mapping[str, int]) -> bool:
        """Whether the position is that of a state, which may be of other ranks, batches or data."""
        here = self.epoch, self.consumed
        return here == (state_dict["epoch"], self._consumed_by(state_dict))

    @property
    def _stride(self) -> int:
        """Return the number of samples in a round: one batch per rank."""
        return self._batch_size * self._world_size

    def _batches(self) -> list[list[int]]:
        count, stride = len(self._samples), self._stride
        order = torch.arange(count, device="cpu")
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, self.epoch))
            order = torch.randperm(count, generator=generator, device="cpu")
        # In rounds, so that for every world size, a prefix of the epoch is a prefix of the same
        # permutation.
        batches = []
        for start in range(0, count, stride):
            share = order[start : start + stride][self._rank :: self._world_size].tolist()
            if len(order[start : start + stride]) < stride and self._drop_last:
                break
            # Every rank must take part in every step: a rank without a sample repeats the first
            # one.
            batches.append(share or order[:1].tolist())
        return batches


class StatefulEpochs(_Epochs):
    """The epochs of a loader that keeps its own position: torchdata's ``StatefulDataLoader``.

    Adds what a resumed run needs besides the loader's position: the number of completed epochs, and
    the moment to restore the random generators. Building an iterator draws from the generators, and
    fetching the first batch may draw as well, so they are restored in between.

    An epoch is also ended by a sample that raises an error: the loader's next iteration begins a new one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        before_batch: Callable[[], None],
        body: Callable[[], Body],
    ) -> None:
        """Wrap a loader.

        Args:
            loader: Any ``DataLoader`` with ``state_dict`` and ``load_state_dict``.
            before_batch: Called before the first batch is fetched, which is where a step begins.
            body: Returns the loop's position.

        Raises:
            ConfigError: If the loader has no position, hands out batches out of order, or has a
                sampler that draws another order in a resumed run.
        """
        if not isinstance(loader, Stateful):
            raise ConfigError(
                f"a {type(loader).__name__} does not know its position; attach it as it is, "
                "attach(..., loader=loader), or pass its dataset and batch_size to "
                "checkpointer.dataloader(...), or a StatefulDataLoader of torchdata"
            )
        refuse_out_of_order(getattr(loader, "in_order", True))
        refuse_redrawing(loader)
        super().__init__(before_batch, body)
        self._loader = loader
        # State for the next iterator. Asking the loader for its state would start its workers.
        self._waiting: dict[str, Any] = {"position": None, "generator": None}
        self._started = False

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the current epoch that were not consumed yet.

        Raises:
            UsageError: If a body of ``steps()`` fetches the next step's batch.
        """
        before = torch.get_rng_state()
        iterator = iter(self._loader)
        position = None if self._started else self._waiting["position"]
        is_finished = isinstance(position, Mapping) and position.get("_iterator_finished")
        if position is not None and not is_finished:
            # The epoch was begun before, and steps() may have restored the generators already.
            torch.set_rng_state(before)
            self._tell_left_out()
        else:
            self.consumed = 0
        if self._waiting["generator"] is not None and not self._started:
            # The loader does not repeat the draw of its workers' seed, so restore its generator.
            self._loader.generator.set_state(self._waiting["generator"])
        self._started = True
        for batch in self._in_time(iterator):
            self.consumed += 1
            yield batch
        self.epoch += 1
        self.consumed = 0

    def _batch_failed(self) -> None:
        self.epoch += 1
        self.consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position in the epoch, and the loader's own generator if it has one."""
        if not self._started:
            return {
                "epoch": self.epoch,
                "consumed": self.consumed,
                **self._waiting,
                "ranks": _num_shares(self._loader),
            }
        generator = self._loader.generator
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "position": self._loader.state_dict(),
            "generator": None if generator is None else generator.get_state(),
            "ranks": _num_shares(self._loader),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position at which the next iteration continues.

        Raises:
            ConfigError: If the epoch was begun with another number of ranks.
        """
        _refuse_other_shares(self._loader, state_dict.get("ranks"), state_dict["position"])
        self._waiting = {name: state_dict[name] for name in ("position", "generator")}
        self.epoch, self._started = state_dict["epoch"], False
        self.consumed = self._left_out = state_dict.get("consumed", 0)
        if self._waiting["position"] is not None:
            self._loader.load_state_dict(self._waiting["position"])

    def holds(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether the position is that of a state, which may be of other ranks."""
        position = self._waiting["position"], state_dict["position"]
        return self.epoch == state_dict["epoch"] and same(*position)


def refuse_redrawing(loader: DataLoader[Any]) -> None:
    """Refuse a loader that knows its position, over a sampler that it cannot let draw the same again.

    torchdata begins the sampler anew and passes over as many samples as were consumed.

    Raises:
        ConfigError: If the sampler is one of PyTorch's that draw from a generator.
    """
    for part in samplers_of(loader):
        if isinstance(part, Stateful):
            return  # and so is all that it draws from
        if type(part).__iter__ in _REDRAWING:
            raise ConfigError(
                f"PyTorch's {type(part).__name__} draws another order in a resumed run, where a "
                f"{type(loader).__name__} passes over the first samples of it; attach a plain "
                "DataLoader with this sampler, or take shuffle=True or torchdata's RandomSampler"
            )


#: What draws anew at each ``iter()``, from a generator that torchdata does not keep.
_REDRAWING = frozenset(
    kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
)


def _num_shares(loader: DataLoader[Any]) -> int | None:
    """Return over how many ranks a loader's sampler shares samples out, if it does."""
    counts = (getattr(part, "num_replicas", None) for part in samplers_of(loader))
    return next((count for count in counts if type(count) is int), None)


def _refuse_other_shares(loader: DataLoader[Any], before: int | None, position: Any) -> None:
    """Refuse a position in an epoch that was shared out over another number of ranks.

    Raises:
        ConfigError: Naming both numbers.
    """
    now = _num_shares(loader)
    if before in (None, now) or not isinstance(position, Mapping):
        return
    main = position.get("_snapshot", {}).get("_main_snapshot", position)
    num_drawn = main.get("_sampler_iter_yielded", 0)
    # Of an epoch that is over as well, torchdata passes over as many batches as were consumed.
    if num_drawn > (len(loader) if position.get("_iterator_finished") else 0):
        raise ConfigError(
            f"the run is in an epoch that was shared out over {before} ranks, and now it is over {now}; "
            f"a {type(loader).__name__} would repeat samples and leave others out. Go on with as many "
            "ranks, or attach a plain DataLoader, which shares the rest of an epoch out anew. To begin "
            "the epoch anew, leave the loader out of attach once"
        )


def samplers_of(loader: Any) -> list[Any]:
    """Return what yields a loader's indices: batch sampler, sampler, and the samplers in them."""
    found: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        part = waiting.pop(0)
        if part is not None and all(part is not other for other in found):
            found.append(part)
            waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
    return found


def refuse_out_of_order(in_order: bool) -> None:
    """Refuse batches whose number does not say which samples were seen.

    Raises:
        ConfigError: If they are not handed out in order.
    """
    if not in_order:
        raise ConfigError(
            "in_order=False hands batches out as they come, so their number does not say which were "
            "seen, and a resumed run would repeat some and leave others out; leave it out"
        )


class _SeededSamples(Dataset[Any]):
    """A dataset whose random augmentation depends only on epoch and sample."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            # These are this worker's own generators; collating the batch continues from here.
            seed_all(mixed_seed(self._seed, self._epoch, index))
            return self._dataset[index]
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            seed_all(mixed_seed(self._seed, self._epoch, index))
            return self._dataset[index]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def seed_all(seed: int) -> None:
    """Seed the global CPU generators of this process: Python's, NumPy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def mixed_seed(*parts: int) -> int:
    """Return one seed from several numbers, mixed as in NumPy."""
    words = np.random.SeedSequence([part % _NUM_SEEDS for part in parts]).generate_state(
        1, np.uint64
    )
    return int(words[0]) % _NUM_SEEDS
