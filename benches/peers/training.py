"""The training that every system protects: the same model, data and optimizer in all arms."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benches.corpus import batch_for_step, load_corpus
from benches.gpt import GPT, GPTConfig


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the batch that makes its step about as long as it should be.

    Attributes:
        shape: Of the GPT.
        sequences: Per rank and step.
        rounds: ABBA rounds that are enough for a figure.
        kills: Trainings that are killed, each of them some minutes long where steps are.
        histories: Numbers of steps to recover from that can be made in minutes by one rank.
        batch_size: Differences per write, for systems that collect them: so many are made in less
            than the five seconds after which lowdiff writes fewer.
    """

    shape: GPTConfig
    sequences: int
    rounds: int
    kills: int
    histories: tuple[int, ...]
    batch_size: int


#: A step takes about 0.3 s and 1.5 s on one core.
MODELS = {
    "tiny": Size(GPTConfig(layers=2, heads=2, width=64, dropout=0.0), 8, 2, 2, (3,), 2),
    "10M": Size(GPTConfig(layers=6, heads=6, width=384, dropout=0.0), 8, 5, 4, (10, 100, 1000), 8),
    "60M": Size(GPTConfig(layers=8, heads=8, width=784, dropout=0.0), 6, 3, 2, (10, 100), 1),
}
_NOISE = 1 << 14
_LAST_STEPS = 3


class Compression(Protocol):
    """Compresses a training's gradients; no part of any checkpointing."""

    def wrap(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Take charge of a module's gradients; what forward is to be called on."""

    def after_backward(self) -> None:
        """Finish the gradients that the optimizer is about to use."""

    def after_step(self) -> None:
        """End the step."""


class Sketch(nn.Module):
    """The same parameters, but gradients that are noise: long histories cost little to make."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.model = model
        largest = max(p.numel() for p in model.parameters())
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(largest + _NOISE, generator=generator)

    def forward(self, step: int) -> torch.Tensor:
        """A loss whose gradient is another slice of the noise for every step and parameter."""
        terms = []
        for i, parameter in enumerate(self.model.parameters()):
            start = (7919 * step + 104_729 * i) % _NOISE
            terms.append(parameter.flatten() @ self._noise[start : start + parameter.numel()])
        return torch.stack(terms).sum()


class Training:
    """A model in training; equal arguments give equal bits.

    It has made one step with a dense gradient, because second moments of exactly 0 are the mark of
    a run's first steps: MKL's square root takes six times as long for them.
    """

    def __init__(
        self,
        size: Size,
        *,
        seed: int,
        rank: int,
        num_ranks: int,
        compression: Compression | None = None,
        is_sketch: bool = False,
    ) -> None:
        torch.manual_seed(seed)  # every arm and every rank starts with the same weights
        self.model: nn.Module = GPT(size.shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self._size, self._seed = size, seed
        self._rank, self._num_ranks = rank, num_ranks
        self._tokens = load_corpus().train
        self._is_sketch = is_sketch
        self.module: nn.Module = self.model
        # Outside DDP, so all ranks need the same batch: that of rank 0.
        self.model(*self._batch(0, 0)).backward()
        self.optimizer.step()
        if is_sketch:
            self.module = Sketch(self.model, seed + rank)
        self.compression = compression
        if compression is not None:
            self.module = compression.wrap(self.module, self.optimizer)
        elif num_ranks > 1:
            self.module = DistributedDataParallel(self.module)

    def step(self, number: int) -> float:
        """Make step ``number``; seconds. Nothing is done outside them, where savers could catch up."""
        begun = time.perf_counter()
        self._step(number)
        return time.perf_counter() - begun

    def state(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}``, live tensors."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take such a state over."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def assert_sane(self) -> None:
        """A bench of a model that does not learn would measure nothing."""
        if not self._is_sketch:
            # Single batches of this text are as hard as the first one was, however many steps on.
            last = statistics.median(self.losses[-_LAST_STEPS:])
            assert 1 < last < self.losses[0] < 10, self.losses
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero(), name

    def _step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = (
            self.module(number)
            if self._is_sketch
            else self.module(*self._batch(number, self._rank))
        )
        loss.backward()
        if self.compression is not None:
            self.compression.after_backward()
        self.optimizer.step()
        if self.compression is not None:
            self.compression.after_step()
        self.losses.append(loss.item())

    def _batch(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch_for_step(
            self._tokens,
            step=number,
            rank=rank,
            world_size=self._num_ranks,
            seed=self._seed,
            batch_size=self._size.sequences,
            context=self._size.shape.context,
        )
