"""The chooser among sources in memory as it was before `lowdiff/recovery/sources/`; the oracle of that room.

It goes when both have made the same plans in every campaign of `tests/faults`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, RunInUse
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark, read_view
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.image import Manifest, check_shard, manifest_file
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.records import RankRecords, reach
from lowdiff.persistence.staging.items import read_items_at
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    SavedStatus,
    TrainerStatus,
    read_status,
)
from lowdiff.recovery import search
from lowdiff.recovery.plan import PlannedStep, confirm_steps, spans_of, steps_after
from lowdiff.recovery.replica.file import PASSING, ReplicaFile, is_of_this_kernel
from lowdiff.recovery.sources import chooser
from lowdiff.recovery.sources.inheritance import items_of_dead, items_of_lost
from lowdiff.types import Fence
from tests.faults.outcome import Outcome

#: Time enough for whoever has just taken a lock to say who it is.
_GLANCE_SECONDS = 0.05
#: How long a replica may take for its last step, and others for a look at the memory.
_PATIENCE_SECONDS = 30.0
_DIFFER = "the choosers differ"


@dataclass(frozen=True, slots=True)
class _Source:
    """Source that one rank's share can be rebuilt from.

    Attributes:
        stage: The staging folder it lies in; None for one on disk.
        step: The step it is of, as a whole.
        reach: The step of its furthest part: the least one it can be brought to.
        image: The trainer's image, of which its replica holds nothing later, or a survivor's; None
            where it is the replica's state.
        items: Where the image has none, as it was saved on another node; None where it has them.
        doubt: What the user should know of these items.
    """

    stage: StagingFolder | None
    step: int
    reach: int
    image: Path | None = None
    items: Mapping[str, bytes] | None = None
    doubt: str = ""

    @property
    def path(self) -> Path:
        """The file."""
        if self.image is not None:
            return self.image
        assert self.stage is not None
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


def plan_in_memory(
    catalog: Catalog, step: int | None, passed_over: dict[int, str] | None = None
) -> MemoryPlan | None:
    """Plan the way to ``step``, or to the newest step, from what lies in memory; None if none leads.

    The differentials on the way are read first; where one is not what is listed, the plan is made
    again with what is there.

    Args:
        catalog: What there is.
        step: Which step; None for the newest.
        passed_over: Gets steps that survivors saved and that cannot be had, and why.

    Raises:
        RunInUse: If the trainer is gone, and somebody else keeps the memory for long.
    """
    while True:
        plan = _way(catalog, step, {} if passed_over is None else passed_over)
        if plan is None or confirm_steps(catalog, plan.common + 1, plan.step):
            return plan


def _way(catalog: Catalog, step: int | None, passed_over: dict[int, str]) -> MemoryPlan | None:
    for span in reversed(spans_of(catalog)):
        fence = catalog.incarnations[span.incarnation]
        if fence.logs_steps and _is_complete(catalog, span):
            continue  # its log leads to all that is committed, and has the residuals
        sources: list[list[_Source]] = []
        while len(sources) < span.world_size and (not sources or sources[-1]):
            sources.append(_sources(catalog, fence, len(sources), passed_over))
        plan = _way_from(catalog, span, step, sources) if sources[-1] else None
        if plan is not None:
            return plan
    return None


def _way_from(
    catalog: Catalog, span: Span, step: int | None, sources: Sequence[Sequence[_Source]]
) -> MemoryPlan | None:
    """The way to ``step``, or to the newest one, from sources of every rank; None if none leads."""
    # A share is replayed by its rank's own records where these have whole gradients.
    is_exact = catalog.incarnations[span.incarnation].logs_steps
    for common in sorted({s.reach for found in sources for s in found}, reverse=True):
        if not span.holds(common) or (step is not None and common > step):
            continue
        chosen = [
            _nearest(
                catalog.of(span.incarnation, rank),
                [s for s in found if s.step == common or not is_exact],
                common,
            )
            for rank, found in enumerate(sources)
        ]
        steps = steps_after(catalog, common, step)
        reached = steps[-1].step if steps else common
        complete = tuple(source for source in chosen if source is not None)
        if len(complete) == len(chosen) and step in (None, reached):
            return MemoryPlan(reached, span.incarnation, common, complete, steps)
    return None


def _is_complete(catalog: Catalog, span: Span) -> bool:
    """Whether the staging folders of all ranks of an incarnation are there."""
    there = {stage.rank for stage in catalog.staging if stage.incarnation == span.incarnation}
    return len(there) == span.world_size


def _sources(
    catalog: Catalog, fence: Fence, rank: int, passed_over: dict[int, str]
) -> list[_Source]:
    """Return what a rank's staging holds whole, while nobody writes it, and what others hold for it."""
    incarnation = fence.incarnation
    stages = [s for s in catalog.staging if (s.incarnation, s.rank) == (incarnation, rank)]
    found: list[_Source] = []
    if fence.strategy == "survivors":
        for stage in filter(_is_at_rest, stages):
            with suppress(FileNotFoundError):  # a trainer attached just now, and clears it
                found += _sources_of(stage)
                mark = read_status(stage.survivor_saved, SavedStatus).image
                found += [] if mark is None else _whole_image(stage, stage.survivor_image, mark)
        # What the rank's own node saved holds all of its items.
        own_steps = [source.step for source in found]
        with suppress(FileNotFoundError):
            found += _from_other_nodes(catalog, incarnation, rank, own_steps, passed_over)
        return found
    copies = [copy for copy in catalog.copies if copy.incarnation == incarnation]
    # A log leads further than its image, but not where a lost rank's part is known from its copy alone.
    for stage in filter(_is_at_rest, stages if copies or not fence.logs_steps else ()):
        with suppress(FileNotFoundError):
            found += _sources_of(stage)
    for copy in copies:
        if copy.rank == rank and _is_at_rest(copy):
            found += _copied(copy)
            found += _sources_of(copy)
    steps = {mark.step for copy in copies for _, mark in _marks(copy)}
    if not found:  # as after a clean end; replicas' copies are of that step, or almost
        steps |= _disk_steps(catalog, incarnation, copies)
    return found + _on_disk(catalog, incarnation, rank, steps - {s.step for s in found})


