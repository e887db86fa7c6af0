"""One rank of a shared replay: python -m tests.recovery.shared_replay RUN STAGING OUT [RANK].

On that rank memory is not enough for a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lowdiff
from lowdiff.recovery import replay
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.unit import UnitState

run, staging, out, *failing = sys.argv[1:]
dist.init_process_group("gloo")
own: list[UnitState] = []


class Counted(UnitState):
    """Remembers that this rank replays it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        own.append(self)

    def step(self, *arguments: Any) -> None:
        if str(dist.get_rank()) in failing:
            raise MemoryError("no room for a step")
        super().step(*arguments)


vars(replay)["UnitState"] = Counted
group = dist.group.WORLD
assert group is not None
options = ReplayOptions(block_elements=64, group=group)
try:
    state = lowdiff.recover(run, staging=staging, options=options)
except Exception as error:
    Path(f"{out}-{dist.get_rank()}.txt").write_text(type(error).__name__)
    dist.barrier()  # torchrun kills the others as soon as one ends
    raise
torch.save(
    {
        "model": state.model_state_dict(),
        "optimizers": [state.optimizer_state_dict(i) for i in range(len(state.optimizers))],
        "own": len(own),
        "all": len(replay.plan_units(state, state.fence, options)),
    },
    f"{out}-{dist.get_rank()}.pt",
)
dist.destroy_process_group()
