"""A small network over time that all parameters of a model share (VITP)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import skip_init

from lowdiff.recovery.prediction.history import History

_SAMPLED = 1 << 16
_BATCH = 4096
_PREDICTED_AT_A_TIME = 1 << 18
_FREQUENCIES = 4


@dataclass(frozen=True, slots=True)
class Temporal:
    """Predicts an element's movement from its last ones, at whatever distances these lie.

    Its inputs are the last movements of an element per step, in units of their own size, and embeddings of the
    distances in time. It is trained on a sample of 65,536 elements to predict the movements that the history has. At
    1.3 million parameters of a history of 12 states it takes 60 MB besides the history.

    Reference: Wang et al., 'Rehabilitating over Recomputing', varying-interval temporal prediction (VITP).

    Attributes:
        window: Movements that it sees.
        width: Of its two hidden layers.
        rounds: Optimizer steps of its training, each on 4,096 elements of a drawn pair of states.
        seed: Of its weights and samples.
    """

    window: int = 3
    width: int = 64
    rounds: int = 400
    seed: int = 0

    @property
    def name(self) -> str:
        """See ``Predictor.name``."""
        return "temporal network"

    @property
    def least_states(self) -> int:
        """See ``Predictor.least_states``."""
        return self.window + 3

    def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
        """See ``Predictor.predict``."""
        generator = torch.Generator().manual_seed(self.seed)
        flat = torch.cat(list(history.parameters.values()), dim=1)
        network = self._trained(flat, history.steps, generator)
        count = len(history.steps)
        parts = []
        with torch.no_grad():
            for piece in flat.split(_PREDICTED_AT_A_TIME, dim=1):
                inputs, scale = self._inputs(piece, history.steps, count, step)
                parts.append(piece[-1] + network(inputs)[:, 0] * scale * (step - history.steps[-1]))
        made = torch.cat(parts).split([own.shape[1] for own in history.parameters.values()])
        return dict(zip(history.parameters, made, strict=True))

    def _trained(
        self, flat: torch.Tensor, steps: tuple[int, ...], generator: torch.Generator
    ) -> nn.Module:
        drawn = torch.randperm(flat.shape[1], generator=generator)[:_SAMPLED]
        sample = flat[:, drawn]
        num_inputs = self.window * (1 + 2 * _FREQUENCIES) + 2 * _FREQUENCIES
        network = _Network(num_inputs, self.width, generator)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        pairs = [
            (seen, target)
            for seen in range(self.window + 1, len(steps))
            for target in range(seen, len(steps))
        ]
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.rounds)
        drawn_pairs = torch.randint(len(pairs), (self.rounds,), generator=generator).tolist()
        with torch.enable_grad():
            for seen, target in (pairs[number] for number in drawn_pairs):
                chosen = torch.randint(sample.shape[1], (_BATCH,), generator=generator)
                part = sample[:, chosen]
                inputs, scale = self._inputs(part, steps, seen, steps[target])
                distance = steps[target] - steps[seen - 1]
                wanted = (part[target] - part[seen - 1]) / (distance * scale)
                loss = nn.functional.smooth_l1_loss(network(inputs)[:, 0], wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        return network

    def _inputs(
        self, values: torch.Tensor, steps: tuple[int, ...], seen: int, target: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs ``[numel, features]`` and the elements' scales ``[numel]``, of the first ``seen`` states."""
        first = seen - 1 - self.window
        times = torch.tensor(steps[first:seen], dtype=torch.float32)
        speeds = values[first:seen].diff(dim=0) / times.diff()[:, None]
        scale = speeds.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        distance = target - steps[seen - 1]
        ages = torch.cat(
            [(steps[seen - 1] - times[:-1]) / distance, torch.tensor([float(distance)])]
        )
        waves = _embedded(torch.cat([ages[:-1], ages[-1:].log()]))
        return torch.cat([(speeds / scale).T, waves.expand(values.shape[1], -1)], dim=1), scale


class _Network(nn.Module):
    """Two hidden layers; drawn without torch's own generator, which belongs to the user's training."""

    def __init__(self, num_inputs: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = skip_init(nn.Linear, num_inputs, width)
        self.second = skip_init(nn.Linear, width, width)
        self.last = skip_init(nn.Linear, width, 1)
        for layer in (self.first, self.second, self.last):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.last.weight)  # it begins as the last state does

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(inputs))
        found: torch.Tensor = self.last(nn.functional.gelu(self.second(hidden)))
        return found


def _embedded(numbers: torch.Tensor) -> torch.Tensor:
    """Return sines and cosines of some numbers, ``[2 * _FREQUENCIES * len(numbers)]``."""
    angles = numbers[:, None] * (2.0 ** torch.arange(_FREQUENCIES)) * (math.pi / 8)
    return torch.cat([angles.sin(), angles.cos()], dim=1).flatten()
