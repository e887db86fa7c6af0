"""PyTorch's own DataLoader: its position is part of every step, and a resumed run skips by index.

The loader stays the user's. Its class becomes a subclass whose ``__iter__`` counts the batches that are
handed out, not those that workers have fetched ahead. A resumed iteration lets the sampler draw again
from the random states that it began with, leaves out the indices of consumed batches, and compares them
by a checksum with those of the earlier run; no sample is loaded to be thrown away.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from crc32c import crc32c
from torch.utils.data import DataLoader, IterableDataset

from lowdiff.core.events import Code, inform
from lowdiff.core.memory import array_of
from lowdiff.errors import ConfigError, UsageError
from lowdiff.loop.dataloader import mixed_seed, refuse_out_of_order, samplers_of, seed_all
from lowdiff.loop.fetches import Body, Count, Fetches, FetchWatch, Gradients
from lowdiff.loop.shares import Share, order_of, share_of
from lowdiff.model.items import Stateful, random_generators
from lowdiff.persistence.format.values import same

#: Name of the attribute by which a hooked loader knows its positions.
_POSITIONS = "_lowdiff_positions"


def is_plain_loader(thing: object) -> bool:
    """Whether an object is a DataLoader that does not know its position."""
    return isinstance(thing, DataLoader) and not isinstance(thing, Stateful)


@dataclass(slots=True)
class _Position:
    """Say where an iteration over the loader is.

    Large because it counts on both sides: what is drawn and handed out, and what was seen of it in this
    process.

    Attributes:
        seed: What the iteration drew for its workers when it began.
        number: Iterations that were begun before it.
        is_nested: Whether it began while another one over the same loader was in progress.
        consumed: Batches handed out.
        drawn: Batches whose indices the sampler has drawn; workers fetch ahead.
        checksum: CRC-32C of the indices of the consumed batches, in their order.
        is_drawn_out: Whether the sampler has said that there are no more.
        is_over: Whether the batches consumed are all that there are.
        begin: Random states, and states of samplers, from which the sampler drew its first index;
            None before.
        checksums: Of each batch that is drawn and not handed out, up to and with it.
        begun_at: Committed steps when it began; -1 if an earlier process began it.
        handed_at: Committed steps when the last batch was handed out.
        recorded: ``consumed`` as a step was told last.
        handed: Batches handed out in this process.
        share: How a ``DistributedSampler`` shares the epoch out; None with another sampler.
        skipped: Samples of the epoch that were consumed on all ranks while it was shared out over others.
        length: Batches of the rest behind these; -1 where none were skipped.
    """

    seed: int
    number: int
    is_nested: bool
    consumed: int = 0
    drawn: int = 0
    checksum: int = 0
    is_drawn_out: bool = False
    is_over: bool = False
    begin: dict[str, Any] | None = None
    share: dict[str, Any] | None = None
    skipped: int = 0
    length: int = -1
    checksums: deque[int] = field(default_factory=deque)
    begun_at: int = -1
    handed_at: int = -1
    recorded: int = -1
    handed: int = 0

    def document(self) -> dict[str, Any]:
        """Return what a step records of it."""
        return {name: getattr(self, name) for name in _RECORDED}


_RECORDED = (
    "seed",
    "number",
    "is_nested",
    "consumed",
    "drawn",
    "checksum",
    "is_drawn_out",
    "is_over",
    "begin",
    "share",
    "skipped",
    "length",
)


class PlainLoader:
    """Knows and restores the positions of a DataLoader; one of the attached objects.

    Large because it has both sides of a position: what a step records, and how iterations begin and end.

    Each ``iter(loader)`` is an epoch of its own, as without lowdiff; the first ones after a resume go on
    with the iterations that were in progress at the resumed step. An iteration that begins while
    gradients are off is an evaluation: it is neither recorded nor resumed.

    """

    def __init__(
        self,
        loader: DataLoader[Any],
        before_batch: Callable[[], None],
        body: Callable[[], Body],
        model: torch.nn.Module,
    ) -> None:
        """Look at a loader; `hook` changes it.

        Args:
            loader: The user's loader.
            before_batch: Called where a step may begin: it restores the random generators.
            body: Returns the loop's position.
            model: What is trained.

        Raises:
            ConfigError: If its batches cannot be skipped by index.
        """
        self._loader = loader
        self._kind = _own_class(loader)
        self._refuse()
        self._before_batch, self._body = before_batch, body
        self._model = weakref.ref(model)  # a loader outlives the Checkpointer
        self._fetches, self.count = Fetches(body), Count()
        self._epoch = 0
        self._num_begun = 0
        self._seed: int | None = None
        self._samplers_at_resume: list[Any] = []
        self._tracked: list[tuple[Callable[[], _Iteration | None], _Position]] = []
        #: Positions of the resumed step that no iteration has taken yet, in the order they began.
        self._untaken: list[_Position] = []
        #: Committed steps when an iteration that was resumed ended without a step, and how it ended.
        self._unused_at: tuple[int, str] | None = None
        #: The gradients when the first batch of a resumed iteration was handed out.
        self._gradients: Gradients | None = None
        #: A plain loader with the same fields, but for dataset, indices and generator. Persistent
        #: workers belong to it.
        self._inner: Any = None

    @property
    def loader(self) -> DataLoader[Any]:
        """Return the user's loader."""
        return self._loader

    def _refuse(self) -> None:
        loader, kind = self._loader, self._kind.__name__
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                "an IterableDataset does not reveal its position, so its batches cannot be skipped "
                "by index; loop over checkpointer.dataloader(loader) with a StatefulDataLoader of torchdata"
            )
        refuse_out_of_order(getattr(loader, "in_order", True))
        if self._kind.__iter__ is not DataLoader.__iter__:
            raise ConfigError(
                f"{kind} has an __iter__ of its own, so the number of its batches does not say which "
                "samples were seen; attach a plain DataLoader (persistent_workers=True keeps workers "
                "from epoch to epoch), or give it state_dict() and load_state_dict()"
            )
        for part in samplers_of(loader):
            if isinstance(part, Iterator):
                raise ConfigError(
                    f"the sampler {type(part).__name__} is an iterator, which cannot begin again, so "
                    "its batches cannot be skipped in a resumed run; give the DataLoader a sampler "
                    "whose __iter__ returns a new iterator, or checkpointer.dataloader(dataset, ...)"
                )

    def hook(self) -> None:
        """Count the loader's batches from now on; iterators that were begun before are void."""
        loader: Any = self._loader
        for iterator in _live_iterators(loader):
            _put_over(iterator, __next__=_refuse_next)
        earlier = loader.__dict__.pop(_POSITIONS, None)
        if earlier is not None:
            earlier._leave()
        loader.__dict__["_iterator"] = None  # its persistent workers are made anew
        if not _is_hooked(loader):
            _put_over(loader, __iter__=_begin, __reduce_ex__=_reduce)
        loader.__dict__[_POSITIONS] = self

    def _leave(self) -> None:
        """Another Checkpointer, or another attach, has hooked the loader."""
        for made, _ in self._tracked:
            iteration = made()
            if iteration is not None:
                iteration.is_void = True

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the iterations in progress, and the states of generators and samplers."""
        self._settle(counts=True)
        for _, position in self._tracked:
            position.recorded = position.consumed
        return {
            "epoch": self._epoch,
            "num_begun": self._num_begun,
            "seed": self._seed,
            "open": [p.document() for p in self._positions()],
            "generators": [g.get_state() for g in _generators(self._loader)],
            "samplers": _read_samplers(self._loader),
        }

    def _positions(self) -> list[_Position]:
        alive = [position for made, position in self._tracked if made() is not None]
        return alive + self._untaken

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the positions with which the next iterations go on."""
        self._epoch, self._num_begun = state["epoch"], state["num_begun"]
        self._seed, self._samplers_at_resume = state["seed"], state["samplers"]
        self._tracked = []
        self._untaken = [_Position(**known) for known in state["open"]]
        for generator, known in zip(_generators(self._loader), state["generators"], strict=False):
            generator.set_state(known)
        _write_samplers(self._loader, state["samplers"])

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether generators and samplers are as a state has them; those that are new have none there."""
        generators = zip(_generators(self._loader), state["generators"], strict=False)
        samplers = zip(_read_samplers(self._loader), state["samplers"], strict=False)
        return all(torch.equal(live.get_state(), known) for live, known in generators) and all(
            same(live, known) for live, known in samplers if live.keys() == known.keys()
        )

    def begin(self) -> Iterator[Any]:
        """Begin an iteration: ``iter(loader)``.

        Raises:
            UsageError: If the sampler is in another epoch than the iteration that goes on.
            ConfigError: If the sampler draws other indices than in the iteration that goes on.
        """
        if not torch.is_grad_enabled():
            return _Iteration(self, self._new(), is_watched=False)
        if self._is_persistent:  # a new iteration takes the workers of those before it
            for index, (made, position) in enumerate(self._tracked):
                if (iteration := made()) is not None:
                    iteration.is_watched = False
                self._tracked[index] = _no_iteration, position
        self._warn_if_left()
        if not self._untaken:
            # The numbers that follow are those of the uninterrupted run only from here on. A body
            # that the loop left is committed here, before the new iteration belongs to it.
            self._before_batch()
        self._settle()
        self._tracked = [(made, p) for made, p in self._tracked if made() is not None]
        self._warn_if_unused()
        if self._untaken and not self._untaken[0].is_nested:
            self.count.goes_on(0 if self._untaken[0].is_over else self.consumed)
        position = self._untaken.pop(0) if self._untaken else self._new()
        iteration = _Iteration(self, position, is_watched=True)
        self._tracked.append((weakref.ref(iteration), position))
        return iteration

    @property
    def _is_persistent(self) -> bool:
        return bool(self._loader.persistent_workers and self._loader.num_workers)

    def _new(self) -> _Position:
        # PyTorch draws the same number at the same place, once where workers are persistent.
        if self._seed is None or not self._is_persistent:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._seed = int(drawn.item())
        is_nested = any(made() is not None for made, _ in self._tracked)
        position = _Position(self._seed, self._num_begun, is_nested, begun_at=self._body().step)
        self._num_begun += 1
        return position

    @property
    def epoch(self) -> int:
        """Iterations that ended, but nested ones, and those that were left before a step was made."""
        self._settle()
        return self._epoch

    @property
    def consumed(self) -> int:
        """Batches of the epoch in progress that were handed out.

        Of an epoch that other ranks began: as many as hold the samples that are consumed.
        """
        position = next((p for p in self._positions() if not p.is_nested), None)
        if position is None:
            return 0
        now = share_of(self._loader)
        if now is None or position.share is None:
            return position.consumed
        before = Share(**position.share)
        samples = position.skipped + position.consumed * before.batch_size * before.ranks
        return samples // (now.batch_size * now.ranks)

    def _settle(self, *, counts: bool = False) -> None:
        """Drop iterations that the loop left after a step; ``counts``: a step is being committed."""
        kept = []
        for made, position in self._tracked:
            is_trained = position.handed and (counts or position.begun_at < self._body().step)
            if made() is not None or not is_trained:
                kept.append((made, position))
                continue
            self._epoch += not position.is_nested
            self._note_unused(position, "was left")
        self._tracked = kept

    def _warn_if_left(self) -> None:
        now = self._body().step
        for made, position in self._tracked:
            is_recorded = position.recorded == position.consumed and position.handed_at < now
            if made() is None and position.handed and is_recorded:
                Code.EPOCH_LEFT.warn(
                    "the loop left an epoch of a loader between commit() and the next batch, so a "
                    "run that resumes at that commit goes on in the epoch that was left; leave it "
                    "before commit(), or when the next batch is there",
                )

    def _note_unused(self, position: _Position, how: str) -> None:
        if position.begun_at == -1 and position.handed and position.handed_at == self._body().step:
            self._unused_at = position.handed_at, how

    @property
    def _is_evaluated(self) -> bool:
        model = self._model()
        return model is not None and not any(part.training for part in model.modules())

    def _warn_if_unused(self) -> None:
        unused, self._unused_at = self._unused_at, None
        gradients, self._gradients = self._gradients, None
        if unused is None or unused[0] != self._body().step:
            return
        # Gradients of a step that is still to come may go over the end of an epoch.
        if gradients is None or not gradients.were_written():
            Code.POSITION_UNUSED.warn(
                "the first iteration over a loader after attach went on where the resumed step was, "
                f"and {unused[1]} before a step or a gradient was made with its batches; the next one "
                "begins a new epoch. If that was a look at the data, take it before attach, or under "
                "torch.no_grad()",
            )

    def came(self, position: _Position) -> None:
        """A batch of an iteration is handed out, or could not be loaded."""
        if position.begun_at == -1 and not position.handed:
            model = self._model()
            self._gradients = Gradients(() if model is None else model.parameters())
        position.consumed += 1
        position.handed += 1
        position.handed_at = self._body().step
        if position.checksums:
            position.checksum = position.checksums.popleft()
        length = position.length if position.skipped else _length(self._source())
        position.is_over = position.consumed == length

    def is_over(self, position: _Position) -> None:
        """An iteration has no more batches."""
        before = len(self._tracked)
        self._tracked = [(made, p) for made, p in self._tracked if p is not position]
        if len(self._tracked) < before:
            self._epoch += not position.is_nested
            if self._is_evaluated:
                self._note_unused(position, "ended in an evaluation of the model,")

    def watch_fetches(self) -> FetchWatch:
        """Return what refuses a batch that is fetched too early, from the first batch of a step on."""
        self._before_batch()
        return self._fetches.begin()

    def batches(self, position: _Position) -> Any:
        """Return PyTorch's own iterator over the batches from a position on."""
        loader = self._loader
        if self._inner is None:
            self._inner = object.__new__(self._kind)
        inner: dict[str, Any] = self._inner.__dict__
        inner |= {k: v for k, v in loader.__dict__.items() if k not in ("_iterator", _POSITIONS)}
        inner.setdefault("_iterator", None)
        indices = _Indices(self, position)
        inner["batch_sampler" if loader.batch_sampler is not None else "sampler"] = indices
        if loader.num_workers:
            inner["dataset"] = _SeededSamples(loader.dataset)
        made = torch.Generator(torch.get_default_device())
        inner["generator"] = made.manual_seed(position.seed)  # the user's has been drawn from
        if inner["_iterator"] is not None:  # persistent workers go on with other indices
            inner["_iterator"]._index_sampler = indices
        return DataLoader.__iter__(self._inner)

    def _source(self) -> Any:
        loader = self._loader
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    def draw(self, position: _Position) -> Iterator[Any]:
        """Yield the indices of each batch that is not consumed; for PyTorch's iterator."""
        ahead: list[Any] = []
        if position.begin is None:
            position.begin, share = _read_all(self._loader), share_of(self._loader)
            position.share = None if share is None else asdict(share)
            indices = iter(self._source())
        else:
            indices, ahead = self._draw_again(position)
        number = position.consumed
        for batch in ahead:
            yield self._numbered(position, number, batch)
            number += 1
        for batch in () if position.is_drawn_out else indices:
            position.drawn += 1
            last = position.checksums[-1] if position.checksums else position.checksum
            position.checksums.append(_checksum(batch, last))
            yield self._numbered(position, number, batch)
            number += 1
        position.is_drawn_out = True

    def _numbered(self, position: _Position, number: int, batch: Any) -> Any:
        if not self._loader.num_workers:
            return batch  # this process draws from the generators that steps record
        return _Draw((position.seed, position.number, number), batch)

    def _draw_again(self, position: _Position) -> tuple[Iterator[Any], list[Any]]:
        """Let the sampler draw what it had drawn; returns it and the indices after the consumed ones."""
        loader, begin = self._loader, position.begin
        assert begin is not None
        now = _read_all(loader)
        self._check_epochs(now["samplers"], begin["samplers"])
        _write_all(loader, begin)
        share = None if position.is_over else share_of(loader)
        before = None if share is None or position.share is None else Share(**position.share)
        try:
            if share is None or before is None or (share == before and not position.skipped):
                indices = iter(self._source())
                if (ahead := _ahead(indices, position)) is not None and not position.skipped:
                    return indices, ahead
            else:
                order = order_of(loader.sampler)  # type: ignore[arg-type]
                indices = iter(before.batches(order, position.skipped))
                if (ahead := _ahead(indices, position)) is not None:
                    if share == before:
                        return indices, ahead
                    return iter(_shared_anew(position, before, share, order)), []
        finally:
            # A stateful sampler is where it drew to.
            now["samplers"] = [{} if "state" in known else known for known in now["samplers"]]
            _write_all(loader, now)
        if position.is_over:  # so other settings are no matter
            position.is_drawn_out = True
            return iter(()), []
        raise ConfigError(
            f"the run is in the middle of an epoch of a {self._kind.__name__}, after "
            f"{position.consumed} batches, and its sampler draws other indices now; keep dataset, "
            "batch size, seed and number of ranks until that epoch is over (batch size and ranks may "
            "change with PyTorch's DistributedSampler). A sampler of your own "
            "must draw the same after the same random states and set_epoch(), or have state_dict() "
            "and load_state_dict(). To begin the epoch anew, leave the loader out of attach once"
        )

    def _check_epochs(self, now: list[Any], begin: list[Any]) -> None:
        """Refuse another epoch than that in which the iteration began.

        Raises:
            UsageError: If the loop has set one.
        """
        for here, there, resumed in zip(now, begin, self._samplers_at_resume, strict=False):
            if here not in (there, resumed) and "epoch" in here and "epoch" in there:
                raise UsageError(
                    f"the run goes on in an epoch of a {self._kind.__name__} that began after "
                    f"set_epoch({there['epoch']}), but set_epoch({here['epoch']}) was called; begin "
                    "the loop there: for epoch in range(checkpointer.epoch_of(loader), N)"
                )


