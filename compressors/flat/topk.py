"""TopK over whole buckets: what one bucket launches does not depend on how many parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.changes import ChangeWarning, Known
from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.exchange import DepartedHeaders, Headers, Wire, assigned, gather, step_of
from lowdiff.compressors.flat.bins import Binned, Bins, Owed
from lowdiff.compressors.flat.selection import (
    Entries,
    Operands,
    Segment,
    Selection,
    Table,
    table_of,
)
from lowdiff.compressors.flat.sent import Departure, Place, Places, Reading, SentBucket, Taken
from lowdiff.compressors.of_ranks import OfRanks
from lowdiff.compressors.sections import missed_section
from lowdiff.compressors.topk import TopK
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.protocols import ResidualStore, WholePair
from lowdiff.types import Layout, Payload, ResidualLayout

#: Tables that are kept, beside one per parameter; a warm-up of the density makes new ones at every step.
_MORE_TABLES = 256


class _BucketSelection:
    """Selects from buckets, and keeps what is owed."""

    def __init__(self, selection: Selection, store: ResidualStore, world_size: int) -> None:
        self._selection = selection
        self._store = store
        #: Divides entries before the sum, as DDP itself averages. A tensor, because a device multiplies by the
        #: reciprocal of a number of the host's.
        self._size = torch.full((), float(world_size), dtype=torch.float32, device=store.device)
        self._one = torch.ones((), dtype=torch.float32, device=store.device)
        self._tables: dict[tuple[object, ...], Table] = {}
        #: Per parameter: dtype of its residual, and where that begins in a slot, in elements.
        self._owed = [
            (dtype, start // dtype.itemsize)
            for (start, _), dtype in zip(
                ResidualLayout(store.layout).ranges,
                (torch_dtype(spec.dtype) for spec in store.layout.parameters),
                strict=True,
            )
        ]

    def take(
        self, buffer: torch.Tensor, places: Places, entries: Entries, bins: Bins | None
    ) -> Binned | None:
        """Select from a bucket, once for each state that its parameters are in.

        Args:
            buffer: The bucket; its gradients are zeros then.
            places: Which entries are whose.
            entries: Filled; divided by the number of ranks, unless these are cut into bins.
            bins: Into which values are cut; None where they are sent as they are.

        Returns:
            What is sent instead of the values, where these are cut into bins.
        """
        size = self._size if bins is None else self._one
        pairs = list(self._store.whole_pairs([part.parameter for part in places.partial]))
        if not pairs:  # nothing of it leaves a residual
            nothing = buffer.new_empty(0).view(torch.uint8)
            pairs = [WholePair((), nothing, nothing)]
        if len(pairs) == 1:
            self._select(buffer, pairs[0], places.parts, entries, size)
        else:
            self._select_by_state(buffer, pairs, places, entries, size)
        binned = None
        if bins is not None:
            owed = [self._owed_in(pair, places) for pair in pairs if pair.parameters]
            scale = self._store.loss_scale.on(buffer.device)
            binned = bins.round(entries, owed, scale, self._size)
        for part in places.partial:
            self._store.written(part.parameter)
        return binned

    def room(self, places: Places, device: torch.device) -> Entries:
        """Make room for entries in the dtype of the residuals of those that are not sent whole."""
        return Entries.empty(places.count, self._owed[places.partial[0].parameter][0], device)

    def _owed_in(self, pair: WholePair, places: Places) -> Owed:
        """Return where the new residuals of a bucket's parameters lie that are in one state."""
        members = {*pair.parameters}
        parts = [part for part in places.partial if part.parameter in members]
        dtype = self._owed[parts[0].parameter][0]
        return Owed(
            pair.target.view(dtype), parts, [self._owed[part.parameter][1] for part in parts]
        )

    def _select_by_state(
        self,
        buffer: torch.Tensor,
        pairs: Sequence[WholePair],
        places: Places,
        entries: Entries,
        size: torch.Tensor,
    ) -> None:
        of_parameter: dict[int, tuple[torch.Tensor, ...]] = {}
        for number, pair in enumerate(pairs):
            members = {*pair.parameters}
            parts = [
                part
                for part in places.parts
                if part.parameter in members or (part.is_whole and not number)
            ]
            counts = [part.count for part in parts]
            found = Entries.empty(sum(counts), entries.values.dtype, buffer.device)
            self._select(buffer, pair, parts, found, size)
            split = (tensor.split(counts) for tensor in (found.positions, found.values))
            numbers = [part.parameter for part in parts]
            of_parameter |= dict(zip(numbers, zip(*split, strict=True), strict=True))
        for place, target in enumerate((entries.positions, entries.values)):
            torch.cat([of_parameter[part.parameter][place] for part in places.parts], out=target)

    def _select(
        self,
        buffer: torch.Tensor,
        pair: WholePair,
        parts: Sequence[Place],
        entries: Entries,
        size: torch.Tensor,
    ) -> None:
        """Select from the parameters of a bucket that are in one state."""
        dtype, first, last = self._range_of([p for p in parts if not p.is_whole], buffer.dtype)
        known = ((part.parameter, part.start, part.count) for part in parts)
        key = (*known, first, devices.queue_of(buffer.device))
        table = self._tables.get(key)
        if table is None:
            segments = [
                Segment(p.parameter, p.start, p.length, self._owed[p.parameter][1] - first, p.count)
                for p in parts
            ]
            if len(self._tables) >= len(self._owed) + _MORE_TABLES:
                self._tables.clear()
            table = self._tables[key] = table_of(segments, self._selection.block, buffer.device)
        source, target = (slot.view(dtype)[first:last] for slot in (pair.source, pair.target))
        scale = self._store.loss_scale.on(buffer.device)
        self._selection(Operands(buffer, source, target, scale, size), table, entries)

    def _range_of(
        self, parts: Sequence[Place], default: torch.dtype
    ) -> tuple[torch.dtype, int, int]:
        """Dtype of some parameters' residuals, and the range of a slot that they lie in."""
        if not parts:
            return default, 0, 0
        begun = [self._owed[part.parameter][1] for part in parts]
        ends = [start + part.length for start, part in zip(begun, parts, strict=True)]
        return self._owed[parts[0].parameter][0], min(begun), max(ends)


