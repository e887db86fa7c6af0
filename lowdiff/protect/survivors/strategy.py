"""Strategy survivors: no step is kept, and whoever lives after a failure saves the state (just-in-time checkpoints)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lowdiff.commit.protection import Protection
from lowdiff.commit.queue import Queue
from lowdiff.commit.session import Session
from lowdiff.commit.storage import Storage
from lowdiff.compressors import Averaged
from lowdiff.core.events import inform
from lowdiff.errors import ConfigError
from lowdiff.model.binding import Attached
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.protect.beginning import Beginning
from lowdiff.protect.memory import Demand, Need, least_chunk
from lowdiff.protect.strategy import Uncompressed
from lowdiff.protect.survivors.standby import Standby
from lowdiff.protect.survivors.survivor import Survivor
from lowdiff.protect.survivors.watch import FailureWatch
from lowdiff.protocols import Compressor
from lowdiff.settings import Settings

#: Files that hold items, all of them together with one that is being written.
_ITEM_FILES = 5


class SurvivorsStrategy(Uncompressed):
    """A run without a compressor, of which every rank holds the whole state."""

    name = "survivors"
    is_replayed = False
    watches = True

    def compressor(self, chosen: Compressor | None, *, reproducible: bool) -> Compressor:
        """See `Strategy`."""
        super().compressor(chosen, reproducible=reproducible)
        return Averaged(reproducible)

    def refuse(self, settings: Settings) -> None:
        """See `Strategy`."""
        super().refuse(settings)
        if settings.copies > 1:
            raise ConfigError(
                f'copies={settings.copies} does not go with strategy="survivors": ranks that live save the state for '
                'those of a lost node, so nothing is copied before. Leave copies out, or take strategy="replica" or a '
                "compressor, whose steps other nodes keep"
            )
        if settings.publish is not None:
            raise ConfigError(
                'strategy="survivors" keeps no steps outside the trainers, so nobody could publish them; take '
                'strategy="replica", or a compressor'
            )

    def refuse_model(self, settings: Settings, attached: Attached, world_size: int) -> None:
        """See `Strategy`."""
        if attached.is_sharded:
            raise ConfigError(
                'strategy="survivors" needs every rank to hold the whole model; sharded parameters take '
                'strategy="replica"'
            )

    def need(self, demand: Demand) -> Need:
        """See `Strategy`: an image, what survivors save beside it, and the items of two steps."""
        image = least_chunk(demand.image_bytes)
        items = _ITEM_FILES * sum(demand.given.tracker.sizes().values())
        saved = image * (1 + demand.num_guests)
        return Need(StagingNeed(0, image, items, items, saved), least_chunk())

    def protect(self, beginning: Beginning) -> Protection:
        """See `Strategy`."""
        trainer, memory = beginning.trainer, beginning.memory
        standby = Standby(trainer.folder, beginning.live, memory.node, memory.image_bytes)
        storage = Storage(beginning.writer)
        return SurvivorsProtection(beginning, storage, standby)


class SurvivorsQueue(Queue):
    """Full snapshots alone. What survivors save is not in it: see `Standby`."""

    def _lacks_files(self) -> bool:
        return not self._trainer.folder.survivor_status.exists()


class SurvivorsProtection(Protection):
    """Regular snapshots, and a watch that saves the live state after a failure.

    Args:
        beginning: What there is.
        storage: The writer.
        standby: Has the items of the last steps.
    """

    saves_live = True

    def __init__(self, beginning: Beginning, storage: Storage, standby: Standby) -> None:
        super().__init__(storage, SurvivorsQueue(beginning.trainer, storage), [standby])
        self._trainer = beginning.trainer
        self._live = beginning.live
        self._standby = standby
        self._session: Session | None = None
        self._survivor: Survivor | None = None
        self._watch: FailureWatch | None = None

    def begin(self, session: Session) -> None:
        """See `Protection`."""
        self._session = session
        self._survivor = Survivor(self._live, session, self._standby, self._trainer.folder)

    def watch(self, *, ends_by_signal: bool) -> None:
        """See `Protection`."""
        session, survivor, settings = self._session, self._survivor, self._trainer.settings
        assert session is not None
        assert survivor is not None
        self._watch = FailureWatch(
            survivor,
            session,
            hang_seconds=settings.hang_seconds,
            on_hang=settings.on_hang,
            ends_by_signal=ends_by_signal,
        )
        text = f"after a failure the state is saved in {survivor.path}"
        inform(text, event="survivors", rank=self._trainer.rank)

    def end_watch(self) -> None:
        """See `Protection`."""
        if self._watch is not None:
            self._watch.close()

    def pause(self) -> AbstractContextManager[None]:
        """See `Protection`."""
        return nullcontext() if self._watch is None else self._watch.pace.pause()

    def save_after_failure(self, why: str) -> None:
        """See `Protection`."""
        if self._watch is not None:
            self._watch.save(why)

    def save(self, why: str) -> None:
        """See `Protection`."""
        assert self._survivor is not None
        self._survivor.save(why)
