"""Copies on other nodes, around a strategy: what each rank stages is kept in their memory as well."""

from __future__ import annotations

from dataclasses import replace

from lowdiff.commit.protection import Protection
from lowdiff.compressors.collectives import own_group
from lowdiff.errors import ConfigError
from lowdiff.model.binding import Attached
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.protect.beginning import Beginning, held_area
from lowdiff.protect.copies.copies import Copies
from lowdiff.protect.copies.residuals import Outgoing, Plan
from lowdiff.protect.copies.spans import Spans
from lowdiff.protect.copies.wards import Ward
from lowdiff.protect.memory import Demand, Need
from lowdiff.protect.strategy import Copyable, Strategy
from lowdiff.protocols import Compressor
from lowdiff.settings import Settings


class Copied(Strategy):
    """A strategy with copies of each step on other nodes.

    Args:
        inner: How steps are protected on their own node.
    """

    def __init__(self, inner: Copyable) -> None:
        self._inner = inner
        self.name = inner.name
        self.logs_steps = inner.logs_steps
        self.keeps_gradients = inner.keeps_gradients
        self.is_replayed = inner.is_replayed
        self.watches = inner.watches

    def compressor(self, chosen: Compressor | None, *, reproducible: bool) -> Compressor:
        """See `Strategy`."""
        return self._inner.compressor(chosen, reproducible=reproducible)

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        self._inner.refuse(settings)

    def refuse_model(self, settings: Settings, attached: Attached, world_size: int) -> None:
        """See `Strategy`."""
        self._inner.refuse_model(settings, attached, world_size)
        residual = settings.compressor.residual_layout(attached.exchanged)
        if settings.replicates_residual and not residual.parameters:
            raise ConfigError(
                f'residual="replicated" has nothing to send: {settings.compressor.name} keeps no '
                "error feedback of this model; leave it out, and a node may be lost all the same"
            )

    def warn(self, attached: Attached, world_size: int) -> None:
        """See `Strategy`."""
        self._inner.warn(attached, world_size)

    def need(self, demand: Demand) -> Need:
        """See `Strategy`: of each rank that copies are kept of, what it stages itself; its residual if that is sent."""
        sent = demand.peers.sent
        if sent and not self._inner.sends_shards:
            raise ConfigError(
                f"copies of what strategy {self.name!r} keeps are made by ranks that hold the same shards, and no rank on "
                f"another node holds those of rank(s) {', '.join(map(str, sent))}; build the mesh so that "
                'replicate= goes over nodes, or take strategy="replica", which sends them'
            )
        need, num_wards = self._inner.need(demand), len(demand.peers.wards)
        staging = need.staging
        kept = self._inner.copy_bytes(staging)
        if demand.settings.replicates_residual:
            kept += staging.residual_bytes
        staging = replace(
            staging,
            copies_bytes=num_wards * kept,
            log_bytes=(1 + num_wards) * staging.log_bytes,
            least_log_bytes=(1 + num_wards) * staging.least_log_bytes,
        )
        return replace(need, staging=staging)

    def protect(self, beginning: Beginning) -> Protection:
        """See `Strategy`."""
        settings, fence = beginning.trainer.settings, beginning.fence
        wards: list[Ward] = []
        for rank in beginning.memory.peers.wards:
            folder = StagingFolder.copy_of(
                settings.staging_root, fence.run_id, fence.incarnation, rank, fence.rank
            )
            area = held_area(folder, settings.folder, fence.life, beginning.undo, beginning.unused)
            wards.append(self._inner.ward(beginning, area))
        return CopiedProtection(self._inner.protect(beginning), beginning, wards)


class CopiedProtection(Protection):
    """What a strategy makes, and copies of it on other nodes.

    Args:
        inner: What the strategy made.
        beginning: Of what.
        wards: What this rank keeps for others.
    """

    def __init__(self, inner: Protection, beginning: Beginning, wards: list[Ward]) -> None:
        super().__init__(inner.storage, inner.queue, inner.sinks[1:])
        self._trainer = beginning.trainer
        self._live = beginning.live
        self._peers = beginning.memory.peers
        self._wards = wards
        self._copies: Copies | None = None

    def join(self, ranks: Ranks) -> None:
        """See `Protection`: the group that carries what ranks send."""
        peers, settings = self._peers, self._trainer.settings
        assert ranks.training_group is not None  # on several nodes
        outgoing = None
        if settings.replicates_residual and peers.keepers:
            plan = Plan(Spans(), len(peers.keepers), self._trainer.rank)
            outgoing = Outgoing(self._live.residual, plan)
            self.exchanges = plan.spans
        group = own_group(ranks.training_group)
        self._copies = Copies(group, peers, self._wards, self._trainer, self._live, outgoing)
        self.sinks.append(self._copies)

    def wait_for_base(self, step: int) -> None:
        """See `Protection`."""
        if self._copies is not None:
            self._copies.wait_for_base(step)

    def close(self, *, removes: bool) -> None:
        """See `Protection`."""
        if self._copies is not None:
            self._copies.close(removes=removes)
