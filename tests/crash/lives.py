"""Lives of a training: begun by ``attach``, ended by ``close`` or by a kill."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import lowdiff
import lowdiff.testing
from lowdiff.commit.pending import MOST_LATE
from lowdiff.compressors import TopK
from lowdiff.model.binding import Attached
from lowdiff.persistence.format.values import encode
from tests.crash.pool import Pool
from tests.crash.trainings import Builder, Training


@dataclass(frozen=True)
class Kill:
    """Where a life ends.

    Attributes:
        step: Step whose optimizer has run on all ranks when the processes die.
        staged_by: Ranks that had also committed it; the others died just before.
        writers: Whether writers and replicas die as well, with batches in their memory.
    """

    step: int
    staged_by: frozenset[int] = frozenset()
    writers: bool = True


@dataclass(frozen=True)
class Life:
    """What one rank saw in one life.

    Attributes:
        resumed: What ``attach`` returned.
        committed: What this rank knew to be committed when it ended.
        losses: Step -> loss as hexadecimal float.
        state: Name -> SHA-256 of every tensor and object, at the life's end.
    """

    resumed: int
    committed: int
    losses: dict[int, str]
    state: dict[str, str]


def live(
    rank: int,
    world_size: int,
    build: Builder,
    run: str,
    staging: str,
    until: int,
    kill: Kill | None,
    settings: dict[str, Any],
) -> Life:
    """One life of a training; runs in a pool's process."""
    seed = 17  # a resumed process starts like the first one did
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    made = build(rank, world_size)
    settings = dict(settings)
    by_buckets = settings.pop("by_buckets", False)  # see `lowdiff.testing.whole_buckets`
    checkpointer = lowdiff.Checkpointer(
        run.format(rank=rank),
        staging=staging.format(rank=rank),
        **{
            "compressor": TopK(0.05, dense_below=64),
            "snapshot_every": 7,
            "batch_size": 3,
            **made.checkpointer,
            **settings,
        },
    )
    with lowdiff.testing.whole_buckets() if by_buckets else nullcontext():
        resumed = checkpointer.attach(made.model, made.optimizer, **made.stateful)
        return _lived(made, checkpointer, resumed, rank, until, kill)


def _lived(
    made: Training,
    checkpointer: lowdiff.Checkpointer,
    resumed: int,
    rank: int,
    until: int,
    kill: Kill | None,
) -> Life:
    losses: dict[int, str] = {}
    counts = made.commits == "steps"
    for step in checkpointer.steps(until) if counts else range(resumed, until):
        loss = made.step(step)
        losses[step + 1] = float(loss.detach()).hex()
        if made.commits == "by hand" and not (kill and step + 1 == kill.step):
            checkpointer.commit()
        if kill is not None and step + 1 == kill.step:
            if rank in kill.staged_by:
                checkpointer.commit()
            committed = checkpointer.stats()["committed_step"]
            lowdiff.testing.kill(checkpointer, processes=kill.writers)
            return Life(resumed, committed, losses, {})
    state = digests(made)
    checkpointer.close()
    return Life(resumed, until, losses, state)


@contextmanager
def as_from_an_accelerator(seed: int, most_seconds: float = 0.05) -> Iterator[None]:
    """Payloads, of whole buckets, looks, items and hyper-parameters arrive late; staging has copies of the residual, of each step.

    A copy more than usual, where three are of 48 steps: ranks may be a step apart, and stage two steps late. With
    strategy replica the trainer takes the snapshots.

    Args:
        seed: Of how late each is.
        most_seconds: How late at most.
    """
    with (
        lowdiff.testing.whole_buckets(),
        lowdiff.testing.late_copies(most_seconds=most_seconds, seed=seed),
        mock.patch("lowdiff.core.devices.comes_late", return_value=True),
        lowdiff.testing.late_looks(),
        mock.patch.object(Attached, "is_on_host", False),
        mock.patch("lowdiff.step.residual.COPIED_EVERY", 1),
        mock.patch("lowdiff.step.residual.NUM_SLOTS", 4),
    ):
        yield


def owed_by(checkpointer: lowdiff.Checkpointer) -> dict[str, torch.Tensor]:
    """A copy of the error feedback of a live training, by parameter."""
    return lowdiff.testing.residual_of(checkpointer)


def digests(made: Training) -> dict[str, str]:
    """SHA-256 of everything that must be bit-identical."""
    model = getattr(made.model, "module", made.model)
    found: dict[str, Any] = {f"model/{k}": v for k, v in model.state_dict().items()}
    optimizers = made.optimizer if isinstance(made.optimizer, Sequence) else [made.optimizer]
    for index, optimizer in enumerate(optimizers):
        content = optimizer.state_dict()
        for number, entries in content["state"].items():
            for key, value in entries.items():
                found[f"optimizer/{index}/{number}/{key}"] = value
        found[f"optimizer/{index}/groups"] = content["param_groups"]
    for name, thing in made.stateful.items():
        found[f"stateful/{name}"] = thing.state_dict()
    found["rng/torch"] = torch.get_rng_state()
    found["rng/python"] = random.getstate()
    found["rng/numpy"] = np.random.get_state()
    return {name: hashlib.sha256(encode(value)).hexdigest() for name, value in found.items()}


@dataclass(frozen=True)
class History:
    """All lives of a run, and what the last of them ended with, per rank."""

    lives: tuple[tuple[Life, ...], ...]

    @property
    def resumed(self) -> list[int]:
        """Where each life after the first resumed."""
        return [life[0].resumed for life in self.lives[1:]]

    def losses(self, rank: int) -> dict[int, str]:
        """Losses of one rank; a later life's replace an earlier's."""
        merged: dict[int, str] = {}
        for life in self.lives:
            merged |= life[rank].losses
        return merged

    def ends(self) -> list[dict[str, str]]:
        """State of every rank at the end."""
        return [life.state for life in self.lives[-1]]


def history(
    pool: Pool,
    build: Builder,
    folder: Path,
    *,
    world_size: int,
    until: int,
    kills: Sequence[Kill] = (),
    settings: dict[str, Any] | None = None,
    run: str = "run",
    staging: str = "staging",
) -> History:
    """Train to ``until``, dying as told on the way. Folders may hold ``{rank}``."""
    lives = [
        tuple(
            pool.run(
                live,
                world_size,
                build,
                str(folder / run),
                str(folder / staging),
                until,
                kill,
                settings or {},
            )
        )
        for kill in [*kills, None]
    ]
    return History(tuple(lives))


def assert_resumed(found: History, expected: Sequence[int], engine: str = "host") -> None:
    """Every life began where it had to, with nothing lost that was committed; late steps may have been on their way."""
    most = MOST_LATE if engine == "late" else 0
    for before, resumed, step in zip(found.lives, found.resumed, expected, strict=False):
        assert step - most <= resumed <= step, (found.resumed, expected)
        assert max(life.committed for life in before) <= resumed
    assert len(found.resumed) == len(expected)


def assert_identical(interrupted: History, uninterrupted: History) -> None:
    """Every loss, tensor and generator of every rank has the same bits."""
    for rank, (ours, theirs) in enumerate(
        zip(interrupted.ends(), uninterrupted.ends(), strict=True)
    ):
        assert interrupted.losses(rank) == uninterrupted.losses(rank)
        different = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        assert not different, f"rank {rank}: {different}"
