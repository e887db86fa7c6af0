"""Exchange between real processes: every rank gets the same bits, whatever shares a bucket.

The ranks run seeded cases and report bit patterns; the tests compare them with each other and with
a plain computation of the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from lowdiff.compressors import TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import layout_of, torch_dtype
from lowdiff.types import Block, Layout, Payload, Section
from tests.contract.compressors import exact, reduced
from tests.crash.pool import Pool

Patterns = npt.NDArray[np.signedinteger[Any]]
WORLD_SIZES = (2, 3)
SEEDS = range(12)
NUM_STEPS = 3
#: How the parameters of one dtype are put into buckets.
GROUPINGS = ("one bucket", "one each", "shuffled")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    """A run of a few steps that every rank can make up from the seed alone."""

    seed: int
    world_size: int

    @property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.world_size])

    @property
    def layout(self) -> Layout:
        rng = self._rng
        sizes = rng.choice([1, 3, 63, 64, 100, 1000, 1777], rng.integers(1, 7))
        kinds = rng.integers(0, len(DTYPES), len(sizes)) if self.seed % 2 else [0] * len(sizes)
        return layout_of(
            (f"p{i}", torch.nn.Parameter(torch.zeros(int(n), dtype=DTYPES[kind])))
            for i, (n, kind) in enumerate(zip(sizes, kinds, strict=True))
        )

    @property
    def compressor(self) -> TopK:
        rng = np.random.default_rng([self.seed, 1])
        return TopK(float(rng.choice([0.001, 0.02, 0.3, 1.0])), int(rng.choice([0, 50, 1024])))

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        rng = np.random.default_rng([self.seed, rank, step])
        made = []
        for spec in self.layout.parameters:
            values = torch.from_numpy(rng.standard_normal(spec.numel))
            if rng.random() < 0.15:
                values.zero_()  # this rank did not use the parameter
            if rng.random() < 0.1:
                values[rng.integers(spec.numel)] = float(rng.choice([math.nan, math.inf]))
            made.append(values.to(torch_dtype(spec.dtype)))
        return made

    def coefficient(self, step: int) -> float:
        """What clipping multiplies the average with."""
        return (1.0, 0.37, math.nan)[(self.seed + step) % 3]

    def buckets(self, grouping: str) -> list[list[int]]:
        of_dtype = [[i for i, _ in self.layout.of_dtype(d)] for d in self.layout.dtypes]
        if grouping == "one bucket":
            return of_dtype
        if grouping == "one each":
            return [[i] for group in of_dtype for i in group]
        rng = self._rng
        made = []
        for group in of_dtype:
            shuffled = [group[i] for i in rng.permutation(len(group))]
            cut = int(rng.integers(0, len(group) + 1))
            made += [part for part in (shuffled[:cut], shuffled[cut:]) if part]
        return [made[i] for i in rng.permutation(len(made))]


CASES = [Case(seed, world_size) for world_size in WORLD_SIZES for seed in SEEDS]


# One rank


def run_case(case: Case, rank: int) -> list[Any]:
    """Per step and grouping: average, consumed gradient, residual and payload."""
    layout, cpu = case.layout, torch.device("cpu")
    residuals = {g: RotatingResidual.zeros(layout, cpu) for g in GROUPINGS}
    reducers = {g: case.compressor.bind(layout, residuals[g], dist.group.WORLD) for g in GROUPINGS}
    report = []
    for step in range(1, NUM_STEPS + 1):
        found: dict[str, Any] = {}
        for grouping in GROUPINGS:
            reducer = reducers[grouping]
            reducer.begin(step)
            averaged = reduced(reducer, case.gradients(rank, step), case.buckets(grouping))
            consumed = [a * torch.tensor(case.coefficient(step), dtype=a.dtype) for a in averaged]
            reducer.consume(consumed)
            residuals[grouping].settle()
            residuals[grouping].advance()
            owed = [residuals[grouping].pair(i)[0] for i in range(len(layout.parameters))]
            found[grouping] = {
                "averaged": [exact(a) for a in averaged],
                "consumed": [exact(c) for c in consumed],
                "owed": [exact(o).copy() for o in owed],
                "payload": [(s.name, s.coding, s.data) for s in reducer.payload().sections],
            }
        report.append(found)
    return report


def run_cases(rank: int, world_size: int) -> list[list[Any]]:
    """A pool's job: every case of this world size."""
    return [run_case(case, rank) for case in CASES if case.world_size == world_size]


def disagree(rank: int, world_size: int) -> tuple[str, str]:
    """A pool's job: what a rank is told when one is at another step, or has another density."""
    step_7 = stamp_of(2, 7)
    other_step = attempt(stamp=step_7 + (rank == 1), density=0.01)
    # One entry or two: the messages are of the same length.
    other_density = attempt(stamp=step_7, density=0.02 if rank == 0 else 0.01)
    return other_step, other_density


def attempt(*, stamp: int, density: float) -> str:
    layout = layout_of([("p", torch.nn.Parameter(torch.zeros(100)))])
    residual = RotatingResidual.zeros(layout, torch.device("cpu"))
    reducer = TopK(density, dense_below=0).bind(layout, residual, dist.group.WORLD)
    reducer.begin(stamp)
    gradient = torch.randn(100)
    try:
        reducer.reduce([0], [gradient], gradient).wait()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# What all ranks together should find


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    patterns = exact(values)
    keys = patterns.astype(np.int64) & np.iinfo(patterns.dtype).max
    order = np.lexsort((np.arange(values.numel()), -keys))
    return torch.from_numpy(np.sort(order[:k]))


