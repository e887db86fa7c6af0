"""A copy that is late, of a run without a compressor: no state leaves it behind, and training goes on."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.errors import RankLost
from lowdiff.peers.line import Head, Receiver
from lowdiff.peers.note import Note
from lowdiff.testing import limits
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

#: A record has it twice: the queue of this small model, of six MiB, holds one.
_ITEM_BYTES = 5 << 19
_LATE_STEP, _MOST_STEPS = 4, 100


class Changing:
    """A large object that is another one at every step."""

    def __init__(self) -> None:
        self.content = b""

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict["content"]


def late(rank: int, world_size: int, folder: str) -> int:
    """Rank 1 takes nothing of rank 0 for a second; the newest step of which there are copies since."""
    torch.manual_seed(0)
    ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    changing = Changing()
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging-{rank}", copies=2, snapshot_every=20
    )
    checkpointer.attach(ddp, optimizer, changing=changing)
    taking, read = Lock(), Note.read

    def read_late(message: bytes) -> Note:
        with taking:
            return read(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Note, "read", read_late)
        replicated = step = 0
        while replicated <= _LATE_STEP + 1:
            assert step < _MOST_STEPS
            if (rank, step) == (1, _LATE_STEP):
                taking.acquire()
                Timer(1.0, taking.release).start()
            optimizer.zero_grad()
            ddp(batch(step, rank, 6, 12)).square().mean().backward()
            optimizer.step()
            changing.content = random.Random(step).randbytes(_ITEM_BYTES)
            checkpointer.commit()
            step += 1
            replicated = checkpointer.stats()["replicated_step"]  # which all ranks hear alike
    checkpointer.close()
    return replicated


@pytest.mark.slow
def test_training_goes_on_and_copies_are_made_again(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run(late, 2, str(tmp_path))) > _LATE_STEP + 1


_FEW_STEPS = 12


def states(rank: int, world_size: int, folder: str, patience: float) -> tuple[list[int], float]:
    """Rank 1 takes nothing of rank 0 for a second.

    Returns:
        After each step, the newest of which there are copies, -1 where a state has gone on without one; and how
        long training waited.
    """
    torch.manual_seed(0)
    ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging-{rank}", copies=2, snapshot_every=20
    )
    checkpointer.attach(ddp, optimizer)
    taking, read, found = Lock(), Note.read, []

    def read_late(message: bytes) -> Note:
        with taking:
            return read(message)

    with pytest.MonkeyPatch.context() as patch, limits(copy_late_seconds=patience):
        patch.setattr(Note, "read", read_late)
        for step in range(_FEW_STEPS):
            if (rank, step) == (1, _LATE_STEP):
                taking.acquire()
                Timer(1.0, taking.release).start()
            optimizer.zero_grad()
            ddp(batch(step, rank, 6, 12)).square().mean().backward()
            optimizer.step()
            checkpointer.commit()
            found.append(checkpointer.stats()["replicated_step"])
    waited = checkpointer.stats()["waiting_seconds"]
    checkpointer.close()
    return found, waited


def test_no_state_goes_on_without_a_copy_that_is_late(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(states, 2, str(tmp_path), 60.0)
    assert all(found[0] >= 0 and found == sorted(found) for found, _ in told)
    assert 0.5 < max(waited for _, waited in told)


def test_a_copy_that_does_not_come_is_given_up(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(states, 2, str(tmp_path), 0.1)
    assert all(-1 in found for found, _ in told)
    assert max(waited for _, waited in told) < 0.5


def broken_line(rank: int, world_size: int, folder: str) -> tuple[int, int, list[str]]:
    """The line to rank 1 breaks; training goes on. How far replica and copies are, and what was said."""
    torch.manual_seed(0)
    ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging-{rank}", copies=2, snapshot_every=20
    )
    checkpointer.attach(ddp, optimizer)
    note, done = Receiver.note, 0
    said: list[str] = []

    def breaks(receiver: Receiver, head: Head) -> bytes:
        if rank == 1 and done >= _LATE_STEP:
            raise RankLost("a message fails its checksum")
        return note(receiver, head)

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logger = logging.getLogger("lowdiff")
    logger.addFilter(hear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "note", breaks)
        for step in range(_FEW_STEPS):
            optimizer.zero_grad()
            ddp(batch(step, rank, 6, 12)).square().mean().backward()
            optimizer.step()
            checkpointer.commit()
            done = step + 1
        far = partial(_is_far, _FEW_STEPS - 2)
        testing.wait_until(checkpointer, far, seconds=20)
    logger.removeFilter(hear)
    stats = checkpointer.stats()
    checkpointer.close()
    return stats["replica_step"], stats["replicated_step"], said


def _is_far(step: int, stats: dict[str, Any]) -> bool:
    return bool(stats["replica_step"] >= step)


def test_a_line_that_breaks_holds_no_replica_back(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(broken_line, 2, str(tmp_path))
    assert all(step >= _FEW_STEPS - 2 and replicated == -1 for step, replicated, _ in told)
    assert any("LD901" in line and "the line to rank 0 broke" in line for line in told[1][2])
