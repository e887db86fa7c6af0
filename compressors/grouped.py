"""Compressors where ranks train different shards: each replica group exchanges and decodes its own part.

A compressor knows one layout, and one group of ranks that all train the whole of it. Here its numbers are
translated: outside, entries are numbered as in the layout of the run; inside, as in the part of one replica
group. Payloads hold the numbers of the part. `Dense` needs none of it: it reads what optimizers consume,
whoever averaged that, and numbers entries as the run does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from lowdiff.compressors.changes import Known
from lowdiff.compressors.dense import Dense
from lowdiff.core.layout import Part, replica_groups
from lowdiff.protocols import Compressor, Decoder, Departed, Reducer
from lowdiff.types import Block, Layout, Payload


class GroupedReducer:
    """A `Reducer` whose entries are numbered as in the whole layout.

    Args:
        reducer: Bound to a part, and to the ranks that train it.
        part: That part.
        peers: For each peer, a rank of the run, its rank among them.
    """

    def __init__(self, reducer: Reducer, part: Part, peers: Mapping[int, int]) -> None:
        self._reducer = reducer
        self._peers = peers
        self._indices = part.indices
        self._place_of = {index: place for place, index in enumerate(part.indices)}

    def begin(self, stamp: int) -> None:
        """See ``Reducer.begin``."""
        self._reducer.begin(stamp)

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``; between the gradients, the buffer may have elements of nobody."""
        return self._reducer.reduce([self._place_of[i] for i in parameters], gradients, buffer)

    def consume(self, gradients: Sequence[torch.Tensor | None], *, factors: Known = ()) -> None:
        """See ``Reducer.consume``."""
        self._reducer.consume([gradients[i] for i in self._indices], factors=factors)

    def skip(self, parameters: Collection[int]) -> None:
        """See ``Reducer.skip``."""
        self._reducer.skip({self._place_of[i] for i in parameters})

    def payload(self, of: int | None = None) -> Payload:
        """See ``Reducer.payload``; a peer is a rank of the run."""
        return self._reducer.payload(None if of is None else self._peers[of])

    def depart(self) -> GroupedDeparted:
        """See ``Reducer.depart``."""
        return GroupedDeparted(self._reducer.depart(), self._peers)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self._reducer.close()


class GroupedDeparted:
    """A `Departed` of which a peer is a rank of the run.

    Args:
        departed: Of one replica group.
        peers: See `GroupedReducer`.
    """

    def __init__(self, departed: Departed, peers: Mapping[int, int]) -> None:
        self._departed = departed
        self._peers = peers

    @property
    def travels(self) -> bool:
        """See ``Departed``."""
        return self._departed.travels

    @property
    def has_missed(self) -> bool:
        """See ``Departed``."""
        return self._departed.has_missed

    def learn(self) -> None:
        """See ``Departed``."""
        self._departed.learn()

    def payload(self, of: int | None = None) -> Payload:
        """See ``Departed``."""
        return self._departed.payload(None if of is None else self._peers[of])


def decoding(compressor: Compressor, layout: Layout) -> Callable[[Sequence[Payload]], Decoder]:
    """Return what prepares a step's gradient for decoding by block, whichever ranks train what.

    It takes the payloads of all ranks of the run, in rank order. Replica groups are found once for all steps.

    Args:
        compressor: It made the payloads.
        layout: Of the run.

    Raises:
        ReplayMismatch: Later, if payloads do not fit the layout.
    """
    groups = replica_groups(layout)
    if len(groups) == 1 or isinstance(compressor, Dense):
        return lambda payloads: compressor.decoder(payloads, layout)
    place_of = {
        index: (ranks, place)
        for ranks, part in groups.items()
        for place, index in enumerate(part.indices)
    }

    def decoder_of(payloads: Sequence[Payload]) -> Decoder:
        decoders = {}
        for ranks, part in groups.items():
            own = [payloads[rank] for rank in ranks] if ranks else payloads
            decoders[ranks] = compressor.decoder(own, part.layout)

        def decode(block: Block, out: torch.Tensor) -> None:
            ranks, place = place_of[block.parameter]
            decoders[ranks](replace(block, parameter=place), out)

        return decode

    return decoder_of
