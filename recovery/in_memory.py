"""The state as the replicas of a dead trainer hold it: in memory, at its newest step.

Every rank's replica holds its share, perhaps a step apart from the others'; what its log holds brings
it to the step of the furthest, which all ranks had staged. From there on the steps in flight are
replayed as ever.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from crc32c import crc32c

from lowdiff.errors import DamagedFile
from lowdiff.persistence.catalog import Catalog
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.paths import RunFolder, StagingFolder
from lowdiff.persistence.records import StoredRecord
from lowdiff.persistence.replica_status import has_replica, read_mark, read_replica_status
from lowdiff.recovery.load import empty_state, load_constants, load_shard
from lowdiff.recovery.plan import PlannedStep, confirm_steps, spans_of, steps_after
from lowdiff.recovery.replay import ReplayOptions, replay
from lowdiff.recovery.replica_file import ReplicaFile
from lowdiff.recovery.shard import Shard, contents_of, share_step
from lowdiff.recovery.sharing import made_by_all
from lowdiff.recovery.state import OptimizerState, RecoveredState
from lowdiff.types import Fence

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """What one rank's share can be rebuilt from.

    Attributes:
        step: The step it is of, as a whole.
        reach: The step of its furthest part: the least one it can be brought to.
        is_image: Whether it is the trainer's image, which its replica had not taken over.
    """

    stage: StagingFolder
    step: int
    reach: int
    is_image: bool


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


def plan_in_memory(catalog: Catalog, step: int | None) -> MemoryPlan | None:
    """Plan the way to ``step``, or to the newest step, from what replicas left; None if none leads.

    What is only claimed of the differentials on the way is read first; where it is wrong, the plan is
    made again with what is there.
    """
    while True:
        plan = _way(catalog, step)
        if plan is None or confirm_steps(catalog, plan.common + 1, plan.step):
            return plan


def _way(catalog: Catalog, step: int | None) -> MemoryPlan | None:
    spans = spans_of(catalog)
    for span in reversed(spans):
        sources = [_sources(catalog, span.incarnation, rank) for rank in range(span.world_size)]
        if not all(sources):
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
    state = made_by_all(lambda: _shares_joined(catalog, plan), options.group)
    host = torch.device("cpu")
    state.move(options.device if plan.steps else host)
    state = replay(state, plan.steps, lambda n: catalog.incarnations[n].fence, options)
    state.move(host)
    return state


def _shares_joined(catalog: Catalog, plan: MemoryPlan) -> RecoveredState:
    """All ranks' shares, at the common step."""
    fence = catalog.incarnations[plan.incarnation].fence
    constants = load_constants(RunFolder(catalog.root), fence)
    state = empty_state(plan.common, fence)
    state.optimizers = []
    for rank, source in enumerate(plan.sources):
        share = _share(catalog, fence, source, plan.common, rank)
        _merge(state, share)
        state.items[rank] = {**constants, **state.items[rank]}
    state.averages = {name: state.averages.get(name, {}) for name in fence.averages}
    return state


def _sources(catalog: Catalog, incarnation: int, rank: int) -> list[_Source]:
    """What a rank's staging holds whole, while nobody writes it."""
    found = []
    for stage in catalog.staging:
        if (stage.incarnation, stage.rank) != (incarnation, rank) or not _is_at_rest(stage):
            continue
        status = read_replica_status(stage.replica_status)
        if status.generation >= 0 and stage.replica_state(status.generation).exists():
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
        mark = read_mark(stage.snapshot_mark)
        if mark is not None and mark.step > status.image_step and stage.snapshot.exists():
            image = read_view(stage.snapshot)
            if len(image) == mark.bytes and crc32c(image) == mark.checksum:
                found.append(_Source(stage, mark.step, mark.step, is_image=True))
    return found


def _is_at_rest(stage: StagingFolder) -> bool:
    """Whether that life had a replica, and neither it nor its trainer lives."""
    if not has_replica(stage):
        return False
    for path in (stage.replica_lock, stage.trainer_lock):
        lock = FileLock(path)
        try:
            is_free = lock.acquire("a look at its replica", shared=True)
        except OSError:
            return False  # somebody else's memory, or it is being removed
        lock.release()
        if not is_free:
            return False
    return True


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


def _share(
    catalog: Catalog, fence: Fence, source: _Source, common: int, rank: int
) -> RecoveredState:
    """One rank's share at the common step, in private memory."""
    stage = source.stage
    if source.is_image:
        state = load_shard(stage.snapshot, source.step, fence)
        if source.step == common:
            return state
        with tempfile.TemporaryDirectory(prefix="lowdiff-") as folder:
            # Its replica came no further than the trainer's image; others did.
            file = ReplicaFile.create(Path(folder) / "share", contents_of(state, whole=False))
    else:
        generation = read_replica_status(stage.replica_status).generation
        file = ReplicaFile.open(stage.replica_state(generation), private=True)
    shard = Shard(file, fence, journaled=False)
    for stored in _between(catalog, fence.incarnation, source, common):
        assert stored is not None
        if stored.record.header.step > shard.step:
            shard.apply(share_step(stored, fence))
    if shard.step != common or not bool((file.unit_steps == common).all()):
        raise DamagedFile(file.path, f"it is not wholly of step {common}")
    return shard.state


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
