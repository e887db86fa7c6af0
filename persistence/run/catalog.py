"""What exists of a run, derived from the files themselves.

Nothing here decides anything: the catalog lists fences, complete snapshots and records over all
tiers, and `recovery` plans with that value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import RecordKind, StoredRecord
from lowdiff.persistence.format.image import Manifest, check_shard, manifest_file
from lowdiff.persistence.run.fences import read_fence, read_run_id
from lowdiff.persistence.run.journal import Collected, Pin, read_notes, read_pins
from lowdiff.persistence.run.owner import staging_of_run
from lowdiff.persistence.run.records import RankRecords, list_segment
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import has_replica
from lowdiff.types import Fence


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A snapshot that exists: all shard manifests of one incarnation do."""

    incarnation: int
    step: int
    folder: Path
    manifests: tuple[Manifest, ...]

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder.parents[1]

    @property
    def bytes(self) -> int:
        """Bytes over all shards."""
        return sum(manifest.bytes for manifest in self.manifests)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything of a run that passed its checks, or has yet to be compared with its checksum.

    Attributes:
        incarnations: Rank 0's fence by number, with which the others' agree but for the rank; only of
            incarnations with every rank's fence that outlived their attach.
        snapshots: Complete ones, by step, then incarnation.
        records: ``(incarnation, rank)`` -> step -> record.
        staging: Staging folders seen.
        damage: What failed a check; none of it is listed above. More comes to light when steps that
            a footer lists are read.
        unreadable: Numbers of incarnations of which a fence is there and cannot be read.
        collected: What retention has removed.
        pins: What it spares, by label.
    """

    run_id: str
    root: Path
    incarnations: Mapping[int, Fence]
    snapshots: tuple[SnapshotSet, ...]
    records: Mapping[tuple[int, int], RankRecords]
    staging: tuple[StagingFolder, ...]
    damage: Sequence[DamagedFile]
    num_incarnations: int
    unreadable: frozenset[int] = frozenset()
    collected: Collected = field(default_factory=Collected)
    pins: tuple[Pin, ...] = ()

    def of(self, incarnation: int, rank: int) -> RankRecords:
        """One rank's records of one incarnation, of which there may be none."""
        found = self.records.get((incarnation, rank))
        return RankRecords() if found is None else found


def scan(
    folder: RunFolder, staging_roots: Sequence[Path] = (), *, check_all: bool = False
) -> Catalog:
    """List a run over its tiers; staging first, because records move from there to segments.

    What the footers of sealed segments say is believed until a step is needed; so are the headers of
    what a replica was to apply.

    Args:
        folder: The run folder.
        staging_roots: Where staging folders of runs live; none to look at durable files only.
        check_all: Read every snapshot and segment, and compare every checksum.

    Raises:
        NotARun: If the folder holds no run.
    """
    run_id = read_run_id(folder)
    damage: list[DamagedFile] = []
    records: dict[tuple[int, int], RankRecords] = {}

    staging = [s for root in staging_roots for s in staging_of_run(root, folder, run_id)]
    for stage in staging:
        # A replica's queue may be gigabytes, and next to nothing of it is needed.
        check = check_all or not has_replica(stage)
        for path, record in staged_records(stage, check=check):
            # A BASE record is of its incarnation's base step, where no differential of it can be.
            if record.header.kind in (RecordKind.DIFFERENTIAL, RecordKind.BASE):
                key = record.header.incarnation, record.header.rank
                own = records.setdefault(key, RankRecords(damage))
                own.stage(StoredRecord(record, path, staged=True), is_checked=check)
    fences, numbers, unreadable = _fences(folder, run_id, damage)
    add_segments(folder, run_id, records, damage, check=check_all)
    # After them, as it is written before anything goes: what is missing above is in it.
    collected, pins = _retention(folder, run_id, damage)
    return Catalog(
        run_id=run_id,
        root=folder.root,
        incarnations={n: fence for n, fence in fences.items() if _has_begun(folder, fence)},
        snapshots=tuple(_snapshots(folder, run_id, damage, check_all)),
        records=records,
        staging=tuple(staging),
        damage=damage,
        num_incarnations=_num_incarnations(numbers, run_id, staging_roots),
        unreadable=unreadable,
        collected=collected,
        pins=pins,
    )


def add_segments(
    folder: RunFolder,
    run_id: str,
    records: dict[tuple[int, int], RankRecords],
    damage: list[DamagedFile],
    *,
    check: bool,
) -> None:
    """List what a run's segments hold.

    Args:
        folder: The run.
        run_id: Its identity.
        records: ``(incarnation, rank)`` -> where to add what is found.
        damage: Gets what fails a check, now and when a step is read.
        check: Whether to read all of the sealed ones, too.
    """
    for incarnation, rank, _, path in folder.segments():
        try:
            found, error = list_segment(path, (run_id, incarnation, rank), check=check)
        except FileNotFoundError:
            continue  # a live run's retention was faster
        except DamagedFile as failure:
            found, error = [], failure
        damage += [] if error is None else [error]
        for stretch in found:
            records.setdefault((incarnation, rank), RankRecords(damage)).add(stretch)


