"""Common part of compressors whose payload represents the gradient instead of holding its values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from lowdiff.compressors.at_hand import AtHand
from lowdiff.compressors.changes import ChangeWarning, Known, read
from lowdiff.compressors.consumed import Consumed
from lowdiff.compressors.exchange import Headers, step_of
from lowdiff.compressors.feedback import ErrorFeedback
from lowdiff.compressors.lane import Lane
from lowdiff.compressors.of_ranks import OfRanks
from lowdiff.compressors.settings import Settings
from lowdiff.protocols import ResidualStore
from lowdiff.types import Layout, Payload, Section

#: The representation of one parameter's gradient that a rank holds until it is stored.
Held = TypeVar("Held")


class Represented(Generic[Held]):
    """What one rank stores of a step: this one, or a peer whose payload it makes as well.

    Attributes:
        rank: Whose it is.
        held: Layout index -> representation of the last exchange. A parameter that was exchanged as
            it is, or not at all, has none.
        kept: Layout index -> representation that an optimizer consumed. A further backward pass does
            not replace it.
        consumed: What was changed since the exchange, in the rank's ranges.
    """

    def __init__(self, layout: Layout, warning: ChangeWarning, rank: int, world_size: int) -> None:
        self.rank = rank
        self.held: dict[int, Held] = {}
        self.kept: dict[int, Held] = {}
        self.consumed = Consumed(layout, rank, world_size, warning)

    def begin(self) -> None:
        """Forget the last step."""
        self.consumed.begin()
        self.held.clear()
        self.kept.clear()


class RepresentedReducer(AtHand, Generic[Held]):
    """Reducer of one run that holds one step's representations; see ``Reducer``.

    Attributes:
        stored: What this rank and its peers store of the step; ``average`` fills their ``held``.
    """

    def __init__(
        self,
        compressor: Settings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        self.compressor = compressor
        self.layout = layout
        self.residual = residual
        self.feedback = ErrorFeedback(residual)
        self.lane = Lane(group)
        self.warning = ChangeWarning(layout)
        make = partial(Represented[Held], layout, self.warning)
        self.stored = OfRanks(group, peers, make)
        self._headers = Headers()
        self._stamp = 0

    @abstractmethod
    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """Return how many bytes this rank sends of a bucket; must be equal on all ranks."""

    @abstractmethod
    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """Overwrite flat gradients, by layout index, with the average that the optimizer shall see.

        Args:
            gradients: Views into ``buffer``.
            buffer: The bucket.
        """

    @abstractmethod
    def rebuilt(self, parameter: int, held: Held, share: slice) -> torch.Tensor:
        """Return a rank's range of the average that ``average`` wrote, from its representation."""

    @abstractmethod
    def sections(self, kept: Mapping[int, Held], rank: int) -> list[Section]:
        """Return a rank's part of the payload for these parameters, in ascending order."""

    @property
    def step(self) -> int:
        """Return the step that the stamp names."""
        return step_of(self._stamp)

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._stamp = stamp
        self._headers.begin()
        for stored in self.stored:
            stored.begin()

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
            for stored in self.stored:
                stored.consumed.unseal(bucket)
                for i in bucket:
                    stored.held.pop(i, None)
            self.average(bucket, buffer)
            for stored in self.stored:
                for i, gradient in bucket.items():
                    if i in stored.held:
                        stored.consumed.seal(i, gradient)
            return buffer

        return self.lane.submit(work, buffer.device)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """See ``Reducer.consume``."""
        numbers = read(factors)
        for stored in self.stored:
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                rebuild = None
                if i in stored.held:
                    share = stored.consumed.share(i)
                    rebuild = partial(self.rebuilt, i, stored.held[i], share)
                    stored.kept[i] = stored.held[i]
                stored.consumed.take(i, rebuild, gradient, numbers)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self.lane.close()

    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``."""
        self._headers.confirm()
        stored = self.stored.of(of)
        kept = {i: stored.kept[i] for i in stored.consumed.parameters}
        return Payload((*self.sections(kept, stored.rank), *stored.consumed.sections()))
