"""Top-k sparsification with error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.compressors.exchange import Notes, exchange
from lowdiff.compressors.selection import MagnitudeSelector
from lowdiff.errors import ConfigError, GradientChanged
from lowdiff.layout import bits
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, ParameterSpec, Payload, Section


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps each parameter's largest gradient entries and remembers the rest.

    Every rank selects from its own gradient plus residual; entries are exchanged with one
    all-gather per bucket and summed in rank order. Per rank and step: ``k`` entries of
    4 + itemsize bytes sent, ``world_size * k`` received, one residual of the model's size kept.

    Reference: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
    2017; error feedback as in Stich et al., "Sparsified SGD with Memory", NeurIPS 2018,
    Algorithm 1. We select per parameter and exactly, never per DDP bucket.

    Attributes:
        density: Share of entries kept, in (0, 1].
        dense_below: Parameters with fewer elements are exchanged whole.

    Raises:
        ConfigError: If a setting is out of range.
    """

    density: float
    dense_below: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"density must be in (0, 1], got {self.density}; 0.01 keeps 1 % of the entries"
            )
        if self.dense_below < 0:
            raise ConfigError(f"dense_below counts elements, got {self.dense_below}")

    @property
    def name(self) -> str:
        """``"topk"``."""
        return "topk"

    def settings(self) -> Mapping[str, Any]:
        """The constructor's arguments."""
        return asdict(self)

    def kept(self, numel: int) -> int:
        """How many entries of a parameter with ``numel`` elements are exchanged."""
        if numel < self.dense_below:
            return numel
        return min(numel, max(1, math.ceil(self.density * numel)))

    def bind(
        self, layout: Layout, residual: ResidualStore, group: dist.ProcessGroup | None
    ) -> TopKReducer:
        """Make the reducer of one run."""
        return TopKReducer(self, layout, residual, group)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Assigns each rank's entries; where ranks overlap they agree bit for bit."""
        entries = {
            dtype: [
                (indices.data, values.data)
                for payload in payloads
                if (indices := payload.section(f"indices/{dtype}"))
                and (values := payload.section(f"values/{dtype}"))
            ]
            for dtype in layout.dtypes
        }

        def decode(block: Block, out: torch.Tensor) -> None:
            spec = layout.parameters[block.parameter]
            first, last = spec.offset + block.start, spec.offset + block.stop
            target = bits(out)
            for indices, values in entries[spec.dtype]:
                begin, end = indices.searchsorted((first, last))
                target[indices[begin:end] - first] = values[begin:end]

        return decode