class _Iteration:
    """One iteration over a hooked loader."""

    def __init__(self, owner: PlainLoader, position: _Position, *, is_watched: bool) -> None:
        self.is_watched, self.is_void = is_watched, False
        self._owner, self._position = owner, position
        self._fetches: FetchWatch | None = None
        self._batches = owner.batches(position)

    def __iter__(self) -> _Iteration:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        if self.is_void:
            raise UsageError(_VOID)
        if not self.is_watched:
            return next(self._batches)
        if self._fetches is None:
            self._fetches = self._owner.watch_fetches()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._fetches.ended()
            self._owner.is_over(self._position)
            raise
        except Exception:  # of the dataset: the loop may go on with the next batch
            self._owner.came(self._position)
            raise
        self._fetches.batch_came()
        self._owner.came(self._position)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


def _no_iteration() -> None:
    """Stand for a reference to an iteration that is gone."""


_VOID = (
    "this iterator over a DataLoader was begun before attach(..., loader=loader), so its batches are "
    "part of no step; call iter(loader) after attach"
)


def _refuse_next(iterator: object) -> Any:
    """Stand for ``__next__`` of an iterator that was begun before its loader was attached."""
    raise UsageError(_VOID)


def _begin(loader: Any) -> Iterator[Any]:
    """Stand for ``__iter__`` of a hooked loader."""
    positions: PlainLoader = loader.__dict__[_POSITIONS]
    return positions.begin()


