"""What was exchanged of whole buckets in one step, and what the optimizers consumed there.

All of it stays on the device until the commit asks for it: no optimizer step waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from lowdiff.compressors.changes import Known
from lowdiff.compressors.entries import Entries, StoredEntries
from lowdiff.compressors.lane import share
from lowdiff.core import devices
from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.types import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter's part of a bucket.

    Attributes:
        parameter: Layout index.
        start: Its first element's place in the bucket.
        length: Its number of elements.
        first: Place of its first entry among those of the bucket.
        count: Entries that every rank sent of it.
    """

    parameter: int
    start: int
    length: int
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it was sent."""
        return self.count == self.length


@dataclass(frozen=True, eq=False)
class Places:
    """Parts of a bucket, in the order of their entries.

    Attributes:
        parts: Of parameters that have elements.
        device: Where the bucket is.
    """

    parts: tuple[Place, ...]
    device: torch.device
    _tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]], device: torch.device) -> Places:
        """Number the entries of some parameters: layout index, place in the bucket, length, and entries of each."""
        parts, first = [], 0
        for parameter, start, length, count in rows:
            parts.append(Place(parameter, start, length, first, count))
            first += count
        return cls(tuple(parts), device)

    @property
    def count(self) -> int:
        """Entries of all."""
        return self.parts[-1].first + self.parts[-1].count if self.parts else 0

    @cached_property
    def partial(self) -> tuple[Place, ...]:
        """Those that were not sent whole."""
        return tuple(part for part in self.parts if not part.is_whole)

    @cached_property
    def most(self) -> int:
        """Entries of the parameter that has most, of those that were not sent whole."""
        return max((part.count for part in self.partial), default=0)

    def table(self, queue: int) -> torch.Tensor:
        """int64 ``[4, partial]``, on the device: their ``parameter``, ``start``, ``first`` and ``count``.

        Args:
            queue: Of whoever reads it; see `devices.queue_of`.
        """
        if queue not in self._tables:
            rows = [(part.parameter, part.start, part.first, part.count) for part in self.partial]
            columns = torch.tensor(list(zip(*rows, strict=True)), device="cpu")
            self._tables[queue] = columns.to(self.device, non_blocking=True)
        return self._tables[queue]


@dataclass(slots=True, eq=False)
class SentBucket:
    """What was exchanged of a bucket in one backward pass.

    Attributes:
        places: Which entries are whose.
        seen: By rank: int32 ``[entries]``, positions in the bucket; filled once they have arrived.
        narrow: By rank of those whose payloads are made: what its entries were rounded to; none where nothing is rounded.
        values: ``[ranks, entries]``: what the optimizers consumed at these positions, once one has.
        bins: Into which values were cut; kept, because the exchange reads it on another stream.
    """

    places: Places
    seen: list[torch.Tensor]
    narrow: dict[int, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None
    bins: object = None

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[ranks, entries]``; one view of what the ranks sent, as that lies evenly in one tensor."""
        first, *others = self.seen
        stride = others[0].storage_offset() - first.storage_offset() if others else first.numel()
        return first.as_strided((len(self.seen), first.numel()), (stride, 1))

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``values``, made where they are not."""
        if self.values is None:
            shape = len(self.seen), self.seen[0].numel()
            self.values = torch.empty(shape, dtype=dtype, device=self.seen[0].device)
        return self.values


class Reading(Protocol):
    """Reads gradients that an optimizer is about to consume, without waiting for them."""

    def read(self, gradients: Mapping[int, torch.Tensor], sent: Sequence[SentBucket]) -> None:
        """Fill `SentBucket.values` for these gradients.

        Args:
            gradients: Layout index -> flat and whole; of one dtype.
            sent: All of a step, of which these have entries.
        """
        ...

    def strange(
        self,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[SentBucket],
        searched: Sequence[int],
    ) -> torch.Tensor:
        """Return which gradients hold another entry than +0.0 at a place that no rank sent.

        Args:
            gradients: As for `read`, after it; zero for a moment at what was sent.
            sent: Likewise.
            searched: Layout indices of those that are asked for.

        Returns:
            bool ``[len(searched)]``.
        """
        ...


class TorchReading:
    """Reading by PyTorch's own operations, several for each parameter."""

    def read(self, gradients: Mapping[int, torch.Tensor], sent: Sequence[SentBucket]) -> None:
        """See `Reading`."""
        for gradient, positions, values in _parts(gradients, sent):
            values.copy_(gradient.index_select(0, positions))

    def strange(
        self,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[SentBucket],
        searched: Sequence[int],
    ) -> torch.Tensor:
        """See `Reading`."""
        parts = list(_parts(gradients, sent))
        try:
            for gradient, positions, _ in parts:
                gradient.index_fill_(0, positions, 0.0)
            found = [patterns(gradients[i]).count_nonzero() for i in searched]
        finally:
            for gradient, positions, values in parts:
                gradient.index_copy_(0, positions, values)
        return torch.stack(found) != 0


