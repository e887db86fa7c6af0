"""Common part of compressors whose payload represents the gradient instead of holding its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from lowdiff.compressors.changes import Factors
from lowdiff.compressors.consumed import Consumed
from lowdiff.compressors.exchange import Headers, step_of
from lowdiff.compressors.feedback import ErrorFeedback
from lowdiff.compressors.lane import Lane
from lowdiff.compressors.settings import Settings
from lowdiff.protocols import ResidualStore
from lowdiff.types import Layout, Payload, Section

#: The representation of one parameter's gradient that a rank holds until it is stored.
Held = TypeVar("Held")


class RepresentedReducer(ABC, Generic[Held]):
    """Reducer of one run that holds one step's representations; see ``Reducer``."""

    def __init__(
        self,
        compressor: Settings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.compressor = compressor
        self.layout = layout
        self.residual = residual
        self.feedback = ErrorFeedback(residual)
        self.lane = Lane(group)
        #: Layout index -> representation of the last exchange. A parameter that was exchanged as it
        #: is, or not at all, has none.
        self.held: dict[int, Held] = {}
        #: Layout index -> representation that an optimizer consumed. A further backward pass does
        #: not replace it.
        self._kept: dict[int, Held] = {}
        self._consumed = Consumed(layout, self.lane.rank, self.lane.world_size)
        self._headers = Headers()
        self._stamp = 0

    @abstractmethod
    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """Return how many bytes this rank sends of a bucket; must be equal on all ranks."""

    @abstractmethod
    def average(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Overwrite flat gradients, by layout index, with the average that the optimizer shall see."""

    @abstractmethod
    def rebuilt(self, parameter: int, share: slice) -> torch.Tensor:
        """Return a range of the average that ``average`` wrote, rebuilt from the representation."""

    @abstractmethod
    def sections(self, kept: Mapping[int, Held]) -> list[Section]:
        """Return this rank's part of the payload for these parameters, in ascending order."""

    @property
    def step(self) -> int:
        """Return the step that the stamp names."""
        return step_of(self._stamp)

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._stamp = stamp
        self._headers.begin()
        self._consumed.begin()
        self.held.clear()
        self._kept.clear()

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        bucket = dict(zip(parameters, gradients, strict=True))

        def work() -> torch.Tensor:
            sizes = [buffer.numel(), self.sent_bytes(bucket)]
            self.lane.greet(self._stamp, sizes, self._headers, buffer.device)
            # The exchange replaces the representations and may fail midway, so discard the seals
            # first.
            self._consumed.unseal(bucket)
            for i in bucket:
                self.held.pop(i, None)
            self.average(bucket)
            for i, gradient in bucket.items():
                if i in self.held:
                    self._consumed.seal(i, gradient)
            return buffer

        return self.lane.submit(work, buffer.device)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Factors = ()) -> None:
        """See ``Reducer.consume``."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            rebuild = None
            if i in self.held:
                rebuild = partial(self.rebuilt, i, self._consumed.share(i))
                self._kept[i] = self.held[i]
            self._consumed.take(i, rebuild, gradient, factors)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self.lane.close()

    def payload(self) -> Payload:
        """See ``Reducer.payload``."""
        self._headers.confirm()
        own = self.sections({i: self._kept[i] for i in self._consumed.parameters})
        return Payload((*own, *self._consumed.sections()))
