"""What was exchanged of whole buckets in one step, and what the optimizers consumed there.

All of it stays on the device until the commit asks for it: no optimizer step waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from lowdiff.compressors.changes import Known, read
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

    @cached_property
    def of_parameter(self) -> dict[int, Place]:
        """The parts by layout index."""
        return {part.parameter: part for part in self.parts}

    @cached_property
    def table(self) -> torch.Tensor:
        """int64 ``[4, partial]``, on the device: their ``parameter``, ``start``, ``first`` and ``count``."""
        rows = [(part.parameter, part.start, part.first, part.count) for part in self.partial]
        columns = list(zip(*rows, strict=True))
        return torch.tensor(columns, device="cpu").to(self.device, non_blocking=True)


@dataclass(slots=True, eq=False)
class Sent:
    """What was exchanged of a bucket in one backward pass.

    Attributes:
        places: Which entries are whose.
        seen: By rank: int32 ``[entries]``, positions in the bucket; filled once they have arrived.
        narrow: By rank of those whose payloads are made: what its entries were rounded to; none where nothing is rounded.
        values: ``[ranks, entries]``: what the optimizers consumed at these positions, once one has.
    """

    places: Places
    seen: list[torch.Tensor]
    narrow: dict[int, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None

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

    def read(self, gradients: Mapping[int, torch.Tensor], sent: Sequence[Sent]) -> None:
        """Fill `Sent.values` for these gradients.

        Args:
            gradients: Layout index -> flat and whole; of one dtype.
            sent: All of a step, of which these have entries.
        """
        ...

    def strange(
        self,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[Sent],
        ranges: Sequence[tuple[int, slice]],
    ) -> torch.Tensor:
        """Return per range whether it holds another entry than +0.0 at a place that no rank sent.

        Args:
            gradients: As for `read`, after it; zero for a moment at what was sent.
            sent: Likewise.
            ranges: Layout index, and the elements to search.

        Returns:
            bool ``[len(ranges)]``.
        """
        ...


class TorchReading:
    """Reading by PyTorch's own operations, several for each parameter."""

    def read(self, gradients: Mapping[int, torch.Tensor], sent: Sequence[Sent]) -> None:
        """See `Reading`."""
        for one, part, gradient in _parts(gradients, sent):
            values = one.room(gradient.dtype)
            for rank, positions in enumerate(one.seen):
                entries = slice(part.first, part.first + part.count)
                values[rank, entries] = gradient.index_select(0, positions[entries] - part.start)

    def strange(
        self,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[Sent],
        ranges: Sequence[tuple[int, slice]],
    ) -> torch.Tensor:
        """See `Reading`."""
        parts = list(_parts(gradients, sent))
        for one, part, gradient in parts:
            for positions in one.seen:
                own = positions[part.first : part.first + part.count] - part.start
                gradient.index_fill_(0, own.long(), 0.0)
        found = [_patterns(gradients[i][own]).count_nonzero() for i, own in ranges]
        for one, part, gradient in parts:
            assert one.values is not None
            for positions, values in zip(one.seen, one.values, strict=True):
                entries = slice(part.first, part.first + part.count)
                gradient.index_copy_(0, (positions[entries] - part.start).long(), values[entries])
        return torch.stack(found) != 0


def _parts(
    gradients: Mapping[int, torch.Tensor], sent: Sequence[Sent]
) -> Iterator[tuple[Sent, Place, torch.Tensor]]:
    for one in sent:
        for part in one.places.partial:
            if part.parameter in gradients:
                yield one, part, gradients[part.parameter]


def _patterns(values: torch.Tensor) -> torch.Tensor:
    return values.view(INT_OF_BYTES[values.element_size()])


#: A rank, and the layout index of a parameter.
_Of = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Step:
    """What was read in a step.

    Attributes:
        known: Layout index -> factors that are known of it.
        passes: Layout index -> backward passes that had exchanged entries of it when an optimizer consumed it.
        whole: What a rank stores of parameters that were exchanged whole: its ranges.
        flags: Whose ranges were searched for what no rank sent, and what was found.
        copies: What a rank stores of gradients that were searched in vain before.
    """

    known: dict[int, Known] = field(default_factory=dict)
    passes: dict[int, list[tuple[Sent, Place]]] = field(default_factory=dict)
    whole: dict[_Of, torch.Tensor] = field(default_factory=dict)
    flags: list[tuple[list[_Of], torch.Tensor]] = field(default_factory=list)
    copies: dict[_Of, torch.Tensor] = field(default_factory=dict)


