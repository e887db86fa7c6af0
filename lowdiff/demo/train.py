"""Train a small GPT on source code, with a checkpoint at every step.

Start it, kill it at any moment, and start it again: it goes on where it stopped::

    torchrun --standalone --nproc-per-node 2 -m lowdiff.demo.train --checkpoints runs/gpt --records runs/gpt-log
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.demo.data import batch_for_step, held_out_batch, load_corpus
from lowdiff.demo.digests import checkpoint_size, state_digests
from lowdiff.demo.model import GPT, GPTConfig
from lowdiff.demo.records import Attached, Finished, RecordWriter, StepDone, log_path
from lowdiff.demo.worker import seed_everything, start_process_group

BATCH_SIZE = 20
WARM_UP_STEPS = 10


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and neither norms nor biases."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(args: argparse.Namespace, log: RecordWriter, device: torch.device) -> None:
    """Train to ``args.steps``, from wherever the run stands."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus, config = load_corpus(), GPTConfig()
    shape = {"batch_size": BATCH_SIZE, "context": config.context}
    seed_everything(args.seed)  # the same weights on every rank
    model = GPT(config).to(device)
    seed_everything(args.seed + 1 + rank)  # other dropout masks on every rank
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps)
    )

    with lowdiff.Checkpointer(
        args.checkpoints, compressor=TopK(density=0.01), snapshot_every=args.snapshot_every
    ) as checkpointer:
        started = time.perf_counter()
        completed = checkpointer.attach(ddp, optimizer, scheduler=scheduler)
        log.write(Attached(completed, time.perf_counter() - started, time.time()))

        for step in checkpointer.steps(until=args.steps):
            started = time.perf_counter()
            inputs, targets = batch_for_step(
                corpus.train, step=step, rank=rank, world_size=world_size, seed=args.seed, **shape
            )
            loss = ddp(inputs.to(device), targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            seconds, staged = time.perf_counter() - started, checkpointer.stats()["staged_bytes"]
            log.write(StepDone(step + 1, loss.item().hex(), seconds, time.time(), staged))

    model.eval()
    inputs, targets = held_out_batch(corpus.held_out, batch_size=128, context=config.context)
    with torch.no_grad():
        held_out_loss = model(inputs.to(device), targets.to(device)).item()
    num_parameters, full_bytes = checkpoint_size(model, optimizer)
    digests = state_digests(model, optimizer, scheduler)
    log.write(
        Finished(held_out_loss.hex(), num_parameters, full_bytes, checkpointer.stats(), digests)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run one worker under torchrun."""
    parser = argparse.ArgumentParser(description="Train a small GPT with lowdiff.")
    parser.add_argument("--checkpoints", type=Path, required=True, help="run folder")
    parser.add_argument("--records", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--snapshot-every", type=int, default=20, help="steps between snapshots")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    device = start_process_group()
    with RecordWriter(log_path(args.records, dist.get_rank())) as log:
        train(args, log, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
