"""One rank of ``bench_sharded``: equal trainings that take turns, with and without checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.harness import Pair, abba
from benches.runs import Places
from lowdiff.model.sharding import local_of
from lowdiff.persistence.format.values import same

#: 10.7 million parameters.
MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
SMOKE_MODEL = GPTConfig(layers=1, heads=2, width=32, context=16, dropout=0.0)
_ROWS = 6
_WARM_UP_STEPS = 3


def sharded(model: GPT) -> nn.Module:
    """Shard every block, and the rest, over all ranks."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


WAYS: dict[str, Callable[[GPT], nn.Module]] = {"fsdp2": sharded, "ddp": DistributedDataParallel}


class Training:
    """A model that makes steps.

    Args:
        way: One of `WAYS`.
        config: Of the model.
        rank: This rank.
    """

    def __init__(self, way: str, config: GPTConfig, rank: int) -> None:
        torch.manual_seed(0)
        self.model = WAYS[way](GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.end_step: Callable[[], object] = lambda: None
        self._config, self._rank, self._step = config, rank, 0

    def step(self) -> None:
        """Make one step."""
        chance = torch.Generator().manual_seed(1000 * self._step + self._rank)
        size = (_ROWS, self._config.context + 1)
        tokens = torch.randint(self._config.vocabulary, size, generator=chance)
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.end_step()
        self._step += 1


def main(rank: int, world_size: int, where: Places, way: str, pairs: int, *, smoke: bool) -> None:
    """Time steps with checkpoints beside steps without, and those beside others without."""
    folder = where.run.parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{way}.store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = SMOKE_MODEL if smoke else MODEL
    plain, twin, checked = (Training(way, config, rank) for _ in range(3))
    checkpointer = lowdiff.Checkpointer(where.run, strategy="replica", staging=where.staging)
    checkpointer.attach(checked.model, checked.optimizer)
    checked.end_step = checkpointer.commit

    def seconds(training: Training) -> float:
        dist.barrier()
        began = time.perf_counter()
        training.step()
        taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    for training in (plain, twin, checked):
        for _ in range(_WARM_UP_STEPS):
            training.step()
    before = checkpointer.stats()["training_thread_seconds"]
    found: dict[str, list[Pair]] = {"pairs": [], "null": []}
    while len(found["pairs"]) < pairs:
        found["pairs"] += abba(lambda: seconds(checked), lambda: seconds(plain))
        found["null"] += abba(lambda: seconds(twin), lambda: seconds(plain))
    for one, other in zip(checked.model.parameters(), twin.model.parameters(), strict=True):
        assert same(local_of(one.detach()), local_of(other.detach())), "other bits with checkpoints"
    stats = checkpointer.stats()
    spent = stats["training_thread_seconds"] - before
    figures = {
        **found,
        "replica_restarts": stats["replica_restarts"],
        "training_thread_seconds": spent / len(found["pairs"]),
    }
    (folder / f"{way}.{rank}").write_text(json.dumps(figures))
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
