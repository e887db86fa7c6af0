"""Models whose tensors share memory, as they are written: each tensor is restored under its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.crash.trainings import Training, batch, training, wrapped


class Sharing(nn.Module):
    """A small regression whose buffers take part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 3)
        self.share()

    def share(self) -> None:
        """Register what shares memory."""

    def move(self) -> None:
        """Write to it, once a step."""

    def extra(self) -> torch.Tensor:
        """What it adds to the output."""
        return torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.move()
        outputs: torch.Tensor = self.last(functional.relu(self.first(inputs)))
        return outputs + self.extra()


class EmaOfWeight(Sharing):
    """An average that begins as the weight itself and soon has memory of its own."""

    ema: torch.Tensor

    def share(self) -> None:
        self.register_buffer("ema", self.last.weight.detach())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def move(self) -> None:
        self.ema = 0.9 * self.ema + 0.1 * self.last.weight

    def extra(self) -> torch.Tensor:
        return self.ema.sum() * 0.1


class EmaThatStaysTheWeight(Sharing):
    """Registered without a clone and never written: it is the weight."""

    ema: torch.Tensor

    def share(self) -> None:
        self.register_buffer("ema", self.last.weight.detach())

    def extra(self) -> torch.Tensor:
        return self.ema.sum() * 0.1


class Basis(Sharing):
    """A basis and its transpose, which training replaces by another that is no transpose."""

    basis: torch.Tensor
    back: torch.Tensor

    def share(self) -> None:
        basis = torch.eye(3) + 0.1
        self.register_buffer("basis", basis)
        self.register_buffer("back", basis.t())

    def move(self) -> None:
        self.basis = self.basis * 1.01
        self.back = self.back * 0.98

    def extra(self) -> torch.Tensor:
        return (self.basis @ self.back).sum() * 0.01


class TwoNamesOfZeros(Sharing):
    """One zero tensor under two names, which part when they are first assigned to."""

    up: torch.Tensor
    down: torch.Tensor

    def share(self) -> None:
        zeros = torch.zeros(4)
        self.register_buffer("up", zeros)
        self.register_buffer("down", zeros)

    def move(self) -> None:
        self.up = self.up + 1.0
        self.down = self.down - 2.0

    def extra(self) -> torch.Tensor:
        return (self.up.sum() + self.down.sum()) * 0.01


class OneCounterInTwoParts(Sharing):
    """Two modules count in one tensor, in place: after a resume they still do."""

    def share(self) -> None:
        counter = torch.zeros(2)
        self.first.register_buffer("counter", counter)
        self.last.register_buffer("counter", counter)

    def move(self) -> None:
        self.first.get_buffer("counter").add_(1.0)
        self.last.get_buffer("counter").mul_(1.5)

    def extra(self) -> torch.Tensor:
        return self.last.get_buffer("counter").sum() * 0.001


class Empties(Sharing):
    """Several buffers of no element, one of which is filled."""

    cache: torch.Tensor

    def share(self) -> None:
        for name in ("cache", "mask"):
            self.register_buffer(name, torch.zeros(0))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))

    def move(self) -> None:
        self.cache = torch.cat([self.cache, torch.ones(1)])

    def extra(self) -> torch.Tensor:
        return self.cache.sum() * 0.01


class Expanded(Sharing):
    """An expanded buffer, its one row under another name, and bytes of it under a third."""

    row: torch.Tensor
    rows: torch.Tensor
    raw: torch.Tensor

    def share(self) -> None:
        row = torch.ones(1, 3)
        self.register_buffer("row", row)
        self.register_buffer("rows", row.expand(5, 3))
        self.register_buffer("raw", row.view(torch.uint8))

    def move(self) -> None:
        self.row.mul_(1.1)
        if self.raw.untyped_storage().data_ptr() != self.row.untyped_storage().data_ptr():
            raise AssertionError("the bytes are a tensor of their own")
        if self.rows.untyped_storage().data_ptr() != self.row.untyped_storage().data_ptr():
            raise AssertionError("the rows are a tensor of their own")

    def extra(self) -> torch.Tensor:
        return self.rows.sum() * 0.01


class ViewOfWeight(Sharing):
    """A buffer that no state dict holds and that is a view of a weight."""

    head: torch.Tensor

    def share(self) -> None:
        self.register_buffer("head", self.last.weight.detach()[:1], persistent=False)

    def extra(self) -> torch.Tensor:
        return self.head.sum() * 0.1


class FrozenTwins(Sharing):
    """Frozen parameters that share memory with each other and with a buffer, and then part."""

    scale: torch.Tensor

    def share(self) -> None:
        values = torch.ones(4)
        self.one = nn.Parameter(values, requires_grad=False)
        self.other = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", values)

    def move(self) -> None:
        self.other.data = self.other * 1.5
        self.scale = self.scale * 0.5

    def extra(self) -> torch.Tensor:
        return (self.one.sum() + self.other.sum() + self.scale.sum()) * 0.01


class Everything(nn.Module):
    """Several of them beside each other."""

    def __init__(self, kinds: Sequence[Callable[[], Sharing]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts]).sum(0)


KINDS: list[Callable[[], Sharing]] = [
    EmaOfWeight,
    EmaThatStaysTheWeight,
    Basis,
    TwoNamesOfZeros,
    OneCounterInTwoParts,
    Empties,
    Expanded,
    ViewOfWeight,
    FrozenTwins,
]


def regression(model: nn.Module, rank: int) -> Training:
    """AdamW on random targets."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch(t, rank, 8, 12)), batch(t + 500, rank, 8, 3))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@training
def shared_memory(rank: int, world_size: int) -> Training:
    """Buffers made from weights and from each other, under DDP."""
    return regression(wrapped(Everything(KINDS), broadcast_buffers=False), rank)


def named_tensors(model: nn.Module) -> dict[str, Any]:
    """A copy of every parameter and buffer by its own name, also of those in no state dict."""
    found = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach().clone() for name, tensor in found}
