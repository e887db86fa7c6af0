"""TopK over whole buckets: what one bucket launches does not depend on how many parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.changes import ChangeWarning, Known
from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.exchange import Headers, Wire, assigned, gather, step_of
from lowdiff.compressors.flat import reading_on, selection_on
from lowdiff.compressors.flat.selection import Entries, Operands
from lowdiff.compressors.flat.sent import Places, Sent, Taken
from lowdiff.compressors.flat.table import Segment, Table, table_of
from lowdiff.compressors.of_ranks import OfRanks
from lowdiff.compressors.topk import TopK
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.protocols import ResidualStore, WholePair
from lowdiff.types import Layout, Payload, ResidualLayout

#: Tables that are kept, beside one per parameter; a warm-up of the density makes new ones at every step.
_MORE_TABLES = 256


class FlatTopKReducer:
    """TopK for an accelerator, bound to one run; entries and residual have the bits of `TopKReducer`."""

    def __init__(
        self,
        compressor: TopK,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        self._compressor = compressor
        self._group = group
        self._world_size = 1 if group is None else group.size()
        self._ranks = OfRanks(group, peers, lambda rank, _: rank)
        self._stamp = 0
        self._headers = Headers()
        self._store = residual
        dtypes = {torch_dtype(dtype) for dtype in layout.dtypes}
        self._selection = selection_on(residual.device, dtypes)
        reading = reading_on(residual.device, self._selection)
        self._taken = Taken(layout, reading, list(self._ranks), self._world_size)
        self._warning = ChangeWarning(layout)
        #: Divides entries before the sum, as DDP itself averages. A tensor, because a device multiplies by the
        #: reciprocal of a number of the host's.
        self._size = torch.full(
            (), float(self._world_size), dtype=torch.float32, device=residual.device
        )
        self._tables: dict[tuple[object, ...], Table] = {}
        self._places: dict[tuple[object, ...], Places] = {}
        #: Per parameter: dtype of its residual, and where that begins in a slot, in elements.
        self._owed = [
            (dtype, start // dtype.itemsize)
            for (start, _), dtype in zip(
                ResidualLayout(residual.layout).ranges,
                (torch_dtype(spec.dtype) for spec in residual.layout.parameters),
                strict=True,
            )
        ]

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._stamp = stamp
        self._headers.begin()
        self._taken.begin()

    def close(self) -> None:
        """Do nothing: this reducer holds no thread and no group. See ``Reducer.close``."""

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        lengths = {i: g.numel() for i, g in zip(parameters, gradients, strict=True)}
        step = step_of(self._stamp)
        kept = {i: self._compressor.kept(n, step) for i, n in lengths.items() if n}
        is_whole = all(k == lengths[i] for i, k in kept.items())
        narrow = self._compressor.narrow
        if is_whole and (not kept or (self._world_size == 1 and narrow is None)):
            return completed(buffer)  # the optimizer may consume what backward left
        begun = int(buffer.storage_offset())
        starts = {
            i: int(g.storage_offset()) - begun for i, g in zip(parameters, gradients, strict=True)
        }
        wire = Wire.empty(sum(kept.values()), buffer.dtype, buffer.device)
        own = torch.empty(sum(kept.values()), dtype=torch.int64, device=buffer.device)
        self._take(buffer, starts, lengths, kept, Entries(wire.positions, own, wire.values))
        for i, k in kept.items():
            if k < lengths[i]:
                self._store.written(i)
        sent = Sent(self._places_of(starts, lengths, kept, buffer.device), [])
        self._taken.sent.append(sent)
        # Between gradients of FSDP there is padding, which nobody selected from.
        is_clear = sum(lengths.values()) == buffer.numel()
        if self._group is None or self._world_size == 1:
            cleared = buffer if is_clear else buffer.zero_()
            done = completed(assigned(cleared, wire.positions, wire.values, sent.seen))
        else:
            done = gather(
                buffer,
                wire,
                stamp=self._stamp,
                group=self._group,
                headers=self._headers,
                seen=sent.seen,
                is_clear=is_clear,
            )
        if narrow is None or narrow == buffer.dtype:
            return done
        return chained(done, _rounding(buffer, sent, narrow, list(self._ranks)), buffer.device)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """See ``Reducer.consume``."""
        there = {i: g for i, g in enumerate(gradients) if g is not None}
        # Without DDP, nothing can change a gradient between the exchange and this call.
        self._taken.consume(there, factors, searches=self._group is not None)

    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``."""
        self._headers.confirm()
        entries = self._taken.entries(self._ranks.of(of))
        self._warning.say(self._taken.strange)
        return Payload((*entries.sections(), *entries.foreign_sections()))

    @property
    def has_missed(self) -> bool:
        """See ``Reducer.has_missed``."""
        return self._taken.has_missed

    def _places_of(
        self,
        starts: dict[int, int],
        lengths: dict[int, int],
        kept: dict[int, int],
        device: torch.device,
    ) -> Places:
        key = (*((i, starts[i], k) for i, k in kept.items()), devices.queue_of(device))
        if key not in self._places:
            if len(self._places) >= len(self._owed) + _MORE_TABLES:
                self._places.clear()
            self._places[key] = Places.of(starts, lengths, kept, device)
        return self._places[key]

    def _take(
        self,
        buffer: torch.Tensor,
        starts: dict[int, int],
        lengths: dict[int, int],
        kept: dict[int, int],
        entries: Entries,
    ) -> None:
        """Select from a bucket, once for each state that its parameters are in.

        Args:
            buffer: The bucket; its gradients are zeros then.
            starts: Layout index -> place in the bucket.
            lengths: Layout index -> number of elements.
            kept: Layout index -> entries to send, of those that have elements.
            entries: Filled.
        """
        left = [i for i, k in kept.items() if k < lengths[i]]
        pairs = list(self._store.whole_pairs(left))
        if not pairs:  # nothing of it leaves a residual
            nothing = buffer.new_empty(0).view(torch.uint8)
            pairs = [WholePair((), nothing, nothing)]
        sent_whole = [i for i, k in kept.items() if k == lengths[i]]
        if len(pairs) == 1:
            self._select(buffer, pairs[0], list(kept), starts, lengths, kept, entries)
            return
        parts: dict[int, tuple[torch.Tensor, ...]] = {}
        for number, pair in enumerate(pairs):
            members = {*pair.parameters, *(() if number else sent_whole)}
            ordered = [i for i in kept if i in members]
            counts = [kept[i] for i in ordered]
            found = Entries.empty(sum(counts), buffer.dtype, buffer.device)
            self._select(buffer, pair, ordered, starts, lengths, kept, found)
            split = (tensor.split(counts) for tensor in (found.positions, found.own, found.values))
            parts |= dict(zip(ordered, zip(*split, strict=True), strict=True))
        for place, target in enumerate((entries.positions, entries.own, entries.values)):
            torch.cat([parts[i][place] for i in kept], out=target)

    def _select(
        self,
        buffer: torch.Tensor,
        pair: WholePair,
        parameters: Sequence[int],
        starts: dict[int, int],
        lengths: dict[int, int],
        kept: dict[int, int],
        entries: Entries,
    ) -> None:
        """Select from the parameters of a bucket that are in one state."""
        known = [(i, starts[i], kept[i]) for i in parameters]
        dtype, first, last = self._range_of(pair.parameters, lengths, buffer.dtype)
        key = (*known, first, devices.queue_of(buffer.device))
        table = self._tables.get(key)
        if table is None:
            segments = [
                Segment(i, start, lengths[i], self._owed[i][1] - first, k) for i, start, k in known
            ]
            if len(self._tables) >= len(self._owed) + _MORE_TABLES:
                self._tables.clear()
            table = self._tables[key] = table_of(segments, self._selection.block, buffer.device)
        source, target = (slot.view(dtype)[first:last] for slot in (pair.source, pair.target))
        scale = self._store.loss_scale.on(buffer.device)
        operands = Operands(buffer, source, target, scale, self._size)
        self._selection(operands, table, entries)

    def _range_of(
        self, parameters: Sequence[int], lengths: dict[int, int], default: torch.dtype
    ) -> tuple[torch.dtype, int, int]:
        """Dtype of some parameters' residuals, and the range of a slot that they lie in."""
        if not parameters:
            return default, 0, 0
        dtype = self._owed[parameters[0]][0]
        ends = [self._owed[i][1] + lengths[i] for i in parameters]
        return dtype, min(self._owed[i][1] for i in parameters), max(ends)


def _rounding(
    buffer: torch.Tensor, sent: Sent, narrow: torch.dtype, ranks: Sequence[int]
) -> Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]:
    """Return what follows an exchange whose average is rounded."""

    def finish(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        averaged = future.value()
        rounded = buffer.to(narrow)
        buffer.copy_(rounded)
        sent.narrow = {rank: rounded.index_select(0, sent.seen[rank]) for rank in ranks}
        return averaged

    return finish
