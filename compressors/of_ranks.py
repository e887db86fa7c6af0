"""What a reducer keeps by rank: for its own payload, and for those of peers, which it makes as well.

A module of its own, because sparse, represented and dense reducers share nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist

from lowdiff.errors import ConfigError, UsageError

Kept = TypeVar("Kept")


class OfRanks(Generic[Kept]):
    """One value for this rank, and one for each peer; iterates over all of them, this rank's first.

    Args:
        group: Process group of the ranks; None for a single process.
        peers: Other ranks of the group, whose payloads this rank can make.
        make: Makes a rank's value from rank and world size.

    Attributes:
        own: The value of this rank.
        peers: The values of its peers, by rank.

    Raises:
        ConfigError: If a peer is no other rank of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        peers: Sequence[int],
        make: Callable[[int, int], Kept],
    ) -> None:
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else group.size()
        for peer in peers:
            if peer == rank or not 0 <= peer < world_size:
                raise ConfigError(f"rank {rank} of {world_size} cannot have rank {peer} as a peer")
        self._rank = rank
        self.own = make(rank, world_size)
        self.peers = {peer: make(peer, world_size) for peer in peers}

    def __iter__(self) -> Iterator[Kept]:
        yield self.own
        yield from self.peers.values()

    def of(self, rank: int | None) -> Kept:
        """Return the value of a rank; None means this one.

        Raises:
            UsageError: If the rank is neither this one nor a peer.
        """
        if rank is None or rank == self._rank:
            return self.own
        if rank not in self.peers:
            raise UsageError(
                f"rank {self._rank} keeps nothing of what rank {rank} stores; its peers are "
                f"{list(self.peers)}, which bind(..., peers=...) decides for the whole run"
            )
        return self.peers[rank]