def _from_other_nodes(
    catalog: Catalog,
    incarnation: int,
    rank: int,
    own_steps: Collection[int],
    passed_over: dict[int, str],
) -> list[_Source]:
    """What survivors on other nodes saved for a rank, at other steps than its own node."""
    stages = {s.rank: s for s in catalog.staging if s.incarnation == incarnation}
    found: dict[int, _Source] = {}
    for stage in catalog.staging:
        if (
            stage.incarnation != incarnation
            or rank not in stage.saved_guests()
            or not _is_at_rest(stage)
        ):
            continue
        saved = read_status(stage.guest_saved(rank), SavedStatus)
        maker = stages.get(saved.maker)
        if saved.image is None or saved.image.step in (*own_steps, *found) or maker is None:
            continue
        step, dead, takes = saved.image.step, stages.get(rank), saved.takes_buffers
        if dead is not None and _is_at_rest(dead):
            items, doubt = items_of_dead(step, rank, maker, dead, takes_buffers=takes)
        else:
            items, doubt = items_of_lost(step, rank, maker, saved, takes_buffers=takes)
        if items is None:
            text = f"step {step}, which rank {saved.maker} saved for all, is passed over: of rank {rank}"
            passed_over[step] = f"{text}, {doubt}"
            continue
        whole = _whole_image(stage, stage.guest(rank), saved.image)
        if not whole:  # its mark came last, so it was whole once
            passed_over[step] = (
                f"step {step}, which rank {saved.maker} saved for all, is passed over: of rank {rank}, what "
                f"{stage.guest(rank)} holds fails its checksum"
            )
        for source in whole:
            found[step] = replace(source, items=items, doubt=doubt)
    return list(found.values())


def _marks(copy: StagingFolder) -> list[tuple[int, ImageMark]]:
    """Slot and mark of each image of a copy."""
    found = [(slot, read_status(page, SavedStatus).image) for slot, page in copy.copied_pages()]
    return [(slot, mark) for slot, mark in found if mark is not None]


def _copied(copy: StagingFolder) -> list[_Source]:
    """Return what a rank on another node keeps of a rank's share."""
    found = []
    for slot, mark in _marks(copy):
        items = read_items_at(copy.copied_items(slot), mark.step)
        if items is not None:
            sources = _whole_image(copy, copy.copied(slot), mark)
            found += [replace(source, items=items) for source in sources]
    return found


def _disk_steps(catalog: Catalog, incarnation: int, copies: Sequence[StagingFolder]) -> set[int]:
    """Steps of an incarnation's snapshots here, complete or not, from the newest state of a replica's copy on."""
    newest = [_newest_step(copy) for copy in copies if copy.replica_status.exists()]
    found = {
        step for number, step, _ in RunFolder(catalog.root).snapshots() if number == incarnation
    }
    return {step for step in found if newest and step >= min(newest)}


def _newest_step(copy: StagingFolder) -> int:
    """Step of the state or the image that a replica's copy has."""
    image = read_status(copy.trainer_status, TrainerStatus).image
    replica = read_status(copy.replica_status, ReplicaStatus)
    return max(replica.step, -1 if image is None else image.step)


