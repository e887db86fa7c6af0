"""Trainings as people really write them; each takes a turn that could break replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.scenarios.trainings import (
    Training,
    batch,
    classifier,
    classify,
    training,
    wrapped,
)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Any:
    """``zero_grad``, forward, backward, ``step`` on a classifier."""

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(model, t, rank)
        loss.backward()
        optimizer.step()
        return loss

    return step


@training
def frozen_parameters(rank: int, world_size: int) -> Training:
    """The first layer is frozen; its weights are part of the state all the same."""
    model = classifier()
    for parameter in next(model.children()).parameters():
        parameter.requires_grad_(False)
    ddp = wrapped(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(40, 64)
        self.left = nn.Linear(64, 10)
        self.right = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = self.trunk(inputs).relu()
        parts = {"left": self.left, "right": self.right}
        return torch.stack([parts[name](hidden) for name in heads.split("+")]).sum(0)


def _two_heads(rank: int, *, set_to_none: bool, bucket_view: bool) -> Training:
    ddp = wrapped(TwoHeads(), find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    use = ["left", "right", "left+right", "left"]

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss: torch.Tensor = ddp(batch(t, rank, 16, 40), use[t % len(use)]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


@training
def unused_parameters(rank: int, world_size: int) -> Training:
    """A head that no rank uses has no gradient; R10: that is not a zero gradient."""
    return _two_heads(rank, set_to_none=True, bucket_view=False)


@training
def unused_parameters_zeroed(rank: int, world_size: int) -> Training:
    """As above, with gradients zeroed in place."""
    return _two_heads(rank, set_to_none=False, bucket_view=False)


@training
def unused_parameters_bucket_view(rank: int, world_size: int) -> Training:
    """As above, with gradients that are views of the buckets."""
    return _two_heads(rank, set_to_none=True, bucket_view=True)


@training
def unused_parameters_bucket_view_zeroed(rank: int, world_size: int) -> Training:
    """As above, zeroed in place."""
    return _two_heads(rank, set_to_none=False, bucket_view=True)


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
def accumulation(rank: int, world_size: int) -> Training:
    """Three micro-batches a step, the first two under ``no_sync``."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        with ddp.no_sync():
            for micro in range(2):
                (classify(ddp, 100 * t + micro, rank) / 3).backward()
        loss = classify(ddp, 100 * t + 2, rank) / 3
        loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


@training
def several_backward_passes(rank: int, world_size: int) -> Training:
    """Two synchronised backward passes a step: the hook runs for each."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        for micro in range(2):
            loss = classify(ddp, 100 * t + micro, rank) / 2
            loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


def _scaled(rank: int, *, fused: bool, clip: bool) -> Training:
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(ddp, t, rank)
        if t in (4, 11):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Training(ddp, optimizer, step, {"scaler": scaler})


@training
def scaler_skips(rank: int, world_size: int) -> Training:
    """A gradient scaler that overflows twice and grows between."""
    return _scaled(rank, fused=False, clip=False)


@training
def scaler_unscale_clip(rank: int, world_size: int) -> Training:
    """The same with an explicit unscale and clipping."""
    return _scaled(rank, fused=False, clip=True)


@training
def scaler_fused(rank: int, world_size: int) -> Training:
    """R2: a fused optimizer unscales and skips inside its kernel."""
    return _scaled(rank, fused=True, clip=False)


@training
def scaler_fused_unscale_clip(rank: int, world_size: int) -> Training:
    """R2 with an explicit unscale."""
    return _scaled(rank, fused=True, clip=True)


@training
def autocast_bfloat16(rank: int, world_size: int) -> Training:
    """Float32 parameters under autocast."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = classify(ddp, t, rank)
        loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


