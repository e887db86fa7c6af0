"""Trains a model whose staging takes more than 64 MiB, and reports every step and the last state.

``FOLDER STAGING UNTIL``; an empty ``STAGING`` leaves the place to lowdiff, which finds a /dev/shm of 64 MiB.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import lowdiff
from lowdiff.compressors import TopK
from tests.background import fork_processes
from tests.mounts import take_small_shm


def main(*words: str) -> None:
    """Train."""
    folder, staging, until = Path(words[0]), words[1], int(words[2])
    take_small_shm(64)
    fork_processes(forks=True)  # anew: the writer is to see it as well
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 12_000), torch.nn.Linear(12_000, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        folder / "run",
        compressor=TopK(0.01),
        snapshot_every=1000,
        batch_size=1000,  # what is not in a snapshot is in staging alone
        staging=staging or None,
    )
    with checkpointer, (folder / "report.txt").open("a", buffering=1) as report:
        print("resumed", checkpointer.attach(model, optimizer), file=report)
        for step in checkpointer.steps(until):
            optimizer.zero_grad()
            inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            print("step", step, file=report)
        tensors = [*model.state_dict().values()]
        tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
        print("state", digest, file=report)
