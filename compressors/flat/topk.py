"""TopK over whole buckets: what one bucket launches does not depend on how many parameters it has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.exchange import exchange
from lowdiff.compressors.flat import selection_on
from lowdiff.compressors.flat.selection import Entries
from lowdiff.compressors.flat.table import Segment, Table, table_of
from lowdiff.compressors.topk import TopK, TopKReducer
from lowdiff.core.layout import ResidualLayout, torch_dtype
from lowdiff.protocols import ResidualStore, WholePair
from lowdiff.types import Layout

#: What kernels take; buckets of other dtypes are compressed parameter by parameter.
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Tables that are kept; a warm-up of the density makes new ones at every step.
_MOST_TABLES = 256


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
        self._selection = selection_on(residual.device)
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
        if buffer.dtype not in _DTYPES:
            return super().reduce(parameters, gradients, buffer)
        kept = {
            i: self.kept(g.numel()) for i, g in zip(parameters, gradients, strict=True) if g.numel()
        }
        lengths = {i: g.numel() for i, g in zip(parameters, gradients, strict=True)}
        if kept == {i: n for i, n in lengths.items() if n} and self._needs_nothing:
            return completed(buffer)
        begun = int(buffer.storage_offset())
        starts = {
            i: int(g.storage_offset()) - begun for i, g in zip(parameters, gradients, strict=True)
        }
        entries = self._take(buffer, starts, lengths, kept)
        counts = [kept.get(i, 0) for i in parameters]
        seen: list[torch.Tensor] = []
        for i, own in zip(parameters, entries.own.split(counts), strict=True):
            self.stored.own.select(i, own)
            if own.numel() < lengths[i]:
                self.remember_exchanged(i, seen, starts[i])
                self._store.written(i)
        if self.world_size > 1:
            entries.values.div_(self.world_size)  # before the sum, as DDP itself averages
        done = exchange(
            buffer,
            entries.positions,
            entries.values,
            stamp=self.stamp,
            group=self.group,
            headers=self.headers,
            seen=None if self.group is None else seen,
            # Between gradients of FSDP there is padding, which nobody selected from.
            is_clear=sum(lengths.values()) == buffer.numel(),
        )
        if self.compressor.narrow is None and not self.stored.peers:
            return done
        return chained(
            done, self.finishing(parameters, gradients, buffer, counts, seen), buffer.device
        )

    @property
    def _needs_nothing(self) -> bool:
        """Whether the optimizer may consume what backward left, where all entries are kept."""
        return self.world_size == 1 and self.compressor.narrow is None

    def _take(
        self,
        buffer: torch.Tensor,
        starts: dict[int, int],
        lengths: dict[int, int],
        kept: dict[int, int],
    ) -> Entries:
        """Select from a bucket, once for each state that its parameters are in.

        Args:
            buffer: The bucket; its gradients are zeros then.
            starts: Layout index -> place in the bucket.
            lengths: Layout index -> number of elements.
            kept: Layout index -> entries to send, of those that have elements.
        """
        left = [i for i, k in kept.items() if k < lengths[i]]
        pairs = list(self._store.whole_pairs(left))
        if not pairs:  # nothing of it leaves a residual
            nothing = buffer.new_empty(0).view(torch.uint8)
            pairs = [WholePair((), nothing, nothing)]
        sent_whole = [i for i, k in kept.items() if k == lengths[i]]
        found: dict[int, Entries] = {}
        for number, pair in enumerate(pairs):
            own = {*pair.parameters, *(() if number else sent_whole)}
            ordered = [i for i in kept if i in own]
            entries = self._select(buffer, pair, ordered, starts, lengths, kept)
            if len(pairs) == 1:
                return entries
            counts = [kept[i] for i in ordered]
            parts = (
                entries.positions.split(counts),
                entries.own.split(counts),
                entries.values.split(counts),
            )
            found |= {i: Entries(*of) for i, *of in zip(ordered, *parts, strict=True)}
        in_order = [found[i] for i in kept]
        return Entries(
            torch.cat([entries.positions for entries in in_order]),
            torch.cat([entries.own for entries in in_order]),
            torch.cat([entries.values for entries in in_order]),
        )

    def _select(
        self,
        buffer: torch.Tensor,
        pair: WholePair,
        parameters: Sequence[int],
        starts: dict[int, int],
        lengths: dict[int, int],
        kept: dict[int, int],
    ) -> Entries:
        """Select from the parameters of a bucket that are in one state."""
        known = [(i, starts[i], kept[i]) for i in parameters]
        dtype, first, last = self._range_of(pair.parameters, lengths, buffer.dtype)
        key = (*known, first)
        table = self._tables.get(key)
        if table is None:
            segments = [
                Segment(i, start, lengths[i], self._owed[i][1] - first, k) for i, start, k in known
            ]
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            table = self._tables[key] = table_of(segments, self._selection.block, buffer.device)
        source, target = (slot.view(dtype)[first:last] for slot in (pair.source, pair.target))
        scale = self._store.loss_scale.on(buffer.device)
        return self._selection(buffer, source, target, scale, table)

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