def _parts(
    gradients: Mapping[int, torch.Tensor], sent: Sequence[SentBucket]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield a gradient, positions in it that a rank sent, and the values read there."""
    for one in sent:
        for part in one.places.partial:
            gradient = gradients.get(part.parameter)
            if gradient is not None:
                entries = slice(part.first, part.first + part.count)
                for positions, values in zip(one.seen, one.room(gradient.dtype), strict=True):
                    yield gradient, positions[entries].long() - part.start, values[entries]


def patterns(values: torch.Tensor) -> torch.Tensor:
    """Look at values as integers."""
    return values.view(INT_OF_BYTES[values.element_size()])


@dataclass(frozen=True, slots=True, eq=False)
class _Consumed:
    """What was read of one gradient.

    Attributes:
        known: Factors that are known of it.
        passes: Backward passes that had exchanged entries of it by then.
        ranges: By rank whose payload is made: its range, where it was exchanged whole, or was strange before.
        flag: bool ``[1]``: whether it holds what no rank sent; None where nobody searched.
    """

    known: Known
    passes: Sequence[tuple[SentBucket, Place]]
    ranges: Mapping[int, torch.Tensor]
    flag: torch.Tensor | None

    @property
    def is_partial(self) -> bool:
        """Whether only entries of it were exchanged."""
        return any(not part.is_whole for _, part in self.passes)

    def narrow(self, rank: int, own: slice) -> torch.Tensor | None:
        """What a rank's entries were rounded to in the last backward pass; of what was sent whole in its range."""
        if not self.passes:
            return None
        sent, part = self.passes[-1]
        values = sent.narrow.get(rank)
        if values is None:
            return None
        values = values[part.first : part.first + part.count]
        return values[own] if part.is_whole else values


class Taken:
    """What the optimizers of a step consume, as the ranks store it whose payloads are made here.

    Entries that no rank sent are noticed on the device and known at the commit: by all ranks that train the parameter,
    as each searches all of it. From the next step on its ranges are copied before the optimizer consumes it, and stored
    where it is strange again; of the first such step nothing is there to be stored.

    Args:
        layout: The parameters.
        reading: Reads gradients.
        ranks: Whose payloads are made, this rank first.
        world_size: Number of ranks.

    """

    def __init__(
        self, layout: Layout, reading: Reading, ranks: Sequence[int], world_size: int
    ) -> None:
        self._reading = reading
        self._shares = Shares(layout, tuple(ranks), world_size)
        #: Layout indices of gradients that held entries no rank sent, in a step that has arrived.
        self._suspects: set[int] = set()
        #: Layout index -> what was exchanged of it in this step, in the order of backward passes.
        self._sent: dict[int, list[tuple[SentBucket, Place]]] = {}
        self._consumed: dict[int, _Consumed] = {}

    def begin(self) -> None:
        """Forget the last step, but for what was strange in it."""
        self._sent, self._consumed = {}, {}

    def add(self, sent: SentBucket) -> None:
        """Note an exchange; it may end later, or break off."""
        for part in sent.places.parts:
            self._sent.setdefault(part.parameter, []).append((sent, part))

    def consume(
        self, gradients: Mapping[int, torch.Tensor], factors: Known, *, searches: bool
    ) -> None:
        """Read what an optimizer is about to consume.

        Args:
            gradients: Layout index -> flat and whole.
            factors: See ``Reducer.consume``.
            searches: Whether gradients may hold what no rank sent.
        """
        of_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
        for i, gradient in gradients.items():
            of_dtype.setdefault(gradient.dtype, {})[i] = gradient
        found: dict[int, _Consumed] = {}
        for own in of_dtype.values():
            found |= self._read(own, factors, searches=searches)
        # A step may be tried again behind one that was broken off.
        self._consumed |= found

    def _read(
        self, gradients: Mapping[int, torch.Tensor], factors: Known, *, searches: bool
    ) -> dict[int, _Consumed]:
        passes = {
            i: [(sent, part) for sent, part in self._sent.get(i, ()) if sent.seen]
            for i in gradients
        }
        partial = [i for i, own in passes.items() if any(not part.is_whole for _, part in own)]
        sent = list(dict.fromkeys(one for i in partial for one, _ in passes[i]))
        flags: dict[int, torch.Tensor] = {}
        if partial:
            self._reading.read(gradients, sent)
        if partial and searches:
            found = self._reading.strange(gradients, sent, partial)
            flags = dict(zip(partial, found.split(1), strict=True))
        copied = [i for i in gradients if i not in partial or i in self._suspects]
        of_ranks = [(i, rank) for i in copied for rank in self._shares.ranks]
        copies = devices.copied([gradients[i][self._shares.of(rank, i)] for i, rank in of_ranks])
        ranges: dict[int, dict[int, torch.Tensor]] = {i: {} for i in gradients}
        for (i, rank), values in zip(of_ranks, copies, strict=True):
            ranges[i][rank] = values
        return {i: _Consumed(factors, passes[i], ranges[i], flags.get(i)) for i in gradients}

    def skip(self, parameters: Collection[int]) -> None:
        """Forget what was read of these: no optimizer has consumed it."""
        self._consumed = {i: own for i, own in self._consumed.items() if i not in parameters}

    def depart(self) -> Departure:
        """Begin to copy to the host what the payloads take."""
        return Departure(self._shares, dict(sorted(self._consumed.items())), self._suspects)


@dataclass(frozen=True, slots=True)
class Shares:
    """What ranks store of a parameter that is divided.

    Attributes:
        layout: The parameters.
        ranks: Whose payloads are made, this rank first.
        world_size: Number of ranks.
    """

    layout: Layout
    ranks: tuple[int, ...]
    world_size: int

    def of(self, rank: int, parameter: int) -> slice:
        """Return a rank's range of a parameter."""
        return slice(*share(self.layout.parameters[parameter].numel, rank, self.world_size))


class Departure:
    """What the optimizers of one step consumed, on its way to the host in one go.

    Args:
        shares: What ranks store.
        consumed: What was read of each gradient, by ascending layout index.
        suspects: Gets those that turn out to be strange.

    Attributes:
        strange: Layout indices of gradients that held entries no rank sent, once they have arrived.
        missed: Those of them that were not copied.
    """

    def __init__(
        self, shares: Shares, consumed: Mapping[int, _Consumed], suspects: set[int]
    ) -> None:
        self.strange: list[int] = []
        self.missed: list[int] = []
        self._shares = shares
        self._consumed = consumed
        self._suspects = suspects
        self._flags = {i: own.flag for i, own in consumed.items() if own.flag is not None}
        of_ranks = [(i, rank) for i in consumed for rank in shares.ranks]
        self._partial = [
            (i, rank, sent, part)
            for i, rank in of_ranks
            if consumed[i].is_partial
            for sent, part in consumed[i].passes
        ]
        whole = {
            of: consumed[of[0]].ranges[of[1]] for of in of_ranks if not consumed[of[0]].is_partial
        }
        rounded = {
            (i, rank): values
            for i, rank in of_ranks
            if (values := consumed[i].narrow(rank, shares.of(rank, i))) is not None
        }
        self._whole, self._rounded = tuple(whole), tuple(rounded)
        self._known = tuple({consumed[i].known: None for i, _ in rounded})
        self._fetch = devices.fetch(
            [
                *self._flags.values(),
                *whole.values(),
                *rounded.values(),
                *(
                    f.reshape(1)
                    for known in self._known
                    for f in known
                    if isinstance(f, torch.Tensor)
                ),
                *(_values(rank, sent, part) for _, rank, sent, part in self._partial),
                *_positions([(rank, sent, part) for _, rank, sent, part in self._partial]),
            ]
        )
        self._entries: dict[int, StoredEntries] | None = None

    @property
    def travels(self) -> bool:
        """Whether it is waited for."""
        return self._fetch.travels

    def learn(self) -> None:
        """Have later steps copy what was strange in this one."""
        self._suspects |= {*self.strange}

    def entries(self, rank: int) -> StoredEntries:
        """Return what a rank stores, on the CPU; waits for it."""
        if self._entries is None:
            self._entries = self._arrive(iter(self._fetch.arrived()))
        return self._entries[rank]

    def _arrive(self, arrived: Iterator[torch.Tensor]) -> dict[int, StoredEntries]:
        """Put together what the payloads take, but for gradients that are stored whole."""
        shares, consumed = self._shares, self._consumed
        self._judge({i: bool(next(arrived)) for i in self._flags})
        entries = {
            (i, rank): (_numbers(shares.of(rank, i)), next(arrived)) for i, rank in self._whole
        }
        narrow = {of: next(arrived) for of in self._rounded}
        factors = {
            known: tuple(float(next(arrived)) if isinstance(f, torch.Tensor) else f for f in known)
            for known in self._known
        }
        of_parts = [next(arrived) for _ in self._partial]
        passes: dict[tuple[int, int], list[Entries]] = {}
        for (i, rank, *_), own, positions in zip(self._partial, of_parts, arrived, strict=True):
            passes.setdefault((i, rank), []).append((positions, own))
        entries |= {of: _united(own) for of, own in passes.items()}
        made = {
            rank: StoredEntries(shares.layout, rank, shares.world_size) for rank in shares.ranks
        }
        for i in consumed:
            for rank in shares.ranks:
                numbers = factors.get(consumed[i].known, ())
                made[rank].put(i, entries[i, rank], narrow.get((i, rank)), numbers)
                if i in self.strange and i not in self.missed:
                    made[rank].foreign[i] = consumed[i].ranges[rank]
        return made

    def _judge(self, verdicts: Mapping[int, bool]) -> None:
        """Note which gradients held what no rank sent."""
        self.strange = [i for i, is_strange in verdicts.items() if is_strange]
        self.missed = [i for i in self.strange if not self._consumed[i].ranges]


def _values(rank: int, sent: SentBucket, part: Place) -> torch.Tensor:
    assert sent.values is not None
    return sent.values[rank, part.first : part.first + part.count]


def _positions(partial: Sequence[tuple[int, SentBucket, Place]]) -> list[torch.Tensor]:
    """Return the positions of all these in their parameters, each int64."""
    if not partial:
        return []
    own = [sent.seen[rank][part.first : part.first + part.count] for rank, sent, part in partial]
    sizes = [part.count for *_, part in partial]
    numbers = torch.tensor([[part.start for *_, part in partial], sizes], device="cpu")
    starts, counts = numbers.to(own[0].device, non_blocking=True).unbind()
    begun = starts.repeat_interleave(counts, output_size=sum(sizes))
    return list((torch.cat(own).long() - begun).split(sizes))


def _numbers(own: slice) -> torch.Tensor:
    return torch.arange(own.start, own.stop, device="cpu")


def _united(passes: Sequence[Entries]) -> Entries:
    """Return the last backward pass's entries, with those of earlier ones that are still in use.

    DDP keeps an earlier pass's gradient of a parameter that no rank used in the last one.
    """
    last, *earlier = reversed(passes)
    used = [(own, patterns(values) != 0, values) for own, values in earlier]
    positions = torch.cat([last[0], *(own[is_used] for own, is_used, _ in used)])
    values = torch.cat([last[1], *(values[is_used] for _, is_used, values in used)])
    union, place = positions.unique(return_inverse=True)  # ascending
    if union.numel() == last[0].numel():
        return last
    return union, values.new_empty(union.numel()).index_copy_(0, place, values)
