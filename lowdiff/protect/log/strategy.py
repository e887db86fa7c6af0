"""Strategy log: every step is kept as a compressed differential."""

from __future__ import annotations

from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.storage import Storage
from lowdiff.compressors import Dense
from lowdiff.compressors.feedback import NUM_SLOTS
from lowdiff.errors import ConfigError
from lowdiff.model.binding import Attached
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.protect.beginning import Beginning
from lowdiff.protect.copies.residuals import KeptResidual
from lowdiff.protect.copies.wards import Ward
from lowdiff.protect.log.queue import LogQueue
from lowdiff.protect.memory import LEAST_CHUNKS, Demand, Need, chunk_of, spare_chunk
from lowdiff.protect.strategy import Copyable
from lowdiff.protocols import Compressor
from lowdiff.settings import Settings


class LogStrategy(Copyable):
    """A run with a compressor: its writer makes every step durable."""

    name = "log"
    logs_steps = True

    def compressor(self, chosen: Compressor | None, *, reproducible: bool) -> Compressor:
        """See `Strategy`."""
        if chosen is None:
            raise ConfigError('strategy="log" needs a compressor, e.g. PowerSGD(matrix_rank=4)')
        if isinstance(chosen, Dense):
            raise ConfigError(
                f"compressor={type(chosen).__name__}() leaves gradients as they are, so there is nothing to log: leave it "
                'out, and name the strategy, "replica" or "survivors"'
            )
        if reproducible:
            raise ConfigError(
                "reproducible=True is for training without compression; compressed gradients are "
                "always summed in rank order"
            )
        return chosen

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        super().refuse(settings)
        if settings.replicates_residual and settings.copies == 1:
            raise ConfigError(
                'residual="replicated" sends the residual to the nodes that keep copies, and copies=1 keeps '
                'none; give copies=2, or residual="exact", which survives a crash of processes'
            )
        if settings.has_several_steps:
            raise ConfigError(
                'optimizer_steps="any" is for training without a compressor: error feedback belongs to '
                "one exchange per step. Leave the compressor out, or call commit() after each "
                "optimizer.step()"
            )

    def refuse_model(self, settings: Settings, attached: Attached, world_size: int) -> None:
        """See `Strategy`."""
        if attached.is_sharded and attached.replicas is None:
            raise ConfigError(
                f"the compressor {settings.compressor.name!r} averages gradients over copies of the model, and "
                "FSDP averages these by itself. Where there are copies, shard over one dimension of the mesh "
                'and name the other: fully_shard(module, mesh=mesh["shard"]), attach(model, optimizer, '
                'replicate=mesh["rep"]). Or leave gradients as they are: strategy="replica", no compressor'
            )

    def need(self, demand: Demand) -> Need:
        """See `Strategy`: the log, an image, and the residual where that outlives a crash."""
        exchanged, settings = demand.exchanged_bytes, demand.settings
        residual = settings.compressor.residual_layout(demand.given.attached.exchanged)
        slots = 0 if settings.residual == "snapshot" else NUM_SLOTS
        chunk = chunk_of(exchanged // 8)
        staging = StagingNeed(
            residual_bytes=slots * sum(spec.nbytes for spec in residual.parameters),
            snapshot_bytes=demand.state_bytes // demand.world_size + exchanged + demand.item_bytes,
            log_bytes=4 * exchanged + spare_chunk(),
            least_log_bytes=LEAST_CHUNKS * chunk,
        )
        return Need(staging, chunk)

    def protect(self, beginning: Beginning) -> Protection:
        """See `Strategy`."""
        trainer = beginning.trainer
        log = beginning.log(trainer.folder)
        storage = Storage(beginning.writer, None, beginning.publisher)
        return Protection(storage, LogQueue(log, trainer, storage))

    def ward(self, beginning: Beginning, area: StagingArea) -> Ward:
        """See `Copyable`."""
        residual = None
        if beginning.trainer.settings.replicates_residual:
            residual = KeptResidual(area.folder.residual, beginning.live.residual.layout)
        return Ward(area, beginning.live, beginning.log(area.folder), residual)
