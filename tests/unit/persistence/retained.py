"""Snapshots and segments that tests of retention are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowdiff.persistence.retention.plan import (
    CollectionPlan,
    Inventory,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.journal import Pin
from lowdiff.types import Fence, Layout, OptimizerSpec, ParameterSpec, Retention
from tests.unit.persistence.made_runs import ENVIRONMENT, RUN_ID


def fence(number: int, parent: int | None, base: int, world_size: int, rank: int = 0) -> Fence:
    return Fence(
        run_id=RUN_ID,
        incarnation=number,
        parent=parent,
        base_step=base,
        rank=rank,
        world_size=world_size,
        environment=ENVIRONMENT,
        layout=Layout((ParameterSpec("w", (2,), (1,), "float32", 0),)),
        optimizers=(OptimizerSpec("torch.optim.sgd.SGD", (("w",),)),),
        compressor={"name": "topk"},
        names={},
        life="0" * 32,
        strategy="log",
    )


def snapshot(incarnation: int, step: int, **changes: Any) -> StoredSnapshot:
    made = StoredSnapshot(incarnation, step, Path(f"i{incarnation}-s{step}"), 10, True, float(step))
    return replace(made, **changes)


def segment(incarnation: int, first: int, rank: int = 0) -> StoredSegment:
    path = Path(f"r{rank}") / f"i{incarnation}-s{first}.seg"
    return StoredSegment(incarnation, rank, first, path, 1)


def planned(
    spans: Sequence[Span],
    snapshots: Sequence[StoredSnapshot],
    segments: Sequence[StoredSegment] = (),
    pins: Sequence[Pin] = (),
    /,
    *,
    now_seconds: float = 0.0,
    bases: tuple[int, ...] = (),
    **policy: Any,
) -> CollectionPlan:
    inventory = Inventory(tuple(spans), tuple(snapshots), tuple(segments), bases)
    return plan_collection(inventory, Retention(**policy), pins, now_seconds=now_seconds)


def names(plan: CollectionPlan) -> tuple[list[str], list[str]]:
    return (
        [r.path.name for r in plan.removals if r.is_snapshot],
        [r.path.name for r in plan.removals if not r.is_snapshot],
    )


ONE = [Span(0, 1, 0, None)]
SNAPSHOTS = [snapshot(0, 0), snapshot(0, 100), snapshot(0, 200)]
SEGMENTS = [segment(0, first) for first in (1, 51, 101, 151, 201)]
