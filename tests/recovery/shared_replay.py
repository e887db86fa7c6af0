"""One rank of a shared replay: python -m tests.recovery.shared_replay RUN STAGING OUT [RANK].

On that rank memory is not enough for a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its functions' defaults would refer to the group

import lowdiff
from lowdiff.recovery import replay
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.unit import UnitState


def replay_part(run: str, staging: str, out: str, failing: Sequence[str]) -> None:
    class Counted(UnitState):
        """Counts how many this rank replays."""

        made = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Counted.made += 1

        def step(self, *arguments: Any) -> None:
            if str(dist.get_rank()) in failing:
                raise MemoryError("no room for a step")
            super().step(*arguments)

    vars(replay)["UnitState"] = Counted
    options = ReplayOptions(block_elements=64, group=dist.group.WORLD)
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
            "own": Counted.made,
            "all": len(replay.plan_units(state, state.fence, options)),
        },
        f"{out}-{dist.get_rank()}.pt",
    )


if __name__ == "__main__":
    run, staging, out, *failing = sys.argv[1:]
    dist.init_process_group("gloo")
    # In a function: where a group is referred to when Python ends, a thread of Gloo's may abort.
    replay_part(run, staging, out, failing)
    dist.destroy_process_group()
