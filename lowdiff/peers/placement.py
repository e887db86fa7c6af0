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
        sent: The wards that send all that they stage, as a keeper of theirs holds other parameters.
        sends_all: Whether this rank does so.
    """

    keepers: tuple[int, ...]
    wards: tuple[int, ...]
    sent: tuple[int, ...] = ()
    sends_all: bool = False

    @property
    def made(self) -> tuple[int, ...]:
        """The wards of which it makes what they stage, from its own memory."""
        return tuple(ward for ward in self.wards if ward not in self.sent)


def peers_of(
    rank: int, of_rank: Sequence[int], copies: int, trained: Sequence[object] = ()
) -> Peers:
    """Find a rank's peers: on each node of its placement a rank that trains the same, if there is one.

    Args:
        rank: The rank.
        of_rank: The node of each rank, numbered from 0.
        copies: See `place`.
        trained: What each rank trains; empty where all train everything.

    Raises:
        ConfigError: If there are fewer nodes than copies.
    """
    placement = place(max(of_rank) + 1, copies)
    own = trained or [None] * len(of_rank)
    keepers = [_keepers(other, of_rank, placement, own) for other in range(len(of_rank))]
    sends = [any(own[keeper] != own[r] for keeper in of_r) for r, of_r in enumerate(keepers)]
    wards = tuple(ward for ward, of_ward in enumerate(keepers) if rank in of_ward)
    return Peers(keepers[rank], wards, tuple(w for w in wards if sends[w]), sends[rank])


def _keepers(
    rank: int, of_rank: Sequence[int], placement: Placement, trained: Sequence[object]
) -> tuple[int, ...]:
    """Return the ranks that keep a rank's copies: at its place among those of their node that train the same.

    Where no rank there trains the same, at its place among all of them.
    """
    found = []
    for node in placement.holders[of_rank[rank]][1:]:
        there = [r for r, number in enumerate(of_rank) if number == node]
        equal = [r for r in there if trained[r] == trained[rank]]
        here = [r for r, number in enumerate(of_rank) if number == of_rank[rank]]
        if equal:
            here = [r for r in here if trained[r] == trained[rank]]
        candidates = equal or there
        found.append(candidates[here.index(rank) % len(candidates)])
    return tuple(found)
