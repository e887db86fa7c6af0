"""Optimizers and schedules as people really set them up."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.crash.trainings import (
    TinyCNN,
    Training,
    batch,
    classifier,
    classify,
    labels,
    plain_loop,
    training,
    wrapped,
)


@training
def parameter_groups(rank: int, world_size: int) -> Training:
    """Groups with other learning rates, betas and flags."""
    ddp = wrapped(classifier())
    first, second, third, fourth = ddp.parameters()
    optimizer = torch.optim.AdamW(
        [
            {"params": [fourth, first], "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": [second], "lr": 1e-3, "amsgrad": True},
            {"params": [third], "weight_decay": 0.3, "maximize": True},
        ]
    )
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def nesterov(rank: int, world_size: int) -> Training:
    """SGD with Nesterov momentum, dampening apart, and weight decay."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def nesterov_foreach(rank: int, world_size: int) -> Training:
    """As CUDA steps SGD by default: the kernel adds the momentum to the gradient in place."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def fused_adamw(rank: int, world_size: int) -> Training:
    """The fused kernel, over parameters large enough to be cut into blocks."""
    model = nn.Sequential(nn.Linear(40, 3001), nn.ReLU(), nn.Linear(3001, 10))
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def one_cycle(rank: int, world_size: int) -> Training:
    """A scheduler that moves lr and momentum at every step."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=50)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(ddp, t, rank)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Training(ddp, optimizer, step, {"scheduler": scheduler})


@training
def multi_step_lr(rank: int, world_size: int) -> Training:
    """A scheduler whose state is a Counter with integer keys."""
    made = one_cycle(rank, world_size)
    optimizer = made.optimizer
    for group in optimizer.param_groups:
        for key in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"):
            group.pop(key, None)
        group["lr"] = 0.1
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 8, 14], gamma=0.5)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(made.model, t, rank)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Training(made.model, optimizer, step, {"scheduler": scheduler})


@training
def lr_by_hand(rank: int, world_size: int) -> Training:
    """The user writes the learning rate into the group, before and after the step."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        loss = classify(ddp, t, rank)
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] += 1e-4
        return loss

    return Training(ddp, optimizer, step)


@training
def rate_in_a_tensor(rank: int, world_size: int) -> Training:
    """A scheduler writes into the learning rate, which is a tensor, after each step; batch norm writes statistics."""
    ddp = wrapped(TinyCNN())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(1e-2), foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        scores = ddp(batch(t, rank, 8, 3, 8, 8))
        loss = functional.cross_entropy(scores, labels(t, rank, 8, 10))
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Training(ddp, optimizer, step, {"scheduler": scheduler})


@training
def two_optimizers(rank: int, world_size: int) -> Training:
    """Two optimizers over disjoint parameters; the second steps every other time."""
    ddp = wrapped(classifier())
    first, second, third, fourth = ddp.parameters()
    often = torch.optim.AdamW([first, fourth], lr=1e-2)
    seldom = torch.optim.SGD([second, third], lr=1e-2, momentum=0.9)

    def step(t: int) -> torch.Tensor:
        ddp.zero_grad()
        loss = classify(ddp, t, rank)
        loss.backward()
        often.step()
        if t % 2:
            seldom.step()
        return loss

    return Training(ddp, [often, seldom], step)


class Adversaries(nn.ModuleDict):
    """A generator and a discriminator under one roof; DDP needs the forward."""

    def __init__(self) -> None:
        super().__init__(
            {
                "generator": nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 40)),
                "discriminator": nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU()),
                "judge": nn.Linear(64, 1),
            }
        )

    def forward(self, name: str, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self["generator"](noise)
        if name == "generator":
            judged: torch.Tensor = self["judge"](self["discriminator"](fake))
            return nn.functional.softplus(-judged).mean()
        both = self["judge"](self["discriminator"](torch.cat([real, fake.detach()])))
        signs = torch.ones_like(both)
        signs[: len(real)] = -1
        return nn.functional.softplus(signs * both).mean()


def _gan(model: nn.Module, inner: Adversaries, rank: int) -> Training:
    made = inner["generator"]
    judges = [*inner["discriminator"].parameters(), *inner["judge"].parameters()]
    optimizers = {
        "discriminator": torch.optim.Adam(judges, lr=2e-3, betas=(0.5, 0.999)),
        "generator": torch.optim.Adam(made.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    }

    def step(t: int) -> torch.Tensor:
        losses = []
        for name, optimizer in optimizers.items():
            # Else the generator's loss would leave gradients, and a residual, with the judges.
            for parameter in judges:
                parameter.requires_grad_(name == "discriminator")
            # All of them: DDP hands gradients left from the other's turn to the hook as well.
            model.zero_grad()
            loss = model(name, batch(t, rank, 16, 40), batch(t + 500, rank, 16, 8))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        for parameter in judges:
            parameter.requires_grad_(True)
        return torch.stack(losses).sum()

    return Training(model, list(optimizers.values()), step)


@training
def gan(rank: int, world_size: int) -> Training:
    """Two modules in one ModuleDict, each with its optimizer, taking turns in every step."""
    inner = Adversaries()
    return _gan(wrapped(inner, find_unused_parameters=True), inner, rank)


@training
def gan_without_ddp(rank: int, world_size: int) -> Training:
    """The same without DDP."""
    inner = Adversaries()
    return _gan(inner, inner, rank)


@training
def centered_rmsprop(rank: int, world_size: int) -> Training:
    """RMSprop, centered, with momentum, maximising."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.RMSprop(
        ddp.parameters(), lr=1e-4, momentum=0.5, centered=True, maximize=True
    )
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))
