"""From files to a state: scan, plan, load, replay; and what to do when one of them fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from lowdiff.core.events import Code, printable, warn
from lowdiff.errors import (
    ConfigError,
    DamagedFile,
    LowDiffError,
    ReplayMismatch,
    RunMismatch,
    StepNotFound,
)
from lowdiff.persistence.files.paths import RunFolder, staging_to_read, user_path
from lowdiff.persistence.format.image import was_removed
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.persistence.store.fetch import fetch_history, temporary_folder
from lowdiff.recovery.damage import judge
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, recoverable
from lowdiff.recovery.replay.replayer import ReplayOptions, replay
from lowdiff.recovery.replay.sizing import check_memory
from lowdiff.recovery.replay.unit import UNREPLAYABLE, is_out_of_means
from lowdiff.recovery.replica.recover import MemoryPlan, plan_in_memory, shares_joined
from lowdiff.recovery.state import RecoveredState, refuse_lost_objects
from lowdiff.types import whole_number

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
        ConfigError: If an argument cannot be.
        NotARun: If the folder or store holds no run.
        StoreError: If the store does not answer.
        StepNotFound: If the step cannot be rebuilt; says which can.
        DamagedFile: If the bytes needed are damaged.
        ReplayMismatch: If replay does not reproduce what the live run recorded.
    """
    root = staging_to_read(staging)
    step = None if step is None else whole_number("step", step)
    if device is not None:
        options = replace(options or ReplayOptions(), device=_device(device))
    if not is_url(run):
        return _recover(RunFolder(user_path("run", run)), step, root, options, progress)
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


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device of torch: {error}") from error


def _recover(
    folder: RunFolder,
    step: int | None,
    root: Path,
    options: ReplayOptions | None,
    progress: Progress | None,
) -> RecoveredState:
    catalog = scan(folder, [root])
    for finding in judge(folder, catalog)[0]:
        warn(_logger, Code.RUN_DAMAGED, "%s", printable(finding.message))
    search = Search(catalog, step, goes_back=step is None)

    def act(seen: Catalog) -> RecoveredState:
        search.catalog = seen
        while True:
            plan = search.plan()
            own = reporting(options or ReplayOptions(), progress, 0, len(plan.steps))
            found = search.attempt(plan, own)
            if isinstance(found, RecoveredState):
                return found
            search.learn([found])

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


def plan_best(catalog: Catalog, step: int | None) -> MemoryPlan | RecoveryPlan:
    """Plan the way from what replicas left in memory where that leads as far as the disk, or further.

    Raises:
        StepNotFound: If nothing leads to ``step``, or to any step where that is None.
    """
    memory = plan_in_memory(catalog, step)
    if memory is None:
        return plan_recovery(catalog, step)
    if step is None and any(last > memory.step for _, last in recoverable(catalog)):
        # Planned, as what is listed may not be what is there.
        with suppress(StepNotFound):
            plan = plan_recovery(catalog)
            return plan if plan.step > memory.step else memory
    return memory


@dataclass(frozen=True, slots=True)
class Setback:
    """What one attempt found on the way, so that the next one goes around it.

    Attributes:
        memory: Whether what replicas left in memory cannot be used.
        snapshot: Incarnation and step of a damaged snapshot.
        unreadable: Its file and what the system says of that, where another try might read it.
        last: The last step that replays, where a later one does not.
    """

    memory: bool = False
    snapshot: tuple[int, int] | None = None
    unreadable: tuple[str, str] | None = None
    last: int | None = None


