"""Ranks that train under a compressor, without a run: what benches of compressors share."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import flat, layout_of
from lowdiff.protocols import Compressor
from lowdiff.step.ddp_hook import HookState
from lowdiff.types import Layout, Payload


class Hooked:
    """A DDP model whose gradients pass through a compressor, as a session would drive it.

    Args:
        model: The model, or one that is in DDP already.
        compressor: Compresses its gradients.
        bucket_mb: Of a DDP that is made.
    """

    def __init__(self, model: nn.Module, compressor: Compressor, *, bucket_mb: int = 25) -> None:
        if not isinstance(model, DistributedDataParallel):
            model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self.ddp = model
        self.layout: Layout = layout_of(self.ddp.module.named_parameters())
        self._parameters = list(self.ddp.module.parameters())
        kept = compressor.residual_layout(self.layout)
        self._residual = RotatingResidual.zeros(kept, self._parameters[0].device)
        self.reducer = compressor.bind(self.layout, self._residual, self.ddp.process_group)
        self.state = HookState()
        self.state.open(self.reducer, self._parameters)
        self.ddp.register_comm_hook(self.state, lowdiff.comm_hook)
        self._step = 0
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._step += 1
        self.reducer.begin(self._step)

    def payload(self) -> Payload:
        """What this rank would stage of the gradients as they are now."""
        self.reducer.consume(self.gradients())
        return self.reducer.payload()

    def gradients(self) -> list[torch.Tensor | None]:
        """Flat gradients in layout order."""
        return [None if p.grad is None else flat(p.grad) for p in self._parameters]

    def end_step(self) -> None:
        """What a commit does: the residual advances."""
        self._residual.settle()
        self._residual.advance()
        self.begin()


def in_ranks(world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``job(rank, world_size, *arguments)`` in processes of one Gloo group; results by rank."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world_size, mp_context=context) as pool,
    ):
        store = str(Path(folder) / "store")
        waiting = [
            pool.submit(_rank, job, rank, world_size, store, arguments)
            for rank in range(world_size)
        ]
        return [result.result() for result in waiting]


def _rank(
    job: Callable[..., Any], rank: int, world_size: int, store: str, arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        return job(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()
