"""A training that is killed behind a step, and leaves word of the bits that it had.

``RUN STAGING DEVICE MODEL SEED STEPS SNAPSHOT_EVERY``
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch

from benches.gpu.training import CHECKPOINTED, MODELS, Arm, alone, checkpointed


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of the bits of tensors, by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        host = tensors[name].detach().cpu().contiguous()
        found.update(host.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(words: list[str]) -> None:
    """Train with top-k's log, write the digest beside the run, and die."""
    run, staging, device, model, seed, steps, every = words
    folder = Path(run)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent, torch.device(device)):
        arm = Arm(torch.device(device), *MODELS[model], int(seed))
        checkpointed(arm, folder, Path(staging), int(every), **CHECKPOINTED["log"])
        arm.run(int(steps))
        named: dict[str, torch.Tensor] = dict(arm.ddp.module.named_parameters())
        # Moments too, under the parameter's name.
        for name, parameter in arm.ddp.module.named_parameters():
            state = arm.optimizer.state[parameter]
            named |= {f"{name}/{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        folder.with_name("digest").write_text(digest(named), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
