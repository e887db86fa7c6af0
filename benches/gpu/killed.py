"""A training that is killed behind a step, and leaves word of the bits that it had.

``RUN STAGING DEVICE MODEL SEED STEPS SNAPSHOT_EVERY``
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benches.gpu.training import CHECKPOINTED, MODELS, Arm, alone, checkpointed
from benches.replay_arms import digest


def digest_of(
    parameters: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, torch.Tensor]]
) -> str:
    """Return a digest of the bits of parameters and of what the optimizer keeps of each, wherever they lie."""
    return digest(
        (name, values.detach().cpu(), {key: own.cpu() for key, own in states[name].items()})
        for name, values in parameters.items()
    )


def main(words: list[str]) -> None:
    """Train with top-k's log, write the digest beside the run, and die."""
    run, staging, device, model, seed, steps, every = words
    folder = Path(run)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent, torch.device(device)):
        arm = Arm(torch.device(device), *MODELS[model], int(seed))
        checkpointed(arm, folder, Path(staging), int(every), **CHECKPOINTED["log"])
        arm.run(int(steps))
        arm.drain()  # the last two steps may be on their way
        named = dict(arm.ddp.module.named_parameters())
        states = {name: arm.optimizer.state[parameter] for name, parameter in named.items()}
        folder.with_name("digest").write_text(digest_of(named, states), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
