"""What a replica holds of a rank: the state in its file, and the trainer's image that it has not taken over."""

from __future__ import annotations

from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.run.records import RankRecords
from lowdiff.persistence.staging.status import ReplicaStatus, read_status
from lowdiff.recovery.replica.file import ReplicaFile, is_of_this_kernel
from lowdiff.recovery.replica.share import Shard, share_step
from lowdiff.recovery.sources.folders import trainer_image
from lowdiff.recovery.sources.source import Source
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Fence


class StateFile(Source):
    """The share in a replica's file; some of its units may be a step ahead of the others."""

    __slots__ = ()

    def load(self, fence: Fence) -> tuple[RecoveredState, bool]:
        """Map the share privately, and end the step that the replica had begun."""
        shard = Shard(ReplicaFile.open(self.path, private=True), fence, journaled=False)
        unit_steps = shard.file.unit_steps
        if (unit_steps > shard.step).any():  # what was begun in blocks ends in blocks
            shard.apply(share_step(self.records[shard.step + 1], fence))
        if (unit_steps != shard.step).any():
            raise DamagedFile(self.path, f"it is not wholly of step {shard.step}")
        return shard.state, shard.is_whole


def in_replica_folder(stage: StagingFolder, records: RankRecords) -> list[Source]:
    """Return the state of a replica, and the trainer's image if the state is not of its step or later."""
    status = read_status(stage.replica_status, ReplicaStatus)
    sources: list[Source] = []
    path = stage.replica_state(status.generation)
    if status.generation >= 0 and path.exists():
        sources += _state_file(stage, path, status, records)
    # An image that was taken over serves where what it was taken into does not.
    return sources + trainer_image(stage, records, after=status.image_step if sources else -1)


def _state_file(
    stage: StagingFolder, path: Path, status: ReplicaStatus, records: RankRecords
) -> list[Source]:
    if not is_of_this_kernel(stage):
        Code.REPLICA_MEMORY_OUTDATED.warn(
            f"the state of a replica in {stage.root} is of before this machine was started, and "
            "may be torn; it is passed over",
        )
        return []
    # Not by the page: the replica may have been killed in the middle of the next step, or after it.
    try:
        file = ReplicaFile.open(path, private=True)
    except DamagedFile as error:
        Code.REPLICA_MEMORY_DAMAGED.warn(error)
        return []
    last = file.last_step()
    step = file.base_step if last is None else last[0]
    if step < status.step:  # the page is published last
        Code.REPLICA_MEMORY_DAMAGED.warn(
            DamagedFile(path, f"step {status.step} fails its checksum")
        )
    return [StateFile(path, step, max(step, file.reach()), records)]
