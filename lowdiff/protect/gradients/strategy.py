"""Strategy gradients: what optimizers consume stays in memory, and recovery replays it on an image that is there."""

from __future__ import annotations

from math import ceil

from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.storage import Storage
from lowdiff.core.events import inform
from lowdiff.persistence.files.paths import NUM_KEPT
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.protect.beginning import Beginning
from lowdiff.protect.copies.wards import Ward
from lowdiff.protect.gradients.queue import GradientsQueue
from lowdiff.protect.memory import (
    LEAST_CHUNKS,
    SECTION_BYTES,
    Demand,
    Need,
    chunk_for,
    largest_share,
    rest_bytes,
)
from lowdiff.protect.strategy import Copyable, Uncompressed, refuse_durable_publishing
from lowdiff.settings import Settings
from lowdiff.types import Layout

#: With fewer steps an image would be taken at every step or two.
_LEAST_STEPS = 6
#: So many snapshot intervals are kept, where memory allows: more would take no fewer images.
_INTERVALS = 3


class GradientsStrategy(Copyable, Uncompressed):
    """A run without a compressor, whose consumed gradients are kept and not applied.

    Each rank keeps those of its share of a snapshot, so that its image and its gradients lead to its share of any
    step since. (LowDiff+, Yao et al., arXiv 2509.04084, applies them to a copy of the state as they come.)
    """

    name = "gradients"
    keeps_gradients = True

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        super().refuse(settings)
        refuse_durable_publishing(settings, self.name)

    def need(self, demand: Demand) -> Need:
        """See `Strategy`: two images, and the gradients of six steps at least."""
        settings = demand.settings
        given = demand.given
        record = _body_bytes(given.attached.layout, demand.world_size, demand.num_steps)
        record += rest_bytes(given.tracker)
        chunk = chunk_for(record)
        per_chunk = chunk // record

        def log_bytes(steps: int) -> int:
            return chunk * max(LEAST_CHUNKS, 1 + ceil(steps / per_chunk))

        least = log_bytes(_LEAST_STEPS)
        wanted = max(least, log_bytes(_INTERVALS * settings.snapshot_every))
        images = NUM_KEPT * demand.image_bytes
        return Need(StagingNeed(0, images, wanted, least), chunk)

    def protect(self, beginning: Beginning) -> Protection:
        """See `Strategy`."""
        trainer, memory = beginning.trainer, beginning.memory
        log = beginning.log(trainer.folder, is_ring=True)
        storage = Storage(beginning.writer, None, beginning.publisher)
        body = _body_bytes(beginning.fence.layout, trainer.world_size, memory.optimizer_steps)
        per_chunk = memory.chunk_bytes // (body + rest_bytes(beginning.live.tracker))
        # Of one chunk nothing is to be reused yet: it is being written.
        num_steps = (memory.log_bytes // memory.chunk_bytes - 1) * max(per_chunk, 1)
        inform(
            f"gradients of about {num_steps} steps are kept in memory, of which at least a third come back",
            rank=trainer.rank,
        )
        return Protection(storage, GradientsQueue(log, num_steps, body, trainer, storage))

    def copy_bytes(self, staging: StagingNeed) -> int:
        """See `Copyable`."""
        return staging.snapshot_bytes

    def ward(self, beginning: Beginning, area: StagingArea) -> Ward:
        """See `Copyable`."""
        return Ward(area, beginning.live, beginning.log(area.folder, is_ring=True))


def _body_bytes(layout: Layout, world_size: int, num_steps: int) -> int:
    """Return what the gradients of one loop body take in the log of the rank that has most of them."""
    heads = SECTION_BYTES * len(layout.parameters)
    return num_steps * (largest_share(layout, world_size) + heads)
