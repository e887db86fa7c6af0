"""Progress of a run, looked at repeatedly at the cost of what is new since the last look.

Reads status pages in staging, file names and sizes, and only those records of a segment that were
added. Takes no lock and writes nothing, so neither trainer nor writer notices.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder, StagingFolder, file_bytes
from lowdiff.persistence.format.framing import HEADER_BYTES
from lowdiff.persistence.format.image import manifest_file, shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.fences import read_fence, read_run_id
from lowdiff.persistence.staging.status import TrainerStatus, WriterStatus, read_status


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank of the newest incarnation, as seen from this machine.

    Attributes:
        trainer: ``"running"``, or ``"gone"`` if its process or its staging folder is gone.
        staged_step: Newest step in staging or on disk; None if neither can be seen.
        durable_step: Newest fsynced step that a durable snapshot leads to; None if it cannot be
            seen.
        durable_snapshot: Step of its newest durable image, -1 for none.
        disk_bytes: Bytes of its segments and images in the run folder, of all incarnations.
        commit_age_seconds: Time since its last commit; None if unknown.
        preempted: Whether it was told to stop soon.
        error: Error that its writer reports, empty if there is none.
    """

    rank: int
    trainer: str
    staged_step: int | None
    durable_step: int | None
    durable_snapshot: int
    disk_bytes: int
    commit_age_seconds: float | None
    preempted: bool
    error: str


@dataclass(frozen=True, slots=True)
class RunProgress:
    """All ranks of the newest incarnation.

    Attributes:
        incarnation: Number of the incarnation; None if the run never began.
        committed_step: Newest step staged on all ranks; None if a rank cannot be seen.
        durable_step: Newest durable step of all ranks; None if a rank cannot be seen.
    """

    incarnation: int | None
    committed_step: int | None
    durable_step: int | None
    ranks: tuple[RankProgress, ...]


class _Listing:
    """Names in the run folder, listed once for all ranks."""

    def __init__(self, folder: RunFolder) -> None:
        self.fences = [(number, rank) for number, rank, _ in folder.fences()]
        self.segments = list(folder.segments())
        self.snapshots = list(folder.snapshots())


class RunWatch:
    """Reads one run's progress, as often as requested."""

    def __init__(self, folder: RunFolder, staging_root: Path) -> None:
        """Open the run.

        Raises:
            NotARun: If the folder holds no run.
        """
        self._folder = folder
        self._staging_root = staging_root
        #: Run and life of the newest incarnation; another one may begin in the same folder.
        self._owner = (read_run_id(folder), "")
        self._tails: dict[Path, tuple[int, int]] = {}

    def look(self, now_unix_seconds: float) -> RunProgress:
        """Return the run's progress now."""
        listing = _Listing(self._folder)
        # Use the newest incarnation whose rank 0 wrote its fence.
        newest = max((number for number, rank in listing.fences if rank == 0), default=None)
        ranks: tuple[RankProgress, ...] = ()
        if newest is not None:
            fence = read_fence(self._folder.fence(newest, 0))
            if (fence.run_id, fence.life) != self._owner:
                self._owner = (fence.run_id, fence.life)
                self._tails.clear()
            ranks = tuple(
                self._rank(listing, newest, rank, fence.base_step, now_unix_seconds)
                for rank in range(fence.world_size)
            )
        return RunProgress(
            incarnation=newest,
            committed_step=_least([rank.staged_step for rank in ranks]),
            durable_step=_least([rank.durable_step for rank in ranks]),
            ranks=ranks,
        )

    def _rank(
        self, listing: _Listing, incarnation: int, rank: int, base_step: int, now: float
    ) -> RankProgress:
        stage = StagingFolder.of(self._staging_root, self._owner[0], incarnation, rank)
        trainer = read_status(stage.trainer_status, TrainerStatus)
        writer = read_status(stage.status, WriterStatus)
        snapshots = [
            step
            for number, step, path in listing.snapshots
            if number == incarnation and manifest_file(path, rank).is_file()
        ]
        files = [path for _, owner, _, path in listing.segments if owner == rank]
        files += [shard_file(path, rank) for _, _, path in listing.snapshots]
        durable: int | None = writer.unbroken_step
        if writer.durable_step < 0:
            durable = self._on_disk(listing, incarnation, rank)
        if durable is None and (incarnation, rank) in listing.fences:
            durable = max([base_step, *snapshots])  # without a log there are no segments
        staged = durable if trainer.pid == 0 else max(trainer.step, durable or 0)
        return RankProgress(
            rank=rank,
            trainer="running" if _is_alive(trainer.pid) else "gone",
            staged_step=staged,
            durable_step=durable,
            durable_snapshot=max(snapshots, default=-1),
            disk_bytes=sum(map(file_bytes, files)),
            commit_age_seconds=None
            if trainer.step < 0
            else max(0.0, now - trainer.committed_at_unix_seconds),
            preempted=trainer.preempted,
            error=writer.error,
        )

    def _on_disk(self, listing: _Listing, incarnation: int, rank: int) -> int | None:
        """Return one rank's last step in its newest segment; None if there is no segment."""
        own = [
            (first, path)
            for number, owner, first, path in listing.segments
            if (number, owner) == (incarnation, rank)
        ]
        if not own:
            return None
        first, path = own[-1]
        # Continue where the last look ended, so that only added records are read.
        end, step = self._tails.get(path, (HEADER_BYTES, first - 1))
        # Retention may have removed the segment, or a dead writer's first record may be torn.
        with contextlib.suppress(OSError, DamagedFile):
            file = SegmentFile(path)
            file.end = end
            while (record := file.next()) is not None:
                end, step = file.end, record.header.step
        self._tails[path] = end, step
        return step


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # not killed and waiting to be reaped


def _least(steps: list[int | None]) -> int | None:
    """Return the smallest step; None if any step is unknown, or if there are none."""
    known = [step for step in steps if step is not None]
    return min(known, default=None) if len(known) == len(steps) else None