def _on_disk(
    catalog: Catalog, incarnation: int, rank: int, steps: Collection[int]
) -> list[_Source]:
    """A rank's share of snapshots at some steps, whether or not those of all ranks are there."""
    found, folder = [], RunFolder(catalog.root)
    for step in steps:
        snapshot = folder.snapshot(incarnation, step)
        if manifest_file(snapshot, rank).is_file():
            with suppress(DamagedFile, FileNotFoundError):  # said where the snapshot is listed
                path = check_shard(snapshot, Manifest.read(manifest_file(snapshot, rank)))
                found.append(_Source(None, step, step, image=path))
    return found


def _sources_of(stage: StagingFolder) -> list[_Source]:
    """Return the state of a replica and the trainer's image, where they are whole."""
    found = []
    status = read_status(stage.replica_status, ReplicaStatus)
    is_there = status.generation >= 0 and stage.replica_state(status.generation).exists()
    if is_there and not is_of_this_kernel(stage):
        Code.REPLICA_MEMORY_OUTDATED.warn(
            f"the state of a replica in {stage.root} is of before this machine was started, and "
            "may be torn; it is passed over",
        )
    elif is_there:
        # Not by its page: it may have been killed in the middle of the next step, or after it.
        try:
            file = ReplicaFile.open(stage.replica_state(status.generation), private=True)
        except DamagedFile as error:
            Code.REPLICA_MEMORY_DAMAGED.warn(error)
        else:
            last = file.last_step()
            step = file.base_step if last is None else last[0]
            if step < status.step:  # the page is published last
                Code.REPLICA_MEMORY_DAMAGED.warn(
                    DamagedFile(file.path, f"step {status.step} fails its checksum")
                )
            found.append(_Source(stage, step, max(step, file.reach())))
    mark = read_status(stage.trainer_status, TrainerStatus).image
    # One that was taken over serves where what it was taken into does not.
    if mark is not None and (mark.step > status.image_step or not found):
        found += _whole_image(stage, stage.snapshot, mark)
    return found


def _whole_image(stage: StagingFolder, path: Path, mark: ImageMark) -> list[_Source]:
    """The image, if it is what its mark says."""
    if not path.exists():
        return []
    image = read_view(path)
    is_whole = len(image) == mark.bytes and crc32c(image) == mark.checksum
    return [_Source(stage, mark.step, mark.step, image=path)] if is_whole else []


def _is_at_rest(stage: StagingFolder) -> bool:
    """Whether neither its trainer nor whoever writes a state into it lives.

    What only looks at the memory, or ends with its trainer, is waited for: to go back to the disk
    because of it would lose the steps that are here.

    Raises:
        RunInUse: If somebody keeps it.
    """
    try:
        trainer, *others = map(FileLock, (stage.trainer_lock, *stage.state_locks))
        is_free = _is_free(trainer, _GLANCE_SECONDS)
        if not is_free and not trainer.has_guest():
            return False
        for lock in (trainer, *others):
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


def _nearest(records: RankRecords, sources: Sequence[_Source], common: int) -> _Source | None:
    """The source from which a rank's own records lead to ``common``, with the least to replay."""
    for source in sorted((s for s in sources if s.reach <= common), key=lambda s: -s.step):
        records.confirm(source.step + 1, common)
        if reach([records], source.step, common) == common:
            return source
    return None


def both(
    catalog: Catalog, step: int | None, passed_over: dict[int, str] | None = None
) -> chooser.MemoryPlan | None:
    """Plan with both choosers; return the plan of the new one.

    Raises:
        AssertionError: If they differ. A writer that still drains may change what is there between two plans, so
            they have three tries.
    """
    for is_last in (False, False, True):
        new_passed, old_passed = dict[int, str](), dict[int, str]()
        plan = chooser.plan_in_memory(catalog, step, new_passed)
        old = plan_in_memory(catalog, step, old_passed)
        new_facts, old_facts = (facts(plan), new_passed), (facts(old), old_passed)
        if new_facts == old_facts:
            break
        assert not is_last, f"{_DIFFER}: {new_facts} now, {old_facts} before"
    if passed_over is not None:
        passed_over |= new_passed
    return plan


def facts(plan: chooser.MemoryPlan | MemoryPlan | None) -> object:
    """All that a plan says, to be compared."""
    if plan is None:
        return None
    sources = [(s.path, s.step, s.reach, s.items, s.doubt) for s in plan.sources]
    steps = [(step.step, step.incarnation, len(step.sources)) for step in plan.steps]
    return plan.step, plan.incarnation, plan.common, sources, steps


def compare_choosers() -> None:
    """Have every recovery of this process plan with both choosers."""
    vars(search)["plan_in_memory"] = both


def note_differences(outcome: Outcome, folder: Path) -> None:
    """Add to a campaign's losses the differences that its processes printed."""
    for path in folder.rglob("output.*"):
        for line in path.read_text(errors="replace").splitlines():
            if _DIFFER in line:
                outcome.lose(f"{path}: {line[:1000]}")
