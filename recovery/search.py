"""The way to a step around whatever is damaged: the one place that decides what is tried next.

A snapshot or a record may be damaged, a step may not replay, and another rank may find so first. All
ranks that recover together try the same candidate, tell each other what stood in its way, and go on to
the same next one, until one serves on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from lowdiff.core.events import Code
from lowdiff.core.layout import shares_of
from lowdiff.core.numerics import other_torch
from lowdiff.errors import DamagedFile, LowDiffError, ReplayMismatch, RunMismatch, StepNotFound
from lowdiff.persistence.format.image import was_removed
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.load import Share, WeightsShare, load_snapshot
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, recoverable
from lowdiff.recovery.replay.optimizers import granularity
from lowdiff.recovery.replay.replayer import ReplayOptions, replay
from lowdiff.recovery.replay.sizing import check_memory
from lowdiff.recovery.replay.unit import UNREPLAYABLE, is_out_of_means
from lowdiff.recovery.reshard import frozen_needed
from lowdiff.recovery.sources.chooser import MemoryPlan, plan_in_memory
from lowdiff.recovery.sources.shares import shares_joined
from lowdiff.recovery.state import RecoveredState, refuse_lost_objects
from lowdiff.types import Fence, Layout

#: Called with the number of steps replayed so far, and the number there are.
Progress = Callable[[int, int], None]
#: Carries a plan out: of the whole state or of a share.
Act: TypeAlias = (
    "Callable[[Catalog, MemoryPlan | RecoveryPlan, ReplayOptions, Share | None], RecoveredState]"
)


class Company(Protocol):
    """The ranks that recover together."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in rank order."""

    def together(self) -> AbstractContextManager[None]:
        """Run the body on every rank; if it fails on any, fail on all."""


class _Alone:
    """A process that recovers by itself."""

    rank, world_size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


def plan_best(catalog: Catalog, step: int | None) -> MemoryPlan | RecoveryPlan:
    """Plan the way from what replicas left in memory where that leads as far as the disk, or further.

    Raises:
        StepNotFound: If nothing leads to ``step``, or to any step where that is None.
    """
    passed_over: dict[int, str] = {}
    memory = plan_in_memory(catalog, step, passed_over)
    best: MemoryPlan | RecoveryPlan
    if memory is None:
        best = plan_recovery(catalog, step)
    else:
        best = memory
        if step is None and any(last > memory.step for _, last in recoverable(catalog)):
            # Planned, as what is listed may not be what is there.
            with suppress(StepNotFound):
                plan = plan_recovery(catalog)
                best = plan if plan.step > memory.step else memory
    for passed, why in passed_over.items():
        if step is None and passed > best.step:
            Code.NOT_SAVED_AFTER_FAILURE.warn(why)
    return best


