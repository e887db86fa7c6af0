"""LowDiff's published procedure, made anew from its authors' code, for the CPU.

Follows ``communicator/lowdiff.py`` and ``torch/cv.py`` of https://github.com/SC25LowDiff/LowDiff:
each gradient's largest entries by magnitude, without error feedback; an all-gather of int64 indices
and one of float32 values per parameter; the sum by scatter-add. Rank 0 puts all ranks' lists into a
queue, from which a process writes one file per batch of steps with ``torch.save``; a batch is one step,
which is the original's default. Full checkpoints are written by ``torch.save`` on the training thread.
Unlike the original it starts with a full checkpoint, and recovery takes the last step, too.
"""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benches.peers.arm import Place, Trained
from benches.peers.full_state import tensors_only

_DENSITY = 0.01
#: ``{parameter: {"values": one tensor per rank, "indices": likewise, "shape": ...}}``.
Lists = dict[str, dict[str, Any]]


class PublishedCompression:
    """Top-k of every gradient as it appears, gathered at once, added up after the backward pass."""

    def __init__(self) -> None:
        self.lists: Lists = {}
        self._works: dict[str, list[Any]] = {}
        self._executor = ThreadPoolExecutor(max_workers=1)

    def wrap(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """See ``Compression.wrap``."""
        del optimizer
        self._parameters = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.register_hook(partial(self._send, name))
        return module

    def after_backward(self) -> None:
        """The original's ``decompress_save``, without saving."""
        done, _ = wait([self._executor.submit(self._add_up, name) for name in self._works])
        for result in done:
            result.result()
        self._works.clear()

    def after_step(self) -> None:
        """Nothing."""

    def _send(self, name: str, gradient: torch.Tensor) -> None:
        flat = gradient.reshape(-1)
        count = max(1, int(flat.numel() * _DENSITY))
        _, indices = torch.topk(flat.abs(), count, sorted=False)
        values = flat.gather(0, indices)
        ranks = range(dist.get_world_size())
        entry = {
            "values": [torch.zeros_like(values) for _ in ranks],
            "indices": [torch.zeros_like(indices) for _ in ranks],
            "shape": gradient.shape,
        }
        self._works[name] = [
            dist.all_gather(entry["indices"], indices, async_op=True),
            dist.all_gather(entry["values"], values, async_op=True),
        ]
        self.lists[name] = entry

    def _add_up(self, name: str) -> None:
        for work in self._works[name]:
            work.wait()
        self._parameters[name].grad = _sum_of(self.lists[name])


class Published:
    """Differentials of every step, one file per batch, and a full checkpoint now and then."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._queue: Any = None

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training
        if self._place.rank == 0:
            context = mp.get_context("spawn")
            self._queue, self._written = context.Queue(), context.SimpleQueue()
            arguments = (self._queue, self._written)
            self._saver = context.Process(target=save_lists, args=arguments, daemon=True)
            self._saver.start()
            self._handed_over = 0
            self._save_full(0)

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        if self._place.rank == 0:
            path = self._place.step(step, ".diff")
            self._queue.put((dict(self._training.compression.lists), str(path)))
            self._handed_over += 1
            if step % self._place.snapshot_every == 0:
                self._save_full(step)
        return True

    def drain(self) -> None:
        """See ``Arm.drain``."""
        while self._queue is not None and self._handed_over:
            self._written.get()
            self._handed_over -= 1

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: the newest full checkpoint, and every differential after it."""
        step, full = self._place.saved(".full")[0]
        training.load(tensors_only(full))
        named = dict(training.model.named_parameters())
        while (path := self._place.step(step + 1, ".diff")).exists():
            lists = _lists_of(path)
            if lists is None:
                break
            for name, entry in lists.items():
                # A sketch of a training names its model's parameters below itself.
                named[name.removeprefix("model.")].grad = _sum_of(entry)
            training.optimizer.step()
            step += 1
        return step

    def _save_full(self, step: int) -> None:
        torch.save(self._training.state(), self._place.step(step, ".full"))


def save_lists(queue: Any, written: Any) -> None:
    """The original's ``diff_ckpt_saver``: the process that writes, and tells of each file."""
    torch.set_num_threads(1)
    while True:
        lists, path = queue.get()
        torch.save(lists, path)
        written.put(None)


def _lists_of(path: Path) -> Lists | None:
    """None where the file was not finished."""
    try:
        lists: Lists = tensors_only(path)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        return None
    return lists


def _sum_of(entry: dict[str, Any]) -> torch.Tensor:
    total = torch.zeros(entry["shape"]).view(-1)
    for indices, values in zip(entry["indices"], entry["values"], strict=True):
        total.scatter_add_(0, indices, values)
    return total.view(entry["shape"])