def plain_step(
    case: Case, step: int, owed: list[list[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Averages and new residuals, computed one parameter after the other."""
    averages = []
    new_owed: list[list[torch.Tensor]] = [[] for _ in range(case.world_size)]
    of_rank = [case.gradients(rank, step) for rank in range(case.world_size)]
    for i, spec in enumerate(case.layout.parameters):
        total = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype))
        for rank in range(case.world_size):
            gradient, residual = of_rank[rank][i], owed[rank][i]
            k = case.compressor.kept(spec.numel)
            if k == spec.numel:
                total += gradient / case.world_size
                new_owed[rank].append(residual)
                continue
            full = gradient + residual
            chosen = largest(full, k)
            if gradient.any():
                total[chosen] += full[chosen] / case.world_size
                full[chosen] = 0
            new_owed[rank].append(full)
        averages.append(total)
    return averages, new_owed


@pytest.fixture(scope="module")
def reports(pool: Pool) -> dict[int, list[Any]]:
    """World size -> per rank: the reports of its cases."""
    return {size: pool.run(run_cases, size) for size in WORLD_SIZES}


def of_case(reports: dict[int, list[Any]], case: Case) -> list[Any]:
    own = [c for c in CASES if c.world_size == case.world_size]
    return [report[own.index(case)] for report in reports[case.world_size]]


def same(left: Sequence[Patterns], right: Sequence[Patterns]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


cases = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.world_size} ranks, seed {c.seed}")


@pytest.mark.cases(12)
@cases
def test_the_average_and_the_residuals_are_those_of_a_plain_computation(
    reports: dict[int, list[Any]], case: Case
) -> None:
    owed = [
        [torch.zeros(s.numel, dtype=torch_dtype(s.dtype)) for s in case.layout.parameters]
        for _ in range(case.world_size)
    ]
    for step in range(1, NUM_STEPS + 1):
        averages, owed = plain_step(case, step, owed)
        for rank, report in enumerate(of_case(reports, case)):
            found = report[step - 1]["one bucket"]
            assert same(found["averaged"], [exact(a) for a in averages])
            assert same(found["owed"], [exact(o) for o in owed[rank]])


@cases
def test_every_rank_has_the_same_bits(reports: dict[int, list[Any]], case: Case) -> None:
    first, *others = of_case(reports, case)
    for other in others:
        for left, right in zip(first, other, strict=True):
            for grouping in GROUPINGS:
                assert same(left[grouping]["averaged"], right[grouping]["averaged"])


@cases
def test_the_bits_do_not_depend_on_what_shares_a_bucket(
    reports: dict[int, list[Any]], case: Case
) -> None:
    for report in of_case(reports, case):
        for found in report:
            first, *others = (found[grouping] for grouping in GROUPINGS)
            for other in others:
                assert same(first["averaged"], other["averaged"])
                assert same(first["owed"], other["owed"])
                assert [p[:2] for p in first["payload"]] == [p[:2] for p in other["payload"]]
                assert same([p[2] for p in first["payload"]], [p[2] for p in other["payload"]])


@pytest.mark.cases(42)
@cases
@pytest.mark.parametrize("block_elements", [64, 1000])
def test_the_payloads_of_all_ranks_decode_to_the_gradient_consumed(
    reports: dict[int, list[Any]], case: Case, block_elements: int
) -> None:
    layout = case.layout
    for step_reports in zip(*of_case(reports, case), strict=True):
        payloads = [
            Payload(tuple(Section(*section) for section in report["one bucket"]["payload"]))
            for report in step_reports
        ]
        for i, spec in enumerate(layout.parameters):
            out = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype))
            for start in range(0, spec.numel, block_elements):
                stop = min(start + block_elements, spec.numel)
                case.compressor.decoder(payloads, layout)(Block(i, start, stop), out[start:stop])
            for report in step_reports:
                assert same([exact(out)], [report["one bucket"]["consumed"][i]])


@cases
def test_the_ranks_share_out_what_is_stored(reports: dict[int, list[Any]], case: Case) -> None:
    """No rank stores more than its own selection, and its part of what was exchanged whole."""
    for found in zip(*of_case(reports, case), strict=True):
        if any(not math.isfinite(float(c.sum())) for c in consumed_floats(case, found[0])):
            continue  # parameters with NaN or Inf are stored whole
        for rank, report in enumerate(found):
            stored = sum(data.size for name, _, data in report["one bucket"]["payload"]) // 2
            expected = 0
            for spec in case.layout.parameters:
                k = case.compressor.kept(spec.numel)
                own = spec.numel * (rank + 1) // case.world_size
                own -= spec.numel * rank // case.world_size
                expected += own if k == spec.numel else k
            assert stored == expected


def consumed_floats(case: Case, report: Any) -> list[torch.Tensor]:
    return [
        torch.from_numpy(patterns).view(torch_dtype(spec.dtype))
        for patterns, spec in zip(
            report["one bucket"]["consumed"], case.layout.parameters, strict=True
        )
    ]


def test_ranks_that_disagree_are_told_who_and_how(pool: Pool) -> None:
    for rank, (other_step, other_density) in enumerate(pool.run(disagree, 3)):
        sender, theirs, ours = (0, 7, 8) if rank == 1 else (1, 8, 7)
        assert (
            f"UsageError: rank {sender} sent gradients of step {theirs} of incarnation 2 while "
            f"this rank is in step {ours} of incarnation 2; every rank must attach" in other_step
        )
        sender, theirs, ours = (1, 1, 2) if rank == 0 else (0, 2, 1)
        assert (
            f"UsageError: rank {sender} sent {theirs} entries of 100 elements where this rank has "
            f"{ours} of 100; give every rank the same model and compressor" in other_density
        )
