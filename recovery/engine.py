"""From files to a state: scan, plan, load, replay; and what to do when one of them fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from lowdiff.core.events import printable
from lowdiff.errors import DamagedFile, ReplayMismatch, RunMismatch, StepNotFound
from lowdiff.persistence.files.paths import RunFolder, staging_to_read
from lowdiff.persistence.format.image import was_removed
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.persistence.store.fetch import fetch_history, temporary_folder
from lowdiff.recovery.damage import judge
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, recoverable
from lowdiff.recovery.replay.replayer import ReplayOptions, in_blocks_or_whole, replay
from lowdiff.recovery.replay.sizing import check_memory
from lowdiff.recovery.replica.recover import MemoryPlan, carry_out_in_memory, plan_in_memory
from lowdiff.recovery.state import RecoveredState, refuse_lost_objects

_logger = logging.getLogger(__name__)

#: Called with the number of steps replayed so far, and the number there are.
Progress = Callable[[int, int], None]

#: A small run is looked at within milliseconds, and may remove its snapshots as fast.
_LOOKS, _LOOKS_SECONDS = 3, 5.0
_Result = TypeVar("_Result")


def recover(
    run: str | Path,
    step: int | None = None,
    *,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
) -> RecoveredState:
    """Rebuild the state of a run at any committed step; the training code is not needed.

    Args:
        run: The run folder, or the URL of its store. Of a store only the nearest snapshot and the
            differentials after it are read, into a temporary folder (``TMPDIR``).
        step: Which step; None for the newest.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        progress: Told about each window of steps.
        device: Where to replay, e.g. ``"cuda"`` for a run that was trained there; the result is on
            the CPU. Instead of the options'.

    Raises:
        NotARun: If the folder or store holds no run.
        StoreError: If the store does not answer.
        StepNotFound: If the step cannot be rebuilt; says which can.
        DamagedFile: If the bytes needed are damaged.
        ReplayMismatch: If replay does not reproduce what the live run recorded.
    """
    root = staging_to_read(staging)
    if device is not None:
        options = replace(options or ReplayOptions(), device=torch.device(device))
    if not is_url(run):
        return _recover(RunFolder(Path(run)), step, root, options, progress)
    with temporary_folder() as folder:
        snapshots = fetch_history(ObjectStore(str(run)), folder, step)
        try:
            return _recover(folder, step, root, options, progress)
        except StepNotFound as error:
            # What was fetched is not all there is, and the rest is not worth fetching for this.
            others = {(found, found) for found in snapshots}
            covered = {s for s, _ in others for a, b in error.recoverable if a <= s <= b}
            ranges = sorted({*error.recoverable, *(r for r in others if r[0] not in covered)})
            why = f"{error.why} (elsewhere only snapshots are listed here, not what lies between)"
            raise StepNotFound(str(run), error.step, ranges, why) from error


def _recover(
    folder: RunFolder,
    step: int | None,
    root: Path,
    options: ReplayOptions | None,
    progress: Progress | None,
) -> RecoveredState:
    catalog = scan(folder, [root])
    for finding in judge(folder, catalog)[0]:
        _logger.warning("%s", printable(finding.message))

    own, aim = options or ReplayOptions(), step

    def act(seen: Catalog) -> RecoveredState:
        # The newest step of a live run moves on, faster perhaps than a replay follows. So the one that
        # was planned first stays the aim: by the next look it is in a segment.
        nonlocal aim
        state = recover_from_memory(seen, aim, own, goes_back=step is None)
        while state is None:
            try:
                plan = plan_recovery(seen, aim)
            except StepNotFound as error:
                if aim == step:
                    raise
                plan = plan_recovery(seen, step)
                _logger.warning("%s; going back to step %d", printable(str(error)), plan.step)
            aim = plan.step
            found = try_from_disk(seen, plan, reporting(own, progress, 0, len(plan.steps)))
            if isinstance(found, RecoveredState):
                return found
            if step is not None:
                raise found.error
            # Where nothing leads to the newest step, the newest that can still be reached serves.
            if found.last is not None:
                told = printable(str(found.error))
                _logger.warning("%s; going back to step %d", told, found.last)
                aim = found.last
            seen = without(seen, found.snapshots)
        return state

    return look_again(folder, root, catalog, act)


def reporting(
    options: ReplayOptions, progress: Progress | None, done: int, total: int
) -> ReplayOptions:
    """Options of one replay of several, the first of whose steps is number ``done`` of all."""
    if progress is None:
        return options
    return replace(options, progress=lambda steps: progress(done + steps, total))


def look_again(
    folder: RunFolder,
    staging: Path,
    catalog: Catalog,
    act: Callable[[Catalog], _Result],
    *,
    check_all: bool = False,
) -> _Result:
    """Act on a run that may be alive.

    Its trainer reuses staging memory once that is durable, and its writer removes old snapshots.

    Args:
        folder: The run's folder.
        staging: Root of its staging folders.
        catalog: What was seen of it.
        act: Called with the catalog, and again with a newer one if what it lists is gone.
        check_all: Whether the newer one, too, reads everything.
    """
    looks, deadline = 0, time.monotonic() + _LOOKS_SECONDS
    while True:
        try:
            return act(catalog)
        except DamagedFile as error:
            is_gone = was_removed(error.path)
            if staging not in error.path.parents and not is_gone:
                raise
            looks += 1
            if looks > _LOOKS and not (is_gone and time.monotonic() < deadline):
                raise
        catalog = scan(folder, [staging], check_all=check_all)


def plan_best(catalog: Catalog, step: int | None) -> MemoryPlan | None:
    """The way from what replicas left in memory, where it leads further than the disk, or as far."""
    memory = plan_in_memory(catalog, step)
    if memory is None or step is not None:
        return memory
    if any(last > memory.step for _, last in recoverable(catalog)):
        # Planned, as what is listed may not be what is there.
        with suppress(StepNotFound):
            return None if plan_recovery(catalog).step > memory.step else memory
    return memory


def newest_step(catalog: Catalog, step: int | None) -> int:
    """The step that a recovery leads to.

    Raises:
        StepNotFound: If there is none, or ``step`` is given and cannot be reached.
    """
    memory = plan_best(catalog, step)
    return plan_recovery(catalog, step).step if memory is None else memory.step


def recover_from_memory(
    catalog: Catalog, step: int | None, options: ReplayOptions, *, goes_back: bool
) -> RecoveredState | None:
    """What replicas left in memory, where it leads as far as the disk; None if it does not.

    Args:
        catalog: What there is.
        step: Which step; None for the newest.
        options: How to replay.
        goes_back: Whether an earlier step serves where that one does not replay.
    """
    memory = plan_best(catalog, step)
    if memory is None:
        return None
    try:
        return carry_out_in_memory(catalog, memory, options)
    except (DamagedFile, ReplayMismatch, RunMismatch) as error:
        # Not for want of memory or of room on a disk: that passes, but a step back would remain.
        what = printable(str(error))
        failed = error.step if isinstance(error, ReplayMismatch) else None
        if not goes_back or failed is None or failed <= memory.common:
            _logger.warning("%s; going back to what is on disk", what)
            return None
        _logger.warning("%s; steps %d to %d are lost", what, failed, memory.step)
    return recover_from_memory(catalog, failed - 1, options, goes_back=True)


@dataclass(frozen=True, slots=True, eq=False)
class OutOfReach:
    """A step to which nothing leads: its snapshots are damaged, or replay does not come so far.

    Attributes:
        error: Says so.
        snapshots: ``(incarnation, step)`` of each damaged one.
        last: The last step that replays, where a later one does not.
    """

    error: StepNotFound | ReplayMismatch
    snapshots: tuple[tuple[int, int], ...] = ()
    last: int | None = None


def without(catalog: Catalog, snapshots: Collection[tuple[int, int]]) -> Catalog:
    """A catalog that lacks some snapshots, each given by incarnation and step."""
    left = tuple(s for s in catalog.snapshots if (s.incarnation, s.step) not in snapshots)
    return replace(catalog, snapshots=left)


def try_from_disk(
    catalog: Catalog, plan: RecoveryPlan, options: ReplayOptions
) -> RecoveredState | OutOfReach:
    """The state at a plan's step: from its snapshot, or from older ones where that is damaged.

    Raises:
        DamagedFile: If nothing else leads there than what cannot be read. That may pass, while a step
            back would remain.
    """
    damaged: list[tuple[int, int]] = []
    unreadable: DamagedFile | None = None
    while True:
        try:
            state = carry_out(catalog, plan, options)
        except DamagedFile as error:
            base, is_only = plan.base, len(catalog.snapshots) == 1
            if was_removed(error.path) or is_only or base.folder not in error.path.parents:
                raise
            _logger.warning("%s; going back to an older snapshot", printable(str(error)))
            damaged.append((base.incarnation, base.step))
            if error.is_unreadable:  # told anew: the error holds on to what was read
                unreadable = DamagedFile(error.path, error.what)
            catalog = without(catalog, damaged)
        except ReplayMismatch as error:
            if error.step is None:
                raise
            last = error.step - 1
            lost = f"{error}. Steps {error.step} to {plan.step} cannot be had; step {last} can"
            return OutOfReach(ReplayMismatch(lost, step=error.step), last=last)
        else:
            lives = dict.fromkeys([plan.base.incarnation, *(s.incarnation for s in plan.steps)])
            refuse_lost_objects(state, [catalog.incarnations[number].fence for number in lives])
            return state
        try:
            plan = plan_recovery(catalog, plan.step)
        except StepNotFound as error:
            if unreadable is not None:
                raise unreadable from error
            which = ", ".join(str(step) for _, step in damaged)
            why = f"{error.why} (snapshot {which}, which leads there, is damaged)"
            found = StepNotFound(catalog.root, error.step, error.recoverable, why)
            return OutOfReach(found, tuple(damaged))


def carry_out(catalog: Catalog, plan: RecoveryPlan, options: ReplayOptions) -> RecoveredState:
    """Load the plan's snapshot and replay its differentials.

    In whole tensors where blocks do not reproduce the live run's bits.
    """
    fences = {number: life.fence for number, life in catalog.incarnations.items()}
    base = fences[plan.base.incarnation]
    if base.layout != fences[plan.incarnation].layout:
        raise RunMismatch(
            f"the model of snapshot {plan.base.step} differs from that of step {plan.step}; "
            "recover a step before the change"
        )

    def attempt(options: ReplayOptions) -> RecoveredState:
        check_memory(plan.base.bytes, options.here)
        state = load_snapshot(plan.base, base, options.readers)
        state.move(options.device)
        state = replay(state, plan.steps, fences.__getitem__, options)
        state.move(torch.device("cpu"))
        return state

    what = f"what is stored up to step {plan.step}"
    return in_blocks_or_whole(attempt, options, catalog.root, what)
