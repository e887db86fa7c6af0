"""What a strategy is: all that differs between ways to protect a run's steps.

Settings, refusals, memory, processes and sinks ask one object, which is found by its name (`lowdiff/protect`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.compressors import Dense
from lowdiff.errors import ConfigError
from lowdiff.model.binding import Attached
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.protect.beginning import Beginning
from lowdiff.protect.copies.wards import Ward
from lowdiff.protect.memory import Demand, Need
from lowdiff.protocols import Compressor
from lowdiff.settings import Settings

#: Images of a rank's share of a snapshot that a copy has at a time.
_NUM_COPIED = 2


class Strategy(ABC):
    """How the steps of a run are protected.

    Attributes:
        name: Users choose it by this name, which stands in the fences of its incarnations.
        logs_steps: Whether every step becomes durable by itself, and gradients are averaged by a compressor.
        keeps_gradients: Whether steps are logged by the gradients that optimizers consume, as they are.
        is_replayed: Whether steps are replayed, by recovery or by a process beside the training.
        watches: Whether ranks that wait for each other are watched, and saved if they hang.
    """

    name: str
    logs_steps: bool = False
    keeps_gradients: bool = False
    is_replayed: bool = True
    watches: bool = False

    @abstractmethod
    def compressor(self, chosen: Compressor | None, *, reproducible: bool) -> Compressor:
        """Return what averages gradients.

        Args:
            chosen: What the user gave, if anything.
            reproducible: Whether sums are the same for any number of ranks and buckets.

        Raises:
            ConfigError: If it does not go with this strategy.
        """

    def refuse(self, settings: Settings) -> None:
        """Refuse settings that do not go with this strategy.

        Raises:
            ConfigError: Saying what to change.
        """
        if not self.watches and (settings.hang_seconds is not None or settings.on_hang != "save"):
            raise ConfigError(
                f'hang_seconds and on_hang are for strategy="survivors", and this run has {self.name!r}, whose steps '
                "are kept however long ranks hang; leave them out. A process group ends waits by its timeout: "
                "init_process_group(timeout=...)"
            )

    def refuse_model(  # noqa: B027  by default any is protected
        self, settings: Settings, attached: Attached, world_size: int
    ) -> None:
        """Refuse a model or an optimizer that this strategy cannot protect.

        Raises:
            ConfigError: Naming it, and what works instead.
            UnsupportedOptimizer: If an optimizer cannot be built elsewhere.
        """

    def warn(self, attached: Attached, world_size: int) -> None:  # noqa: B027  by default it is cheap
        """Say what this strategy costs where it costs much; on one rank."""

    @abstractmethod
    def need(self, demand: Demand) -> Need:
        """Return what one rank's staging takes."""

    @abstractmethod
    def protect(self, beginning: Beginning) -> Protection:
        """Make what takes the steps of one rank.

        Raises:
            StorageError: If there is no memory.
        """


class Copyable(Strategy):
    """A strategy whose steps other nodes can keep as well.

    Attributes:
        sends_shards: Whether shards that no other node holds are sent there.
    """

    sends_shards: ClassVar[bool] = False

    @abstractmethod
    def ward(self, beginning: Beginning, area: StagingArea) -> Ward:
        """Begin to keep what a rank on another node stages, in a folder for it."""

    def copy_bytes(self, staging: StagingNeed) -> int:
        """Return what a copy of one rank's state takes on another node, beside its log."""
        return _NUM_COPIED * staging.snapshot_bytes


def refuse_durable_publishing(settings: Settings, name: str) -> None:
    """Refuse to publish durable steps alone where a strategy makes few of them durable.

    Raises:
        ConfigError: Saying what to change.
    """
    if settings.publish is not None and settings.publish.durable:
        raise ConfigError(
            f"publish durable=True waits until a step is on a disk, and a run with strategy {name!r} has few such steps; "
            "give a compressor, or leave durable out"
        )


class Uncompressed(Strategy):
    """What strategies that leave gradients as they are have in common."""

    def compressor(self, chosen: Compressor | None, *, reproducible: bool) -> Compressor:
        """See `Strategy`."""
        if chosen is not None:
            raise ConfigError(
                f"strategy={self.name!r} leaves gradients as they are; give no compressor"
            )
        return Dense(reproducible)

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        super().refuse(settings)
        if settings.is_tuned:
            raise ConfigError(
                'snapshot_every="auto" and batch_size="auto" are for strategy "log", with a compressor: '
                "they weigh logged steps against snapshots; give a number of steps"
            )
        if settings.replicates_residual:
            raise ConfigError(
                'residual="replicated" is for strategy "log", with a compressor that has error feedback; '
                f"strategy {self.name!r} has no residual to send, so leave it out"
            )
