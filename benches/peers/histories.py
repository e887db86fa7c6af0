"""Histories to recover from: of a given length, or cut off at a random instant."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benches.peers.trial import NEVER, Trial, written_bytes

_SAVED_AT_END = 2


def train(this: Trial) -> None:
    """Phase ``"train"``: a history of ``task.steps`` steps after the newest full snapshot.

    Who saves whole states makes only the last: what came before is in no file that is read.
    """
    task = this.task
    training = this.training()
    arm = this.arm(NEVER)
    arm.open(training)
    first_saved = 1 if this.system.keeps_differences else task.steps - _SAVED_AT_END + 1
    before = written_bytes(task.files)
    for step in range(first_saved, task.steps + 1):
        training.step(step)
        arm.after_step(step)
    arm.drain()
    dist.barrier()
    grown = written_bytes(task.files) - before
    if this.rank == 0:
        torch.save(training.state(), task.expected)
    num_saved = task.steps - first_saved + 1
    this.end_by_kill({"written_bytes": grown, "saved_steps": num_saved})


def until_killed(this: Trial) -> None:
    """Phase ``"kill"``: steps, each saved and then noted in the diary."""
    training = this.training()
    arm = this.arm(NEVER)
    arm.open(training)
    diary = os.open(this.task.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(1, this.task.steps + 1):
        training.step(step)
        arm.after_step(step)
        if this.rank == 0:
            os.write(diary, b".")
    raise TimeoutError(f"nobody killed this process in {this.task.steps} steps")