class TopKReducer:
    """TopK bound to one run; remembers this rank's selection until the optimizer's step."""

    def __init__(
        self,
        compressor: TopK,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._compressor = compressor
        self._layout = layout
        self._residual = residual
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else group.size()
        self._selector = MagnitudeSelector()
        self._selected: dict[int, torch.Tensor] = {}
        self._consumed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._exchanged: dict[int, int] = {}
        self._notes = Notes()
        self._stamp = 0
        self._audit = False

    def begin(self, stamp: int, *, audit: bool = False, note: int = 0) -> None:
        """See ``Reducer.begin``: forget the last step's selection."""
        self._selected.clear()
        self._consumed.clear()
        self._exchanged.clear()
        self._stamp = stamp
        self._audit = audit
        self._notes.begin(note)

    def heard(self) -> tuple[int, ...]:
        """See ``Reducer.heard``."""
        return self._notes.heard()

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        whole = all(self._compressor.kept(g.numel()) == g.numel() for g in gradients)
        if whole and self._world_size == 1 and not self._audit:
            # Nothing to choose and nobody to tell: for models of many small parameters, whose
            # every call would otherwise cost more than the parameter's own update.
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        positions: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            chosen, kept = self._compress(parameter, gradient)
            self._selected[parameter] = chosen
            offset = int(gradient.storage_offset()) - int(buffer.storage_offset())
            positions.append(chosen + offset)
            values.append(kept)
        entries = torch.cat(values)
        if self._world_size > 1:
            entries.div_(self._world_size)  # before the sum, as DDP itself averages
        done = exchange(
            buffer,
            torch.cat(positions),
            entries,
            stamp=self._stamp,
            group=self._group,
            notes=self._notes,
        )
        if not self._audit:
            return done

        def count(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            averaged = future.value()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._exchanged[parameter] = int(gradient.count_nonzero())
            return averaged

        counted: torch.futures.Future[torch.Tensor] = done.then(count)
        return counted

    def _compress(
        self, parameter: int, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._compressor.kept(gradient.numel())
        if k == gradient.numel():
            return torch.arange(k, device=gradient.device), gradient
        source, target = self._residual.pair(parameter)
        torch.add(gradient, source, out=target)
        chosen = self._selector.select(target, k)
        kept = target.index_select(0, chosen)
        if _is_used(gradient):
            target.index_fill_(0, chosen, 0.0)
        else:
            # DDP drops the average of a parameter that no rank used: what would be sent now
            # would be lost, so the residual waits for the next real gradient.
            kept.zero_()
        self._residual.written(parameter)
        return chosen, kept

    def consume(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See ``Reducer.consume``. Tensors exchanged whole are split over the ranks."""
        fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                spec = self._layout.parameters[i]
                if self._audit and i in self._exchanged:
                    found = int(gradient.count_nonzero())
                    # A NaN norm makes every entry NaN; such a gradient is stored whole.
                    if found > self._exchanged[i] and bool(gradient.isfinite().all()):
                        raise GradientChanged(spec.name, self._exchanged[i], found)
                fresh[i] = self._own(i, spec, gradient)
        if fresh and not _all_finite(fresh.values()):
            # Clipping by a NaN norm turns every entry NaN, also those that nobody selected.
            for i, (_, values) in fresh.items():
                whole = gradients[i]
                if whole is not None and not bool(values.isfinite().all()):
                    fresh[i] = (torch.arange(whole.numel()), whole.clone())
        self._consumed |= fresh

    def payload(self) -> Payload:
        """See ``Reducer.payload``: indices into the layout, ascending, and their values."""
        sections: list[Section] = []
        for dtype in self._layout.dtypes:
            parts = [
                (spec.offset, *self._consumed[i])
                for i, spec in self._layout.of_dtype(dtype)
                if i in self._consumed
            ]
            if parts:
                indices = torch.cat([own for _, own, _ in parts]).cpu().numpy()
                indices += np.repeat([p[0] for p in parts], [len(p[1]) for p in parts])
                values = torch.cat([values for _, _, values in parts]).cpu()
                sections += [
                    Section(f"indices/{dtype}", "ascending", indices),
                    Section(f"values/{dtype}", "planes", bits(values)),
                ]
        return Payload(tuple(sections))

    def _own(
        self, parameter: int, spec: ParameterSpec, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions inside the parameter that this rank stores, and the final values there."""
        selected = self._selected.get(parameter)
        if selected is None or selected.numel() == spec.numel:
            first = spec.numel * self._rank // self._world_size
            last = spec.numel * (self._rank + 1) // self._world_size
            return torch.arange(first, last, device=gradient.device), gradient[first:last].clone()
        return selected, gradient.index_select(0, selected)


def _all_finite(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether no value is NaN or infinite; on CUDA assumed, because looking would stop the host."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, values in parts:
        by_dtype.setdefault(values.dtype, []).append(values)
    return all(
        values[0].is_cuda or bool(torch.cat(values).isfinite().all())
        for values in by_dtype.values()
    )


def _is_used(gradient: torch.Tensor) -> bool:
    """Whether any entry is not zero; on CUDA assumed, because looking would stop the host."""
    if gradient.is_cuda:
        return True
    return bool(gradient[:256].any()) or bool(gradient.any())
