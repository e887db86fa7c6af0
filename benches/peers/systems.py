"""The systems that are compared: how each is driven, and what it promises to have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from benches.peers.arm import Arm, Place
from benches.peers.compression import COMPRESSORS, Compressed
from benches.peers.published import PublishedCompression
from benches.peers.training import Compression


@dataclass(frozen=True, slots=True)
class System:
    """One way to checkpoint.

    Attributes:
        label: Its name for readers.
        module: Under ``benches.peers``; imports the system, so only its environment can load it.
        arm: Class in it.
        setting: How it is driven, in words.
        fsync: What is on the disk when it calls a step saved, in words.
        environment: Key of ``REQUIREMENTS``; empty where the bench's own has all it takes.
        origin: Which version that is, then.
        options: For the arm.
        compression: What both arms do to gradients: ``""``, ``"published"`` or of ``COMPRESSORS``.
        keeps_differences: Whether a step is a difference to be replayed, not the whole state.
        agent: Module that runs beside the trainer all the time and outlives it.
    """

    label: str
    module: str
    arm: str
    setting: str
    fsync: str
    environment: str = ""
    origin: str = "this one"
    options: Mapping[str, Any] = field(default_factory=dict)
    compression: str = ""
    keeps_differences: bool = False
    agent: str = ""


_NO_FSYNC = "none: a loss of power may take it"
_LOWDIFF_FSYNC = (
    "every batch and snapshot, in the background: a loss of power takes up to two batches"
)
_PYTORCH = "PyTorch's"

SYSTEMS: dict[str, System] = {
    "lowdiff_topk": System(
        "lowdiff, top-k 1 %",
        "lowdiff_arms",
        "LowDiff",
        "`commit()` after each step, batches of 8 steps, at 60 million parameters of one (default: 16), every step kept",
        _LOWDIFF_FSYNC,
        options={"compressor": "topk"},
        compression="topk",
        keeps_differences=True,
    ),
    "lowdiff_powersgd": System(
        "lowdiff, PowerSGD rank 4",
        "lowdiff_arms",
        "LowDiff",
        "as above",
        _LOWDIFF_FSYNC,
        options={"compressor": "powersgd"},
        compression="powersgd",
        keeps_differences=True,
    ),
    "lowdiff_plus": System(
        "lowdiff, LowDiff+",
        "lowdiff_arms",
        "LowDiff",
        "no compressor; each step is in the replica's memory, with several ranks all but the newest",
        "snapshots only, in the background; a loss of power goes back to the last one",
        keeps_differences=True,
    ),
    "torch_save": System(
        "torch.save",
        "torch_save",
        "TorchSave",
        "rank 0, a new file per step, renamed when whole",
        _NO_FSYNC,
        origin=_PYTORCH,
    ),
    "dcp_thread": System(
        "DCP async_save, thread",
        "dcp",
        "AsyncSave",
        "own Gloo group, staging memory and plans reused, one save in flight",
        "every file, before a save counts as done",
        origin=_PYTORCH,
    ),
    "dcp_process": System(
        "DCP async_save, process",
        "dcp",
        "AsyncSave",
        "the same with `AsyncCheckpointerType.PROCESS` and shared staging memory",
        "every file, before a save counts as done",
        origin=_PYTORCH,
        options={"in_process": True},
    ),
    "torchsnapshot": System(
        "torchsnapshot async_take",
        "torchsnapshot",
        "AsyncTake",
        'replicated=["**"], one snapshot in flight',
        _NO_FSYNC,
        environment="torchsnapshot",
    ),
    "dlrover_memory": System(
        "DLRover Flash Checkpoint, memory",
        "dlrover",
        "FlashCheckpoint",
        "`StorageType.MEMORY`, with the agent's saver, which outlives the trainer; without the rarer "
        "`DISK` saves that its documentation adds",
        "nothing is on disk",
        environment="dlrover",
        options={"to_disk": False},
        agent="dlrover",
    ),
    "dlrover_disk": System(
        "DLRover Flash Checkpoint, disk",
        "dlrover",
        "FlashCheckpoint",
        "`StorageType.DISK`, likewise; skips a step while the one before is written",
        "the tracker file only, not the states",
        environment="dlrover",
        options={"to_disk": True},
        agent="dlrover",
    ),
    "orbax": System(
        "Orbax CheckpointManager",
        "orbax",
        "Orbax",
        "asynchronous, NumPy views of the tensors, not compressed, rank 0",
        "TensorStore's data files (its `file_io_sync` is on by default)",
        environment="orbax",
    ),
    "lightning": System(
        "Lightning AsyncCheckpointIO",
        "lightning",
        "AsyncPlugin",
        "on `TorchCheckpointIO`, without a Trainer, rank 0; its queue has no bound",
        _NO_FSYNC,
        environment="lightning",
    ),
    "deepspeed": System(
        "DeepSpeed torch engine",
        "deepspeed",
        "TorchEngine",
        "`save_checkpoint` of an engine without ZeRO; steps are made outside it",
        _NO_FSYNC,
        environment="deepspeed",
    ),
    "torch_checkpointing": System(
        "torch_checkpointing",
        "torch_checkpointing",
        "ManagerSave",
        "asynchronous, pinned memory and O_DIRECT off, every rank writes its own whole state",
        _NO_FSYNC,
        environment="torch_checkpointing",
    ),
    "published": System(
        "LowDiff as published, made anew for CPUs",
        "published",
        "Published",
        "its own top-k 1 % without error feedback, in both arms; a file per step",
        _NO_FSYNC,
        origin="after [its authors' code](https://github.com/SC25LowDiff/LowDiff)",
        compression="published",
        keeps_differences=True,
    ),
    "gemini": System(
        "Gemini, made anew for CPUs",
        "gemini",
        "Gemini",
        "each rank's share of the state in its own memory and in one other rank's, two buffers of each, "
        "sent in the background on its own Gloo group; without the rarer saves to remote storage",
        "nothing is on disk",
        origin="after [its paper](https://doi.org/10.1145/3600006.3613145)",
    ),
}

#: What ``make bench`` compares.
QUICK = ("lowdiff_topk", "torch_save", "dcp_thread")


def arm_of(name: str) -> Callable[[Place], Arm]:
    """What makes the arm of a system; only its environment can import it."""
    system = SYSTEMS[name]
    made: Callable[..., Arm] = getattr(import_module(f"benches.peers.{system.module}"), system.arm)
    return partial(made, **system.options)


def compression_of(name: str, num_ranks: int, *, has_arm: bool) -> Compression | None:
    """What happens to gradients; lowdiff's own arm compresses them by itself."""
    kind = SYSTEMS[name].compression
    if kind == "published":
        return PublishedCompression()
    if kind and not has_arm:
        return Compressed(COMPRESSORS[kind], num_ranks)
    return None