class Search:
    """The way to a step, around whatever turns out to be damaged."""

    def __init__(self, catalog: Catalog, step: int | None, *, goes_back: bool) -> None:
        """Begin.

        Args:
            catalog: What there is.
            step: Which step; None for the newest that can be had.
            goes_back: Whether an earlier step serves where the newest does not replay.
        """
        self.catalog = catalog
        #: The step of the first plan stays the goal: a live run's newest moves on, perhaps faster than
        #: a replay follows, but by the next look that step is in a segment.
        self.goal = step
        self._step = step
        self._goes_back = goes_back
        self._damaged: list[int] = []
        self._unreadable: tuple[str, str] | None = None

    def plan(self) -> MemoryPlan | RecoveryPlan:
        """Plan the way to the goal, or to the newest step where nothing leads to the goal any more.

        Raises:
            StepNotFound: If nothing leads to the step that was asked for.
            DamagedFile: If nothing leads there but what cannot be read. That may pass, while a step
                back would remain.
        """
        try:
            plan = plan_best(self.catalog, self.goal)
        except StepNotFound as error:
            if self._unreadable is not None:
                path, what = self._unreadable
                raise DamagedFile(Path(path), what) from error
            if self._damaged:
                which = ", ".join(map(str, self._damaged))
                why = f"{error.why} (snapshot {which}, which leads there, is damaged)"
                error = StepNotFound(self.catalog.root, error.step, error.recoverable, why)
            if self.goal == self._step:
                raise error from None
            plan = plan_best(self.catalog, self._step)
            warn(
                _logger,
                Code.NEWEST_STEP_LOST,
                "%s; going back to step %d",
                printable(str(error)),
                plan.step,
            )
        self.goal = plan.step
        return plan

    def attempt(
        self, plan: MemoryPlan | RecoveryPlan, options: ReplayOptions
    ) -> RecoveredState | Setback:
        """Carry a plan out, or say what the next one has to go around.

        Raises:
            DamagedFile: If it is no snapshot with another one beside it, or was removed.
            ReplayMismatch: If a step does not replay, and no earlier one serves.
            RunMismatch: If the run's history does not hold the whole state of that step.
        """
        try:
            state = carry_out(self.catalog, plan, options)
            if isinstance(plan, RecoveryPlan):
                lives = dict.fromkeys([plan.base.incarnation, *(s.incarnation for s in plan.steps)])
                fences = [self.catalog.incarnations[number] for number in lives]
                refuse_lost_objects(state, fences)
            return state
        except ReplayMismatch as error:
            failed, why = error.step, str(error)
            if isinstance(plan, MemoryPlan) and (
                not self._goes_back or failed is None or failed <= plan.common
            ):
                setback, where = Setback(memory=True), "what is on disk"
            elif failed is None:
                raise
            else:
                last = failed - 1
                why = f"{why}. Steps {failed} to {plan.step} cannot be had; step {last} can"
                if not self._goes_back:
                    raise ReplayMismatch(why, step=failed) from None
                setback, where = Setback(last=last), f"step {last}"
        except (DamagedFile, RunMismatch) as error:
            why = str(error)
            # Not for want of memory or of room on a disk: that passes, but a step back would remain.
            if isinstance(plan, MemoryPlan):
                setback, where = Setback(memory=True), "what is on disk"
            elif isinstance(error, RunMismatch):
                raise
            else:
                base, is_only = plan.base, len(self.catalog.snapshots) == 1
                if was_removed(error.path) or is_only or base.folder not in error.path.parents:
                    raise
                unreadable = (str(error.path), error.what) if error.is_unreadable else None
                setback = Setback(snapshot=(base.incarnation, base.step), unreadable=unreadable)
                where = "an older snapshot"
        warn(_logger, Code.RECOVERY_WENT_BACK, "%s; going back to %s", printable(why), where)
        return setback

    def learn(self, setbacks: Sequence[Setback]) -> None:
        """Go around what an attempt found, on this rank or on others."""
        damaged = {s.snapshot for s in setbacks if s.snapshot is not None}
        self._damaged += sorted(step for _, step in damaged)
        self._unreadable = next((s.unreadable for s in setbacks if s.unreadable), self._unreadable)
        left = (s for s in self.catalog.snapshots if (s.incarnation, s.step) not in damaged)
        staging = () if any(s.memory for s in setbacks) else self.catalog.staging
        self.catalog = replace(self.catalog, snapshots=tuple(left), staging=staging)
        self.goal = min((s.last for s in setbacks if s.last is not None), default=self.goal)


def carry_out(
    catalog: Catalog, plan: MemoryPlan | RecoveryPlan, options: ReplayOptions
) -> RecoveredState:
    """Load what a plan begins with and replay its differentials, checked by the recorded digests.

    Where blocks do not reproduce them (an unusual kernel or thread count), all is done once more with
    parameters replayed whole. Checksums hold for whatever a stranger has written, so what fits no
    optimizer is damaged; that a machine has nothing left says nothing about it.

    Raises:
        ReplayMismatch: If whole parameters do not reproduce the digests, either.
        DamagedFile: Also instead of what the optimizer says of values that do not fit.
    """
    try:
        return _carry_out(catalog, plan, options)
    except ReplayMismatch as error:
        if options.whole:
            raise
        why = str(error)
    except LowDiffError:
        raise
    except UNREPLAYABLE as error:
        if is_out_of_means(error):
            raise
        what = f"what is stored up to step {plan.step} cannot be replayed ({error!r:.200})"
        raise DamagedFile(catalog.root, what) from error
    # Not in the clause above, and not with the error itself, which holds on to the first state.
    warn(_logger, Code.REPLAYED_WHOLE, "%s; replaying whole tensors instead of blocks", why)
    if options.movements is not None:
        options.movements.clear()
    return carry_out(catalog, plan, replace(options, whole=True))


def _carry_out(
    catalog: Catalog, plan: MemoryPlan | RecoveryPlan, options: ReplayOptions
) -> RecoveredState:
    fences = catalog.incarnations
    if isinstance(plan, MemoryPlan):
        state, is_whole = shares_joined(catalog, plan, options)
        options = replace(options, whole=is_whole)
    else:
        base = fences[plan.base.incarnation]
        if base.layout != fences[plan.incarnation].layout:
            raise RunMismatch(
                f"the model of snapshot {plan.base.step} differs from that of step {plan.step}; "
                "recover a step before the change"
            )
        check_memory(plan.base.bytes, options.here)
        state = load_snapshot(plan.base, base, options.readers)
    state.move(options.device)
    state = replay(state, plan.steps, fences.__getitem__, options)
    state.move(torch.device("cpu"))
    return state
