"""Models as people really build them; each takes a turn that could break replay."""

from __future__ import annotations

import torch
from torch import nn

from tests.crash.trainings import Training, batch, classifier, plain_loop, training, wrapped


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
    """A head that no rank uses has no gradient; that is not a zero gradient."""
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
def weight_tying_two_names(rank: int, world_size: int) -> Training:
    """One weight under two names, first used as the head."""
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 10))
    model[2].weight = model[0].weight
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    return Training(ddp, optimizer, plain_loop(ddp, optimizer, rank))