class FlatTopKReducer:
    """TopK for an accelerator, bound to one run; entries and residual have the bits of `TopKReducer`.

    Args:
        compressor: Its settings.
        layout: Of the run.
        residual: Keeps what is not sent.
        group: Process group of the ranks; None for a single process.
        peers: See ``Compressor.bind``.
        selection: Selects entries.
        reading: Reads what optimizers consume.
    """

    def __init__(
        self,
        compressor: TopK,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
        *,
        selection: Selection,
        reading: Reading,
    ) -> None:
        self._compressor = compressor
        self._group = group
        self._world_size = 1 if group is None else group.size()
        self._ranks = OfRanks(group, peers, lambda rank, _: rank)
        self._stamp = 0
        self._headers = Headers()
        self._selection = _BucketSelection(selection, residual, self._world_size)
        self._departed: DepartedTopK | None = None
        self._taken = Taken(layout, reading, list(self._ranks), self._world_size)
        self._warning = ChangeWarning(layout)
        self._places: dict[tuple[object, ...], Places] = {}
        self._most_places = len(layout.parameters) + _MORE_TABLES

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._stamp = stamp
        self._headers.begin()
        self._taken.begin()
        self._departed = None

    def close(self) -> None:
        """Do nothing: this reducer holds no thread and no group. See ``Reducer.close``."""

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        places = self._places_of(parameters, gradients, buffer)
        narrow = self._compressor.narrow
        is_alone = self._group is None or self._world_size == 1
        if not places.parts or (not places.partial and is_alone and narrow is None):
            return completed(buffer)  # the optimizer may consume what backward left
        wire = Wire.empty(places.count, buffer.dtype, buffer.device)
        entries, bins, view = Entries(wire.positions, wire.values), None, None
        if self._compressor.value_bits is not None and places.partial:
            bins = Bins(self._compressor.value_bits, places, buffer.dtype)
            entries = self._selection.room(places, buffer.device)
        binned = self._selection.take(buffer, places, entries, bins)
        sent = SentBucket(places, [], bins=bins)
        self._taken.add(sent)
        # Between gradients of FSDP there is padding, which nobody selected from.
        is_clear = sum(part.length for part in places.parts) == buffer.numel()
        if self._group is None or is_alone:
            cleared = buffer if is_clear else buffer.zero_()
            values = entries.values
            if bins is not None and binned is not None:
                values = bins.values(binned)
            done = completed(assigned(cleared, entries.positions, values, sent.seen))
        else:
            if bins is not None and binned is not None:
                wire, view = bins.wire(entries.positions, binned), bins.view
            done = gather(
                buffer,
                wire,
                stamp=self._stamp,
                group=self._group,
                headers=self._headers,
                seen=sent.seen,
                is_clear=is_clear,
                view=view,
            )
        if narrow is None or narrow == buffer.dtype:
            return done
        return chained(done, _rounding(buffer, sent, narrow, list(self._ranks)), buffer.device)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """See ``Reducer.consume``."""
        there = {i: g for i, g in enumerate(gradients) if g is not None}
        # Without DDP, nothing can change a gradient between the exchange and this call.
        self._taken.consume(there, factors, searches=self._group is not None)
        self._departed = None

    def skip(self, parameters: Collection[int]) -> None:
        """See ``Reducer.skip``."""
        self._taken.skip(parameters)
        self._departed = None

    def depart(self) -> DepartedTopK:
        """See ``Reducer.depart``."""
        if self._departed is None:
            headers, departure = self._headers.depart(), self._taken.depart()
            self._departed = DepartedTopK(headers, departure, self._ranks, self._warning)
        return self._departed

    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``."""
        departed = self.depart()
        payload = departed.payload(of)
        departed.learn()
        return payload

    def _places_of(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> Places:
        """Return which entries of a bucket are whose in this step; none of empty parameters."""
        begun, step = int(buffer.storage_offset()), step_of(self._stamp)
        rows = [
            (i, int(g.storage_offset()) - begun, n, self._compressor.kept(n, step))
            for i, g in zip(parameters, gradients, strict=True)
            if (n := g.numel())
        ]
        key = tuple(rows)
        if key not in self._places:
            if len(self._places) >= self._most_places:
                self._places.clear()
            self._places[key] = Places.of(rows, buffer.device)
        return self._places[key]


class DepartedTopK:
    """What optimizers consumed in one step, on its way to the host; see ``Departed``.

    Args:
        headers: Of the step's exchanges.
        departure: Has the entries.
        ranks: Whose payloads are made.
        warning: Names gradients that were changed.
    """

    def __init__(
        self,
        headers: DepartedHeaders,
        departure: Departure,
        ranks: OfRanks[int],
        warning: ChangeWarning,
    ) -> None:
        self._departure = departure
        self._headers = headers
        self._ranks = ranks
        self._warning = warning

    @property
    def travels(self) -> bool:
        """See ``Departed``."""
        return self._departure.travels

    @property
    def has_missed(self) -> bool:
        """See ``Departed``."""
        return bool(self._departure.missed)

    def learn(self) -> None:
        """See ``Departed``."""
        self._departure.learn()

    def payload(self, of: int | None = None) -> Payload:
        """See ``Departed``."""
        self._headers.confirm()
        entries = self._departure.entries(self._ranks.of(of))
        self._warning.say(self._departure.strange)
        lacks = missed_section(self._departure.missed)
        return Payload((*entries.sections(), *entries.foreign_sections(), *lacks))


def _rounding(
    buffer: torch.Tensor, sent: SentBucket, narrow: torch.dtype, ranks: Sequence[int]
) -> Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]:
    """Return what follows an exchange whose average is rounded."""

    def finish(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        averaged = future.value()
        rounded = buffer.to(narrow)
        buffer.copy_(rounded)
        sent.narrow = {rank: rounded.index_select(0, sent.seen[rank]) for rank in ranks}
        return averaged

    return finish