def _reduce(loader: Any, protocol: Any) -> Any:
    """Stand for ``__reduce_ex__`` of a hooked loader: a copy is a loader of its own, without positions."""
    state = {key: value for key, value in loader.__dict__.items() if key != _POSITIONS}
    return _copied, (_own_class(loader), state)


def _copied(kind: type, state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state)
    return made


def _own_class(loader: Any) -> Any:
    """Return the class that a loader has, or had before it was hooked."""
    kind = type(loader)
    return kind.__bases__[0] if _is_hooked(loader) else kind


def _is_hooked(loader: Any) -> bool:
    return type(loader).__dict__.get("__iter__") is _begin


def _put_over(thing: Any, **methods: Any) -> None:
    """Give one object methods that Python looks up in classes only."""
    kind = type(thing)
    # One base: with a second one in front a live object cannot take the class.
    thing.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _live_iterators(loader: Any) -> list[Any]:
    """Return the iterators over a loader that is not hooked which somebody holds."""
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    # Looking through all objects takes a tenth of a second. Without an iterator only the loader, the
    # variable here and the call hold what yields the indices.
    if _is_hooked(loader) or sys.getrefcount(source) <= 3:
        return []
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return [thing for thing in found if getattr(thing, "_index_sampler", None) is source]


class _Indices:
    """Stands for the sampler: yields what a position has left."""

    def __init__(self, owner: PlainLoader, position: _Position) -> None:
        self._owner, self._position = owner, position

    def __len__(self) -> int:
        return len(self._owner._source())

    def __iter__(self) -> Iterator[Any]:
        return self._owner.draw(self._position)


