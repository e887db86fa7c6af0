"""A training as torchtitan's trainer makes it, which may kill itself anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integrations.kills import Kill, leave, rank
from tests.integrations.torchtitan.recorded import Trainer, install


class Rows:
    """A loader that knows its place, as torchtitan's does."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            dice = torch.Generator().manual_seed(1000 * rank() + self.place)
            self.place += 1
            yield torch.randn(4, 12, generator=dice)

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"version": 1, f"dp_rank_{rank()}": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a place."""
        self.place = state_dict[f"dp_rank_{rank()}"]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    made: torch.Tensor = model(batch).square().mean()
    return made


def warm_up() -> None:
    """Nothing takes long."""


def main(name: str, folder: str, more: str = "{}", kill: str = "") -> None:
    """Train or resume, and write what is compared to ``FOLDER/result-RANK.pt``.

    Args:
        name: ``one`` or ``fsdp``.
        folder: Of run, staging and output.
        more: ``steps``.
        kill: See `Kill`.
    """
    install()
    from lowdiff.examples.torchtitan_manager import LowDiffManager

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 7))
    if name == "fsdp":
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    config = LowDiffManager.Config(enable=True, folder="run", staging=f"{folder}/staging")
    trainer = Trainer(
        partial(LowDiffManager, config),
        model,
        Rows(),
        loss_of,
        json.loads(more).get("steps", 12),
        folder,
        Kill(kill).happens,
    )
    trainer.train()
    result = {
        "weights": {
            key: value.to_local() if name == "fsdp" else value
            for key, value in model.state_dict().items()
        },
        "learning rate": trainer.optimizers.optimizers[0].param_groups[0]["lr"],
        "state": trainer.state_dict(),
        "last loss": trainer.losses.get(trainer.steps),
        "place": trainer.dataloader.place,
        "drawn": torch.rand(3),
    }
    trainer.close()
    leave(result, folder)
