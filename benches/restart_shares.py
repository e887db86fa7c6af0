"""What one of several ranks reads of a snapshot when all resume together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.hooked import in_ranks
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.compressors import TopK

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Resumed:
    """One rank's attach to a run that was closed.

    Attributes:
        step: Where it resumed.
        snapshot_bytes: Read of files of snapshots.
        digest: SHA-256 of parameters and optimizer state.
    """

    step: int
    snapshot_bytes: int
    digest: str


def resumed(
    rank: int, world_size: int, where: Places, model: GPTConfig, until: int, seed: int
) -> Resumed:
    """Attach, train to a step if there is anything left to train, and close."""
    torch.manual_seed(seed)
    gpt = GPT(model)
    ddp = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    compressor = TopK(density=0.01)
    checkpointer = lowdiff.Checkpointer(where.run, compressor=compressor, staging=where.staging)
    with _reads_counted() as read:
        step = checkpointer.attach(ddp, optimizer)
    tokens = torch.randint(model.vocabulary, (2, model.context + 1))
    for _ in checkpointer.steps(until):
        optimizer.zero_grad()
        loss = ddp(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    found = digest((name, p, optimizer.state[p]) for name, p in gpt.named_parameters())
    checkpointer.close()
    return Resumed(step, sum(read), found)


def shares(where: Places, model: GPTConfig, seed: int) -> dict[str, list[Resumed]]:
    """Runs made by one rank and by two, each resumed by one and by two, from a snapshot alone."""
    turns: dict[str, list[Resumed]] = {}
    for makers in (1, 2):
        made = Places(where.run.with_name(f"made-{makers}"), where.staging)
        in_ranks(makers, resumed, made, model, _STEPS, seed)
        for readers in (1, 2):
            again = Places(where.run.with_name(f"made-{makers}-by-{readers}"), where.staging)
            shutil.copytree(made.run, again.run)
            found = in_ranks(readers, resumed, again, model, _STEPS, seed)
            assert {turn.step for turn in found} == {_STEPS}
            turns[f"made_by_{makers}_read_by_{readers}"] = found
        digests = {t.digest for key, ts in turns.items() for t in ts if f"by_{makers}_" in key}
        assert len(digests) == 1, "the number of ranks that resume changes the state"
    return turns


def of_two_over_one(turns: dict[str, list[Resumed]], makers: int) -> float:
    """What the rank of two that reads more reads, over what one rank alone reads of the same run."""
    most = {
        readers: max(t.snapshot_bytes for t in turns[f"made_by_{makers}_read_by_{readers}"])
        for readers in (1, 2)
    }
    return most[2] / most[1]


@contextmanager
def _reads_counted() -> Iterator[list[int]]:
    """Count the bytes that this process reads of snapshots."""
    really, counts = os.preadv, list[int]()

    def counting(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        count = really(descriptor, targets, offset)
        if "snapshots" in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parts:
            counts.append(count)
        return count

    os.preadv = counting  # type: ignore[assignment]
    try:
        yield counts
    finally:
        os.preadv = really
