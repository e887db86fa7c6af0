"""The state as the replicas of a dead trainer hold it: in memory, at its newest step.

Every rank's replica holds its share, perhaps a step apart from the others'; what its log holds brings
it to the step of the furthest, which all ranks had staged. From there on the steps in flight are
replayed as ever.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from crc32c import crc32c

from lowdiff.errors import DamagedFile, RunInUse
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.records import StoredRecord, joined
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    TrainerStatus,
    has_replica,
    read_status,
)
from lowdiff.recovery.load import empty_state, load_constants, load_shard
from lowdiff.recovery.plan import PlannedStep, confirm_steps, spans_of, steps_after
from lowdiff.recovery.replay.kernels import StepChooser
from lowdiff.recovery.replay.optimizers import is_registered, settle_kernels, without_default_group
from lowdiff.recovery.replay.replayer import ReplayOptions, in_blocks_or_whole, replay
from lowdiff.recovery.replay.sizing import threads_put_back
from lowdiff.recovery.replica.file import PASSING, ReplicaFile, is_of_this_kernel
from lowdiff.recovery.replica.share import Shard, contents_of, share_step
from lowdiff.recovery.state import OptimizerState, RecoveredState
from lowdiff.types import Fence

_logger = logging.getLogger(__name__)

#: How a trainer describes itself in its lock; others add what they do with its memory.
_TRAINER = re.compile(r"process \d+")
#: Time enough for whoever has just taken a lock to say who it is.
_GLANCE_SECONDS = 0.05
#: How long a replica may take for its last step, and others for a look at the memory.
_PATIENCE_SECONDS = 30.0
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Source:
    """What one rank's share can be rebuilt from.

    Attributes:
        step: The step it is of, as a whole.
        reach: The step of its furthest part: the least one it can be brought to.
        is_image: Whether it is the trainer's image, of which its replica holds nothing later.
    """

    stage: StagingFolder
    step: int
    reach: int
    is_image: bool

    @property
    def path(self) -> Path:
        """The file."""
        if self.is_image:
            return self.stage.snapshot
        return self.stage.replica_state(
            read_status(self.stage.replica_status, ReplicaStatus).generation
        )


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """How to reach ``step`` from the replicas.

    Attributes:
        incarnation: Whose replicas.
        common: The step that every share is brought to by itself.
        sources: One per rank.
        steps: Differentials ``common + 1 .. step``.
    """

    step: int
    incarnation: int
    common: int
    sources: tuple[_Source, ...]
    steps: tuple[PlannedStep, ...]

    @property
    def range(self) -> tuple[int, int]:
        """First and last step that can be had this way."""
        return self.common, self.step

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read, one per rank; a trainer that attaches meanwhile removes them."""
        return tuple(source.path for source in self.sources)


def with_steps_in_memory(
    ranges: Sequence[tuple[int, int]], memory: tuple[int, int] | None
) -> list[tuple[int, int]]:
    """Ranges of steps that the disk leads to, and those that memory does; ends included, ascending."""
    return joined([*ranges, *([] if memory is None else [memory])])


def plan_in_memory(catalog: Catalog, step: int | None) -> MemoryPlan | None:
    """Plan the way to ``step``, or to the newest step, from what replicas left; None if none leads.

    The differentials on the way are read first; where one is not what is listed, the plan is made
    again with what is there.

    Raises:
        RunInUse: If the trainer is gone, and somebody else keeps the memory for long.
    """
    while True:
        plan = _way(catalog, step)
        if plan is None or confirm_steps(catalog, plan.common + 1, plan.step):
            return plan


def _way(catalog: Catalog, step: int | None) -> MemoryPlan | None:
    spans = spans_of(catalog)
    for span in reversed(spans):
        sources: list[list[_Source]] = []
        while len(sources) < span.world_size and (not sources or sources[-1]):
            sources.append(_sources(catalog, span.incarnation, len(sources)))
        if not sources[-1]:
            continue
        for common in sorted({s.reach for found in sources for s in found}, reverse=True):
            if not span.holds(common) or (step is not None and common > step):
                continue
            chosen = [_nearest(catalog, span.incarnation, found, common) for found in sources]
            steps = steps_after(catalog, common, step)
            reached = steps[-1].step if steps else common
            complete = tuple(source for source in chosen if source is not None)
            if len(complete) == len(chosen) and step in (None, reached):
                return MemoryPlan(reached, span.incarnation, common, complete, steps)
    return None


