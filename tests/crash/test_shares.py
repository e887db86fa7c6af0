"""Ranks that resume together each read and replay their share, and end with the bits of the whole."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.format.image import manifest_file, read_image_header, shard_file
from lowdiff.protocols import Compressor
from tests.contract.compressors import FAMILY
from tests.crash.lives import digests
from tests.crash.pool import Pool
from tests.crash.third_party import FlatMuon, Whitening
from tests.crash.trainings import TRAININGS, Training, classifier, classify, wrapped
from tests.unit.recovery.training import flip

#: Of files of snapshots: name, offset, bytes.
Reads = list[tuple[str, int, int]]
UNTIL, KILLED = 9, 12


@dataclass(frozen=True)
class Resumed:
    """What one rank saw: the step, its state there, and at the end, and what it read of snapshots."""

    step: int
    began: dict[str, str]
    ended: dict[str, str]
    reads: Reads

    @property
    def num_bytes(self) -> int:
        return sum(size for *_, size in self.reads)


@contextmanager
def reads_noted() -> Iterator[Reads]:
    """Note what this process reads of snapshots."""
    really, noted = os.preadv, Reads()

    def noting(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        count = really(descriptor, targets, offset)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent.parent.name == "snapshots":
            noted.append((f"{path.parent.name}/{path.name}", offset, count))
        return count

    os.preadv = noting  # type: ignore[assignment]
    try:
        yield noted
    finally:
        os.preadv = really


def coupled(rank: int, world_size: int) -> Training:
    """One optimizer couples all its tensors, another the elements of a tensor, the third nothing."""
    lowdiff.register_optimizer(Whitening, "whole")
    lowdiff.register_optimizer(FlatMuon, "tensor")
    both = nn.ModuleDict({"one": classifier(), "two": classifier()})
    # Which its optimizer's group names, and no share has.
    both["one"].register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = both["one"](x) + both["two"](x)
            return total

    model: Any = wrapped(Sum()) if world_size > 1 else Sum()
    matrices = [p for p in both["two"].parameters() if p.dim() == 2]
    vectors = [p for p in both["two"].parameters() if p.dim() == 1]
    optimizers = [
        Whitening(both["one"].parameters(), lr=0.01),
        FlatMuon(matrices),
        torch.optim.AdamW(vectors, lr=1e-3),
    ]

    def step(t: int) -> torch.Tensor:
        model.zero_grad()
        loss = classify(model, t, rank)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Training(model, optimizers, step)


BUILDS = {**TRAININGS, "coupled": coupled}


def live(
    rank: int,
    world_size: int,
    name: str,
    folder: str,
    until: int,
    ends: str,
    compressor: Compressor | None = None,
    run: str = "run",
) -> Resumed:
    """A pool's job: one life, which is closed, killed, or killed while its writer ends its work."""
    torch.manual_seed(17)
    made = BUILDS[name](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/{run}".format(rank=rank),
        compressor=compressor or TopK(0.05, dense_below=64),
        staging=f"{folder}/staging",
        snapshot_every=5,
        batch_size=2,
        retention=None,
    )
    with reads_noted() as noted:
        step = checkpointer.attach(made.model, made.optimizer, **made.stateful)
    began = shared(digests(made))
    for number in checkpointer.steps(until):
        made.step(number)
    ended = shared(digests(made))
    if ends == "closed":
        checkpointer.close()
    else:
        testing.kill(checkpointer, processes=ends == "killed")
    return Resumed(step, began, ended, noted)


def shared(state: dict[str, str]) -> dict[str, str]:
    """Without generators, which are restored when the first step begins."""
    return {name: value for name, value in state.items() if not name.startswith("rng/")}


def copied(folder: Path, to: Path) -> Path:
    """A run without what it had in memory; the copy is a run of its own."""
    shutil.copytree(folder / "run", to / "run")
    return to


def offset_in(image: Path, prefix: str) -> int:
    """Where the first tensor of an image begins whose name begins so."""
    with image.open("rb") as file:
        header = read_image_header(file.fileno())
    offset = header.bytes
    for entry in header.entries:
        if entry.name.startswith(prefix):
            return offset
        offset += entry.nbytes
    raise KeyError(prefix)