class _Draw(NamedTuple):
    """The indices of a batch, and what seeds the random numbers with which a worker makes the batch."""

    seeds: tuple[int, int, int]
    indices: Any


class _SeededSamples:
    """Stands for the user's dataset in workers: a batch's random numbers depend on its number alone.

    A worker's generators go on from batch to batch. In a resumed run they would have to skip what the
    skipped batches drew.
    """

    __slots__ = ("_lowdiff_dataset",)

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_lowdiff_dataset", dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(get_worker_info().dataset, ...)
        return type(object.__getattribute__(self, "_lowdiff_dataset"))

    def __getitem__(self, drawn: Any) -> Any:
        dataset = object.__getattribute__(self, "_lowdiff_dataset")
        if not isinstance(drawn, _Draw):
            return dataset[drawn]
        seed_all(mixed_seed(*drawn.seeds))
        return dataset[drawn.indices]

    def __getitems__(self, drawn: _Draw) -> Any:
        dataset = object.__getattribute__(self, "_lowdiff_dataset")
        seed_all(mixed_seed(*drawn.seeds))
        several = getattr(dataset, "__getitems__", None)
        return several(drawn.indices) if several else [dataset[i] for i in drawn.indices]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_lowdiff_dataset"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_lowdiff_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_lowdiff_dataset"), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _SeededSamples, (object.__getattribute__(self, "_lowdiff_dataset"),)