def carry_out_in_memory(
    catalog: Catalog, plan: MemoryPlan, options: ReplayOptions
) -> RecoveredState:
    """Put the shares together and replay the steps in flight; the replicas' files stay as they are.

    The tensors are private views of them: reading costs no copy.

    Raises:
        DamagedFile: If one is not what was published.
        ReplayMismatch: If a step in flight does not replay.
    """
    settle_kernels()

    def attempt(options: ReplayOptions) -> RecoveredState:
        state, is_whole = _shares_joined(catalog, plan, options)
        state.move(options.device if plan.steps else _HOST)
        options = replace(options, whole=is_whole)
        state = replay(state, plan.steps, lambda n: catalog.incarnations[n].fence, options)
        state.move(_HOST)
        return state

    what = f"what is in memory up to step {plan.step}"
    return in_blocks_or_whole(attempt, options, catalog.root, what)


def _shares_joined(
    catalog: Catalog, plan: MemoryPlan, options: ReplayOptions
) -> tuple[RecoveredState, bool]:
    """All ranks' shares, at the common step; and whether only whole tensors reproduce the run's bits."""
    fence = catalog.incarnations[plan.incarnation].fence
    constants = load_constants(RunFolder(catalog.root), fence)
    state = empty_state(plan.common, fence)
    state.optimizers = []
    # What one replica has seen of its share holds for all of the state.
    is_whole = options.whole or any(map(_is_whole, plan.sources))
    for rank, share in enumerate(_shares(catalog, fence, plan, replace(options, whole=is_whole))):
        _merge(state, share)
        state.items[rank] = {**constants, **state.items[rank]}
    state.averages = {name: state.averages.get(name, {}) for name in fence.averages}
    return state, is_whole


def _sources(catalog: Catalog, incarnation: int, rank: int) -> list[_Source]:
    """What a rank's staging holds whole, while nobody writes it."""
    found = []
    for stage in catalog.staging:
        if (stage.incarnation, stage.rank) == (incarnation, rank) and _is_at_rest(stage):
            with suppress(FileNotFoundError):  # a trainer attached just now, and clears it
                found += _sources_of(stage)
    return found


def _sources_of(stage: StagingFolder) -> list[_Source]:
    found = []
    status = read_status(stage.replica_status, ReplicaStatus)
    is_there = status.generation >= 0 and stage.replica_state(status.generation).exists()
    if is_there and not is_of_this_kernel(stage):
        _logger.warning(
            "the state of a replica in %s is of before this machine was started, and may be torn; it "
            "is passed over",
            stage.root,
        )
    elif is_there:
        # Not by its page: it may have been killed in the middle of the next step, or after it.
        try:
            file = ReplicaFile.open(stage.replica_state(status.generation), private=True)
        except DamagedFile as error:
            _logger.warning("%s", error)
        else:
            last = file.last_step()
            step = file.base_step if last is None else last[0]
            reach = max([step, *map(int, file.unit_steps)])
            found.append(_Source(stage, step, reach, is_image=False))
    mark = read_status(stage.trainer_status, TrainerStatus).image
    if mark is None or not stage.snapshot.exists():
        return found
    # One that was taken over serves where what it was taken into does not.
    if mark.step > status.image_step or not found:
        image = read_view(stage.snapshot)
        if len(image) == mark.bytes and crc32c(image) == mark.checksum:
            found.append(_Source(stage, mark.step, mark.step, is_image=True))
    return found


def _is_at_rest(stage: StagingFolder) -> bool:
    """Whether that life had a replica, and neither it nor its trainer lives.

    What only looks at the memory, or ends with its trainer, is waited for: to go back to the disk
    because of it would lose the steps that are here.

    Raises:
        RunInUse: If somebody keeps it.
    """
    if not has_replica(stage):
        return False
    try:
        trainer, replica = FileLock(stage.trainer_lock), FileLock(stage.replica_lock)
        is_free = _is_free(trainer, _GLANCE_SECONDS)
        if not is_free and _TRAINER.fullmatch(trainer.holder()):
            return False
        for lock in (trainer, replica):
            if not _is_free(lock, _PATIENCE_SECONDS):
                raise RunInUse(stage.root, lock.holder(), _PATIENCE_SECONDS)
    except OSError as error:
        if error.errno in PASSING:
            raise
        return False  # somebody else's memory, or it is being removed
    return True


