"""One of two ranks that are told to stop while a collective blocks them.

``FOLDER RANK STEPS``
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from tests.crash.trainings import TRAININGS


def main(*words: str) -> None:
    """Train, then wait in a collective that nobody completes."""
    folder, rank, steps = Path(words[0]), int(words[1]), int(words[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    made = TRAININGS["gpt_adamw"](rank, 2)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", compressor=TopK(0.05), batch_size=1000, staging=folder / "staging"
    )
    # Nothing but the signal makes a batch of so few steps durable.
    testing.adjust(checkpointer, flush_seconds=1000.0)
    checkpointer.attach(made.model, made.optimizer)
    for step in checkpointer.steps(until=steps):
        made.step(step)
    (folder / f"blocked-{rank}").touch()
    if rank == 0:
        dist.barrier()
    time.sleep(1000)
