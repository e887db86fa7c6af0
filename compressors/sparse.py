"""Common part of compressors that keep some entries: turn a selection into a payload and back.

Each rank stores the consumed values at its own positions. Scaling and clipping are thus part of the
values, and recovery assigns them. With a narrower value dtype, a rank stores the narrow values and
the factors that were applied to them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lowdiff.compressors.changes import (
    ChangeWarning,
    Factors,
    find_factors,
    has_foreign_entries,
    multiply,
)
from lowdiff.compressors.exchange import Headers, step_of
from lowdiff.compressors.feedback import ErrorFeedback, is_used
from lowdiff.compressors.lane import Lane, share, shares_in
from lowdiff.compressors.sections import factor_sections, factors_of, floats, pieces, shared_parts
from lowdiff.compressors.settings import SparseSettings
from lowdiff.core.layout import INT_OF_BYTES, bits
from lowdiff.protocols import ResidualStore
from lowdiff.types import Bits, Block, Layout, Payload, Section

#: Positions inside a parameter that this rank stores, and the values at these positions.
Entries = tuple[torch.Tensor, torch.Tensor]
_Keys: TypeAlias = "npt.NDArray[np.signedinteger[Any]]"
#: Number of elements below which one exact partition is cheaper than sampling first.
_SAMPLE_FROM = 1 << 15
_SAMPLES = 1 << 15


class SparseReducer:
    """Reducer without the parts that select and exchange entries; subclasses add those.

    Their ``reduce`` calls `remember_selected` for every parameter, and `remember_exchanged` for one that
    was not exchanged whole.

    Large because one step's selection, exchange and consumption must be forgotten together.
    """

    def __init__(
        self,
        compressor: SparseSettings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        value_dtype: torch.dtype | None = None,
    ) -> None:
        self.compressor = compressor
        self.selector = MagnitudeSelector()
        self.layout = layout
        self.feedback = ErrorFeedback(residual)
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else group.size()
        self.value_dtype = value_dtype
        #: Layout index -> positions that this rank stores. A whole parameter is divided into
        #: shares.
        self.selected: dict[int, torch.Tensor] = {}
        #: `selected` as it was in earlier backward passes of this step.
        self._earlier: dict[int, torch.Tensor] = {}
        #: Layout index -> one entry per backward pass: the positions that the ranks exchanged
        #: (ascending per rank), and the position of the parameter's first element among them.
        self._exchanged: dict[int, list[tuple[list[torch.Tensor], int]]] = {}
        self.consumed: dict[int, Entries] = {}
        #: Layout index -> this rank's range of a gradient that has entries no rank exchanged.
        self._foreign: dict[int, torch.Tensor] = {}
        self._warning = ChangeWarning(layout)
        self.headers = Headers()
        self.stamp = self.step = 0
        self._narrow: dict[int, torch.Tensor] = {}
        #: Layout index -> entries consumed as narrow values, and the factors that give the final
        #: ones.
        self._consumed_narrow: dict[int, Entries] = {}
        self._factors: dict[int, Factors] = {}

    def begin(self, stamp: int) -> None:
        """Forget the last step's selection; see ``Reducer.begin``."""
        self.selected.clear()
        self._earlier.clear()
        self._exchanged.clear()
        self.consumed.clear()
        self._foreign.clear()
        self._narrow.clear()
        self._consumed_narrow.clear()
        self._factors.clear()
        self.headers.begin()
        self.stamp, self.step = stamp, step_of(stamp)

    def kept(self, numel: int) -> int:
        """Return how many entries of a parameter are exchanged in this step."""
        return self.compressor.kept(numel, self.step)

    def close(self) -> None:
        """Do nothing: this reducer holds no thread and no group. See ``Reducer.close``."""

    def averaged(self, parameters: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Finish a bucket whose gradients now hold the average over ranks."""
        for i, gradient in zip(parameters, gradients, strict=True):
            if self.value_dtype is not None and self.value_dtype != gradient.dtype:
                rounded = gradient.to(self.value_dtype)
                gradient.copy_(rounded)
                self._narrow[i] = rounded[self._positions(i, gradient.numel())].clone()

    def remember_selected(self, parameter: int, positions: torch.Tensor) -> None:
        """Store these positions of a parameter, plus earlier passes' positions that are still in use.

        DDP keeps the previous pass's gradient if no rank used the parameter in the last pass.
        """
        earlier = self.selected.get(parameter)
        if earlier is not None:
            known = self._earlier.get(parameter)
            self._earlier[parameter] = earlier if known is None else torch.cat([known, earlier])
        self.selected[parameter] = positions

    def remember_exchanged(self, parameter: int, seen: list[torch.Tensor], offset: int = 0) -> None:
        """Remember that entries of a parameter were exchanged.

        Args:
            parameter: Layout index.
            seen: Positions by rank, each ascending; the exchange may fill this list later.
            offset: The position of the parameter's first element.
        """
        self._exchanged.setdefault(parameter, []).append((seen, offset))

    def exchanged(self, parameter: int, share: slice) -> list[torch.Tensor] | None:
        """Return the positions that any rank exchanged in a range of a parameter.

        Positions are counted from the range's start. Return None if the parameter was exchanged
        whole or was not exchanged.
        """
        if parameter not in self._exchanged:
            return None
        found = []
        for seen, offset in self._exchanged[parameter]:
            for own in seen:
                first, last = offset + share.start, offset + share.stop
                begin, end = torch.searchsorted(own, own.new_tensor([first, last])).tolist()
                found.append(own[begin:end] - first)
        return found

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Factors = ()) -> None:
        """Take what the optimizer consumes; see ``Reducer.consume``.

        A tensor that was exchanged whole is divided over the ranks.
        """
        fresh = {i: self._own(i, g) for i, g in enumerate(gradients) if g is not None}
        strange: set[int] = set()
        if fresh and not _all_finite(fresh.values()):
            # Clipping by a NaN norm turns every entry NaN, including entries that no rank selected.
            for i, (_, values) in fresh.items():
                whole = gradients[i]
                if whole is not None and not bool(values.isfinite().all()):
                    fresh[i] = (torch.arange(whole.numel(), device=whole.device), whole.clone())
                    strange.add(i)
        for i, (own, values) in fresh.items():
            narrow = self._narrow.get(i)
            if narrow is not None and narrow.numel() == values.numel():
                self._keep_narrow(i, (own, narrow), values, factors)
        self.consumed |= fresh
        # Without DDP, nothing can change a gradient between the exchange and this call.
        if self.group is not None:
            self._keep_foreign(
                {i: g for i in fresh if i not in strange and (g := gradients[i]) is not None}
            )

    def _keep_foreign(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Store this rank's range of every gradient that has entries no rank exchanged.

        Gradients on an accelerator are not examined: reading them would stop the host.
        """
        for i, gradient in gradients.items():
            self._foreign.pop(i, None)  # a step may be tried again behind one that was broken off
            mine = slice(*share(gradient.numel(), self.rank, self.world_size))
            exchanged = self.exchanged(i, mine)
            if exchanged is None or not gradient.is_cpu:
                continue
            if has_foreign_entries(gradient[mine], exchanged):
                self._foreign[i] = gradient[mine].clone()
        self._warning.say(list(self._foreign))

    def _keep_narrow(
        self, parameter: int, narrow: Entries, values: torch.Tensor, known: Factors
    ) -> None:
        last = next(reversed(self._factors.values()), ())
        tries = dict.fromkeys([last, *(known[: n + 1] for n in reversed(range(len(known))))])
        if not bool(values.isfinite().all()):
            return
        found = find_factors(narrow[1].to(values.dtype), values, [f for f in tries if f])
        if found is not None:
            self._factors[parameter] = found
            self._consumed_narrow[parameter] = narrow

    def payload(self) -> Payload:
        """Return ascending layout indices and their values; see ``Reducer.payload``."""
        self.headers.confirm()
        full = {i: own for i, own in self.consumed.items() if i not in self._consumed_narrow}
        sections = self.indexed("", full)
        if self._consumed_narrow:
            sections += self.indexed("narrow/", self._consumed_narrow)
            sections += factor_sections(self._factors)
        return Payload((*sections, *self.foreign_sections()))

    def foreign_sections(self) -> list[Section]:
        """Return this rank's ranges of gradients that have entries no rank exchanged."""
        return pieces("whole", self.layout, self._foreign)

    def indexed(self, prefix: str, entries: Mapping[int, Entries]) -> list[Section]:
        """Return entries as sections ``PREFIXindices/DTYPE`` and ``PREFIXvalues/DTYPE``."""
        sections: list[Section] = []
        for dtype in self.layout.dtypes:
            chosen = [
                (spec.offset, *entries[i])
                for i, spec in self.layout.of_dtype(dtype)
                if i in entries
            ]
            if chosen:
                indices = torch.cat([own for _, own, _ in chosen])
                pieces = indices.split([own.numel() for _, own, _ in chosen])
                for (offset, _, _), piece in zip(chosen, pieces, strict=True):
                    piece += offset
                values = torch.cat([values for _, _, values in chosen]).cpu()
                sections += [
                    Section(f"{prefix}indices/{dtype}", "ascending", indices.cpu().numpy()),
                    Section(f"{prefix}values/{dtype}", "planes", bits(values)),
                ]
        return sections

    def _own(self, parameter: int, gradient: torch.Tensor) -> Entries:
        """Return the positions that this rank stores of a parameter, and the final values there."""
        positions = self._positions(parameter, gradient.numel())
        if isinstance(positions, slice):
            values = gradient[positions].clone()
            return torch.arange(positions.start, positions.stop, device=gradient.device), values
        earlier = self._earlier.get(parameter)
        if earlier is not None:
            filled = gradient.view(INT_OF_BYTES[gradient.element_size()])[earlier] != 0
            union = torch.cat([positions, earlier[filled]]).unique()  # ascending
            positions = union if union.numel() > positions.numel() else positions
        return positions, gradient.index_select(0, positions)

    def _positions(self, parameter: int, numel: int) -> torch.Tensor | slice:
        selected = self.selected.get(parameter)
        if selected is not None and selected.numel() < numel:
            return selected
        if self.world_size == 1:
            return slice(0, numel)
        return slice(*share(numel, self.rank, self.world_size))

    def send(
        self,
        parameter: int,
        gradient: torch.Tensor,
        total: torch.Tensor,
        chosen: torch.Tensor,
        *,
        are_largest: bool = False,
    ) -> torch.Tensor:
        """Return the total's values at the chosen positions and remove them from the residual.

        Args:
            parameter: Layout index.
            gradient: Flat; gives the values their dtype.
            total: Gradient plus residual; the part that is not sent becomes the residual.
            chosen: int64, ascending.
            are_largest: Whether no other entry has a greater magnitude, with NaN above all. If the
                chosen entries are finite, all entries are; this spares a pass over the total.
        """
        kept = total.index_select(0, chosen).to(gradient.dtype)
        is_finite = are_largest and kept.is_cpu and bool(kept.isfinite().all())
        used = is_used(gradient)
        if not used:
            kept.zero_()
        rounded = kept if kept.dtype != total.dtype else None
        self.feedback.sent_at(parameter, chosen if used else None, rounded, is_finite=is_finite)
        return kept


class SharedReducer(SparseReducer, ABC):
    """Averages the same ``k`` entries of every rank; each rank stores its share of the entries."""

    def __init__(
        self,
        compressor: SparseSettings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(compressor, layout, residual, group)
        self.lane = Lane(group)

    @abstractmethod
    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return ascending positions, int64 ``[kept]``, for each parameter; the same on all ranks.

        Args:
            totals: Layout index -> gradient plus residual of this rank.
        """

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""

        def work() -> torch.Tensor:
            self._average(dict(zip(parameters, gradients, strict=True)), buffer)
            return buffer

        return self.lane.submit(work, buffer.device)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self.lane.close()

    def _average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        counts = {i: self.kept(g.numel()) for i, g in gradients.items()}
        sizes = [buffer.numel(), sum(counts.values())]
        self.lane.greet(self.stamp, sizes, self.headers, buffer.device)
        totals = {
            i: self.feedback.total(i, g) for i, g in gradients.items() if counts[i] < g.numel()
        }
        chosen = self.choose(totals)
        # An overflow among unsent entries must not go unnoticed: such a tensor sends NaN, so that
        # a scaler skips the step.
        hidden = {i: total.sum(dtype=_wide(total)) * 0 for i, total in totals.items()}
        values = [
            self.send(i, g, totals[i], chosen[i]).add_(hidden[i]) if i in chosen else g
            for i, g in gradients.items()
        ]
        entries = torch.cat(values)
        self.lane.mean(entries)
        for (i, gradient), own in zip(
            gradients.items(), entries.split(list(counts.values())), strict=True
        ):
            if i not in chosen:
                gradient.copy_(own)
                continue
            gradient.zero_().index_copy_(0, chosen[i], own)
            mine = slice(*share(counts[i], self.rank, self.world_size))
            self.remember_selected(i, chosen[i][mine])
            self.remember_exchanged(i, [chosen[i]])


class IndexedDecoder:
    """Assigns each rank's entries; entries that several ranks stored agree bit for bit.

    This decoder also writes into tensors on an accelerator, and then copies only the entries
    to the device.
    """

    def __init__(
        self,
        payloads: Sequence[Payload],
        layout: Layout,
        value_dtype: torch.dtype | None = None,
    ) -> None:
        self._layout = layout
        self._value_dtype = value_dtype
        self._full = {dtype: _entries("", payloads, dtype) for dtype in layout.dtypes}
        self._narrow = {
            dtype: _entries("narrow/", payloads, dtype) if value_dtype else []
            for dtype in layout.dtypes
        }
        self._factors = [factors_of(payload) for payload in payloads]
        self._whole = shared_parts("whole", payloads, layout)

    def __call__(self, block: Block, out: torch.Tensor) -> None:
        """See ``Decoder``."""
        spec = self._layout.parameters[block.parameter]
        first, last = spec.offset + block.start, spec.offset + block.stop
        assign = _assign if out.is_cpu else _assign_there
        for rank, indices, values in self._narrow[spec.dtype]:
            begin, end = indices.searchsorted((first, last))
            assert self._value_dtype is not None
            stored = floats(values[begin:end], self._value_dtype)
            wide = multiply(stored.to(out.dtype), self._factors[rank].get(block.parameter, ()))
            assign(out, indices[begin:end] - first, bits(wide))
        for _, indices, values in self._full[spec.dtype]:
            begin, end = indices.searchsorted((first, last))
            assign(out, indices[begin:end] - first, values[begin:end])
        for rank, there, here in shares_in(block, spec.numel, len(self._whole)):
            stored_whole = self._whole[rank].get(block.parameter)
            if stored_whole is not None:
                out[here] = floats(stored_whole[there], out.dtype).to(out.device)


def _assign(out: torch.Tensor, positions: Bits, patterns: Bits) -> None:
    bits(out)[positions] = patterns


def _assign_there(out: torch.Tensor, positions: Bits, patterns: Bits) -> None:
    if positions.size:
        where = torch.from_numpy(positions.astype(np.int64)).to(out.device)
        out.index_copy_(0, where, floats(patterns, out.dtype).to(out.device))


def _entries(prefix: str, payloads: Sequence[Payload], dtype: str) -> list[tuple[int, Bits, Bits]]:
    return [
        (rank, indices.data, values.data)
        for rank, payload in enumerate(payloads)
        if (indices := payload.section(f"{prefix}indices/{dtype}"))
        and (values := payload.section(f"{prefix}values/{dtype}"))
    ]


def _all_finite(parts: Iterable[Entries]) -> bool:
    """Return whether no value is NaN or infinite; True on an accelerator, where the host would stop."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, values in parts:
        by_dtype.setdefault(values.dtype, []).append(values)
    return all(
        not values[0].is_cpu or bool(torch.cat(values).isfinite().all())
        for values in by_dtype.values()
    )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class MagnitudeSelector:
    """Finds the ``k`` largest magnitudes of a vector; keeps its scratch memory between calls.

    A float's bit pattern without the sign orders like its magnitude, with NaN above infinity. The
    selection works on these integers: exact for every dtype, NaN first as in ``torch.topk``, and
    ties go to the lowest index, so the result depends on the values alone.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def select(self, values: torch.Tensor, k: int) -> torch.Tensor:
        """Return the indices of the ``k`` largest magnitudes, ascending.

        Args:
            values: Flat tensor, ``n`` elements, float16, bfloat16, float32 or float64.
            k: Number of indices, ``1 <= k <= n``.

        Returns:
            int64 tensor of shape ``[k]`` on the device of ``values``. On an accelerator the host
            does not wait, and equal magnitudes are chosen as ``torch.topk`` does.
        """
        integer = INT_OF_BYTES[values.element_size()]
        if not values.is_cpu:
            keys = values.view(integer).bitwise_and(torch.iinfo(integer).max)
            return torch.topk(keys, k, sorted=False).indices.sort().values
        scratch = self._scratch.get(integer)
        if scratch is None or scratch.numel() < values.numel():
            scratch = self._scratch[integer] = torch.empty_like(values, dtype=integer)
        keys = torch.bitwise_and(
            values.view(integer), torch.iinfo(integer).max, out=scratch[: values.numel()]
        )
        return torch.from_numpy(_largest(keys.numpy(), k))


def _largest(keys: _Keys, k: int) -> npt.NDArray[np.int64]:
    """Return indices of the ``k`` largest non-negative keys, ascending, ties to the lowest index."""
    n = keys.size
    if k == n:
        return np.arange(n)
    candidates = None
    if n >= _SAMPLE_FROM:
        # The stride is odd, so that a power-of-two pattern in the data cannot hide from the sample.
        sample = keys[:: (n // _SAMPLES) | 1]
        expected = sample.size * k / n
        rank = int(expected + 4 * math.sqrt(expected) + 8)
        if rank < sample.size:
            threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
            candidates = np.flatnonzero(keys >= threshold)
    if candidates is None or candidates.size < k:
        candidates = np.arange(n)
    among = keys[candidates]
    smallest = np.partition(among, among.size - k)[among.size - k]
    keep = among > smallest
    ties = np.flatnonzero(among == smallest)
    keep[ties[: k - int(keep.sum())]] = True
    chosen: npt.NDArray[np.int64] = candidates[keep]
    return chosen
