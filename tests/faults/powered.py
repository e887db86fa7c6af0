"""A trainer to be recorded: ``SCRIPT FOLDER STEPS``; two lives, the first of them killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from lowdiff import testing
from tests.faults.victim import TinyTraining, checkpointer_for


def main() -> None:
    """Train; say in a file of its own what was committed when."""
    torch.set_num_threads(1)
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    marks = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT)
    # An odd step ends the first life: its last batch is not full, and only staging has it.
    for until in (steps // 2 | 1, steps):
        training = TinyTraining()
        checkpointer = checkpointer_for(folder / "root/run", folder / "staging", retention=2)
        resumed = checkpointer.attach(training.model, training.optimizer, **training.stateful)
        os.write(marks, f"{resumed} {training.digest()}".encode())
        for step in checkpointer.steps(until):
            if step > resumed:
                os.write(marks, f"{step} {training.digest()}".encode())
            training.step(step)
        os.write(marks, f"{until} {training.digest()}".encode())
        if until < steps:
            testing.kill(checkpointer)
    checkpointer.close()


if __name__ == "__main__":
    main()
