"""``torch_checkpointing`` (torchtitan's new backend): its manager's asynchronous save after every step."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benches.peers.arm import Place, Trained
from benches.peers.dcp import contents_of, put_back
from benches.peers.full_state import newest_that_loads


class ManagerSave:
    """As its pages say for a CPU: no pinned memory; without O_DIRECT, which ext4 refuses."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._under_way: Future[Any] | None = None
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``: until the state is copied, before which no optimizer may step."""
        contents = contents_of(self._training)
        self._under_way = self._manager.save(str(self._place.step(step)), contents)
        with self._manager.lock():
            return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: a folder is renamed to its name when it is whole."""

        def load(path: Path) -> None:
            contents = contents_of(training)
            put_back(training, self._manager.load(str(path), into=contents, strict=True))

        return newest_that_loads(self._place.saved(), load, (RuntimeError, OSError, ValueError))
