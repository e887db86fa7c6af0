"""Ranks that keep copies for each other, by the placement of copies on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowdiff.core.placement import Placement, place


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's part in a placement.

    Attributes:
        keepers: Ranks on other nodes that keep copies of what it stages.
        wards: Ranks on other nodes of whose data it keeps copies.
    """

    keepers: tuple[int, ...]
    wards: tuple[int, ...]


def peers_of(rank: int, of_rank: Sequence[int], copies: int) -> Peers:
    """Find a rank's peers: on each node of its placement the rank that has its place there.

    Args:
        rank: The rank.
        of_rank: The node of each rank, numbered from 0.
        copies: See `place`.

    Raises:
        ConfigError: If there are fewer nodes than copies.
    """
    placement = place(max(of_rank) + 1, copies)
    keepers = [_keepers(other, of_rank, placement) for other in range(len(of_rank))]
    wards = tuple(ward for ward, own in enumerate(keepers) if rank in own)
    return Peers(keepers[rank], wards)


def _keepers(rank: int, of_rank: Sequence[int], placement: Placement) -> tuple[int, ...]:
    """Return the ranks that keep a rank's copies: those at its place among the ranks of their node."""
    own = of_rank[rank]
    ranks = [
        [r for r, number in enumerate(of_rank) if number == node]
        for node in range(max(of_rank) + 1)
    ]
    at = ranks[own].index(rank)
    return tuple(
        ranks[node][at % len(ranks[node])] for node in placement.holders[own] if node != own
    )
