"""A CNN with batch norm on several processes: buffers that differ across ranks, autocast, 8 bits.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # for --max-restarts: docs/getting_started.md
torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ddp_cnn.py runs/cnn
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import Quantize


def stripes(count: int) -> TensorDataset:
    """Return noisy images of horizontal, vertical and diagonal stripes, ``[count, 1, 16, 16]``."""
    generator = torch.Generator().manual_seed(0)
    row, column = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    patterns = torch.stack([row, column, row + column]).mul(1.2).sin()
    labels = torch.randint(3, (count,), generator=generator)
    images = patterns[labels] + 0.8 * torch.randn(count, 16, 16, generator=generator)
    return TensorDataset(images.unsqueeze(1), labels)


def cnn() -> nn.Module:
    """Return two convolutions, each with batch norm, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(32, 3)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train or resume."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    ddp = DistributedDataParallel(cnn())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[300, 800])

    checkpointer = lowdiff.Checkpointer(args.run, compressor=Quantize(8), staging=args.staging)
    loader = checkpointer.dataloader(stripes(2000), batch_size=16)
    with checkpointer:
        completed = checkpointer.attach(ddp, optimizer, scheduler=scheduler)
        if rank == 0:
            print(f"starting at step {completed}", flush=True)
        while completed < args.steps and not checkpointer.preempted:
            begun = checkpointer.batch_of(loader)  # a resumed epoch goes on in its middle
            for batch, (images, labels) in enumerate(loader, start=begun):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(ddp(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                checkpointer.commit()
                completed += 1
                if rank == 0 and completed % 10 == 0:
                    print(f"step {completed}: loss {loss.item():.9g}", flush=True)
                if rank == 0 and batch + 1 == len(loader):
                    print(f"epoch {loader.epoch + 1} ends", flush=True)
                if completed == args.steps or checkpointer.preempted:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