@dataclass(frozen=True, slots=True)
class Setback:
    """Damage that one attempt found on the way, so that the next one goes around it.

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

    def __init__(
        self,
        catalog: Catalog,
        step: int | None,
        *,
        goes_back: bool,
        act: Act | None = None,
        frozen: Layout | None = None,
    ) -> None:
        """Begin.

        Args:
            catalog: What there is.
            step: Which step; None for the newest that can be had.
            goes_back: Whether an earlier step serves where the newest does not replay.
            act: Carries a plan out, perhaps again after damage; None for `load_and_replay`.
            frozen: How frozen parameters are sharded over the ranks that recover; None as they were.
        """
        self.catalog = catalog
        self._act = act or load_and_replay
        self._frozen = frozen
        #: The step of the first plan stays the goal: a live run's newest moves on, perhaps faster than
        #: a replay follows, but by the next look that step is in a segment.
        self.goal = step
        self._step = step
        self._goes_back = goes_back
        self._damaged: list[int] = []
        self._unreadable: tuple[str, str] | None = None
        self._versions_said: set[str] = set()

    def run(
        self,
        options: ReplayOptions,
        company: Company | None = None,
        *,
        progress: Progress | None = None,
    ) -> RecoveredState:
        """Try one candidate after the other until one serves on every rank.

        Args:
            options: How to replay.
            company: The ranks that recover together; None if this process is alone.
            progress: Told about each window of steps.

        Returns:
            The state; of several ranks each has its share, see `recovery/shares.py`.

        Raises:
            StepNotFound: If nothing leads to the step that was asked for.
            DamagedFile: If nothing leads there but what cannot be read, or is no snapshot.
            ReplayMismatch: If a step does not replay, and no earlier one serves.
            RunMismatch: If the run's history does not hold the whole state of that step.
        """
        company = company or _Alone()
        self._leave_out_what_others_lack(company)
        while True:
            # Ranks may see a dead trainer's writer drain at different moments: rank 0's view decides.
            with company.together():
                plan = self._plan() if company.rank == 0 else None
            self.goal = company.gather(plan and plan.step)[0]
            with company.together():
                plan = plan or plan_best(self.catalog, self.goal)
                if company.rank == 0:
                    self._say_other_torch(plan)
                own = reporting(options, progress, 0, len(plan.steps))
                found = self._attempt_or_mismatch(plan, own, company)
            mismatch = [str(found), found.step] if isinstance(found, ReplayMismatch) else None
            told = company.gather([mismatch, asdict(found) if isinstance(found, Setback) else None])
            if isinstance(found, ReplayMismatch):
                raise found
            for rank, (theirs, _) in enumerate(told):
                if theirs is not None:
                    raise ReplayMismatch(f"rank {rank}: {theirs[0]}", step=theirs[1])
            setbacks = [Setback(**setback) for _, setback in told if setback is not None]
            if isinstance(found, RecoveredState) and not setbacks:
                return found
            # What one rank cannot use, none does: all go back, and to the same step.
            del found  # where it is a state, another one takes its place
            self._learn(setbacks)

    def _say_other_torch(self, plan: MemoryPlan | RecoveryPlan) -> None:
        """Say which steps another version of PyTorch made than is about to replay them."""
        steps_of: dict[str, list[int]] = {}
        for step, incarnation in _replayed_by(plan).items():
            version = other_torch(self.catalog.incarnations[incarnation].environment)
            if version is not None:
                steps_of.setdefault(version, []).append(step)
        for version, steps in steps_of.items():
            if version not in self._versions_said:
                self._versions_said.add(version)
                fence = self.catalog.incarnations[plan.incarnation]
                compared = "each is compared with the checksums recorded of it"
                if fence.environment.device != "cpu" and fence.digests == "crc32c":
                    compared = "they have no checksums, so nothing tells whether bits agree"
                Code.REPLAYED_WITH_OTHER_TORCH.warn(
                    f"steps {steps[0]} to {steps[-1]} were made with torch {version} and are replayed with "
                    f"torch {torch.__version__}; {compared}"
                )

    def _refuse_other_torch(
        self, plan: MemoryPlan | RecoveryPlan, mismatch: ReplayMismatch
    ) -> None:
        """Give no step up that the version of PyTorch which made the step may still give.

        Raises:
            ReplayMismatch: If another version made the step that does not replay; with the ways out.
        """
        failed = plan.step if mismatch.step is None else mismatch.step
        made_by = _replayed_by(plan).get(failed, plan.incarnation)
        fence = self.catalog.incarnations[made_by]
        version = other_torch(fence.environment)
        if version is None:
            return
        last: int | None = failed - 1
        if isinstance(plan, MemoryPlan):
            on_disk = recoverable(replace(self.catalog, staging=(), copies=()))
            last = max((last for _, last in on_disk), default=None)
        without = f"attach(..., step={last})"
        if last is None:
            without = "begin another run folder"
        raise ReplayMismatch(
            f"{mismatch}. No step is given up for that. Start the training once with torch {version}, up "
            "to its close(), whose snapshot every version goes on from; or recover with that version. To "
            f"go on without the steps up to {plan.step}: {without}",
            step=failed,
        )

    def _leave_out_what_others_lack(self, company: Company) -> None:
        """Go on with the snapshots that every rank sees whole.

        Where each node has a folder, one node's copy of a manifest may be damaged: ranks that began with
        different snapshots might end in different lives, and expect different things of each other.
        """
        own = {(s.incarnation, s.step): s for s in self.catalog.snapshots}
        common = set(own)
        for theirs in company.gather([list(key) for key in own]):
            common &= {(incarnation, step) for incarnation, step in theirs}
        self._damaged += sorted(step for _, step in own.keys() - common)
        left = tuple(s for key, s in own.items() if key in common)
        self.catalog = replace(self.catalog, snapshots=left)

    def _plan(self) -> MemoryPlan | RecoveryPlan:
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
            Code.NEWEST_STEP_LOST.warn(f"{error}; going back to step {plan.step}")
        self.goal = plan.step
        return plan

    def _attempt_or_mismatch(
        self, plan: MemoryPlan | RecoveryPlan, options: ReplayOptions, company: Company
    ) -> RecoveredState | Setback | ReplayMismatch:
        """Return a mismatch that no earlier step cures, so that it is the same error on all ranks."""
        try:
            return self._attempt(plan, options, company)
        except ReplayMismatch as error:
            return error

    def _attempt(
        self, plan: MemoryPlan | RecoveryPlan, options: ReplayOptions, company: Company
    ) -> RecoveredState | Setback:
        """Carry a rank's share of a plan out, or say what the next one has to go around.

        Raises:
            DamagedFile: If it is no snapshot with another one beside it, or was removed.
            ReplayMismatch: If a step does not replay, and no earlier one serves.
            RunMismatch: If the run's history does not hold the whole state of that step.
        """
        try:
            if isinstance(plan, MemoryPlan):
                return carry_out(self.catalog, plan, options, None, self._act)
            fences = self.catalog.incarnations
            share = share_of(company.rank, company.world_size, plan, fences, self._frozen)
            state = carry_out(self.catalog, plan, options, share, self._act)
            lives = dict.fromkeys([plan.base.incarnation, *(s.incarnation for s in plan.steps)])
            refuse_lost_objects(state, [fences[number] for number in lives])
            return state
        except ReplayMismatch as error:
            self._refuse_other_torch(plan, error)
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
        Code.RECOVERY_WENT_BACK.warn(f"{why}; going back to {where}")
        return setback

    def _learn(self, setbacks: Sequence[Setback]) -> None:
        """Go around what an attempt found, on this rank or on others."""
        damaged = {s.snapshot for s in setbacks if s.snapshot is not None}
        self._damaged += sorted(step for _, step in damaged)
        self._unreadable = next((s.unreadable for s in setbacks if s.unreadable), self._unreadable)
        left = (s for s in self.catalog.snapshots if (s.incarnation, s.step) not in damaged)
        self.catalog = replace(self.catalog, snapshots=tuple(left))
        if any(s.memory for s in setbacks):
            self.catalog = replace(self.catalog, staging=(), copies=())
        self.goal = min((s.last for s in setbacks if s.last is not None), default=self.goal)


def _replayed_by(plan: MemoryPlan | RecoveryPlan) -> dict[int, int]:
    """Return the steps that a plan replays, ascending, each with the incarnation that made it."""
    steps = {step.step: step.incarnation for step in plan.steps}
    if isinstance(plan, MemoryPlan):
        first = min(source.step for source in plan.sources) + 1
        steps = dict.fromkeys(range(first, plan.common + 1), plan.incarnation) | steps
    return steps


def reporting(
    options: ReplayOptions, progress: Progress | None, done: int, total: int
) -> ReplayOptions:
    """Options of one replay of several, the first of whose steps is number ``done`` of all."""
    if progress is None:
        return options
    return replace(options, progress=lambda steps: progress(done + steps, total))


def carry_out(
    catalog: Catalog,
    plan: MemoryPlan | RecoveryPlan,
    options: ReplayOptions,
    share: Share | None = None,
    act: Act | None = None,
) -> RecoveredState:
    """Load what a plan begins with and replay its differentials, checked by the recorded digests.

    Where blocks do not reproduce them (an unusual kernel or thread count), all is done once more with
    parameters replayed whole. Checksums hold for whatever a stranger has written, so what fits no
    optimizer is damaged; that a machine has nothing left says nothing about it.

    Args:
        catalog: What there is.
        plan: The way to a step.
        options: How to replay.
        share: What of a snapshot is loaded and replayed; None for all of it. What is in memory is
            always taken whole.
        act: What is done; None for `load_and_replay`.

    Raises:
        ReplayMismatch: If whole parameters do not reproduce the digests, either.
        DamagedFile: Also instead of what the optimizer says of values that do not fit.
    """
    try:
        return (act or load_and_replay)(catalog, plan, options, share)
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
    Code.REPLAYED_WHOLE.warn(f"{why}; replaying whole tensors instead of blocks")
    if options.movements is not None:
        options.movements.clear()
    return carry_out(catalog, plan, replace(options, whole=True), share, act)


def load_and_replay(
    catalog: Catalog,
    plan: MemoryPlan | RecoveryPlan,
    options: ReplayOptions,
    share: Share | WeightsShare | None,
) -> RecoveredState:
    """Load what a plan begins with and replay its differentials, once; see `carry_out`."""
    fences = catalog.incarnations
    if isinstance(plan, MemoryPlan):
        state, is_whole = shares_joined(catalog, plan, options)
        options = replace(options, whole=is_whole)
    else:
        base, last = fences[plan.base.incarnation], fences[plan.incarnation]
        if (base.layout, base.frozen_shards) != (last.layout, last.frozen_shards):
            raise RunMismatch(
                f"the model of snapshot {plan.base.step} differs from that of step {plan.step}; "
                "recover a step before the change"
            )
        needed = share.bytes if isinstance(share, WeightsShare) else plan.base.bytes
        check_memory(needed, options.here)
        state = load_snapshot(plan.base, base, options.readers, share)
    state.move(options.device)
    state = replay(state, plan.steps, fences.__getitem__, options)
    state.move(torch.device("cpu"))
    return state


def share_of(
    rank: int,
    world_size: int,
    plan: RecoveryPlan,
    fences: Mapping[int, Fence],
    frozen: Layout | None = None,
) -> Share | None:
    """One rank's share of a recovery; None if it has to do all of it.

    Parameters are divided as those of a snapshot are, so that a rank of as many as there were reads its
    own shard. What an optimizer that couples tensors steps cannot be divided: every rank replays that.

    Args:
        rank: Of the ranks that recover.
        world_size: How many recover together.
        plan: The way to the step.
        fences: Incarnation number -> its fence.
        frozen: How frozen parameters are sharded over these ranks; None as they were.
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
        frozen=frozen_needed(fence.frozen_shards, frozen, rank),
    )


def _source(rank: int, sizes: list[int]) -> int:
    """The rank of the first life with whose items a rank goes on, over lives of these sizes."""
    for size in reversed(sizes):
        rank %= size
    return rank
