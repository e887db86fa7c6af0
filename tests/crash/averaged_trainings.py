"""Trainings that keep averages of their parameters, or other large objects beside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from tests.crash.trainings import (
    TinyCNN,
    TinyGPT,
    Training,
    batch,
    classifier,
    classify,
    labels,
    training,
    wrapped,
)


def updating(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: AveragedModel,
    loss_of: Callable[[int], torch.Tensor],
    *,
    every: int = 1,
    first: bool = False,
) -> Callable[[int], torch.Tensor]:
    """One step, and an update of the average after it, or before it."""

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(t)
        loss.backward()
        if first:
            average.update_parameters(ddp)
        optimizer.step()
        if not first and t % every == 0:
            average.update_parameters(ddp)
        return loss

    return step


@training
def ema_of_ddp(rank: int, world_size: int) -> Training:
    """An exponential average of the wrapped model: tied embeddings and a mask buffer."""
    ddp = wrapped(TinyGPT())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    average = AveragedModel(ddp, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def loss_of(t: int) -> torch.Tensor:
        tokens = labels(t, rank, 4 * 16, 96).view(4, 16)
        return functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    return Training(ddp, optimizer, updating(ddp, optimizer, average, loss_of), {"ema": average})


@training
def swa_of_every_third_step(rank: int, world_size: int) -> Training:
    """torch's default average, batch norm's buffers averaged as well."""
    ddp = wrapped(TinyCNN())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(ddp.module, use_buffers=True)

    def loss_of(t: int) -> torch.Tensor:
        scores = ddp(batch(t, rank, 8, 3, 8, 8))
        return functional.cross_entropy(scores, labels(t, rank, 8, 10))

    step = updating(ddp.module, optimizer, average, loss_of, every=3)
    return Training(ddp, optimizer, step, {"swa": average})


@training
def ema_beside_fused_adamw(rank: int, world_size: int) -> Training:
    """Single-tensor function, a frozen layer, bfloat16, and an optimizer that is one kernel."""
    model = classifier().to(torch.bfloat16)
    for parameter in next(model.children()).parameters():
        parameter.requires_grad_(False)
    ddp = wrapped(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    average = AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.8))

    def loss_of(t: int) -> torch.Tensor:
        scores = ddp(batch(t, rank, 16, 40).bfloat16())
        return functional.cross_entropy(scores.float(), labels(t, rank, 16, 10))

    return Training(ddp, optimizer, updating(model, optimizer, average, loss_of), {"ema": average})


@training
def ema_updated_before_the_step(rank: int, world_size: int) -> Training:
    """The average takes in what the step before left: stored by snapshots instead of replayed."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    average = AveragedModel(ddp.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    step = updating(ddp.module, optimizer, average, lambda t: classify(ddp, t, rank), first=True)
    return Training(ddp, optimizer, step, {"ema": average})


@training
def average_of_its_own_kind(rank: int, world_size: int) -> Training:
    """A function that replay does not know: logged like any stateful object."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)

    def geometric(old: Any, new: Any, count: Any) -> Any:
        return old + (new - old) / (2.0 + count)

    average = AveragedModel(ddp.module, avg_fn=geometric)
    step = updating(ddp.module, optimizer, average, lambda t: classify(ddp, t, rank), every=2)
    return Training(ddp, optimizer, step, {"average": average})


@training
def ema_of_a_generator(rank: int, world_size: int) -> Training:
    """The average follows one of two modules, which have an optimizer each."""
    both = nn.ModuleDict({"generator": classifier(), "critic": nn.Linear(10, 10)})

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = both

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.parts["critic"](self.parts["generator"](inputs))
            return scores

    ddp = wrapped(Gan())
    first = torch.optim.AdamW(both["generator"].parameters(), lr=1e-2)
    second = torch.optim.SGD(both["critic"].parameters(), lr=1e-2)
    average = AveragedModel(both["generator"], multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))

    def step(t: int) -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        loss = classify(ddp, t, rank)
        loss.backward()
        first.step()
        average.update_parameters(both["generator"])
        if t % 2:
            second.step()
        return loss

    return Training(ddp, [first, second], step, {"ema": average})


class Memory:
    """A queue of features that is written now and then, and grows and shrinks."""

    def __init__(self) -> None:
        self.features = torch.zeros(40, 64)
        self.history = [torch.zeros(2000)]

    def push(self, t: int) -> None:
        if t % 3 == 0:
            self.features[t % 40] = t
        if t % 5 == 0:
            self.history.append(torch.full((2000,), float(t)))
        if t % 7 == 0:
            self.history = self.history[-1:]

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features, "history": list(self.history), "small": (1, 2.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.features.copy_(state["features"])
        self.history = list(state["history"])


@training
def large_stateful_object(rank: int, world_size: int) -> Training:
    """Its tensors are logged apart, only in steps that change them."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    memory = Memory()

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(ddp, t, rank) + memory.features.mean()
        loss.backward()
        optimizer.step()
        memory.push(t)
        return loss

    return Training(ddp, optimizer, step, {"memory": memory})