class Taken:
    """What the optimizers of a step consume, as the ranks store it whose payloads are made here.

    Entries that no rank sent are noticed on the device and known at the commit. A gradient that had some is copied
    whole in the next step, before its optimizer consumes it, and stored if it has some again; of the first step
    nothing is there to be stored.

    Args:
        layout: The parameters.
        reading: Reads gradients.
        ranks: Whose payloads are made, this rank first.
        world_size: Number of ranks.

    Attributes:
        sent: What was exchanged in this step, in the order of backward passes.
        strange: Layout indices of this rank's ranges that held entries no rank sent, once they have arrived.
        has_missed: Whether some of these were not copied before.
    """

    def __init__(
        self, layout: Layout, reading: Reading, ranks: Sequence[int], world_size: int
    ) -> None:
        self._layout = layout
        self._reading = reading
        self._ranks = tuple(ranks)
        self._world_size = world_size
        self.sent: list[Sent] = []
        self.strange: list[int] = []
        self.has_missed = False
        self._step = _Step()
        self._suspects: set[_Of] = set()
        self._arrived: dict[int, StoredEntries] | None = None

    def begin(self) -> None:
        """Forget the last step, but for what was strange in it."""
        self.sent, self.strange, self.has_missed = [], [], False
        self._step, self._arrived = _Step(), None

    def consume(
        self, gradients: Mapping[int, torch.Tensor], factors: Known, *, searches: bool
    ) -> None:
        """Read what an optimizer is about to consume.

        Args:
            gradients: Layout index -> flat and whole.
            factors: See ``Reducer.consume``.
            searches: Whether gradients may hold what no rank sent.
        """
        self._arrived = None
        self._step.known |= dict.fromkeys(gradients, factors)
        of_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
        for i, gradient in gradients.items():
            of_dtype.setdefault(gradient.dtype, {})[i] = gradient
        for own in of_dtype.values():
            self._read(own, searches=searches)

    def _read(self, gradients: Mapping[int, torch.Tensor], *, searches: bool) -> None:
        for i in gradients:
            places = ((one, one.places.of_parameter.get(i)) for one in self.sent)
            self._step.passes[i] = [(one, place) for one, place in places if place is not None]
        partial = {i for i in gradients if any(not p.is_whole for _, p in self._step.passes[i])}
        sent = list(dict.fromkeys(one for i in partial for one, _ in self._step.passes[i]))
        if sent:
            self._reading.read(gradients, sent)
        of_ranks = [(rank, i) for rank in self._ranks for i in gradients]
        for rank, i in of_ranks:
            self._step.copies.pop((rank, i), None)  # a step may be tried again
        searched = [of for of in of_ranks if of[1] in partial] if searches else []
        if searched:
            ranges = [(i, self._share(rank, i)) for rank, i in searched]
            self._step.flags.append((searched, self._reading.strange(gradients, sent, ranges)))
            for rank, i in self._suspects.intersection(searched):
                self._step.copies[rank, i] = gradients[i][self._share(rank, i)].clone()
        whole = [of for of in of_ranks if of[1] not in partial]
        if whole:
            parts = [gradients[i][self._share(rank, i)] for rank, i in whole]
            values = torch.cat(parts).split([part.numel() for part in parts])
            self._step.whole |= dict(zip(whole, values, strict=True))

    def _share(self, rank: int, parameter: int) -> slice:
        return slice(*share(self._layout.parameters[parameter].numel, rank, self._world_size))

    def entries(self, rank: int) -> StoredEntries:
        """Return what a rank stores, on the CPU; waits for what is on the device."""
        if self._arrived is None:
            self._arrived = self._arrive()
        return self._arrived[rank]

    def _arrive(self) -> dict[int, StoredEntries]:
        """Copy all that the step's payloads need in one go, and make of it what the ranks store."""
        asked: list[torch.Tensor] = [flags for _, flags in self._step.flags]
        asked += self._step.whole.values()
        partial = [
            (rank, one, part)
            for rank in self._ranks
            for i, passes in self._step.passes.items()
            if (rank, i) not in self._step.whole
            for one, part in passes
        ]
        for rank, one, part in partial:
            assert one.values is not None
            asked.append(one.values[rank][part.first : part.first + part.count])
        rounded = self._rounded()
        arrived = iter(devices.fetched([*asked, *rounded.values(), *_positions(partial)]))
        self._judge([(of, next(arrived)) for of, _ in self._step.flags])
        whole = {of: next(arrived) for of in self._step.whole}
        entries_of: dict[_Of, list[Entries]] = {}
        of_parts = [next(arrived) for _ in partial]
        narrow = {of: next(arrived) for of in rounded}
        for (rank, _, part), values, own in zip(partial, of_parts, arrived, strict=True):
            entries_of.setdefault((rank, part.parameter), []).append((own, values))
        numbers = {known: read(known) for known in {self._step.known[i] for _, i in narrow}}
        made = {rank: StoredEntries(self._layout, rank, self._world_size) for rank in self._ranks}
        for rank, stored in made.items():
            for i in sorted(self._step.known):
                entries = (
                    _united(entries_of[rank, i])
                    if (rank, i) in entries_of
                    else (_range(self._share(rank, i)), whole[rank, i])
                )
                stored.put(i, entries, narrow.get((rank, i)), numbers.get(self._step.known[i], ()))
        for (rank, i), copy in self._step.copies.items():
            if (rank, i) in self._suspects:
                made[rank].foreign[i] = copy
        return made

    def _rounded(self) -> dict[_Of, torch.Tensor]:
        """What entries were rounded to in the last backward pass, of which they all have to be."""
        found: dict[_Of, torch.Tensor] = {}
        for i, passes in self._step.passes.items():
            last, part = passes[-1] if passes else (None, None)
            for rank, values in last.narrow.items() if last is not None else ():
                assert part is not None
                own = values[part.first : part.first + part.count]
                found[rank, i] = own[self._share(rank, i)] if part.is_whole else own
        return found

    def _judge(self, flags: Sequence[tuple[Sequence[_Of], torch.Tensor]]) -> None:
        """Note whose gradients held what no rank sent."""
        verdicts = {
            of: bool(flag)
            for searched, found in flags
            for of, flag in zip(searched, found.tolist(), strict=True)
        }
        self._suspects = {of for of, is_strange in verdicts.items() if is_strange}
        own = self._ranks[0]
        self.strange = sorted(i for rank, i in self._suspects if rank == own)
        self.has_missed = any((own, i) not in self._step.copies for i in self.strange)