def _ahead(indices: Iterator[Any], position: _Position) -> list[Any] | None:
    """Pass over what a position has consumed; return what was drawn behind it, None if that is not the same."""
    position.checksums.clear()
    checksum, ahead = 0, []
    for number in range(position.drawn):
        batch = next(indices, None)
        if batch is None:
            return None
        checksum = _checksum(batch, checksum)
        if number >= position.consumed:
            ahead.append(batch)
            position.checksums.append(checksum)
        elif number == position.consumed - 1 and checksum != position.checksum:
            return None
    if position.is_drawn_out:
        next(indices, None)  # some samplers draw once more at their end
    return ahead


def _shared_anew(
    position: _Position, before: Share, share: Share, order: list[int]
) -> list[list[int]]:
    """Begin the rest of an epoch with other ranks or batches; return the indices of its batches."""
    position.skipped += position.consumed * before.batch_size * before.ranks
    # What workers draw depends on the number of the batch, which begins anew.
    position.seed = mixed_seed(position.seed, position.skipped, share.rank)
    position.share = asdict(share)
    position.consumed = position.drawn = position.checksum = 0
    position.is_drawn_out = False
    position.checksums.clear()
    batches = share.batches(order, position.skipped)
    position.length = len(batches)
    left = max(0, len(order) - position.skipped)
    inform(f"the {left} samples that are left of an epoch go to {share.ranks} rank(s) now")
    return batches


