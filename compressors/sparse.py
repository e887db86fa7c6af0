"""Common part of compressors that keep some entries: turn a selection into a payload and back.

Each rank stores the consumed values at its own positions. Scaling and clipping are thus part of the
values, and recovery assigns them. With a narrower value dtype, a rank stores the narrow values and
the factors that were applied to them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lowdiff.compressors.at_hand import AtHand
from lowdiff.compressors.changes import ChangeWarning, Known, multiply
from lowdiff.compressors.entries import StoredEntries
from lowdiff.compressors.exchange import Headers, step_of
from lowdiff.compressors.feedback import ErrorFeedback, is_used
from lowdiff.compressors.lane import Lane, shares_in
from lowdiff.compressors.of_ranks import OfRanks
from lowdiff.compressors.sections import factors_of, floats, refuse_missed, shared_parts
from lowdiff.compressors.settings import SparseSettings
from lowdiff.core import devices
from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.core.memory import array_of, bits
from lowdiff.protocols import ResidualStore
from lowdiff.types import Bits, Block, Layout, Payload, Section

_Keys: TypeAlias = "npt.NDArray[np.signedinteger[Any]]"
#: Number of elements below which one exact partition is cheaper than sampling first.
_SAMPLE_FROM = 1 << 15
_SAMPLES = 1 << 15


class SparseReducer(AtHand):
    """Reducer without the parts that select and exchange entries; subclasses add those.

    Their ``reduce`` calls `StoredEntries.select` for every parameter, and `remember_exchanged` for one
    that was not exchanged whole.

    Attributes:
        stored: What this rank and its peers store of the step.
    """

    def __init__(
        self,
        compressor: SparseSettings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        self.compressor = compressor
        self.selector = MagnitudeSelector()
        self.layout = layout
        self.feedback = ErrorFeedback(residual)
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else group.size()
        self.stored = OfRanks(group, peers, partial(StoredEntries, layout))
        #: Layout index -> one entry per backward pass: the positions that the ranks exchanged
        #: (ascending per rank), and the position of the parameter's first element among them.
        self._exchanged: dict[int, list[tuple[list[torch.Tensor], int]]] = {}
        self._warning = ChangeWarning(layout)
        self.headers = Headers()
        self.stamp = 0

    @property
    def step(self) -> int:
        """Return the step that the stamp names."""
        return step_of(self.stamp)

    def begin(self, stamp: int) -> None:
        """Forget the last step's selection; see ``Reducer.begin``."""
        for stored in self.stored:
            stored.begin()
        self._exchanged.clear()
        self.headers.begin()
        self.stamp = stamp

    def kept(self, numel: int) -> int:
        """Return how many entries of a parameter are exchanged in this step."""
        return self.compressor.kept(numel, self.step)

    def close(self) -> None:
        """Do nothing: this reducer holds no thread and no group. See ``Reducer.close``."""

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

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """Take what the optimizer consumes; see ``Reducer.consume``.

        A tensor that was exchanged whole is divided over the ranks.
        """
        for stored in self.stored:
            whole = stored.consume(gradients, factors)
            # Without DDP, nothing can change a gradient between the exchange and this call.
            if self.group is not None:
                others = {i: g for i, g in enumerate(gradients) if g is not None and i not in whole}
                stored.keep_foreign(others, self.exchanged)
                self._warning.say(list(stored.foreign))

    def payload(self, of: int | None = None) -> Payload:
        """Return ascending layout indices and their values; see ``Reducer.payload``."""
        self.headers.confirm()
        stored = self.stored.of(of)
        return Payload((*self.sections(stored), *stored.foreign_sections()))

    def sections(self, stored: StoredEntries) -> list[Section]:
        """Return the sections of a rank's entries."""
        return stored.sections()

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
        is_finite = are_largest and devices.may_look(kept) and bool(kept.isfinite().all())
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
        peers: Sequence[int] = (),
    ) -> None:
        super().__init__(compressor, layout, residual, group, peers)
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
            for stored in self.stored:
                stored.select(i, chosen[i][stored.share(counts[i])])
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
        refuse_missed(payloads, layout)
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
        assign = _assign if devices.may_look(out) else _assign_there
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
        if not devices.may_look(values):
            keys = values.view(integer).bitwise_and(torch.iinfo(integer).max)
            return torch.topk(keys, k, sorted=False).indices.sort().values
        scratch = self._scratch.get(integer)
        if scratch is None or scratch.numel() < values.numel():
            scratch = self._scratch[integer] = torch.empty_like(values, dtype=integer)
        keys = torch.bitwise_and(
            values.view(integer), torch.iinfo(integer).max, out=scratch[: values.numel()]
        )
        return torch.from_numpy(_largest(array_of(keys), k))


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
