"""One rank that trains on PyTorch's own DataLoader with workers: ``SCRIPT RUN STAGING UNTIL REPORT``."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lowdiff
from lowdiff.compressors import TopK


class Noisy(Dataset[Any]):
    """Samples that are augmented in workers."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(16) * index + random.random() + np.random.rand()


def main(*words: str) -> None:
    """Train epoch after epoch."""
    run, staging, until, report = words[0], words[1], int(words[2]), Path(words[3])
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(17)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    model: nn.Module = net
    options: dict[str, Any] = {"shuffle": True}
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
        options = {"sampler": DistributedSampler(Noisy(), seed=2)}
    loader = DataLoader(Noisy(), batch_size=8, num_workers=2, persistent_workers=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = os.environ.get("RANK", "0")
    checkpointer = lowdiff.Checkpointer(
        run, compressor=TopK(0.1), snapshot_every=7, batch_size=3, staging=staging
    )
    with checkpointer, report.with_suffix(f".{rank}").open("a") as lines:
        step = checkpointer.attach(model, optimizer, loader=loader)
        print(json.dumps({"resumed": step}), file=lines, flush=True)
        for epoch in range(checkpointer.epoch_of(loader), 10**6):
            if step >= until:  # it was killed after its last step
                break
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                line = {"step": step, "loss": float(loss.detach()).hex()}
                print(json.dumps(line), file=lines, flush=True)
                checkpointer.commit()
                time.sleep(0.01)  # so that whoever kills it comes in time
                step += 1
                if step >= until:
                    break
            if step >= until:
                break
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        print(json.dumps({"state": digest.hexdigest()}), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