def _typed(rank: int, dtype: torch.dtype) -> Training:
    ddp = wrapped(classifier().to(dtype))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ddp(batch(t, rank, 16, 40).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


@training
def bfloat16_parameters(rank: int, world_size: int) -> Training:
    """Parameters, gradients and state in bfloat16."""
    return _typed(rank, torch.bfloat16)


@training
def float64_parameters(rank: int, world_size: int) -> Training:
    """Parameters, gradients and state in float64."""
    return _typed(rank, torch.float64)


@training
def mixed_dtypes(rank: int, world_size: int) -> Training:
    """Two dtypes in one model: DDP keeps them in different buckets."""
    model = nn.ModuleDict({"a": nn.Linear(40, 64), "b": nn.Linear(64, 10).to(torch.bfloat16)})

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.parts["b"](self.parts["a"](inputs).relu().bfloat16())
            return scores.float()

    ddp = wrapped(Mixed())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def bucket_view(rank: int, world_size: int) -> Training:
    """Gradients are views of the buckets."""
    ddp = wrapped(classifier(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def many_buckets(rank: int, world_size: int) -> Training:
    """Every parameter in a bucket of its own."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)), nn.Linear(40, 10))
    ddp = wrapped(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


class Scaled(nn.Module):
    """A classifier whose temperature is a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = classifier()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(inputs) * self.temperature
        return scores


@training
def scalar_parameter(rank: int, world_size: int) -> Training:
    """A parameter of shape ()."""
    ddp = wrapped(Scaled())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def channels_last(rank: int, world_size: int) -> Training:
    """Weights whose memory order is not their logical order."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(384, 10)
    )
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    ddp = wrapped(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        images = batch(t, rank, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        loss: torch.Tensor = ddp(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


@training
def commit_by_hand(rank: int, world_size: int) -> Training:
    """A loop of the user's own that calls ``commit()``."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank), commits="by hand")


@training
def evaluation_between_steps(rank: int, world_size: int) -> Training:
    """An evaluation loop that draws random numbers changes nothing."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    train = plain_loop(ddp, optimizer, rank)

    def step(t: int) -> torch.Tensor:
        loss: torch.Tensor = train(t)
        if t % 3 == 0:
            ddp.eval()
            with torch.no_grad():
                ddp(torch.rand(4, 40) + batch(t, rank, 4, 40))
            ddp.train()
        return loss

    return Training(ddp, optimizer, step)


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
def nan_gradients(rank: int, world_size: int) -> Training:
    """R7: NaN in one gradient, spread by clipping to all of them; training goes on."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(ddp, t, rank)
        if t == 9 and rank == 0:
            loss = loss * float("nan")
        loss.backward()
        if t % 2:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        return loss

    return Training(ddp, optimizer, step)


@training
def centered_rmsprop(rank: int, world_size: int) -> Training:
    """RMSprop, centered, with momentum, maximising."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.RMSprop(
        ddp.parameters(), lr=1e-4, momentum=0.5, centered=True, maximize=True
    )
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


@training
def plain_module(rank: int, world_size: int) -> Training:
    """No DDP: gradients are compressed when the optimizer steps."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(model, t, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@training
def weight_tying_two_names(rank: int, world_size: int) -> Training:
    """One weight under two names, first used as the head."""
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 10))
    model[2].weight = model[0].weight
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))


PLAIN = {"plain_module", "gan_without_ddp"}


@training
def never_commits(rank: int, world_size: int) -> Training:
    """R11: a loop that knows nothing of lowdiff but ``attach``."""
    made = one_cycle(rank, world_size)
    return Training(made.model, made.optimizer, made.step, made.stateful, commits="never")


@training
def clamped_weights(rank: int, world_size: int) -> Training:
    """R6: weights changed outside the optimizer, now and then."""
    ddp = wrapped(classifier())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    train = plain_loop(ddp, optimizer, rank)

    def step(t: int) -> torch.Tensor:
        loss: torch.Tensor = train(t)
        if t in (4, 10):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.clamp_(-0.05, 0.05)
        return loss

    return Training(ddp, optimizer, step)
