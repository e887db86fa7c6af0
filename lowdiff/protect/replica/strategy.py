"""Strategy replica (LowDiff+): a process beside each rank applies every step to a copy of its share of the state."""

from __future__ import annotations

import os
import sys

from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.storage import Storage
from lowdiff.core.events import Code
from lowdiff.core.layout import shares_of
from lowdiff.model.binding import Attached
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.protect.beginning import Beginning
from lowdiff.protect.copies.wards import ReplicaWard, SentWard, Ward
from lowdiff.protect.memory import LEAST_CHUNKS, SECTION_BYTES, Demand, Need, least_chunk
from lowdiff.protect.replica.queue import ReplicaQueue
from lowdiff.protect.strategy import Copyable, Uncompressed, refuse_durable_publishing
from lowdiff.recovery.replay.optimizers import refuse_what_a_replica_lacks, registrations
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.recovery.state import SCALAR_STATE
from lowdiff.settings import Settings
from lowdiff.tuner.side_by_side import REPLICA_SECONDS_PER_ELEMENT

#: So few take a quarter of a second.
_FAST_ELEMENTS = 20_000_000
#: Of the queue: each takes one step of a large model, or many of a small one.
_QUEUE_CHUNKS = 6


class ReplicaStrategy(Copyable, Uncompressed):
    """A run without a compressor, whose steps are applied at once instead of being written."""

    name = "replica"
    keeps_gradients = True
    sends_shards = True

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        super().refuse(settings)
        refuse_durable_publishing(settings, self.name)

    def refuse_model(self, settings: Settings, attached: Attached, world_size: int) -> None:
        """See `Strategy`."""
        refuse_what_a_replica_lacks(attached.specs, settings.imports, world_size)

    def warn(self, attached: Attached, world_size: int) -> None:
        """See `Strategy`: on a CPU a replica may not keep up with an accelerator."""
        if attached.is_on_host:
            return
        parameters = attached.layout.parameters
        shares = shares_of(attached.layout, world_size)
        largest = max(sum(parameters[i].numel for i in share) for share in shares)
        if largest > _FAST_ELEMENTS:
            seconds = REPLICA_SECONDS_PER_ELEMENT * largest
            Code.REPLICA_ON_ACCELERATOR.warn(
                f'strategy "replica" applies every step to a rank\'s {largest / 1e6:.0f} million elements on the CPU, '
                f"which takes about {seconds:.1f} s by what was measured beside an H200; where steps on "
                f"{attached.device} are shorter, training waits for it (there: 388 ms a step instead of 75). Compress "
                "gradients, compressor=PowerSGD(4) (there: 124 ms), train on more ranks, or take "
                'strategy="survivors", which was not run on accelerators',
                elements=largest,
            )

    def need(self, demand: Demand) -> Need:
        """See `Strategy`: the state that is stepped, one that waits for the disk, and an image.

        The third is the trainer's, or is taken while the first step lasts.
        """
        steps, image = demand.num_steps, demand.image_bytes
        heads = SECTION_BYTES * len(demand.given.attached.layout.parameters) * (steps - 1)
        chunk = least_chunk(steps * demand.largest_share + heads)
        chunks = _QUEUE_CHUNKS if steps == 1 else LEAST_CHUNKS
        return Need(StagingNeed(0, image, chunks * chunk, LEAST_CHUNKS * chunk, 2 * image), chunk)

    def protect(self, beginning: Beginning) -> Protection:
        """See `Strategy`.

        On an accelerator the trainer takes the regular snapshots: the replica's arithmetic may differ there in the
        last place.
        """
        trainer, makes_images = beginning.trainer, beginning.live.attached.is_on_host
        log = beginning.log(trainer.folder)
        replica = _replica(beginning, log, makes_images=makes_images)
        storage = Storage(beginning.writer, replica, beginning.publisher)
        return Protection(
            storage, ReplicaQueue(log, trainer, storage, replica, makes_images=makes_images)
        )

    def copy_bytes(self, staging: StagingNeed) -> int:
        """See `Copyable`: the replica's state, and the trainer's image."""
        return staging.snapshot_bytes + staging.replica_bytes // 2

    def ward(self, beginning: Beginning, area: StagingArea) -> Ward:
        """See `Copyable`."""
        log = beginning.log(area.folder)
        replica = _replica(beginning, log, makes_images=False)
        is_sent = area.folder.rank in beginning.memory.peers.sent
        return (SentWard if is_sent else ReplicaWard)(area, beginning.live, log, replica)


def _replica(beginning: Beginning, log: StagingLog, *, makes_images: bool) -> ReplicaProcess:
    """Prepare the process that reads ``log``."""
    settings, live = beginning.trainer.settings, beginning.live
    kept = (settings.retention and settings.retention.every_steps) or 0
    replica = ReplicaProcess(
        ReplicaSettings(
            run=str(settings.run),
            staging_root=str(log.folder.root.parents[1]),
            run_id=log.folder.run_id,
            incarnation=log.folder.incarnation,
            rank=log.folder.rank,
            keeper=log.folder.keeper,
            world_size=live.world_size,
            trainer_pid=os.getpid(),
            image_every=settings.snapshot_every if makes_images else 0,
            keep_every=kept if makes_images else 0,
            waits=settings.backpressure == "block",
            imports=settings.imports,
            optimizers=tuple(registrations(live.attached.specs)),
            scalar_state=tuple(sorted(SCALAR_STATE)),
            import_path=tuple(map(os.path.abspath, sys.path)) if settings.imports else (),
        )
    )
    beginning.undo.callback(replica.stop)
    return replica
