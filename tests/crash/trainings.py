"""The kinds of training that must resume bit for bit: each a model and one step of its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Training:
    """What a training script holds.

    Attributes:
        model: Wrapped in DDP unless the world is a plain process.
        optimizer: What ``attach`` gets.
        step: Runs one optimizer step and returns the loss of this rank.
        stateful: Further objects for ``attach``.
        checkpointer: Settings of the Checkpointer that this training wants.
        commits: How its loop ends a step: ``"steps"``, ``"by hand"`` or ``"never"``.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[[int], torch.Tensor]
    stateful: dict[str, Any] = field(default_factory=dict)
    checkpointer: dict[str, Any] = field(default_factory=dict)
    commits: str = "steps"


Builder = Callable[[int, int], Training]
TRAININGS: dict[str, Builder] = {}


def training(builder: Builder) -> Builder:
    """Register a builder under its name."""
    TRAININGS[builder.__name__] = builder
    return builder


def batch(step: int, rank: int, *shape: int) -> torch.Tensor:
    """Data of one step and rank; the data position is the step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator)


def labels(step: int, rank: int, count: int, classes: int) -> torch.Tensor:
    """Class labels of one step and rank."""
    generator = torch.Generator().manual_seed(7000 * step + rank)
    return torch.randint(classes, (count,), generator=generator)


def wrapped(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """The model in DDP, over the world that the job is in."""
    return DistributedDataParallel(model, **settings)


class TinyGPT(nn.Module):
    """A transformer with tied embeddings, dropout and a mask buffer."""

    def __init__(self, vocabulary: int = 96, width: int = 48, context: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 3 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        mask = torch.triu(torch.full((context, context), float("-inf")), 1)
        self.register_buffer("mask", mask)
        self.mask: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        hidden = self.wte(tokens) * 0.1 + self.wpe(places)
        hidden = self.block(hidden, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class TinyCNN(nn.Module):
    """Convolutions with batch norm and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(32 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def classifier() -> nn.Module:
    """A small multilayer perceptron with dropout."""
    return nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Dropout(0.1), nn.Linear(90, 10))


def classify(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Loss of a classifier on the step's batch."""
    return functional.cross_entropy(model(batch(step, rank, 16, 40)), labels(step, rank, 16, 10))


@training
def gpt_adamw(rank: int, world_size: int) -> Training:
    """Tied embeddings, AdamW with two groups, a scheduler every step, clipping, dropout."""
    model = wrapped(TinyGPT())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def step(t: int) -> torch.Tensor:
        tokens = labels(t, rank, 4 * 16, 96).view(4, 16)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss

    return Training(model, optimizer, step, {"scheduler": scheduler})


@training
def cnn_sgd(rank: int, world_size: int) -> Training:
    """Batch norm, whose buffers differ across ranks, and SGD with momentum."""
    model = wrapped(TinyCNN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(batch(t, rank, 8, 3, 8, 8))
        loss = functional.cross_entropy(scores, labels(t, rank, 8, 10))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Any:
    """``zero_grad``, forward, backward, ``step`` on a classifier."""

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(model, t, rank)
        loss.backward()
        optimizer.step()
        return loss

    return step
