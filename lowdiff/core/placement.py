"""Which ranks share a node, in whose memory the data of each node lies, and which losses that survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from lowdiff.errors import ConfigError
from lowdiff.types import whole_number


@dataclass(frozen=True, slots=True)
class Node:
    """This rank's node, and all others.

    Attributes:
        rank: This rank.
        of_rank: The node of each rank, numbered in the order of their first ranks.
    """

    rank: int
    of_rank: tuple[int, ...]

    @property
    def first(self) -> int:
        """Lowest rank of the node: what is saved for ranks on other nodes lies in its staging folder."""
        return self.of_rank.index(self.of_rank[self.rank])

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks on other nodes."""
        own = self.of_rank[self.rank]
        return tuple(rank for rank, node in enumerate(self.of_rank) if node != own)


@dataclass(frozen=True, slots=True)
class Placement:
    """In which nodes' memory each node's data lies.

    Nodes are divided into rings of consecutive nodes. The data of a node lies on the node itself and
    on the next ``copies - 1`` nodes of its ring. A ring has ``copies`` nodes, each of which thus holds
    everything of the ring. Only the last ring is larger where ``copies`` does not divide the number
    of nodes: it has at most ``2 * copies - 1``.

    Reference: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", SOSP 2023, section 4 (group placement, and mixed placement where the number of
    replicas does not divide the number of machines).

    Attributes:
        rings: Nodes of each ring, ascending.
        holders: For each node, the nodes that hold its data: itself first, then in ring order.
    """

    rings: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]

    def held_by(self, node: int) -> tuple[int, ...]:
        """Return the nodes whose data lies in a node's memory, ascending; the node itself is one."""
        return tuple(owner for owner, holders in enumerate(self.holders) if node in holders)


def place(nodes: int, copies: int) -> Placement:
    """Place copies on the nodes ``0 .. nodes - 1``.

    Args:
        nodes: Number of nodes.
        copies: On how many nodes the data of each node lies, its own included.

    Raises:
        ConfigError: If there are fewer nodes than copies, or no copy at all.
    """
    nodes, copies = _checked(nodes, copies)
    starts = [k * copies for k in range(nodes // copies)]
    rings = [
        tuple(range(first, last)) for first, last in zip(starts, [*starts[1:], nodes], strict=True)
    ]
    holders = [
        tuple(ring[(place + k) % len(ring)] for k in range(copies))
        for ring in rings
        for place in range(len(ring))
    ]
    return Placement(tuple(rings), tuple(holders))


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


def survival_probability(nodes: int, copies: int, lost: int) -> Fraction:
    """Return the probability that nothing is lost when ``lost`` of the nodes are, all sets being equally likely.

    Nothing is lost if every node's data lies on a node that is left. The result is exact for any
    number of nodes.

    Reference: Wang et al., SOSP 2023, section 4. We count the sets, also those of the last ring.

    Raises:
        ConfigError: If `place` refuses the numbers, or ``lost`` is not in ``0 .. nodes``.
    """
    nodes, copies = _checked(nodes, copies)
    lost = whole_number("lost", lost)
    if not 0 <= lost <= nodes:
        raise ConfigError(f"lost counts nodes, 0 to {nodes} of {nodes}, got {lost}")
    others = nodes // copies - 1
    last = nodes - others * copies
    harmless = sum(
        _of_ring(last, copies, k) * _of_groups(others, copies, lost - k)
        for k in range(min(last, lost) + 1)
    )
    return Fraction(harmless, comb(nodes, lost))


def _checked(nodes: int, copies: int) -> tuple[int, int]:
    nodes, copies = whole_number("nodes", nodes), whole_number("copies", copies)
    if copies < 1:
        raise ConfigError(
            f"copies counts the nodes that hold a step, this one included, got {copies}; "
            "copies=1 keeps none on other nodes"
        )
    if copies > nodes:
        raise ConfigError(
            f"copies={copies} needs {copies} nodes, and there are {nodes}; use fewer copies or more "
            "nodes (processes on one machine are one node, unless node= says otherwise)"
        )
    return nodes, copies


def _of_groups(groups: int, copies: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes that contain none of ``groups`` groups of ``copies`` nodes whole."""
    # Inclusion and exclusion over the groups that are lost whole.
    return sum(
        _sign(whole) * comb(groups, whole) * comb((groups - whole) * copies, lost - whole * copies)
        for whole in range(min(groups, lost // copies) + 1)
    )


def _of_ring(nodes: int, copies: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes of a ring that contain no ``copies`` nodes in a row."""
    left = nodes - lost
    if left == 0:
        return 0
    # Mark one of the nodes that are left, and go round: runs of lost nodes, each shorter than
    # ``copies``, end at the nodes that are left. There are ``nodes`` places for the marked one, and
    # ``left`` nodes of a set that can be marked.
    runs = sum(
        _sign(k) * comb(left, k) * comb(lost - k * copies + left - 1, left - 1)
        for k in range(min(left, lost // copies) + 1)
    )
    return nodes * runs // left


def _sign(count: int) -> int:
    """Return the sign of a term of inclusion and exclusion."""
    return -1 if count % 2 else 1
