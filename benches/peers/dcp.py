"""``torch.distributed.checkpoint.async_save`` after every step, in a thread or in a process."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benches.peers.arm import Place, Trained
from benches.peers.full_state import newest_that_loads


class AsyncSave:
    """As the recipe says: its own Gloo group, one save in flight, memory of the copy reused.

    The training group must not be used: a save in the background hangs under DDP.
    """

    def __init__(self, place: Place, *, in_process: bool = False) -> None:
        self._place = place
        self._kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        self._stager = reused_memory(in_process=in_process)
        # What is saved has the same names and shapes at every step.
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._group = dist.new_group(backend="gloo")
        self._under_way: Future[Any] | None = None

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        self.drain()
        saving = dcp.async_save(
            contents_of(self._training),
            checkpoint_id=self._place.step(step),
            planner=self._planner,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        self._under_way = completion(saving)
        return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: ``.metadata`` is written last, so a folder without is not whole."""

        def load(path: Path) -> None:
            contents = contents_of(training)
            dcp.load(contents, checkpoint_id=path, process_group=self._group)
            put_back(training, contents)

        whole = [(s, p) for s, p in self._place.saved() if (p / ".metadata").exists()]
        return newest_that_loads(whole, load, (CheckpointException, OSError))


def reused_memory(*, in_process: bool = False) -> DefaultStager:
    """The recipe's cache of staging memory; pinning and its stream are for CUDA."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=in_process,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def completion(saving: Future[Any] | AsyncSaveResponse) -> Future[Any]:
    """When a save is whole; what ``async_save`` returns depends on the stager."""
    return saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving


def contents_of(training: Trained) -> dict[str, Any]:
    """State dicts by PyTorch's names; an optimizer that has not stepped gets its state."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def put_back(training: Trained, contents: Mapping[str, Any]) -> None:
    """Load what `contents_of` gave into model and optimizer."""
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=contents["model"],
        optim_state_dict=contents["optimizer"],
    )
