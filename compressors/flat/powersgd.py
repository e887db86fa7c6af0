"""PowerSGD over all matrices of a bucket: what one bucket launches does not depend on how many it has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.changes import Known
from lowdiff.compressors.exchange import DepartedHeaders
from lowdiff.compressors.flat.compared import Compared, Departure
from lowdiff.compressors.flat.matrices import Matrices, Matrix, matrices_of
from lowdiff.compressors.flat.matrix_operators import Products
from lowdiff.compressors.lane import share
from lowdiff.compressors.powersgd import PowerSGD, PowerSGDReducer, matrix_of, starts_of
from lowdiff.compressors.sections import factor_sections, pieces
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.protocols import ResidualStore, WholePair
from lowdiff.types import Layout, Payload, ResidualLayout


class FlatPowerSGDReducer(PowerSGDReducer):
    """`PowerSGDReducer` for an accelerator, bound to one run.

    The bits of a matrix depend on no other one and on no bucket, as those of `PowerSGDReducer`; they are others,
    because products are added up in another order, and P is made orthogonal by its Gram matrix.
    """

    def __init__(
        self,
        compressor: PowerSGD,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
        *,
        products: Products,
    ) -> None:
        super().__init__(compressor, layout, residual, group, peers)
        self._products = products
        self._tables: dict[tuple[object, ...], Matrices] = {}
        self._begun = [start for start, _ in ResidualLayout(residual.layout).ranges]
        #: Factors of this step, in the order of buckets and backward passes.
        self._made: list[tuple[Matrices, torch.Tensor]] = []
        shares = [stored.consumed.share for stored in self.stored]
        self._compared = Compared(products, compressor.matrix_rank, shares)
        self._departed: DepartedPowerSGD | None = None

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        super().begin(stamp)
        self._made.clear()
        self._compared.begin()
        self._departed = None

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """See ``Reducer.consume``; nothing is compared on the host."""
        there = {i: g for i, g in enumerate(gradients) if g is not None}
        for stored in self.stored:
            stored.kept |= {i: stored.held[i] for i in there if i in stored.held}
        self._compared.consume(there, self._made, factors)
        self._departed = None

    def skip(self, parameters: Collection[int]) -> None:
        """See ``Reducer.skip``."""
        self._compared.skip(parameters)
        self._departed = None

    def depart(self) -> DepartedPowerSGD:
        """See ``Reducer.depart``."""
        if self._departed is None:
            kept = [
                {
                    i: both[slice(*share(both.numel(), stored.rank, self.lane.world_size))]
                    for i, both in stored.kept.items()
                }
                for stored in self.stored
            ]
            self._departed = DepartedPowerSGD(
                self, self._headers.depart(), self._compared.depart(kept)
            )
        return self._departed

    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``."""
        departed = self.depart()
        payload = departed.payload(of)
        departed.learn()
        return payload

    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """See ``RepresentedReducer``."""
        own = {i: g for i, g in gradients.items() if i in self._q_of}
        if not own:
            super().average(gradients, buffer)
            return
        dense = {i: g for i, g in gradients.items() if i not in own}
        scale = self.residual.loss_scale.on(buffer.device)
        rank, products = self.compressor.matrix_rank, self._products
        # One exchange of each kind, whatever states the matrices of this rank are in.
        states = [
            (pair, *self._table(pair, own, buffer)) for pair in self.residual.whole_pairs(own)
        ]
        projected = [
            products.project(
                buffer, source, target, scale, pair.source.view(torch.float32), table, rank
            )
            for pair, table, source, target in states
        ]
        tables = [table for _, table, *_ in states]
        self.lane.mean_of(dense | self._in_order(own, tables, [left for left, _ in projected]))
        multiplied = [
            products.back(target, left, used, table, rank)
            for (_, table, _, target), (left, used) in zip(states, projected, strict=True)
        ]
        self.lane.mean_of(
            self._in_order(own, tables, [right for _, right in multiplied], is_right=True)
        )
        for (pair, table, _, target), (factors, right) in zip(states, multiplied, strict=True):
            last, kept = (slot.view(torch.float32) for slot in (pair.source, pair.target))
            products.update(buffer, target, scale, last, kept, factors, right, table, rank)
            self._made.append((table, factors))
            parts = factors.split(table.counts)
            for matrix, both in zip(table.matrices, parts, strict=True):
                for stored in self.stored:
                    stored.held[matrix.parameter] = both
                self.residual.written(matrix.parameter)
                self.residual.written(self._q_of[matrix.parameter], of=matrix.parameter)

    def _in_order(
        self,
        gradients: Iterable[int],
        tables: Sequence[Matrices],
        values: Sequence[torch.Tensor],
        *,
        is_right: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Return P, or Q, of all matrices in the bucket's order, whatever states they are in on this rank.

        Args:
            gradients: Layout indices in the bucket's order.
            tables: Of each state.
            values: Of each state's matrices, one after the other.
            is_right: Whether these are Q.
        """
        if len(tables) == 1:
            return {-1: values[0]}  # as one, beside layout indices
        rank, parts = self.compressor.matrix_rank, dict[int, torch.Tensor]()
        for table, own in zip(tables, values, strict=True):
            sizes = [rank * (m.columns if is_right else m.rows) for m in table.matrices]
            numbers = [matrix.parameter for matrix in table.matrices]
            parts |= dict(zip(numbers, own.split(sizes), strict=True))
        return {i: parts[i] for i in gradients}

    def _table(
        self, pair: WholePair, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor
    ) -> tuple[Matrices, torch.Tensor, torch.Tensor]:
        """Return where matrices in one state lie, and the residual that is read and written of them."""
        begun = int(buffer.storage_offset())
        known = [(i, int(gradients[i].storage_offset()) - begun) for i in pair.parameters]
        dtype = torch_dtype(self.residual.layout.parameters[pair.parameters[0]].dtype)
        key = (*known, devices.queue_of(buffer.device))
        table = self._tables.get(key)
        if table is None:
            specs, width = self.layout.parameters, dtype.itemsize
            matrices = [
                Matrix(
                    i,
                    start,
                    self._begun[i] // width,
                    *matrix_of(specs[i]),
                    self._begun[self._q_of[i]] // 4,
                )
                for i, start in known
            ]
            drawn = [
                starts_of(self.compressor, i, matrix.columns)
                for (i, _), matrix in zip(known, matrices, strict=True)
            ]
            table = matrices_of(
                matrices, self.compressor.matrix_rank, drawn, self._products.tiling, buffer.device
            )
            self._tables[key] = table
        return table, pair.source.view(dtype), pair.target.view(dtype)

    def rebuilt(self, parameter: int, held: torch.Tensor, share: slice) -> torch.Tensor:
        """See ``RepresentedReducer``."""
        spec = self.layout.parameters[parameter]
        out = torch.empty(
            share.stop - share.start, dtype=torch_dtype(spec.dtype), device=held.device
        )
        rank = self.compressor.matrix_rank
        self._products.expand(held, *matrix_of(spec), rank, share.start, out)
        return out


class DepartedPowerSGD:
    """What optimizers consumed in one step, on its way to the host; see ``Departed``.

    Args:
        reducer: Knows ranks and layout, and names gradients that were changed.
        headers: Of the step's exchanges.
        departure: Has verdicts, factors and values.
    """

    def __init__(
        self, reducer: FlatPowerSGDReducer, headers: DepartedHeaders, departure: Departure
    ) -> None:
        self._reducer = reducer
        self._headers = headers
        self._departure = departure

    @property
    def travels(self) -> bool:
        """See ``Departed``."""
        return self._departure.travels

    @property
    def has_missed(self) -> bool:
        """See ``Departed``."""
        return self._departure.has_missed

    def learn(self) -> None:
        """See ``Departed``."""
        self._departure.learn()

    def payload(self, of: int | None = None) -> Payload:
        """See ``Departed``."""
        self._headers.confirm()
        reducer = self._reducer
        ranks = {stored.rank: n for n, stored in enumerate(reducer.stored)}
        own = self._departure.arrived()[ranks[reducer.stored.of(of).rank]]
        reducer.warning.say(self._departure.strange)
        return Payload(
            (
                *pieces("low_rank", reducer.layout, own.represented),
                *factor_sections(own.factors),
                *pieces("whole", reducer.layout, own.whole),
            )
        )
