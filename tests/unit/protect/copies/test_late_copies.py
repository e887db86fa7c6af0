"""A copy that is late, of a run without a compressor: no state leaves it behind, and training goes on."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from lowdiff.protect.copies.line import Head, Receiver
from lowdiff.protect.copies.note import Note
from lowdiff.testing import limits
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.protect.copies.test_copies import Said
from tests.unit.protect.copies.test_sent import reaches

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


class Training:
    """A rank on a node of its own."""

    def __init__(self, rank: int, folder: str, **stateful: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.done = rank, 0
        self._ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
        self._optimizer = torch.optim.Adam(self._ddp.parameters(), lr=0.1)
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", staging=f"{folder}/staging-{rank}", copies=2, snapshot_every=20
        )
        self.checkpointer.attach(self._ddp, self._optimizer, **stateful)

    def step(self) -> int:
        """Make and commit one; the newest of which there are copies, which all ranks hear alike."""
        self._optimizer.zero_grad()
        self._ddp(batch(self.done, self.rank, 6, 12)).square().mean().backward()
        self._optimizer.step()
        self.checkpointer.commit()
        self.done += 1
        return int(self.checkpointer.stats()["replicated_step"])


@contextmanager
def late_once(training: Training) -> Iterator[Callable[[], None]]:
    """Yield what is called before each step: rank 1 takes nothing of rank 0 for a second, once."""
    taking, read = Lock(), Note.read

    def read_late(message: bytes) -> Note:
        with taking:
            return read(message)

    def before_step() -> None:
        if (training.rank, training.done) == (1, _LATE_STEP):
            taking.acquire()
            Timer(1.0, taking.release).start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Note, "read", read_late)
        yield before_step


def late(rank: int, world_size: int, folder: str) -> int:
    """The newest step of which there are copies, once there are some of steps behind the late one."""
    changing = Changing()
    training = Training(rank, folder, changing=changing)
    with late_once(training) as before_step:
        replicated = 0
        while replicated <= _LATE_STEP + 1:
            assert training.done < _MOST_STEPS
            before_step()
            changing.content = random.Random(training.done).randbytes(_ITEM_BYTES)
            replicated = training.step()
    training.checkpointer.close()
    return replicated


@pytest.mark.slow
def test_training_goes_on_and_copies_are_made_again(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run(late, 2, str(tmp_path))) > _LATE_STEP + 1


_FEW_STEPS = 12


def states(rank: int, world_size: int, folder: str, patience: float) -> tuple[list[int], float]:
    """Let rank 1 be late.

    Returns:
        After each step, the newest of which there are copies, -1 where a state has gone on without one; and how
        long training waited.
    """
    training, found = Training(rank, folder), []
    with late_once(training) as before_step, limits(copy_late_seconds=patience):
        for _ in range(_FEW_STEPS):
            before_step()
            found.append(training.step())
    waited = training.checkpointer.stats()["waiting_seconds"]
    training.checkpointer.close()
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
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training, note = Training(rank, folder), Receiver.note

    def breaks(receiver: Receiver, head: Head) -> bytes:
        if rank == 1 and training.done >= _LATE_STEP:
            raise RankLost("a message fails its checksum")
        return note(receiver, head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "note", breaks)
        for _ in range(_FEW_STEPS):
            training.step()
        far = partial(reaches, "replica_step", _FEW_STEPS - 2)
        testing.wait_until(training.checkpointer, far, seconds=20)
    logging.getLogger("lowdiff").removeHandler(said)
    stats = training.checkpointer.stats()
    training.checkpointer.close()
    return stats["replica_step"], stats["replicated_step"], said.texts


def test_a_line_that_breaks_holds_no_replica_back(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(broken_line, 2, str(tmp_path))
    assert all(step >= _FEW_STEPS - 2 and replicated == -1 for step, replicated, _ in told)
    assert any("LD901" in line and "the line to rank 0 broke" in line for line in told[1][2])
