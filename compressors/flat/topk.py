"""TopK over whole buckets: what one bucket launches does not depend on how many parameters it has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.exchange import Wire, assigned, gather
from lowdiff.compressors.flat import DTYPES, selection_on
from lowdiff.compressors.flat.selection import Entries, Operands
from lowdiff.compressors.flat.table import Segment, Table, table_of
from lowdiff.compressors.topk import TopK, TopKReducer
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.protocols import ResidualStore, WholePair
from lowdiff.types import Layout, ResidualLayout

#: Tables that are kept, beside one per parameter; a warm-up of the density makes new ones at every step.
_MORE_TABLES = 256


class FlatTopKReducer(TopKReducer):
    """`TopKReducer` for an accelerator, bound to one run; entries and residual have the same bits."""

    def __init__(
        self,
        compressor: TopK,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        super().__init__(compressor, layout, residual, group, peers)
        self._store = residual
        self._selection = selection_on(residual.device, {torch_dtype(d) for d in layout.dtypes})
        #: Divides entries before the sum, as DDP itself averages. A tensor, because a device multiplies by the
        #: reciprocal of a number of the host's.
        self._size = torch.full(
            (), float(self.world_size), dtype=torch.float32, device=residual.device
        )
        self._tables: dict[tuple[object, ...], Table] = {}
        #: Per parameter: dtype of its residual, and where that begins in a slot, in elements.
        self._owed = [
            (dtype, start // dtype.itemsize)
            for (start, _), dtype in zip(
                ResidualLayout(residual.layout).ranges,
                (torch_dtype(spec.dtype) for spec in residual.layout.parameters),
                strict=True,
            )
        ]

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        if buffer.dtype not in DTYPES:
            return super().reduce(parameters, gradients, buffer)
        lengths = {i: g.numel() for i, g in zip(parameters, gradients, strict=True)}
        kept = {i: self.kept(n) for i, n in lengths.items() if n}
        is_whole = all(k == lengths[i] for i, k in kept.items())
        if not kept:
            return super().reduce(parameters, gradients, buffer)
        if is_whole and self.world_size == 1 and self.compressor.narrow is None:
            return completed(buffer)  # the optimizer may consume what backward left
        begun = int(buffer.storage_offset())
        starts = {
            i: int(g.storage_offset()) - begun for i, g in zip(parameters, gradients, strict=True)
        }
        counts = [kept.get(i, 0) for i in parameters]
        wire = Wire.empty(sum(counts), buffer.dtype, buffer.device)
        own = torch.empty(sum(counts), dtype=torch.int64, device=buffer.device)
        entries = Entries(wire.positions, own, wire.values)
        self._take(buffer, starts, lengths, kept, entries)
        seen: list[torch.Tensor] = []
        for i, positions in zip(parameters, own.split(counts), strict=True):
            self.stored.own.select(i, positions)
            if positions.numel() < lengths[i]:
                self.remember_exchanged(i, seen, starts[i])
                self._store.written(i)
        # Between gradients of FSDP there is padding, which nobody selected from.
        is_clear = sum(lengths.values()) == buffer.numel()
        if self.group is None or self.world_size == 1:
            cleared = buffer if is_clear else buffer.zero_()
            of_all = None if self.group is None else seen
            done = completed(assigned(cleared, wire.positions, wire.values, of_all))
        else:
            done = gather(
                buffer,
                wire,
                stamp=self.stamp,
                group=self.group,
                headers=self.headers,
                seen=seen,
                is_clear=is_clear,
            )
        if self.compressor.narrow is None and not self.stored.peers:
            return done
        return chained(
            done, self.finishing(parameters, gradients, buffer, counts, seen), buffer.device
        )

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

    def round(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> None:
        """See ``TopKReducer.round``."""
        narrow = self.compressor.narrow
        if narrow is None or narrow == buffer.dtype:
            return
        rounded = buffer.to(narrow)
        buffer.copy_(rounded)
        begun = int(buffer.storage_offset())
        for i, gradient in zip(parameters, gradients, strict=True):
            start = int(gradient.storage_offset()) - begun
            for stored in self.stored:
                stored.round(i, rounded[start : start + gradient.numel()])