def _length(source: Any) -> int:
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # an endless sampler
        return -1


def _checksum(indices: Any, before: int) -> int:
    try:
        data = np.asarray(_numbers(indices), dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):  # keys of another kind
        data = repr(indices).encode()
    return int(crc32c(data, before))


def _numbers(indices: Any) -> Any:
    """Return indices without tensors, which NumPy would mark; see module `memory`."""
    if isinstance(indices, torch.Tensor):
        return indices.tolist()
    if isinstance(indices, list | tuple):
        return [i.tolist() if isinstance(i, torch.Tensor) else i for i in indices]
    return indices


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers have of their own, each once."""
    found: dict[int, torch.Generator] = {}
    for part in (loader, *samplers_of(loader)):
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                found.setdefault(id(value), value)
    return list(found.values())


def _read_samplers(loader: Any) -> list[Any]:
    """Return the state of each sampler: its own state dict, or its epoch."""
    found: list[Any] = []
    for part in samplers_of(loader):
        epoch = getattr(part, "epoch", None)
        if isinstance(part, Stateful):
            found.append({"state": copy.deepcopy(part.state_dict())})
        else:
            found.append({"epoch": epoch} if type(epoch) is int else {})
    return found


def _write_samplers(loader: Any, states: list[Any]) -> None:
    for part, known in zip(samplers_of(loader), states, strict=False):
        if "state" in known and isinstance(part, Stateful):
            part.load_state_dict(copy.deepcopy(known["state"]))
        elif "epoch" in known and getattr(part, "epoch", None) != known["epoch"]:
            set_epoch = getattr(part, "set_epoch", None)
            set_epoch(known["epoch"]) if set_epoch else setattr(part, "epoch", known["epoch"])


def _read_all(loader: Any) -> dict[str, Any]:
    """Return all from which a sampler may draw, large states as tensors, which are logged once."""
    found: dict[str, Any] = {
        name: read() for name, (read, _) in random_generators(torch.get_default_device()).items()
    }
    return {
        "random": {name: _packed(state) for name, state in found.items()},
        "generators": [generator.get_state() for generator in _generators(loader)],
        "samplers": _read_samplers(loader),
    }


def _write_all(loader: Any, states: Mapping[str, Any]) -> None:
    for name, (_, write) in random_generators(torch.get_default_device()).items():
        if name in states["random"]:
            write(_unpacked(states["random"][name]))
    for generator, state in zip(_generators(loader), states["generators"], strict=False):
        generator.set_state(state)
    _write_samplers(loader, states["samplers"])


def _packed(state: Any) -> Any:
    """Return a generator's state with its words as a tensor."""
    if isinstance(state, tuple):  # Python's
        return {
            "version": state[0],
            "words": torch.tensor(state[1], device="cpu"),
            "more": state[2],
        }
    if isinstance(state, Mapping) and state.get("bit_generator") == "MT19937":  # NumPy's
        key = torch.from_numpy(state["state"]["key"].astype(np.int64))
        return {**state, "state": {**state["state"], "key": key}}
    return state


def _unpacked(state: Any) -> Any:
    if isinstance(state, Mapping) and "words" in state:
        return state["version"], tuple(state["words"].tolist()), state["more"]
    if isinstance(state, Mapping) and state.get("bit_generator") == "MT19937":
        key = array_of(state["state"]["key"]).astype(np.uint32)
        return {**state, "state": {**state["state"], "key": key}}
    return state
