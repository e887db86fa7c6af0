"""Where copies lie, and how likely the loss of some nodes loses nothing."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from lowdiff.core.placement import Placement, place, survival_probability
from lowdiff.errors import ConfigError

SMALL = [(nodes, copies) for nodes in range(1, 12) for copies in range(1, nodes + 1)]


def loses_nothing(placement: Placement, lost: tuple[int, ...]) -> bool:
    return not any(set(holders) <= set(lost) for holders in placement.holders)


def test_nodes_in_groups_hold_everything_of_their_group() -> None:
    placement = place(4, 2)
    assert placement.rings == ((0, 1), (2, 3))
    assert placement.holders == ((0, 1), (1, 0), (2, 3), (3, 2))


def test_a_rest_makes_the_last_group_a_ring() -> None:
    placement = place(8, 3)
    assert placement.rings == ((0, 1, 2), (3, 4, 5, 6, 7))
    assert placement.holders[3:] == ((3, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 3), (7, 3, 4))
    assert placement.held_by(3) == (3, 6, 7)
    assert placement.held_by(1) == (0, 1, 2)


def test_a_single_copy_is_the_nodes_own() -> None:
    assert place(3, 1).holders == ((0,), (1,), (2,))


@pytest.mark.parametrize(("nodes", "copies"), SMALL)
def test_every_node_holds_as_much_as_it_gives_away(nodes: int, copies: int) -> None:
    placement = place(nodes, copies)
    assert [node for ring in placement.rings for node in ring] == list(range(nodes))
    *groups, last = placement.rings
    assert all(len(ring) == copies for ring in groups)
    assert copies <= len(last) <= 2 * copies - 1
    for node, holders in enumerate(placement.holders):
        assert holders[0] == node
        assert len(set(holders)) == copies
        assert len(placement.held_by(node)) == copies
        assert all(node in placement.held_by(holder) for holder in holders)


@pytest.mark.parametrize(
    ("nodes", "copies", "lost", "expected"),
    [
        (4, 2, 2, 0.6667),
        (16, 2, 2, 0.9333),
        (16, 2, 3, 0.8000),
        (16, 2, 4, 0.6154),
        (16, 4, 4, 0.9978),
        (12, 3, 3, 0.9818),
        (5, 2, 2, 0.6000),
        (7, 3, 3, 0.8571),
        (11, 4, 4, 0.9758),
    ],
)
def test_known_figures_come_out(nodes: int, copies: int, lost: int, expected: float) -> None:
    assert round(float(survival_probability(nodes, copies, lost)), 4) == expected


@pytest.mark.parametrize(("nodes", "copies"), SMALL)
def test_the_probability_is_that_of_all_sets_tried_one_by_one(nodes: int, copies: int) -> None:
    placement = place(nodes, copies)
    for lost in range(nodes + 1):
        sets = list(combinations(range(nodes), lost))
        harmless = sum(loses_nothing(placement, chosen) for chosen in sets)
        assert survival_probability(nodes, copies, lost) == Fraction(harmless, len(sets)), lost


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [4096, 5001])
def test_thousands_of_nodes_are_counted_exactly(nodes: int) -> None:
    # Two lost nodes are harmful if they are a group of two, or neighbours in a last ring of three.
    harmful = nodes // 2 if nodes % 2 == 0 else nodes // 2 - 1 + 3
    assert survival_probability(nodes, 2, 2) == 1 - Fraction(harmful, comb(nodes, 2))
    assert survival_probability(nodes, 3, 2) == 1
    assert survival_probability(nodes, 2, nodes // 2 + 1) == 0
    assert 0 < survival_probability(nodes, 4, 40) < 1


@pytest.mark.parametrize(
    ("nodes", "copies", "message"),
    [
        (3, 4, "copies=4 needs 4 nodes, and there are 3"),
        (3, 0, "copies counts the nodes that hold a step, this one included, got 0"),
        (0, 1, "copies=1 needs 1 nodes, and there are 0"),
        (3, 1.5, "copies is a whole number, got 1.5"),
    ],
)
def test_what_cannot_be_placed_is_refused(nodes: int, copies: int, message: str) -> None:
    for refuses in (place, lambda n, m: survival_probability(n, m, 1)):
        with pytest.raises(ConfigError, match=message):
            refuses(nodes, copies)


@pytest.mark.parametrize("lost", [-1, 5])
def test_more_nodes_than_there_are_cannot_be_lost(lost: int) -> None:
    with pytest.raises(ConfigError, match="lost counts nodes, 0 to 4 of 4"):
        survival_probability(4, 2, lost)
