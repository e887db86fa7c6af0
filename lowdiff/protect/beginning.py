"""What a strategy makes its parts of, when an incarnation begins."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.storage import Trainer
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.protect.memory import Memory
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.types import Fence


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """What a protection is made of, on one rank whose staging folder is there.

    Attributes:
        trainer: What this rank's training knows of itself.
        live: What each step reads.
        fence: Of the incarnation that begins.
        memory: What may be used.
        starting: The writer, which makes steps or images durable; it takes half a second to start.
        publisher: Publishes weights; None where nothing is published from here.
        undo: Ends what was begun, should another part fail.
        unused: Removes staging folders that no incarnation began with.
    """

    trainer: Trainer
    live: Live
    fence: Fence
    memory: Memory
    starting: Future[WriterProcess]
    publisher: PublisherProcess | None
    undo: ExitStack
    unused: ExitStack

    @property
    def writer(self) -> WriterProcess:
        """The writer; waits until it has started, so memory is taken first.

        Raises:
            WriterFailed: If it did not come up.
        """
        return self.starting.result()

    def log(self, folder: StagingFolder, *, is_ring: bool = False) -> StagingLog:
        """Make a staging log in a folder; see `StagingLog`."""
        return StagingLog(
            folder,
            run_id=self.fence.run_id,
            world_size=self.fence.world_size,
            chunk_bytes=self.memory.chunk_bytes,
            cap_bytes=self.memory.log_bytes,
            is_ring=is_ring,
        )


def held_area(
    folder: StagingFolder, run: RunFolder, life: str, undo: ExitStack, unused: ExitStack
) -> StagingArea:
    """Make a staging folder of an incarnation, and hold it; see `StagingArea` and `Beginning`."""
    area = StagingArea(folder, run, life)
    unused.callback(folder.remove)
    undo.callback(area.release)
    return area
