"""torchsnapshot's ``Snapshot.async_take`` after every step."""

from __future__ import annotations

from pathlib import Path

from torchsnapshot import Snapshot
from torchsnapshot.snapshot import PendingSnapshot

from benches.peers.arm import Place, Trained
from benches.peers.full_state import newest_that_loads


class AsyncTake:
    """As its README says: application state by name, replicated, one snapshot in flight."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._under_way: PendingSnapshot | None = None

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        self.drain()
        self._under_way = Snapshot.async_take(
            str(self._place.step(step)),
            {"model": self._training.model, "optimizer": self._training.optimizer},
            replicated=["**"],
        )
        return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: the metadata is written last."""

        def load(path: Path) -> None:
            Snapshot(str(path)).restore({"model": training.model, "optimizer": training.optimizer})

        whole = [(s, p) for s, p in self._place.saved() if (p / ".snapshot_metadata").exists()]
        return newest_that_loads(whole, load, (RuntimeError, OSError))
