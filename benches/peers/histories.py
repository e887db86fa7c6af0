"""Histories to recover from: of a given length, or cut off at a random instant."""

from __future__ import annotations

import os
import struct
import time

import torch
import torch.distributed as dist

from benches.peers.trial import NEVER, Trial, settle, written_bytes

#: An entry of a diary: seconds of a clock that all processes share.
INSTANT = struct.Struct("<d")
_SAVED_AT_END = 2


def train(this: Trial) -> None:
    """Phase ``"train"``: ``task.steps`` steps, with one full snapshot in the middle.

    By then error feedback is as large as it gets, and a half of the steps lies behind it. Who saves
    whole states makes only the last steps: what came before is in no file that is read.
    """
    task = this.task
    training = this.training()
    arm = this.arm(snapshot_every=task.steps // 2 + 1)
    arm.open(training)
    first_saved = 1 if this.system.keeps_differences else task.steps - _SAVED_AT_END + 1
    bytes_before = written_bytes(task.files)
    num_saved = 0
    for step in range(first_saved, task.steps + 1):
        training.step(step)
        num_saved += arm.after_step(step)
        if not this.system.keeps_differences:
            arm.drain()  # steps of a history are too short to save a whole state in one
    arm.drain()
    dist.barrier()
    grown = written_bytes(task.files) - bytes_before
    if this.rank == 0:
        torch.save(training.state(), task.expected)
    this.end_by_kill({"written_bytes": grown, "num_saved": num_saved})


def until_killed(this: Trial) -> None:
    """Phase ``"kill"``: steps, and a note in the diary of when saving each began and ended.

    The first block is in no diary: until it is drained, some systems still start their processes.
    """
    task = this.task
    training = this.training()
    arm = this.arm(NEVER)
    arm.open(training)
    for step in range(1, 1 + task.block_steps):
        training.step(step)
        arm.after_step(step)
    settle(this, arm)
    diary = os.open(task.diary(this.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note() -> None:
        os.write(diary, INSTANT.pack(time.monotonic()))

    for step in range(1 + task.block_steps, 1 + task.steps):
        training.step(step)
        note()
        arm.after_step(step)
        note()
    raise TimeoutError(f"nobody killed this process in {task.steps} steps")
