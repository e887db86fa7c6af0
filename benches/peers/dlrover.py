"""DLRover's Flash Checkpoint after every step, to shared memory or on to disk.

    python -m benches.peers.dlrover

is the part of ``dlrover-run``'s agent that outlives the trainer and writes what it left in memory.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from dlrover.python.common.constants import CheckpointConstant
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

from benches.peers.arm import Place, Trained

_DRAIN_SECONDS = 60.0
_POLL_SECONDS = 0.01


class FlashCheckpoint:
    """``DdpCheckpointer``: rank 0 copies to shared memory, the agent's saver writes from there.

    To disk it skips a step while the saver still writes the one before.
    """

    def __init__(self, place: Place, *, to_disk: bool) -> None:
        self._place = place
        self._storage = StorageType.DISK if to_disk else StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(str(place.files))

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        contents: dict[str, Any] = {"step": step, **self._training.state()}
        self._checkpointer.save_checkpoint(step, contents, storage_type=self._storage)
        return bool(self._checkpointer._engine._cached_step == step)

    def drain(self) -> None:
        """See ``Arm.drain``: what was taken last is on disk, or in memory."""
        # Its own wait looks every three seconds, which would be most of a block's time.
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._storage == StorageType.DISK and self._is_behind():
            assert time.monotonic() < deadline, "the saver does not finish"
            time.sleep(_POLL_SECONDS)

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: from memory if it is there, else from disk."""
        state = self._checkpointer.load_checkpoint()
        if not state:
            return 0
        training.load(state)
        return int(state["step"])

    def _is_behind(self) -> bool:
        tracker = self._place.files / CheckpointConstant.TRACER_FILE_NAME
        latest = self._checkpointer._engine.latest_step
        return latest > 0 and not (tracker.exists() and tracker.read_text() == str(latest))


def main() -> None:
    """Be the agent until killed."""
    AsyncCheckpointSaver.start_async_saving_ckpt()
    signal.pause()


if __name__ == "__main__":
    main()
