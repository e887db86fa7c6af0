"""Catalog: everything that exists of a run, derived from the files themselves.

The catalog decides nothing. It lists fences, complete snapshots and records over all tiers, and
`recovery` makes its plans from this value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.locks import is_locked
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import RecordKind, StoredRecord
from lowdiff.persistence.format.image import Manifest, check_shard, is_complete, manifest_file
from lowdiff.persistence.run.fences import read_fence, read_run_id
from lowdiff.persistence.run.journal import Collected, Pin, read_journal, read_pins
from lowdiff.persistence.run.owner import copies_of_run, staging_of_run
from lowdiff.persistence.run.records import RankRecords, list_segment
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import is_log
from lowdiff.types import Fence


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A complete snapshot: all manifests of one incarnation and step exist."""

    incarnation: int
    step: int
    folder: Path
    manifests: tuple[Manifest, ...]

    @property
    def run(self) -> Path:
        """Return the run folder."""
        return self.folder.parents[1]

    @property
    def bytes(self) -> int:
        """Return the bytes of all images."""
        return sum(manifest.bytes for manifest in self.manifests)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything of a run that passed its checks, or whose checksum is yet to be compared.

    Attributes:
        incarnations: Rank 0's fence by number; the other ranks' fences differ only in the rank.
            Only incarnations with every rank's fence that outlived their attach.
        snapshots: Complete snapshots, by step, then incarnation.
        records: ``(incarnation, rank)`` -> step -> record.
        staging: Staging folders seen.
        copies: Folders with copies of what other nodes' ranks staged.
        damage: Files that failed a check; none is listed above. Reading steps that only a footer
            lists may add more.
        unreadable: Numbers of incarnations with a fence that cannot be read.
        collected: Steps that retention has removed.
        pins: Pinned steps, by label.
    """

    run_id: str
    root: Path
    incarnations: Mapping[int, Fence]
    snapshots: tuple[SnapshotSet, ...]
    records: Mapping[tuple[int, int], RankRecords]
    staging: tuple[StagingFolder, ...]
    damage: Sequence[DamagedFile]
    unreadable: frozenset[int] = frozenset()
    collected: Collected = field(default_factory=Collected)
    pins: tuple[Pin, ...] = ()
    copies: tuple[StagingFolder, ...] = ()

    def of(self, incarnation: int, rank: int) -> RankRecords:
        """Return one rank's records of one incarnation; there may be none."""
        found = self.records.get((incarnation, rank))
        return RankRecords() if found is None else found


def scan(
    folder: RunFolder, staging_roots: Sequence[Path] = (), *, check_all: bool = False
) -> Catalog:
    """List a run over its tiers; staging first, because records move from there to segments.

    Footers of sealed segments, and headers in a replica's queue, are believed until a step is
    needed.

    Args:
        folder: The run folder.
        staging_roots: Staging roots to look at; none to look at durable files only.
        check_all: Whether to read every snapshot and segment and compare every checksum.

    Raises:
        NotARun: If the folder holds no run.
    """
    damage: list[DamagedFile] = []
    run_id = read_run_id(folder, damage, with_copy=check_all)
    records: dict[tuple[int, int], RankRecords] = {}

    staging = [s for root in staging_roots for s in staging_of_run(root, folder, run_id)]
    copies = [c for root in staging_roots for c in copies_of_run(root, folder, run_id)]
    for stage in (*staging, *copies):  # what a rank staged itself counts first
        # A replica's queue may have gigabytes, of which almost nothing is needed, so skip
        # checksums.
        check = check_all or is_log(stage)
        # Without its lock nobody knows.
        is_live = is_locked(stage.trainer_lock) is not False or not stage.trainer_lock.exists()
        for path, record in staged_records(stage, check=check):
            # A BASE record stands at its incarnation's base step, where no differential can be.
            if record.header.kind in (RecordKind.DIFFERENTIAL, RecordKind.BASE):
                key = record.header.incarnation, record.header.rank
                own = records.setdefault(key, RankRecords(damage))
                own.stage(StoredRecord(record, path, may_change=is_live), is_checked=check)
    fences, unreadable = _fences(folder, run_id, damage, damage, with_copies=check_all)
    add_segments(folder, run_id, records, damage, check=check_all)
    # Read retention.json last: removals are recorded before deletion, so a missing segment is
    # listed.
    collected, pins = _retention(folder, run_id, damage)
    return Catalog(
        run_id=run_id,
        root=folder.root,
        incarnations={n: fence for n, fence in fences.items() if _has_begun(folder, fence)},
        snapshots=tuple(_snapshots(folder, run_id, damage, check_all)),
        records=records,
        staging=tuple(staging),
        damage=damage,
        unreadable=unreadable,
        collected=collected,
        pins=pins,
        copies=tuple(copies),
    )


