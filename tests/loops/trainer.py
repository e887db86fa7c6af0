"""Model, optimizers and body of a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from tests.loops.generate import GRADIENT_WRITES, SLOW_WRITES, Loop

#: Steps from one copy into the target network to the next.
_TARGET_STEPS = 3


class Transformer(nn.Module):
    """A language model of one layer, with tied weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.layer(self.embedding(inputs)))
        return hidden


class One(nn.Module):
    """One tensor."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        shape = {100: (100,), 10_000: (100, 100), 1_000_000: (1000, 1000)}[numel]
        self.weight = nn.Parameter(torch.randn(shape) * 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs[0, 0] + self.weight.roll(1) * inputs[0, 1]


class WithTarget(nn.Module):
    """A network that learns to differ from an older copy of itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.target = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(inputs) - 0.1 * self.target(inputs).detach()
        return outputs


class Copies:
    """Weights kept beside the model: an average made by hand, Lookahead's slow weights."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.tensors = [p.detach().clone() for p in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {str(i): tensor for i, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, tensor in enumerate(self.tensors):
            tensor.copy_(state[str(i)])


class Training:
    """Model, optimizers and attached objects of a loop, and its body."""

    def __init__(self, loop: Loop, rank: int) -> None:
        torch.manual_seed(loop.seed)
        self.loop, self.rank = loop, rank
        self.dtype: torch.dtype = getattr(torch, loop.dtype)
        self.inner = _model(loop).to(self.dtype)
        if loop.model == "shared":
            layer = self.inner.get_submodule("net.0" if "target" in loop.frozen else "0")
            weight, basis = layer.get_parameter("weight").detach(), torch.randn(5, 5)
            shared = {"ema": weight, "last": weight[-1], "basis": basis, "inverse": basis.t()}
            for name, buffer in shared.items():
                layer.register_buffer(name, buffer)
        if loop.frozen == "first":
            next(self.inner.parameters()).requires_grad_(False)
        self.trained = [p for p in self.inner.parameters() if p.requires_grad]
        self.ddp = DistributedDataParallel(self.inner) if loop.is_ddp else None
        self.model = self.ddp or self.inner
        self.optimizers = _optimizers(loop, self.inner, self.trained)
        self.stateful: dict[str, Any] = {}
        if loop.scheduler == "cosine":
            made = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], loop.steps)
            self.stateful["scheduler"] = made
        elif loop.scheduler:
            self.stateful["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 4, 0.8)
        self.averaged: list[torch.Tensor] = []
        if loop.ema == "averaged":
            average = AveragedModel(self.inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.stateful["average"] = average
            own = zip(average.module.parameters(), self.inner.parameters(), strict=True)
            self.averaged = [a for a, p in own if p.requires_grad]
        elif loop.ema:
            self.stateful["average"] = Copies(self.trained)
            self.averaged = self.stateful["average"].tensors
        if loop.write and loop.write.kind in SLOW_WRITES:
            self.stateful["slow"] = Copies(self._targets())

    def body(
        self, step: int, checkpointer: lowdiff.Checkpointer, die: Callable[[str], None]
    ) -> None:
        """Lead from ``step`` to ``step + 1``."""
        loop = self.loop
        die("top")
        self.at("top", step)
        if loop.optimizer == "gan":
            self._gan_gradients(step)
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for micro in range(loop.accumulation):
                is_last = micro + 1 == loop.accumulation
                with self.ddp.no_sync() if self.ddp and not is_last else nullcontext():
                    (self._loss(step, micro) / loop.accumulation).backward()
        die("backward")
        self.at("before step", step)
        if loop.clipping == "norm":
            nn.utils.clip_grad_norm_(self.trained, 0.1)
        elif loop.clipping == "checkpointer":
            checkpointer.clip_grad_norm_(self.trained, 0.1)
        elif loop.clipping:
            nn.utils.clip_grad_value_(self.trained, 0.01)
        for optimizer in self.optimizers:
            optimizer.step()
        die("stepped")
        if loop.scheduler:
            self.stateful["scheduler"].step()
        if loop.ema == "averaged":
            self.stateful["average"].update_parameters(self.inner)
        if loop.ema == "by hand":
            for average, parameter in zip(self.averaged, self.trained, strict=True):
                average.lerp_(parameter.detach(), 0.1)
        if "target" in loop.frozen and step % _TARGET_STEPS == _TARGET_STEPS - 1:
            pairs = zip(self._part("target"), self._part("net"), strict=True)
            with torch.no_grad():
                for old, new in pairs:
                    (old.data if "data" in loop.frozen else old).copy_(new)
        self.at("after step", step)

    def at(self, place: str, step: int) -> None:
        """Evaluate and write, if the loop does so here."""
        if self.loop.evaluation == place:
            self._evaluate(step)
        write = self.loop.write
        if write and write.place == place and write.fires(step):
            self._write()

    def _part(self, name: str) -> list[nn.Parameter]:
        return list(self.inner.get_submodule(name).parameters())

    def _chance(self, step: int, micro: int) -> torch.Generator:
        return torch.Generator().manual_seed(
            (self.loop.seed * 100 + step) * 100 + micro * 10 + self.rank
        )

    def _inputs(self, step: int, micro: int) -> torch.Tensor:
        chance = self._chance(step, micro)
        if self.loop.model == "transformer":
            return torch.randint(32, (4, 8), generator=chance)
        shape = (8, 3, 6, 6) if self.loop.model == "conv" else (8, 12)
        return torch.randn(shape, generator=chance).to(self.dtype)

    def _loss(self, step: int, micro: int) -> torch.Tensor:
        inputs = self._inputs(step, micro)
        outputs: torch.Tensor = self.model(inputs)
        if self.loop.model == "transformer":
            return nn.functional.cross_entropy(outputs.flatten(0, 1), inputs.roll(-1, 1).flatten())
        if self.loop.model.startswith("one"):
            chance = self._chance(step, micro + 5)
            return (outputs - torch.randn(outputs.shape, generator=chance)).square().mean()
        return (outputs - inputs.flatten(1)[:, :4]).square().mean()

    def _gan_gradients(self, step: int) -> None:
        generator, critic = (self.inner.get_submodule(name) for name in ("generator", "critic"))
        inputs, (of_generator, of_critic) = self._inputs(step, 0), self.optimizers
        for optimizer in (of_critic, of_generator):
            optimizer.zero_grad()
        critic.requires_grad_(False)
        (-critic(generator(inputs)).mean()).backward()
        critic.requires_grad_(True)
        fake = generator(inputs).detach()
        (critic(fake).mean() - critic(inputs).mean()).backward()

    def _evaluate(self, step: int) -> None:
        self._swap()
        self.inner.eval()
        with torch.no_grad():
            self.inner(self._inputs(step, 0))
        self.inner.train()
        self._swap()

    def _swap(self) -> None:
        """Exchange the trained weights and the averaged ones."""
        for parameter, average in zip(self.trained, self.averaged, strict=True):
            if self.loop.swaps_pointers:
                parameter.data, average.data = average.data, parameter.data
            else:
                kept = parameter.data.clone()
                parameter.data.copy_(average.data)
                average.data.copy_(kept)

    def _targets(self) -> list[nn.Parameter]:
        assert self.loop.write is not None
        target = self.loop.write.target
        if target == "all":
            return list(self.trained)
        order = sorted(self.trained, key=lambda p: (p.dim() == 1, p.numel()))
        return [order[-1]] if target == "bias" else [max(order[:1] + order[:-1], key=torch.numel)]

    @torch.no_grad()
    def _write(self) -> None:
        write = self.loop.write
        assert write is not None
        kind, extent, targets = write.kind, write.extent, self._targets()
        if kind == "vector":
            vector = parameters_to_vector(targets)
            _select(vector, extent).mul_(0.99)
            vector_to_parameters(vector, targets)
            return
        for i, parameter in enumerate(targets):
            part = _select(parameter.data, extent)
            if kind in GRADIENT_WRITES:
                if parameter.grad is None:
                    continue
                if write.through == "new grad":
                    parameter.grad = parameter.grad.clone()
                is_hidden = write.through == "grad.data"
                gradient = parameter.grad.data if is_hidden else parameter.grad
                _change_gradient(kind, gradient, parameter.data, extent)
            elif kind in SLOW_WRITES:
                slow, kept = self.stateful["slow"].tensors[i], parameter.data.clone()
                mixed = slow.lerp(kept, 0.5) if kind == "lookahead" else slow.clone()
                parameter.data.copy_(mixed)
                slow.copy_(mixed if kind == "lookahead" else kept)
            elif kind in ("new tensor", "new order"):
                made = parameter.data.clone()
                _select(made, extent).mul_(0.99)
                if kind == "new order":
                    made = made.transpose(0, -1).contiguous().transpose(0, -1)
                parameter.data = made
            elif kind == "copy_":
                _select(parameter, extent).copy_(part * 0.99)
            elif kind == "clamp":
                part.clamp_(-0.05, 0.05)
            else:
                part.div_(part.norm().clamp_min(0.001))


def _model(loop: Loop) -> nn.Module:
    made: nn.Module
    if loop.optimizer == "gan":
        generator = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        critic = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})
    if loop.model == "conv":
        convolution = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        made = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(96, 4))
    elif loop.model == "transformer":
        made = Transformer()
    elif loop.model.startswith("one"):
        made = One(int(loop.model.split()[1]))
    else:
        made = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4))
    return WithTarget(made) if "target" in loop.frozen else made


def _optimizers(
    loop: Loop, model: nn.Module, trained: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    if loop.optimizer == "gan":
        parts = [list(model.get_submodule(name).parameters()) for name in ("generator", "critic")]
        return [torch.optim.Adam(part, lr=0.003) for part in parts]
    if loop.optimizer == "two":
        return [torch.optim.AdamW(trained[:1]), torch.optim.SGD(trained[1:], 0.01, momentum=0.9)]
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.003),
        "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.003, foreach=True),
        "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.003, fused=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    }
    return [make[loop.optimizer](trained)]


def _select(tensor: torch.Tensor, extent: str) -> torch.Tensor:
    """The part of a tensor that is written, sharing its memory."""
    if extent == "element":
        return tensor.view(-1)[tensor.numel() // 3 :][:1]
    if extent == "row":
        return tensor[-1:]
    return tensor.view(-1)[::100] if extent == "percent" else tensor


def _change_gradient(kind: str, gradient: torch.Tensor, weights: torch.Tensor, extent: str) -> None:
    part, own = _select(gradient, extent), _select(weights, extent)
    if kind == "noise":  # from the global generator, which a resumed run gets back
        part.add_(torch.randn(part.shape).to(part.dtype), alpha=0.001)
    elif kind == "centralised":
        part.sub_(gradient.mean())
    elif kind == "decay":
        part.add_(own, alpha=0.01)
    elif kind == "projection":
        part.sub_(own * ((gradient * weights).sum() / weights.square().sum().clamp_min(1e-6)))
    else:
        part.zero_()
