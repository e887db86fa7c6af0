"""Which part of a recovery each of several ranks does: what it loads and replays, before all exchange."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from lowdiff.core.layout import shares_of
from lowdiff.recovery.load import Share
from lowdiff.recovery.plan import RecoveryPlan
from lowdiff.recovery.replay.optimizers import granularity
from lowdiff.types import Fence


def share_of(
    rank: int, world_size: int, plan: RecoveryPlan, fences: Mapping[int, Fence]
) -> Share | None:
    """One rank's share of a recovery; None if it has to do all of it.

    Parameters are divided as those of a snapshot are, so that a rank of as many as there were reads its
    own shard. What an optimizer that couples tensors steps cannot be divided: every rank replays that.

    Args:
        rank: Of the ranks that recover.
        world_size: How many recover together.
        plan: The way to the step.
        fences: Incarnation number -> its fence.
    """
    if world_size == 1:
        return None
    fence = fences[plan.incarnation]
    specs = fence.layout.parameters
    names = {specs[i].name for i in shares_of(fence.layout, world_size)[rank]}
    if plan.steps:
        coupling = (spec for spec in fence.optimizers if granularity(spec) == "whole")
        coupled = {name for spec in coupling for group in spec.groups for name in group}
        # Groups hold frozen parameters, too, which no image has.
        names.update(spec.name for spec in specs if spec.name in coupled)
    lives = [number for number, _ in groupby(step.incarnation for step in plan.steps)]
    sizes = [fences[number].world_size for number in (plan.base.incarnation, *lives)]
    return Share(
        parameters=frozenset(names),
        items=_source(rank, sizes),
        residual=rank if {sizes[0], sizes[-1]} == {world_size} else None,
    )


def _source(rank: int, sizes: list[int]) -> int:
    """The rank of the first life with whose items a rank goes on, over lives of these sizes."""
    for size in reversed(sizes):
        rank %= size
    return rank
