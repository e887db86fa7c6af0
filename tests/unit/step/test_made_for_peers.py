"""With DDP, loss scaling and clipping, every rank makes what its peers put into their records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, CyclicTopK, Dense, PowerSGD, Quantize, RandomK, TopK
from lowdiff.model.watch import Seen, Watch
from lowdiff.protocols import Compressor, Reducer
from lowdiff.step import recorder
from lowdiff.types import AverageStep, Payload, Written
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

WORLD = 3
COMPRESSORS: dict[str, Compressor | None] = {
    "topk": TopK(0.1, dense_below=64),
    "topk bfloat16": TopK(0.1, dense_below=64, value_dtype="bfloat16"),
    "topk of 2 bits": TopK(0.1, dense_below=64, value_bits=2),
    "cyclic": CyclicTopK(0.1, dense_below=64),
    "cyclic of 2 bits": CyclicTopK(0.1, dense_below=64, value_bits=2),
    "randomk": RandomK(0.1, dense_below=64),
    "powersgd": PowerSGD(2, dense_below=64),
    "quantize": Quantize(8),
    "cast": Cast("bfloat16"),
    "replica": None,
}
#: Rank -> ``(name, bytes)`` of each section of its payload.
Made = list[list[tuple[str, bytes]]]


class Model(nn.Module):
    """A branch is used in the first backward pass of a step alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 30)
        self.branch = nn.Linear(12, 30)

    def forward(self, inputs: torch.Tensor, branches: bool) -> torch.Tensor:
        made: torch.Tensor = self.last(self.first(inputs).relu())
        return made + self.branch(inputs) if branches else made


def trained(
    rank: int, world_size: int, folder: str, compressor: Compressor | None, passes: int
) -> list[Made]:
    """A pool's job: all ranks' payloads, each time that this rank asks for its own."""
    kind = type(compressor) if compressor is not None else Dense
    bind, report = kind.bind, []

    def bound(self: Any, layout: Any, residual: Any, group: Any, _: Any) -> Reducer:
        others = [other for other in range(world_size) if other != rank]
        reducer = bind(self, layout, residual, group, others)
        make = reducer.payload

        def payload(of: int | None = None) -> Payload:
            made = [make(of=of) for of in range(world_size)]
            report.append([[(s.name, s.data.tobytes()) for s in own.sections] for own in made])
            return made[rank]

        vars(reducer)["payload"] = payload
        return reducer

    ddp = wrapped(Model(), find_unused_parameters=True)
    model = ddp.module
    optimizers = [
        torch.optim.AdamW([*model.first.parameters(), *model.branch.parameters()], lr=0.01),
        torch.optim.SGD(model.last.parameters(), lr=0.1),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "bind", bound)
        checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
        )
        checkpointer.attach(ddp, optimizers, scaler=scaler)
    for step in checkpointer.steps(4):
        ddp.zero_grad()
        for number in range(passes):
            loss = ddp(batch(10 * step + number, rank, 6, 12), number == 0).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        checkpointer.clip_grad_norm_(ddp.parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    checkpointer.close()
    return report


@pytest.mark.cases(1)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_a_rank_makes_what_its_peers_record(
    pool: Pool, tmp_path: Path, name: str, passes: int
) -> None:
    reports = pool.run(trained, WORLD, str(tmp_path), COMPRESSORS[name], passes)
    # A replica gets the gradients of each optimizer by themselves, of which a rank may own none.
    stored = [made for made in reports[0] if any(made)]
    assert len(stored) >= 3
    for first in range(WORLD):
        assert sum(bool(made[first]) for made in stored) >= 3
        assert all(made[first] != made[first - 1] for made in stored)
    for of_ranks in zip(*reports, strict=True):
        for made in of_ranks:
            for owner, payload in enumerate(made):
                assert payload == of_ranks[owner][owner]


class Watches(Watch):
    """This rank's watch, and one of every rank's share: what a rank with copies would look at."""

    def __init__(
        self, attached: Any, averages: Any, rank: int, world_size: int, *, mode: str
    ) -> None:
        super().__init__(attached, averages, rank, world_size, mode=mode)
        self.of_ranks = [
            Watch(attached, averages, of, world_size, mode=mode) for of in range(world_size)
        ]
        self.report: list[list[dict[str, bytes]]] = []

    def before_step(self, optimizer: int) -> None:
        super().before_step(optimizer)
        for watch in self.of_ranks:
            watch.before_step(optimizer)

    def after_step(self, optimizer: int) -> None:
        super().after_step(optimizer)
        for watch in self.of_ranks:
            watch.after_step(optimizer)

    def at_commit(
        self, step: int, averages: Mapping[str, AverageStep], *, whole_state: bool
    ) -> Seen:
        seen = super().at_commit(step, averages, whole_state=whole_state)
        of_ranks = [
            watch.at_commit(step, averages, whole_state=whole_state) for watch in self.of_ranks
        ]
        self.report.append([*(in_bytes(of.written) for of in of_ranks), in_bytes(seen.written)])
        return seen


def in_bytes(written: Written) -> dict[str, bytes]:
    parts = {"before": written.before, "after": written.after}
    return {f"{side}/{i}": v.tobytes() for side, part in parts.items() for i, v in part.items()}


def written(rank: int, world_size: int, folder: str) -> list[list[dict[str, bytes]]]:
    """A pool's job: what was written to each rank's share, as this rank sees it; its own is last."""
    ddp = wrapped(Model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    made: list[Watches] = []

    class Kept(Watches):
        def __init__(self, *arguments: Any, mode: str) -> None:
            super().__init__(*arguments, mode=mode)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "Watch", Kept)
        checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", compressor=TopK(0.1), staging=f"{folder}/staging-{rank}"
        )
        checkpointer.attach(ddp, optimizer)
    for step in checkpointer.steps(3):
        ddp.zero_grad()
        ddp(batch(step, rank, 6, 12), True).square().mean().backward()
        for parameter in ddp.parameters():  # before the step
            parameter.data.mul_(0.5)
        optimizer.step()
        for parameter in ddp.parameters():  # and after it
            parameter.data.add_(0.01)
    checkpointer.close()
    return made[0].report


def test_a_watch_of_a_peers_share_finds_the_values_that_the_peer_records(
    pool: Pool, tmp_path: Path
) -> None:
    reports = pool.run(written, WORLD, str(tmp_path))
    for of_ranks in zip(*reports, strict=True):
        for seen in of_ranks:
            assert seen[:WORLD] == [own[-1] for own in of_ranks]
        sides = {key.partition("/")[0] for own in of_ranks for key in own[-1]}
        assert sides == {"before", "after"}
        assert all(own[-1] for own in of_ranks)
