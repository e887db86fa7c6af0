"""What of a recovery each of several ranks does: a pure function of the plan and the run's fences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowdiff.core.layout import layout_of
from lowdiff.persistence.run.catalog import SnapshotSet
from lowdiff.persistence.run.records import RankRecords
from lowdiff.recovery.load import Share
from lowdiff.recovery.plan import PlannedStep, RecoveryPlan
from lowdiff.recovery.replay.optimizers import GRANULARITY
from lowdiff.recovery.search import share_of
from lowdiff.types import Fence, OptimizerSpec
from tests.unit.recovery.test_plan import life as some_life

SIZES = {"a": 8, "b": 6, "c": 5, "a/b": 3, "empty": 0}
NAMES = frozenset(SIZES)


def life(number: int, ranks: int, *kinds: str) -> Fence:
    """A fence whose optimizers deal out the parameters in turn."""
    kinds = kinds or ("torch.optim.adamw.AdamW",)
    own = [tuple(list(SIZES)[i :: len(kinds)]) for i in range(len(kinds))]
    specs = tuple(OptimizerSpec(kind, (names,)) for kind, names in zip(kinds, own, strict=True))
    layout = layout_of([(n, torch.nn.Parameter(torch.empty(size))) for n, size in SIZES.items()])
    return replace(some_life(number, ranks=ranks), layout=layout, optimizers=specs)


def plan(*lives: Fence, steps: int = 1) -> tuple[RecoveryPlan, dict[int, Fence]]:
    """From a snapshot of the first life over some steps of each that follows, and of the first."""
    base = SnapshotSet(lives[0].incarnation, 0, Path("s"), ())
    order = [one.incarnation for one in lives for _ in range(steps)]
    planned = tuple(
        PlannedStep(step, number, (RankRecords(),)) for step, number in enumerate(order, 1)
    )
    made = RecoveryPlan(len(order), lives[-1].incarnation, base, planned)
    return made, {one.incarnation: one for one in lives}


def shares(world_size: int, *lives: Fence, steps: int = 1) -> list[Share]:
    found = [share_of(rank, world_size, *plan(*lives, steps=steps)) for rank in range(world_size)]
    assert all(share is not None for share in found)
    return [share for share in found if share is not None]


def test_a_rank_alone_does_everything() -> None:
    assert share_of(0, 1, *plan(life(0, 2))) is None


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_parameter_is_in_one_share(world_size: int) -> None:
    dealt = [name for share in shares(world_size, life(0, 2)) for name in share.parameters]
    assert sorted(dealt) == sorted(NAMES)
    largest = max(sum(SIZES[name] for name in share.parameters) for share in shares(2, life(0, 2)))
    assert largest == sum(SIZES.values()) / 2


def test_what_couples_tensors_is_replayed_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRANULARITY, "third.Whitening", "whole")
    monkeypatch.setitem(GRANULARITY, "third.Muon", "tensor")
    assert [s.parameters for s in shares(2, life(0, 2, "third.Whitening"))] == [NAMES, NAMES]
    both = shares(2, life(0, 2, "third.Whitening", "third.Muon"))
    whole = {"a", "c", "empty"}
    assert both[0].parameters & both[1].parameters == whole
    assert both[0].parameters | both[1].parameters == NAMES
    # Nothing is stepped where the snapshot is of the very step.
    first, second = shares(2, life(0, 2, "third.Whitening"), steps=0)
    assert not first.parameters & second.parameters


@pytest.mark.parametrize(
    ("world_size", "lives", "items"),
    [
        (2, [2], [0, 1]),
        (3, [2], [0, 1, 0]),
        (2, [3], [0, 1]),
        (3, [1, 2], [0, 0, 0]),
        (5, [2, 3], [0, 1, 0, 0, 1]),
        (3, [3, 2], [0, 1, 0]),
    ],
)
def test_items_are_those_that_lives_hand_on(
    world_size: int, lives: list[int], items: list[int]
) -> None:
    made = [life(number, ranks) for number, ranks in enumerate(lives)]
    assert [share.items for share in shares(world_size, *made)] == items


@pytest.mark.parametrize(
    ("world_size", "lives", "own"),
    [(2, [2], True), (2, [2, 2], True), (3, [2], False), (2, [3, 2], False), (2, [2, 3], False)],
)
def test_a_rank_reads_its_own_residual_unless_all_take_the_mean(
    world_size: int, lives: list[int], own: bool
) -> None:
    made = [life(number, ranks) for number, ranks in enumerate(lives)]
    found = [share.residual for share in shares(world_size, *made)]
    assert found == (list(range(world_size)) if own else [None] * world_size)