def _positions(partial: Sequence[tuple[int, Sent, Place]]) -> list[torch.Tensor]:
    """Return the positions of all these in their parameters, each int64."""
    if not partial:
        return []
    own = [one.seen[rank][part.first : part.first + part.count] for rank, one, part in partial]
    numbers = [[part.start, part.count] for *_, part in partial]
    starts, counts = (
        torch.tensor(numbers, device="cpu")
        .T.contiguous()
        .to(own[0].device, non_blocking=True)
        .unbind()
    )
    sizes = [part.count for *_, part in partial]
    begun = starts.repeat_interleave(counts, output_size=sum(sizes))
    return list((torch.cat(own).long() - begun).split(sizes))


def _range(own: slice) -> torch.Tensor:
    return torch.arange(own.start, own.stop, device="cpu")


def _united(passes: Sequence[Entries]) -> Entries:
    """Return the last backward pass's entries, with those of earlier ones that are still in use.

    DDP keeps an earlier pass's gradient of a parameter that no rank used in the last one.
    """
    last, *earlier = reversed(passes)
    used = [(own, _patterns(values) != 0, values) for own, values in earlier]
    positions = torch.cat([last[0], *(own[is_used] for own, is_used, _ in used)])
    values = torch.cat([last[1], *(values[is_used] for _, is_used, values in used)])
    union, place = positions.unique(return_inverse=True)  # ascending
    if union.numel() == last[0].numel():
        return last
    return union, values.new_empty(union.numel()).index_copy_(0, place, values)