def add_segments(
    folder: RunFolder,
    run_id: str,
    records: dict[tuple[int, int], RankRecords],
    damage: list[DamagedFile],
    *,
    check: bool,
) -> None:
    """List the records in a run's segments.

    Args:
        folder: The run folder.
        run_id: Identity of the run.
        records: ``(incarnation, rank)`` -> records, to which this function adds.
        damage: List that receives files that fail a check, now and when a step is read.
        check: Whether to read all sealed segments, too.
    """
    for incarnation, rank, _, path in folder.segments():
        try:
            found, error = list_segment(path, (run_id, incarnation, rank), check=check)
        except FileNotFoundError:
            continue  # a live run's retention has removed the segment
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
        collected = read_journal(folder, run_id).collected
    except DamagedFile as error:
        damage.append(error)
    for label, path in folder.pins():
        try:
            pins += read_pins(folder, run_id, label)
        except DamagedFile as error:
            damage.append(DamagedFile(path, error.what))
    return collected, tuple(pins)


def _has_begun(folder: RunFolder, fence: Fence) -> bool:
    """Return whether an incarnation outlived its attach.

    An incarnation without a parent returns from attach only once its first snapshot is durable. If
    it died before, the run's earlier history is still valid. Damaged manifests count, because they
    must be reported, not passed over. Those of a node's own disk may be lost with it: then a file says it.
    """
    if fence.parent is not None or folder.begun(fence.incarnation).is_file():
        return True
    return any(
        number == fence.incarnation and is_complete(path, fence.world_size)
        for number, _, path in folder.snapshots()
    )


def complete_snapshots(
    folder: RunFolder, run_id: str, damage: list[DamagedFile] | None = None
) -> tuple[SnapshotSet, ...]:
    """Return the snapshots whose manifests are all there, by step, then incarnation.

    Unreadable manifests are added to ``damage``, because it is unknown whether their snapshots are
    complete.
    """
    return tuple(_snapshots(folder, run_id, [] if damage is None else damage, check=False))


def complete_fences(folder: RunFolder, run_id: str) -> Mapping[int, Fence]:
    """Return rank 0's fence of every incarnation whose ranks have all written theirs, begun or not."""
    return _fences(folder, run_id, [])[0]


def next_incarnation(folder: RunFolder, run_id: str, staging_roots: Sequence[Path]) -> int:
    """Return one more than the highest incarnation number of which there is a trace.

    This includes numbers known only from staging, as on a node that comes back with old memory, and
    numbers of copies of the run folder: no two incarnations may share a name in staging. Files of an
    incarnation whose fence is lost carry its number as well, and must not pass for those of another.
    """
    durable = (folder.fences(), folder.snapshots(), folder.segments())
    staged = [
        stage for root in staging_roots for stage in StagingFolder.with_copies_of_run(root, run_id)
    ]
    numbers = [number for found in durable for number, *_ in found]
    return max([*numbers, *(stage.incarnation for stage in staged)], default=-1) + 1


def begun_fences(folder: RunFolder, run_id: str) -> Mapping[int, Fence]:
    """Return rank 0's fence of every incarnation that began.

    Raises:
        DamagedFile: If a fence is damaged or missing, so that the run's history is uncertain.
    """
    damage: list[DamagedFile] = []
    found, _ = _fences(folder, run_id, damage)
    if damage:
        raise damage[0]
    numbers = folder.incarnations()
    for number, fence in found.items():
        if fence.parent is not None and fence.parent not in numbers:
            raise DamagedFile(
                folder.fence(fence.parent, 0),
                f"it is missing, and incarnation {number} goes on from it",
            )
    return {n: fence for n, fence in found.items() if _has_begun(folder, fence)}


def _fences(
    folder: RunFolder,
    run_id: str,
    damage: list[DamagedFile],
    mended: list[DamagedFile] | None = None,
    *,
    with_copies: bool = False,
) -> tuple[dict[int, Fence], frozenset[int]]:
    """Return complete fences by number, and numbers with an unreadable fence.

    Args:
        folder: The run folder.
        run_id: Identity of the run.
        damage: Gets errors of fences that cannot be read.
        mended: Gets errors of those whose copies serve, or whose copies are damaged.
        with_copies: Whether to look at the copies of good ones.
    """
    by_number: dict[int, dict[int, Fence]] = {}
    unreadable = set()
    for number, rank, path in folder.fences():
        try:
            fence = read_fence(path, mended, with_copy=with_copies)
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
    return complete, frozenset(unreadable - complete.keys())


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
            continue  # a live run's retention has removed the folder
        except DamagedFile as error:
            damage.append(error)
        else:
            if manifests:
                found.append(SnapshotSet(incarnation, step, path, manifests))
    yield from sorted(found, key=lambda s: (s.step, s.incarnation))


def _manifests(folder: Path, run_id: str, incarnation: int, step: int) -> tuple[Manifest, ...]:
    """Return all manifests of a snapshot, or none if one is missing."""
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
