"""What a rank makes of a peer's payload has the bits of what that peer makes itself, and is not sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lowdiff.compressors import Averaged, Dense, TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import flat
from lowdiff.errors import ConfigError, UsageError
from lowdiff.protocols import Compressor
from lowdiff.types import Payload
from tests.contract.compressors import CHANGES, FAMILY, Case, as_named, reduced
from tests.crash.pool import Pool

WORLD = 3
EVERY: dict[str, Compressor] = {
    **FAMILY,
    "topk of everything": TopK(1.0),
    "dense": Dense(),
    "dense in rank order": Dense(reproducible=True),
    "averaged": Averaged(),
}
SHAPES = ((1777,), (24, 40), (300,), (63,), (8, 6, 3, 3), (24, 40), (0,), (100, 17), (1,))
#: ``(name, coding, dtype, bytes)`` of each section.
Bits = list[tuple[str, str, str, bytes]]


@dataclass(frozen=True)
class Steps:
    """Steps of some backward passes each, on parameters of some dtypes."""

    compressor: str
    passes: int
    dtypes: tuple[torch.dtype, ...]
    seed: int = 0

    @property
    def case(self) -> Case:
        dtypes = tuple(self.dtypes[i % len(self.dtypes)] for i in range(len(SHAPES)))
        return Case(self.compressor, SHAPES, dtypes, (*CHANGES, "noise"), self.seed)


def bits_of(payload: Payload) -> Bits:
    return [(s.name, s.coding, str(s.data.dtype), s.data.tobytes()) for s in payload.sections]


def payloads(rank: int, world_size: int, steps: Steps) -> list[list[Bits]]:
    """A pool's job: per step, every rank's payload as this rank makes it."""
    case, compressor = steps.case, EVERY[steps.compressor]
    layout = case.layout
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
    others = [other for other in range(world_size) if other != rank]
    with as_named(steps.compressor):
        reducer = compressor.bind(layout, residual, dist.group.WORLD, others)
    buckets = [[i for i, _ in layout.of_dtype(dtype)] for dtype in layout.dtypes]
    report = []
    for step, change in enumerate(case.changes, start=1):
        reducer.begin(stamp_of(3, step))
        averaged = [torch.zeros(spec.numel) for spec in layout.parameters]
        first: list[torch.Tensor] = []
        for number in range(steps.passes):
            new = case.gradients(rank, 100 * step + number)
            # DDP accumulates into the average of the pass before.
            given = [g if not first else a + g for a, g in zip(averaged, new, strict=True)]
            averaged = [a.clone() for a in reduced(reducer, given, buckets)]
            first = first or averaged
        # DDP drops the average of a parameter that no rank used in the last pass.
        averaged = [first[i] if i % 3 == 0 else a for i, a in enumerate(averaged)]
        consumed = [flat(c) for c in case.consumed(averaged, step)]
        if change == "noise":
            add_everywhere(consumed)
        half = len(consumed) // 2
        absent = {2}
        reducer.consume([None if i in absent or i >= half else c for i, c in enumerate(consumed)])
        if steps.passes > 1:  # between two optimizers
            reduced(reducer, case.gradients(rank, 100 * step + 50), buckets)
        reducer.consume([None if i in absent or i < half else c for i, c in enumerate(consumed)])
        made = [reducer.payload(of=of) for of in range(world_size)]
        report.append([bits_of(payload) for payload in made])
        if change != "overflow":
            residual.settle()
        residual.advance()
    reducer.close()
    return report


def add_everywhere(gradients: Sequence[torch.Tensor]) -> None:
    """Noise, the same on all ranks, where no rank exchanged an entry."""
    for i, gradient in enumerate(gradients):
        if i % 2 and gradient.numel():
            generator = torch.Generator().manual_seed(i)
            gradient.add_(torch.rand(gradient.numel(), generator=generator).to(gradient.dtype))


def assert_as_made_by_peers(reports: Sequence[Sequence[Sequence[Bits]]]) -> None:
    for step, of_ranks in enumerate(zip(*reports, strict=True), start=1):
        for maker, made in enumerate(of_ranks):
            for owner, payload in enumerate(made):
                own = of_ranks[owner][owner]
                assert [s[:3] for s in payload] == [s[:3] for s in own], (step, maker, owner)
                for mine, theirs in zip(payload, own, strict=True):
                    assert mine == theirs, (step, maker, owner, mine[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_rank_makes_what_its_peers_store(pool: Pool, name: str, passes: int) -> None:
    half = torch.float16 if "float16" in name and "bfloat16" not in name else torch.bfloat16
    steps = Steps(name, passes, (torch.float32, half, torch.float64), seed=len(name))
    reports = pool.run(payloads, WORLD, steps)
    assert_as_made_by_peers(reports)
    first = reports[0][0]
    # Nothing is shown where nothing is stored, or all ranks store the same.
    assert name == "averaged" or (all(first) and first[0] != first[1] != first[2] != first[0])


def only_one_peer(rank: int, world_size: int) -> list[str]:
    """A pool's job: what is said of a rank that is no peer."""
    layout = Case("topk", ((300,),), (torch.float32,), (), 0).layout
    said = []
    for compressor in EVERY.values():
        residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
        peers = [(rank + 1) % world_size]
        reducer = compressor.bind(layout, residual, dist.group.WORLD, peers)
        reducer.begin(1)
        reducer.payload(of=peers[0])
        try:
            reducer.payload(of=(rank + 2) % world_size)
        except UsageError as error:
            said.append(str(error))
        dist.barrier()  # nobody leaves the reducer's group before all have joined it
        reducer.close()
    return said


def test_the_payload_of_a_rank_that_is_no_peer_is_refused(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(only_one_peer, WORLD)):
        assert len(said) == len(EVERY)
        other, peer = (rank + 2) % WORLD, (rank + 1) % WORLD
        for message in said:
            assert f"rank {rank} keeps nothing of what rank {other} stores" in message
            assert f"its peers are [{peer}]" in message


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize("peer", [-1, 0, 1])
def test_a_single_process_has_no_peers(name: str, peer: int) -> None:
    layout = Case("topk", ((300,),), (torch.float32,), (), 0).layout
    compressor = EVERY[name]
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"rank 0 of 1 cannot have rank {peer} as a peer"):
        compressor.bind(layout, residual, None, [peer])