def _is_free(lock: FileLock, timeout_seconds: float) -> bool:
    is_free = lock.acquire("a look at its replica", shared=True, timeout_seconds=timeout_seconds)
    lock.release()
    return is_free


def _nearest(
    catalog: Catalog, incarnation: int, sources: Sequence[_Source], common: int
) -> _Source | None:
    """The source from which a rank's own records lead to ``common``, with the least to replay."""
    for source in sorted(sources, key=lambda s: -s.step):
        between = list(_between(catalog, incarnation, source, common))
        if source.reach <= common and None not in between:
            return source
    return None


def _between(
    catalog: Catalog, incarnation: int, source: _Source, common: int
) -> Iterator[StoredRecord | None]:
    records = catalog.of(incarnation, source.stage.rank)
    records.confirm(source.step + 1, common)
    for step in range(source.step + 1, common + 1):
        found = records.get(step)
        yield None if found is None or found.record.header.rebases else found


def _shares(
    catalog: Catalog, fence: Fence, plan: MemoryPlan, options: ReplayOptions
) -> list[RecoveredState]:
    """Every rank's share at the common step, in private memory; several are stepped at a time."""
    chooser = StepChooser()
    begun = [_begun(s, fence, plan.common, chooser, whole=options.whole) for s in plan.sources]
    between = [
        [s for s in _between(catalog, fence.incarnation, source, plan.common) if s is not None]
        for source in plan.sources
    ]
    num_workers = replace(options, device=_HOST).workers
    has_registered = any(map(is_registered, fence.optimizers))
    with (
        threads_put_back(),
        without_default_group(when=has_registered),
        ThreadPoolExecutor(num_workers) as pool,
    ):
        arrive = partial(_at_step, step=plan.common, fence=fence)
        return list(pool.map(arrive, begun, between))


def _is_whole(source: _Source) -> bool:
    """Whether a replica found that blocks do not reproduce its share's bits."""
    if source.is_image:
        return False
    return bool(ReplicaFile.open(source.path, private=True).base().get("whole"))


def _begun(
    source: _Source, fence: Fence, common: int, chooser: StepChooser, *, whole: bool
) -> Shard | RecoveredState:
    """One rank's share as it was left, ready to be stepped, in whole tensors where that is asked."""
    if source.is_image:
        state = load_shard(source.path, source.step, fence)
        if source.step == common:
            return state
        # Its replica came no further than the trainer's image; others did.
    else:
        file = ReplicaFile.open(source.path, private=True)
        share = Shard(file, fence, journaled=False, chooser=chooser)
        # A step that was begun in blocks ends in blocks.
        if not whole or share.is_whole or source.step == common or source.reach > source.step:
            return share
        state = share.state
    with tempfile.TemporaryDirectory(prefix="lowdiff-") as folder:
        file = ReplicaFile.create(Path(folder) / "share", contents_of(state, whole=whole))
    return Shard(file, fence, journaled=False, chooser=chooser)


def _at_step(
    begun: Shard | RecoveredState, records: Sequence[StoredRecord], step: int, fence: Fence
) -> RecoveredState:
    if isinstance(begun, RecoveredState):
        return begun
    for stored in records:
        if stored.record.header.step > begun.step:
            begun.apply(share_step(stored, fence))
    if begun.step != step or not bool((begun.file.unit_steps == step).all()):
        raise DamagedFile(begun.file.path, f"it is not wholly of step {step}")
    return begun.state


def _merge(state: RecoveredState, share: RecoveredState) -> None:
    state.parameters |= share.parameters
    if not state.optimizers:
        state.optimizers = [OptimizerState(o.groups, {}) for o in share.optimizers]
    for optimizer, part in zip(state.optimizers, share.optimizers, strict=True):
        optimizer.state |= part.state
    state.items += share.items
    state.residuals.append({})
    state.residual_marks.append(None)
    state.held = share.held
    for name, followed in share.averages.items():
        state.averages.setdefault(name, {}).update(followed)
