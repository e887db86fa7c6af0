"""Loops as people really write them; each takes a turn that could break replay."""

from __future__ import annotations

import torch
from torch import nn

from tests.crash.trainings import (
    Training,
    batch,
    classifier,
    classify,
    plain_loop,
    training,
    wrapped,
)


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
    """A fused optimizer unscales and skips inside its kernel."""
    return _scaled(rank, fused=True, clip=False)


@training
def scaler_fused_unscale_clip(rank: int, world_size: int) -> Training:
    """The same with an explicit unscale."""
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
def nan_gradients(rank: int, world_size: int) -> Training:
    """NaN in one gradient, spread by clipping to all of them; training goes on."""
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
def clamped_weights(rank: int, world_size: int) -> Training:
    """Weights changed outside the optimizer, now and then."""
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
