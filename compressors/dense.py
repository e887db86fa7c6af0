"""No compression: gradients are averaged as DDP averages them, and logged whole (LowDiff+)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.compressors.at_hand import AtHand
from lowdiff.compressors.changes import Known
from lowdiff.compressors.collectives import chained, completed, reproducible_mean
from lowdiff.compressors.of_ranks import OfRanks
from lowdiff.compressors.settings import Settings
from lowdiff.core import devices
from lowdiff.core.layout import shares_of
from lowdiff.core.memory import bits
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Decoder, Departed, ResidualStore
from lowdiff.types import Bits, Block, Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class Dense(Settings):
    """Leaves the gradient as it is; each rank logs its share of the parameters.

    The average has the bits of DDP without a communication hook: every rank's gradient times
    ``1 / world_size``, then one all-reduce per bucket. (Where gradients are views of DDP's buckets
    and are kept from step to step, DDP divides instead of multiplying. The results then differ in
    the last place if the world size is no power of two.) With three or more ranks, the all-reduce
    adds in an order that depends on DDP's buckets, which change after a restart. ``reproducible``
    adds in rank order instead, whatever shares a bucket, by an all-to-all and an all-gather, with
    the bytes of a ring all-reduce. The payload of a peer costs no memory: it consists of gradients
    that this rank has.

    Reference: Yao et al., "LowDiff", arXiv 2509.04084, LowDiff+ (layer-wise reuse of gradients
    without compression). We read gradients right before the optimizer does, after unscaling and
    clipping, and divide them over ranks by parameter.

    Attributes:
        reproducible: Whether the sum's bits are independent of DDP's buckets.
    """

    name: ClassVar[str] = "dense"
    reproducible: bool = False

    def residual_layout(self, layout: Layout) -> Layout:
        """Return an empty layout, because nothing is left out; see ``Compressor.residual_layout``."""
        return replace(layout, parameters=())

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> DenseReducer:
        """Make the reducer of one run; there is no residual."""
        world_size = 1 if group is None else group.size()
        return DenseReducer(self, group, peers, shares=shares_of(layout, world_size))

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that copies a block from the payload of the rank that logged its parameter.

        Raises:
            ReplayMismatch: If a section is not a parameter's whole gradient.
        """
        gradients = dict(_read(payloads, layout))

        def decode(block: Block, out: torch.Tensor) -> None:
            if block.parameter not in gradients:
                raise ReplayMismatch("a rank's payload lacks a gradient that was used")
            np.copyto(bits(out), gradients[block.parameter][block.start : block.stop])

        return decode


def _read(payloads: Sequence[Payload], layout: Layout) -> Iterator[tuple[int, Bits]]:
    """Yield layout index and bit patterns of every logged gradient."""
    indices = {str(i): i for i in range(len(layout.parameters))}
    for section in (section for payload in payloads for section in payload.sections):
        spec = None if section.name not in indices else layout.parameters[indices[section.name]]
        if spec is None or (section.data.size, section.data.nbytes) != (spec.numel, spec.nbytes):
            raise ReplayMismatch(
                f"a dense payload holds {section.data.nbytes} bytes as {section.name!r}, which is "
                "no gradient of this model; a log of another version of lowdiff?"
            )
        yield indices[section.name], section.data


def mean(
    buffer: torch.Tensor, group: dist.ProcessGroup | None, *, reproducible: bool
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, in place, with DDP's own arithmetic.

    Args:
        buffer: Overwritten with the average; shape ``[n]``.
        group: Process group of the ranks; None for one process.
        reproducible: Whether to add in rank order.
    """
    world_size = 1 if group is None else group.size()
    if world_size == 1:
        return completed(buffer)
    if reproducible:
        return reproducible_mean(buffer, group)
    buffer.mul_(1.0 / world_size)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return future.value()[0]

    return chained(work.get_future(), first, buffer.device)


class DenseReducer(AtHand):
    """Dense bound to one run; passes on the gradients of this rank's and its peers' parameters.

    Args:
        compressor: Its settings.
        group: Process group of the ranks; None for one process.
        peers: Ranks whose payloads it makes as well.
        shares: For each rank, the layout indices of the parameters whose gradients it stores.
    """

    def __init__(
        self,
        compressor: Dense,
        group: dist.ProcessGroup | None,
        peers: Sequence[int],
        *,
        shares: Sequence[Sequence[int]],
    ) -> None:
        self._reproducible = compressor.reproducible
        self._group = group
        self._stored = OfRanks(group, peers, lambda rank, _: _Stored(shares[rank]))

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        for stored in self._stored:
            stored.gradients.clear()

    def close(self) -> None:
        """Do nothing: this reducer holds no thread and no group. See ``Reducer.close``."""

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        return mean(buffer, self._group, reproducible=self._reproducible)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """Take the ranks' shares, already unscaled and clipped; see ``Reducer.consume``.

        Nothing is copied: use ``payload`` before the caller of the optimizer may change the
        gradients.
        """
        for stored in self._stored:
            for i in stored.share:
                gradient = gradients[i]
                if gradient is not None:
                    stored.gradients[i] = gradient.detach()

    def depart(self) -> Departed:
        """See ``Reducer.depart``: also as soon as an optimizer has consumed them."""
        consumed = (gradient for one in self._stored for gradient in one.gradients.values())
        return (
            _Leaving(self._stored) if any(map(devices.comes_late, consumed)) else super().depart()
        )

    def payload(self, of: int | None = None) -> Payload:
        """Return one section per gradient, named by its parameter's index; see ``Reducer.payload``.

        On the CPU, sections share the memory of the gradients. A second call for the same rank
        returns no section twice.
        """
        stored = self._stored.of(of)
        consumed, stored.gradients = stored.gradients, {}
        return _payload(consumed, devices.on_host(list(consumed.values())))


class _Leaving:
    """Gradients on their way from an accelerator, of this rank's share and its peers'; see ``Departed``.

    They are gathered first: whoever called the optimizer may overwrite them.
    """

    travels: ClassVar[bool] = True
    has_missed: ClassVar[bool] = False

    def __init__(self, stored: OfRanks[_Stored]) -> None:
        self._stored = stored
        self._on_the_way = {
            id(one): (list(one.gradients), devices.fetch(list(one.gradients.values())))
            for one in stored
        }
        for one in stored:
            one.gradients = {}

    def payload(self, of: int | None = None) -> Payload:
        """See ``Departed``."""
        indices, fetch = self._on_the_way[id(self._stored.of(of))]
        return _payload(indices, fetch.arrived())

    def learn(self) -> None:
        """See ``Departed``: nothing was missed."""


def _payload(indices: Iterable[int], gradients: Sequence[torch.Tensor]) -> Payload:
    """Return whole gradients, each named by its parameter's layout index."""
    return Payload(
        tuple(
            Section(str(i), "planes", bits(own)) for i, own in zip(indices, gradients, strict=True)
        )
    )


class _Stored:
    """What one rank stores of a step: gradients of the parameters in its share, by layout index."""

    def __init__(self, share: Sequence[int]) -> None:
        self.share = share
        self.gradients: dict[int, torch.Tensor] = {}