def _retention(
    folder: RunFolder, run_id: str, damage: list[DamagedFile]
) -> tuple[Collected, tuple[Pin, ...]]:
    collected, pins = Collected(), []
    try:
        collected = read_notes(folder, run_id).collected
    except DamagedFile as error:
        damage.append(error)
    for label, path in folder.pins():
        try:
            pins += read_pins(folder, run_id, label)
        except DamagedFile as error:
            damage.append(DamagedFile(path, error.what))
    return collected, tuple(pins)


def _num_incarnations(numbers: set[int], run_id: str, staging_roots: Sequence[Path]) -> int:
    """One more than the highest number taken.

    Also those that only staging remembers, as on a node that comes back with old memory, and those
    of a copy of the run folder: two incarnations never share a name in staging.
    """
    staged = [s for root in staging_roots for s in StagingFolder.all_of_run(root, run_id)]
    return max([*numbers, *(s.incarnation for s in staged)], default=-1) + 1


def _has_begun(folder: RunFolder, fence: Fence) -> bool:
    """Whether an incarnation outlived its attach.

    One without a parent returns from attach only once its first snapshot is durable. If it died
    before that, what was there before it is still the run's history. Damaged manifests count:
    they are to be complained about, not passed over.
    """
    return fence.parent is not None or any(
        number == fence.incarnation
        and all(manifest_file(path, rank).is_file() for rank in range(fence.world_size))
        for number, _, path in folder.snapshots()
    )


def complete_snapshots(
    folder: RunFolder, run_id: str, damage: list[DamagedFile] | None = None
) -> tuple[SnapshotSet, ...]:
    """Snapshots whose manifests are all there, by step, then incarnation.

    Manifests that are there but cannot be read, now or ever, are added to ``damage``: whether their
    snapshots are complete is not known.
    """
    return tuple(_snapshots(folder, run_id, [] if damage is None else damage, check=False))


def complete_fences(folder: RunFolder, run_id: str) -> Mapping[int, Fence]:
    """Rank 0's fence of every incarnation whose ranks have all written theirs, begun or not."""
    return _fences(folder, run_id, [])[0]


def begun_fences(folder: RunFolder, run_id: str) -> Mapping[int, Fence]:
    """Rank 0's fence of every incarnation that began.

    Raises:
        DamagedFile: If a fence is damaged, so that the run's history is not known for sure.
    """
    damage: list[DamagedFile] = []
    found, *_ = _fences(folder, run_id, damage)
    if damage:
        raise damage[0]
    return {n: fence for n, fence in found.items() if _has_begun(folder, fence)}


def _fences(
    folder: RunFolder, run_id: str, damage: list[DamagedFile]
) -> tuple[dict[int, Fence], set[int], frozenset[int]]:
    """Complete fences by number, all numbers, and those of which a fence cannot be read."""
    by_number: dict[int, dict[int, Fence]] = {}
    numbers, unreadable = set(), set()
    for number, rank, path in folder.fences():
        numbers.add(number)
        try:
            fence = read_fence(path)
            if (fence.run_id, fence.incarnation, fence.rank) != (run_id, number, rank):
                raise DamagedFile(path, "it belongs to another run, incarnation or rank")
        except DamagedFile as error:
            damage.append(error)
            unreadable.add(number)
        else:
            by_number.setdefault(number, {})[rank] = fence
    complete = {
        number: fences[0]
        for number, fences in by_number.items()
        if 0 in fences and len(fences) == fences[0].world_size
    }
    return complete, numbers, frozenset(unreadable - complete.keys())


def _snapshots(
    folder: RunFolder, run_id: str, damage: list[DamagedFile], check: bool
) -> Iterator[SnapshotSet]:
    found = []
    for incarnation, step, path in folder.snapshots():
        try:
            manifests = _manifests(path, run_id, incarnation, step)
            for manifest in manifests if check else ():
                check_shard(path, manifest)
        except FileNotFoundError:
            continue  # a live run's retention was faster
        except DamagedFile as error:
            damage.append(error)
        else:
            if manifests:
                found.append(SnapshotSet(incarnation, step, path, manifests))
    yield from sorted(found, key=lambda s: (s.step, s.incarnation))


def _manifests(folder: Path, run_id: str, incarnation: int, step: int) -> tuple[Manifest, ...]:
    """All manifests of a snapshot, or none if one is missing."""
    manifests: list[Manifest] = []
    try:
        manifests.append(Manifest.read(manifest_file(folder, 0)))
        for rank in range(1, manifests[0].world_size):
            manifests.append(Manifest.read(manifest_file(folder, rank)))
    except FileNotFoundError:
        return ()
    expected = (run_id, incarnation, step, manifests[0].world_size)
    for rank, m in enumerate(manifests):
        if (m.run_id, m.incarnation, m.step, m.world_size) != expected or m.rank != rank:
            raise DamagedFile(manifest_file(folder, rank), "it belongs to another snapshot")
    return tuple(manifests)
