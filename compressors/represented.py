"""What compressors share whose payload is a representation of the gradient, not its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from lowdiff.compressors.changes import Factors
from lowdiff.compressors.consumed import Consumed
from lowdiff.compressors.exchange import Headers
from lowdiff.compressors.lane import Lane
from lowdiff.types import Layout, Payload, Section


class Method(Protocol):
    """How one compressor represents gradients; bound to a run, remembers one step."""

    def begin(self, step: int) -> None:
        """Start a step: forget the last one."""
        ...

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """Bytes this rank sends of a bucket; must be equal on all ranks."""
        ...

    def average(self, gradients: Mapping[int, torch.Tensor], lane: Lane) -> None:
        """Overwrite flat gradients, by layout index, with what the optimizer shall see."""
        ...

    def represents(self, parameter: int) -> bool:
        """Whether the payload will represent it; else it was exchanged as it is, or not at all."""
        ...

    def rebuilt(self, parameter: int, share: slice) -> torch.Tensor:
        """A range of what ``average`` left, rebuilt from what the payload will hold."""
        ...

    def keep(self, parameter: int) -> None:
        """Note that an optimizer consumed it: a further backward pass must not replace this."""
        ...

    def sections(self, parameters: Sequence[int]) -> list[Section]:
        """This rank's part of the payload for these parameters: ascending, all kept."""
        ...


class RepresentedReducer:
    """A ``Reducer`` around a method."""

    def __init__(self, method: Method, layout: Layout, group: dist.ProcessGroup | None) -> None:
        self._method = method
        self._lane = Lane(group)
        self._consumed = Consumed(layout, self._lane.rank, self._lane.world_size)
        self._headers = Headers()
        self._stamp = 0

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._stamp = stamp
        self._headers.begin()
        self._consumed.begin()
        self._method.begin(stamp & 0xFFFFFFFFFF)

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        bucket = dict(zip(parameters, gradients, strict=True))

        def work() -> torch.Tensor:
            sizes = [buffer.numel(), self._method.sent_bytes(bucket)]
            self._lane.greet(self._stamp, sizes, self._headers, buffer.device)
            self._consumed.unseal(bucket)
            self._method.average(bucket, self._lane)
            for i, gradient in bucket.items():
                if self._method.represents(i):
                    self._consumed.seal(i, gradient)
            return buffer

        return self._lane.submit(work, buffer.device)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Factors = ()) -> None:
        """See ``Reducer.consume``."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            rebuild = None
            if self._method.represents(i):
                rebuild = partial(self._method.rebuilt, i, self._consumed.share(i))
            self._consumed.take(i, rebuild, gradient, factors)
            if rebuild is not None:
                self._method.keep(i)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self._lane.close()

    def payload(self) -> Payload:
        """See ``Reducer.payload``."""
        self._headers.confirm()
        own = self._method.sections(self._consumed.parameters)
        return Payload((*own, *self._consumed.sections()))
