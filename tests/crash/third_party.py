"""Optimizers as third parties publish them, each small; `register` makes all of them known."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import lowdiff


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms": the sign of a momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                own = self.state[p]
                if not own:
                    own["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = own["exp_avg"].mul(first).add_(p.grad, alpha=1 - first)
                p.add_(update.sign_(), alpha=-group["lr"])
                own["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)


def orthogonal(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton and Schulz's iteration, with the coefficients of Jordan's Muon."""
    x = gradient.bfloat16()
    is_tall = x.size(0) > x.size(1)
    x = x.mT if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: torch.Tensor = x.mT if is_tall else x
    return result


class FlatMuon(torch.optim.Optimizer):
    """Jordan's Muon: wants a flat list of parameters, and sorts it."""

    def __init__(
        self, params: Any, lr: float = 0.02, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        assert isinstance(params, list)
        assert isinstance(params[0], torch.nn.Parameter)
        params = sorted(params, key=lambda p: p.size(), reverse=True)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        own = self.state[p]
        assert p.grad is not None
        if not own:
            own["momentum_buffer"] = torch.zeros_like(p)
        own["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        update = p.grad.lerp_(own["momentum_buffer"], group["momentum"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(orthogonal(update).to(p.dtype), alpha=-group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)


class SharingMuon(FlatMuon):
    """Each rank makes the updates of some parameters, and hands them to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if number % num_ranks == rank:
                    self.update(p, group)
                dist.broadcast(p.detach(), number % num_ranks)


class LateShampoo(torch.optim.Optimizer):
    """Gupta et al., "Shampoo", with preconditioners that are made some steps after the momentum."""

    def __init__(self, params: Any, lr: float = 0.01, begins: int = 5) -> None:
        super().__init__(params, {"lr": lr, "begins": begins})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                own = self.state[p]
                if not own:
                    own.update(turn=0, momentum=torch.zeros_like(p))
                own["turn"] += 1
                own["momentum"].mul_(0.9).add_(p.grad)
                update = own["momentum"]
                if own["turn"] >= group["begins"]:
                    for side, product in (
                        ("left", p.grad @ p.grad.T),
                        ("right", p.grad.T @ p.grad),
                    ):
                        if side not in own:
                            own[side] = 1e-3 * torch.eye(len(product))
                        own[side].add_(product)
                    update = inverse_root(own["left"]) @ update @ inverse_root(own["right"])
                p.sub_(update, alpha=group["lr"])


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix ** (-1 / 4)``."""
    values, vectors = torch.linalg.eigh(matrix)
    root: torch.Tensor = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
    return root


class Drawing(torch.optim.Optimizer):
    """Wrong: adds noise, which replay draws anew."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad + 1e-3 * torch.randn_like(p), alpha=group["lr"])


class CountingAll(Drawing):
    """Wrong: its rate depends on a number that all objects of the class share."""

    steps: ClassVar[int] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        CountingAll.steps += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / CountingAll.steps)


class CountingItself(Drawing):
    """Wrong: counts its steps in an attribute, which is not part of its state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / self.steps)


class Forgetting(Drawing):
    """Wrong in its state alone: what it keeps holds a random number that no update uses."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["noise"] = torch.rand(())
                p.sub_(p.grad, alpha=group["lr"])


class Partial(Drawing):
    """Wrong for one of the parameters only, which one rank proves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])
                if p.numel() == 1200:
                    p.mul_(1 - 1e-3 * random.random())


class Wasting(Drawing):
    """Draws random numbers, and does nothing with them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.rand(3)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])


class Whitening(Drawing):
    """Couples its tensors: every update is divided by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in own]).norm() + 1e-6
            for p in own:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Demanding(Drawing):
    """Its constructor wants what no group holds."""

    def __init__(self, params: Any, model: torch.nn.Module, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.model = model


GRANULARITY = {
    Lion: "element",
    FlatMuon: "tensor",
    SharingMuon: "whole",
    LateShampoo: "tensor",
    Drawing: "element",
    CountingAll: "whole",
    CountingItself: "whole",
    Forgetting: "element",
    Partial: "tensor",
    Wasting: "element",
    Whitening: "whole",
    Demanding: "element",
}


def register() -> None:
    """Make them known, as a training script does."""
    for kind, granularity in GRANULARITY.items():
        lowdiff.register_optimizer(kind, granularity)  # type: ignore[arg-type]