def wait_for(snapshot: Path, ranks: int) -> list[Path]:
    """The parts of a snapshot, once it is complete."""
    parts = [shard_file(snapshot, rank) for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(manifest_file(snapshot, rank).exists() for rank in range(ranks)):
        assert time.monotonic() < deadline, snapshot
        time.sleep(0.02)
    return parts


def names_read(folder: Path, reads: Reads) -> dict[str, set[str]]:
    """Rank's file -> names of the tensors that were read of it."""
    found: dict[str, set[str]] = {}
    for name in {name for name, *_ in reads}:
        path = folder / "run/snapshots" / name
        with path.open("rb") as file:
            header = read_image_header(file.fileno())
        at, places = header.bytes, []
        for entry in header.entries:
            places.append((entry.name, at, at + entry.nbytes))
            at += entry.nbytes
        own = [(start, start + size) for other, start, size in reads if other == name]
        found[path.name] = {
            tensor for tensor, a, b in places if any(a < stop and start < b for start, stop in own)
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt_adamw", "coupled", pytest.param("two_optimizers", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_that_are_exchanged_are_the_whole_state(
    pool: Pool, engine: str, tmp_path: Path, name: str, world_size: int
) -> None:
    ended = pool.run(live, world_size, name, str(tmp_path), KILLED, "killed")
    began = pool.run(live, world_size, name, str(tmp_path), KILLED + 1, "closed")
    for before, after in zip(ended, began, strict=True):
        assert after.step == KILLED
        assert after.began == before.ended


@pytest.mark.slow
def test_the_bytes_that_a_rank_reads_fall_with_the_number_of_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    made = pool.run(live, 2, "gpt_adamw", str(tmp_path / "made"), UNTIL, "closed")
    read, states = {}, []
    for world_size in (1, 2, 3):
        folder = copied(tmp_path / "made", tmp_path / f"by-{world_size}")
        found = pool.run(live, world_size, "gpt_adamw", str(folder), UNTIL, "killed")
        assert [one.step for one in found] == [UNTIL] * world_size
        read[world_size] = max(one.num_bytes for one in found)
        states += [one.began for one in found]
    assert all(state == made[0].ended for state in states)
    assert read[2] < 0.6 * read[1]
    assert read[3] < 0.45 * read[1]


@pytest.mark.slow
def test_q_and_residuals_are_read_by_their_rank_alone(
    pool: Pool, engine: str, tmp_path: Path
) -> None:
    compressor = FAMILY["powersgd"]
    pool.run(live, 2, "cnn_sgd", str(tmp_path / "made"), UNTIL, "closed", compressor)
    folder = copied(tmp_path / "made", tmp_path / "again")
    found = pool.run(live, 2, "cnn_sgd", str(folder), UNTIL, "killed", compressor)
    for rank, one in enumerate(found):
        names = names_read(folder, one.reads)
        own, other = (names[f"rank-{r:04d}.safetensors"] for r in (rank, 1 - rank))
        assert any(name.endswith("/warm_start") for name in own)
        assert any(name.startswith("residual/") for name in own)
        assert any(name.startswith("optimizer/") for name in own)
        assert other == {"lowdiff/scalars"}


@pytest.mark.slow
def test_a_part_that_one_rank_finds_damaged_sends_all_to_the_same_older_snapshot(
    pool: Pool, engine: str, tmp_path: Path
) -> None:
    ended = pool.run(live, 3, "gpt_adamw", str(tmp_path), KILLED, "left to its writer")
    part = wait_for(tmp_path / "run/snapshots/i000000-s0000000010", ranks=3)[2]
    flip(part, offset_in(part, "model/"))  # which only rank 2 reads
    found = pool.run(live, 3, "gpt_adamw", str(tmp_path), KILLED, "killed")
    for before, after in zip(ended, found, strict=True):
        assert after.step == KILLED
        assert after.began == before.ended
        read = {Path(name).parent.name[-2:] for name, *_ in after.reads}
        assert read == {"10", "05"}


@pytest.mark.slow
def test_what_no_rank_needs_of_its_own_copy_may_be_damaged(pool: Pool, tmp_path: Path) -> None:
    pool.run(live, 2, "gpt_adamw", str(tmp_path / "made"), UNTIL, "closed")
    for rank in (0, 1):
        shutil.copytree(tmp_path / "made/run", tmp_path / f"run-{rank}")
        newest = max((tmp_path / f"run-{rank}/snapshots").iterdir())
        part = newest / f"rank-{1 - rank:04d}.safetensors"
        flip(part, offset_in(part, "optimizer/"))
    arguments = "gpt_adamw", str(tmp_path), UNTIL, "killed", None, "run-{rank}"
    found = pool.run(live, 2, *arguments)
    assert [one.step for one in found] == [UNTIL, UNTIL]
    assert len({Path(name).parent for one in found for name, *_ in one.reads}) == 1


@pytest.mark.slow
def test_a_manifest_that_is_damaged_on_one_node_parts_no_ranks(pool: Pool, tmp_path: Path) -> None:
    arguments = "gpt_adamw", str(tmp_path), UNTIL
    pool.run(live, 2, *arguments, "closed", None, "run-{rank}")
    began = pool.run(live, 3, *arguments, "killed", None, "run-{rank}")
    first = f"snapshots/i000001-s{UNTIL:010d}"
    shards = [tmp_path / f"run-{rank}" / first for rank in range(3)]
    for rank, shard in enumerate(shards):
        for other in shards[:rank] + shards[rank + 1 :]:
            shutil.copy(shard_file(shard, rank), other)
            shutil.copy(manifest_file(shard, rank), other)
    flip(manifest_file(shards[1], 0), -30)  # on rank 1's node alone
    again = pool.run(live, 3, *arguments, "killed", None, "run-{rank}")
    for before, after in zip(began, again, strict=True):
        assert after.step == UNTIL
        assert after.began == before.began
