"""From files to a state: scan, plan, load, replay; and what to do when one of them fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from lowdiff.errors import DamagedFile, ReplayMismatch, RunMismatch, StepNotFound
from lowdiff.events import printable
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.fetching import fetch_history, temporary_folder
from lowdiff.persistence.object_store import ObjectStore, is_url
from lowdiff.persistence.paths import RunFolder, staging_to_read
from lowdiff.persistence.snapshots import was_removed
from lowdiff.recovery.attempts import in_blocks_or_whole, unfit_is_damaged
from lowdiff.recovery.damage import judge
from lowdiff.recovery.in_memory import MemoryPlan, carry_out_in_memory, plan_in_memory
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, recoverable
from lowdiff.recovery.replay import ReplayOptions, replay
from lowdiff.recovery.sharing import gather, made_by_all
from lowdiff.recovery.sizing import check_memory, local_ranks
from lowdiff.recovery.state import RecoveredState, refuse_lost_objects
from lowdiff.types import Fence

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
        snapshots = fetch_history(ObjectStore(str(run)), folder, step, [root])
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

    aim = _Aim(step)

    def act(seen: Catalog) -> RecoveredState:
        goes_back = aim.asked is None
        state = recover_from_memory(seen, aim.step, options or ReplayOptions(), goes_back=goes_back)
        return _reach(seen, aim, options, progress) if state is None else state

    return look_again(folder, root, catalog, act)


class _Aim:
    """Where a recovery leads.

    The newest step of a live run moves on, faster perhaps than a replay follows. So the one that was
    planned first stays: by the next look it is in a segment.
    """

    def __init__(self, asked: int | None) -> None:
        self.asked = self.step = asked

    def plan(self, catalog: Catalog) -> RecoveryPlan:
        """Plan the way there; or to the newest step there is, if that is what is asked for.

        Raises:
            StepNotFound: If nothing leads there.
        """
        try:
            plan = plan_recovery(catalog, self.step)
        except StepNotFound as error:
            if self.step == self.asked:
                raise
            plan = plan_recovery(catalog, self.asked)
            _logger.warning("%s; going back to step %d", printable(str(error)), plan.step)
        self.step = plan.step
        return plan


def reporting(
    options: ReplayOptions | None, progress: Progress | None, done: int, total: int
) -> ReplayOptions:
    """Options of one replay of several, the first of whose steps is number ``done`` of all."""
    own = options or ReplayOptions()
    if progress is None:
        return own
    return replace(own, progress=lambda steps: progress(done + steps, total))


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
        check_all: Whether the newer one, too, reads everything, and believes and writes no index.
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
    if memory is None:
        return None
    return None if step is None and _leads_beyond(catalog, memory.step) else memory


def _leads_beyond(catalog: Catalog, step: int) -> bool:
    """Whether the disk does; planned where it is listed, which may be a false claim.

    Of a segment that grew, no index claims too little: it does not fit its length.
    """
    if all(last <= step for _, last in recoverable(catalog)):
        return False
    try:
        return plan_recovery(catalog).step > step
    except StepNotFound:
        return False


def newest_step(catalog: Catalog, step: int | None) -> int:
    """The step that `recover_from` leads to.

    Raises:
        StepNotFound: If there is none, or ``step`` is given and cannot be reached.
    """
    memory = plan_best(catalog, step)
    return plan_recovery(catalog, step).step if memory is None else memory.step


def recover_from(catalog: Catalog, step: int | None, options: ReplayOptions) -> RecoveredState:
    """`recover` with a catalog at hand.

    What replicas left in memory comes first.
    """
    state = recover_from_memory(catalog, step, options, goes_back=step is None)
    return recover_from_disk(catalog, step, options) if state is None else state


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


def recover_from_disk(catalog: Catalog, step: int | None, options: ReplayOptions) -> RecoveredState:
    """What segments and snapshots lead to; a damaged snapshot is passed over for an older one.

    Where it was the only way to the newest step, and that was asked for, the newest that can still
    be reached serves.
    """
    return _reach(catalog, _Aim(step), options, None)


def _reach(
    catalog: Catalog, aim: _Aim, options: ReplayOptions | None, progress: Progress | None
) -> RecoveredState:
    while True:
        plan = aim.plan(catalog)
        found = try_from_disk(catalog, plan, reporting(options, progress, 0, len(plan.steps)))
        if isinstance(found, RecoveredState):
            return found
        if aim.asked is not None:
            raise found.error
        if found.last is not None:
            _logger.warning("%s; going back to step %d", printable(str(found.error)), found.last)
            aim.step = found.last
        catalog = without(catalog, found.snapshots)


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
    return in_blocks_or_whole(partial(_carry_out, catalog, plan), options)


def _carry_out(catalog: Catalog, plan: RecoveryPlan, options: ReplayOptions) -> RecoveredState:
    def fence_of(incarnation: int) -> Fence:
        return catalog.incarnations[incarnation].fence

    _same_layout(fence_of(plan.base.incarnation), plan, fence_of(plan.incarnation))

    group = options.group
    if group is not None:
        options = replace(options, here=local_ranks(partial(gather, group=group)))

    def load() -> RecoveredState:
        check_memory(plan.base.bytes, options.here)
        state = load_snapshot(plan.base, fence_of(plan.base.incarnation), options.readers)
        state.move(options.device)
        return state

    with unfit_is_damaged(catalog.root, f"what is stored up to step {plan.step}"):
        state = made_by_all(load, group)
        state = replay(state, plan.steps, fence_of, options)
        state.move(torch.device("cpu"))
        return state


def _same_layout(base: Fence, plan: RecoveryPlan, target: Fence) -> None:
    if base.layout != target.layout:
        raise RunMismatch(
            f"the model of snapshot {plan.base.step} differs from that of step {plan.step}; "
            "recover a step before the change"
        )
