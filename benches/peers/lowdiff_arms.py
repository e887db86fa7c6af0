"""lowdiff itself, with its defaults, but for the interval of snapshots, for retention, and for batches.

A block is some whole batches: a drain in the middle of one would wait for the seconds after which a
batch is flushed that never fills, and training that goes on has no such wait.
"""

from __future__ import annotations

import time
from typing import Any

import lowdiff
from benches.peers.arm import Place, Trained
from benches.peers.compression import COMPRESSORS

_POLL_SECONDS = 0.005
_DRAIN_SECONDS = 120.0


class LowDiff:
    """``Checkpointer`` with a compressor, or without one: LowDiff+."""

    def __init__(self, place: Place, *, compressor: str = "") -> None:
        self._place = place
        self._is_replica = not compressor
        self._checkpointer = lowdiff.Checkpointer(
            place.files / "run",
            compressor=COMPRESSORS.get(compressor),
            snapshot_every=place.snapshot_every,
            batch_size=place.batch_size,
            staging=place.staging,
            retention=None,
            on_error="raise",
        )

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        assert self.restore(training) == 0

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``: the rest of the work is in the optimizer's hooks."""
        del step
        self._checkpointer.commit()
        return True

    def drain(self) -> None:
        """See ``Arm.drain``: all is on disk; with LowDiff+ every step is in the replica's memory.

        A snapshot that has come due is on disk in both cases.
        """
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._is_behind(self._checkpointer.stats()):
            assert time.monotonic() < deadline, f"not drained: {self._checkpointer.stats()}"
            time.sleep(_POLL_SECONDS)

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``."""
        return self._checkpointer.attach(training.module, training.optimizer)

    def _is_behind(self, stats: dict[str, Any]) -> bool:
        if stats["durable_snapshot"] < stats["snapshot_step"]:
            return True
        if self._is_replica:
            # With several ranks the newest step is committed, and applied, with the next one.
            newest = stats["steps"] - (self._place.num_ranks > 1)
            last_snapshot = newest - newest % self._place.snapshot_every
            lag = stats["replica_lag_steps"]
            return bool(lag > stats["steps"] - newest or stats["durable_step"] < last_snapshot)
        return bool(stats["durable_step"] < stats["steps"])
