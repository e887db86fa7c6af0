"""Measurements of every step of a run, by replaying it: where did the run go wrong?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

from lowdiff.errors import ConfigError, StepNotFound
from lowdiff.persistence.files.paths import staging_to_read
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet, scan
from lowdiff.persistence.store.fetch import opened
from lowdiff.recovery.engine import look_again
from lowdiff.recovery.plan import (
    PlannedStep,
    RecoveryPlan,
    confirm_steps,
    decisions,
    plan_recovery,
    recoverable,
    steps_after,
    usable_snapshots,
)
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.unit import Movement
from lowdiff.recovery.search import Progress, carry_out, reporting
from lowdiff.types import Decision

#: A norm over so many times the median of those before it is far out of line.
FAR_OUT = 50.0
_FEWEST_BEFORE, _MOST_BEFORE = 10, 100
#: Steps of which one can be told to be far out of line, by more than that it is not finite.
FEWEST_STEPS = _FEWEST_BEFORE + 1


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """Measurements of one step.

    Attributes:
        update_norm: L2 norm of the change of all parameters.
        gradient_norm: L2 norm of the gradient that the optimizers consumed.
        density: Share of the gradient's entries that are not zero.
        lr: Learning rate of every parameter group of every optimizer, in order.
        stepped: Whether any optimizer stepped; a gradient scaler may have skipped it, or a fused
            kernel on its behalf.
        stored_bytes: Bytes of the differential over all ranks.
    """

    step: int
    incarnation: int
    update_norm: float
    gradient_norm: float
    density: float
    lr: tuple[float, ...]
    stepped: bool
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps of a run.

    Attributes:
        steps: Consecutive, but for those left out.
        left_out: Steps between them that cannot be measured, because only a snapshot leads there.
        lost_tails: What was decided about lost steps on the run's history, oldest first.
    """

    run: str
    run_id: str
    steps: tuple[TimelineStep, ...]
    left_out: tuple[int, ...] = ()
    lost_tails: tuple[Decision, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON content; what is not finite becomes None."""
        steps = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(step).items()
            }
            for step in self.steps
        ]
        return {
            "run": self.run,
            "run_id": self.run_id,
            "steps": steps,
            "left_out": list(self.left_out),
            "lost_tails": [decision.document() for decision in self.lost_tails],
        }


def first_outlier(steps: Sequence[TimelineStep]) -> TimelineStep | None:
    """The first step far out of line: a norm over 50 times its median of up to 100 steps before.

    Needs ten steps before it; one that is not finite is far out, too, wherever it is.
    """
    for i, step in enumerate(steps):
        before = steps[max(0, i - _MOST_BEFORE) : i]
        for norm in map(attrgetter, ("gradient_norm", "update_norm")):
            value = norm(step)
            if not math.isfinite(value):
                return step
            if i >= _FEWEST_BEFORE and value > FAR_OUT * statistics.median(map(norm, before)) > 0:
                return step
    return None


def timeline(
    run: str | Path,
    *,
    first: int | None = None,
    last: int | None = None,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
) -> Timeline:
    """Replay a run, and measure every step of it that can be replayed.

    Args:
        run: The run folder, or the URL of its store.
        first: First step to measure; None for the earliest of the newest unbroken range.
        last: Last step, inclusive; None for the newest.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        progress: Told about each window of steps.

    Raises:
        ConfigError: If ``first`` lies after ``last``.
        StepNotFound: If these steps cannot be rebuilt; says which can.
    """
    if first is not None and last is not None and first > last:
        raise ConfigError(f"no step lies between first={first} and last={last}; swap them?")
    root = staging_to_read(staging)
    with opened(run) as folder:
        end = last

        def act(seen: Catalog) -> Timeline:
            # A live run's newest step may move on faster than replay follows. That of the first look is
            # in a segment by the next, or was dropped before it was durable.
            nonlocal end
            try:
                begins, end = _unbroken(seen, end)
            except StepNotFound:
                if last is not None or end is None:
                    raise
                begins, end = _unbroken(seen, None)
            own = options or ReplayOptions()
            return _measured(seen, str(run), first, (begins, end), own, progress)

        return look_again(folder, root, scan(folder, [root]), act)


def _measured(
    catalog: Catalog,
    run: str,
    first: int | None,
    unbroken: tuple[int, int],
    options: ReplayOptions,
    progress: Progress | None,
) -> Timeline:
    begins, end = unbroken
    start = begins if first is None else max(first - 1, 0)
    if first is not None and first > end:
        why = f"the newest step is {end}"
        raise StepNotFound(catalog.root, first, recoverable(catalog), why)
    bases = [s for s in usable_snapshots(catalog) if s.step >= begins]
    before = sum(s.step <= start for s in bases)
    if not before:
        why = f"no snapshot and unbroken steps lead to it, and step {start + 1} is measured from there"
        raise StepNotFound(catalog.root, start, recoverable(catalog), why)
    plans = [p for p in _plans(bases[before - 1 :], catalog, end) if p.step > start]
    steps: list[TimelineStep] = []
    total, done = sum(len(plan.steps) for plan in plans), 0
    for plan in plans:
        moved: dict[int, Movement] = {}
        how = replace(reporting(options, progress, done, total), movements=moved)
        carry_out(catalog, plan, how)
        elements = catalog.incarnations[plan.incarnation].layout.elements
        steps += [_step(s, moved, elements) for s in plan.steps if s.step > start]
        done += len(plan.steps)
    left_out = set(range(start + 1, end + 1)) - {step.step for step in steps}
    return Timeline(run, catalog.run_id, tuple(steps), tuple(sorted(left_out)), decisions(catalog))


def _unbroken(catalog: Catalog, last: int | None) -> tuple[int, int]:
    """The range of steps to measure from: its first, and ``last`` or its newest."""
    while True:
        end = plan_recovery(catalog, last).step
        begins = next((a for a, b in recoverable(catalog) if a <= end <= b), end)
        if confirm_steps(catalog, begins + 1, end):
            return begins, end


def _plans(bases: Sequence[SnapshotSet], catalog: Catalog, end: int) -> Iterator[RecoveryPlan]:
    """Replays from snapshot to snapshot, that together make every step up to ``end`` that can be made.

    Each begins anew at its snapshot, so that a step which only a snapshot leads to ends one replay.
    """
    for base, later in zip_longest(bases, bases[1:]):
        steps = _steps(catalog, base, end if later is None else min(later.step, end))
        if steps:
            yield RecoveryPlan(steps[-1].step, steps[-1].incarnation, base, steps)


def _steps(catalog: Catalog, base: SnapshotSet, last: int) -> tuple[PlannedStep, ...]:
    """Steps that replay of a snapshot leads to: later averages are in a later life's snapshot."""

    def averages(incarnation: int) -> Mapping[str, Sequence[str]]:
        return catalog.incarnations[incarnation].averages

    own, steps = averages(base.incarnation), steps_after(catalog, base.step, last)
    return tuple(takewhile(lambda step: averages(step.incarnation) == own, steps))


def _step(planned: PlannedStep, moved: Mapping[int, Movement], elements: int) -> TimelineStep:
    shards = planned.shards
    done = read_differential(shards[0], Codec()).optimizers
    movement = moved.get(planned.step, Movement())
    return TimelineStep(
        step=planned.step,
        incarnation=planned.incarnation,
        update_norm=math.sqrt(movement.update_squared),
        gradient_norm=math.sqrt(movement.gradient_squared),
        density=movement.nonzeros / elements,
        lr=tuple(float(group["lr"]) for step in done for group in step.consumed if "lr" in group),
        stepped=any(step.stepped and not step.found_inf for step in done),
        stored_bytes=sum(shard.framed_bytes for shard in shards),
    )
