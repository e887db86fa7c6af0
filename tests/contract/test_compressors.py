"""The contract of every compressor: payloads decode, by block, to what the optimizer consumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.errors import ReplayMismatch
from lowdiff.types import Payload
from tests.contract.compressors import (
    CHANGES,
    DTYPES,
    FAMILY,
    SHAPES,
    Case,
    Patterns,
    as_named,
    decoded,
    exact,
    payload_of,
    reduced,
    run,
)
from tests.crash.pool import Pool


def takes(compressor: str, dtype: torch.dtype) -> bool:
    """Half-width parameters do not become the other half width; whole buckets have no float64."""
    if "by buckets" in compressor and dtype == torch.float64:
        return False
    other = {torch.bfloat16: " float16", torch.float16: " bfloat16"}.get(dtype, "never")
    return other not in compressor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    compressor = draw(st.sampled_from(sorted(FAMILY)))
    dtypes = [dtype for dtype in DTYPES if takes(compressor, dtype)]
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    return Case(
        compressor,
        tuple(shapes),
        tuple(draw(st.sampled_from(dtypes)) for _ in shapes),
        tuple(draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4))),
        draw(st.integers(0, 1000)),
        draw(st.booleans()),
    )


def every_case() -> list[Case]:
    """Each compressor with every dtype that it takes, and every change."""
    made = []
    for k, name in enumerate(sorted(FAMILY)):
        dtypes = [dtype for dtype in DTYPES if takes(name, dtype)]
        kinds = tuple(dtypes[i % len(dtypes)] for i in range(len(SHAPES) * 2))
        made.append(Case(name, SHAPES * 2, kinds, CHANGES, k))
    return made


def assert_decodes(case: Case, reports: list[list[dict[str, Any]]], block_elements: int) -> None:
    layout = case.layout
    for step, of_ranks in enumerate(zip(*reports, strict=True), start=1):
        payloads = [payload_of(report) for report in of_ranks]
        if of_ranks[0]["missed"]:
            assert all(report["missed"] for report in of_ranks)
            assert "by buckets" in case.compressor
            assert case.changes[step - 1] == "overflow"
            with pytest.raises(ReplayMismatch):
                decoded(case.made, payloads, layout, block_elements)
            continue
        rebuilt = decoded(case.made, payloads, layout, block_elements)
        for report in of_ranks:
            assert_same(of_ranks[0]["averaged"], report["averaged"], f"{case}: ranks, step {step}")
            assert_same([exact(r) for r in rebuilt], report["consumed"], f"{case}: step {step}")


def assert_same(left: list[Patterns], right: list[Patterns], what: str) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert np.array_equal(a, b), f"{what}, parameter {i}: {np.flatnonzero(a != b)[:5]}"


def on_a_rank(rank: int, world_size: int, some: list[Case]) -> list[list[dict[str, Any]]]:
    """A pool's job."""
    return [run(case, rank, dist.group.WORLD) for case in some]


@pytest.mark.slow
@given(case=cases(), block_elements=st.integers(1, 2000))
def test_alone_any_block_decodes_to_the_bits_consumed(case: Case, block_elements: int) -> None:
    assert_decodes(case, [run(case, 0, None)], block_elements)


@pytest.mark.slow
@given(case=cases(), world_size=st.integers(2, 3), block_elements=st.integers(1, 2000))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    Case("8 bits", ((300,), (24, 40)), (torch.float32, torch.bfloat16), ("overflow",), 4), 3, 100
)
def test_ranks_together_decode_to_the_bits_consumed(
    pool: Pool, case: Case, world_size: int, block_elements: int
) -> None:
    reports = pool.run(on_a_rank, world_size, [case])
    assert_decodes(case, [of_rank[0] for of_rank in reports], block_elements)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_compressor_dtype_and_change_decodes_exactly(pool: Pool, world_size: int) -> None:
    some = every_case()
    reports = pool.run(on_a_rank, world_size, some)
    for index, case in enumerate(some):
        own = [of_rank[index] for of_rank in reports]
        assert_decodes(case, own, 64 + 61 * (index % 7))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_is_lost_what_did_not_come_out_is_owed(pool: Pool, world_size: int) -> None:
    """Averages so far and the mean of the residuals add up to the mean of all gradients."""
    names = [name for name in FAMILY if not name.startswith("cast")]  # which owes nothing
    shapes = ((300,), (24, 40), (8, 6, 3, 3))
    some = [Case(n, shapes, (torch.float64,) * 3, ("nothing",) * 5, 1) for n in names]
    rounded = ("bfloat16", "float16")
    reports = pool.run(on_a_rank, world_size, some)
    for index, case in enumerate(some):
        own = [of_rank[index] for of_rank in reports]
        for i, spec in enumerate(case.layout.parameters):
            came = sum(torch.from_numpy(s["averaged"][i].view(np.float64)) for s in own[0])
            olds = [of_rank[-1]["residual"].get(spec.name, torch.zeros(1)) for of_rank in own]
            given_ = sum(
                case.gradients(rank, step)[i] for rank in range(world_size) for step in range(1, 6)
            )
            assert isinstance(came, torch.Tensor)
            loose = 2e-2 if case.compressor.endswith(rounded) else 1e-5
            torch.testing.assert_close(
                came + sum(olds) / world_size, given_ / world_size, rtol=loose, atol=10 * loose
            )


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_a_later_backward_pass_does_not_replace_what_an_optimizer_consumed(name: str) -> None:
    """As with two networks that take turns in one step: DDP hands all gradients over each time."""
    case = Case(name, ((24, 40), (300,), (24, 40)), (torch.float32,) * 3, ("nothing",), 2)
    layout, compressor = case.layout, case.made
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
    with as_named(name):
        reducer = compressor.bind(layout, residual, None)
    reducer.begin(1)
    first = reduced(reducer, case.gradients(0, 1), [[0, 1, 2]])
    reducer.consume([first[0] * 0.3, first[1], None])
    consumed = [exact(first[0] * 0.3), exact(first[1].clone())]
    second = reduced(reducer, case.gradients(0, 2), [[0, 1, 2]])
    reducer.consume([None, None, second[2]])
    consumed.append(exact(second[2]))
    rebuilt = decoded(compressor, [reducer.payload()], layout, 100)
    assert_same([exact(r) for r in rebuilt], consumed, name)


@pytest.mark.parametrize("name", ["cast to bfloat16", "8 bits", "powersgd"])
def test_a_payload_that_lacks_a_part_is_an_error_and_not_zeros(name: str) -> None:
    case = Case(name, ((24, 40),), (torch.float32,), ("nothing",), 2)
    report = run(case, 0, None)[0]
    whole = payload_of(report)
    decoded(case.made, [whole], case.layout, 100)
    for payloads in ([Payload(())], [whole, Payload(())], [Payload(whole.sections[:1])]):
        with pytest.raises(ReplayMismatch, match="payload"):
            decoded(case.made, payloads, case.layout, 100)


def test_factors_of_another_width_are_an_error_that_says_so() -> None:
    case = Case("powersgd", ((24, 40),), (torch.float32,), ("nothing",), 2)
    whole = payload_of(run(case, 0, None)[0])
    cut = tuple(
        replace(s, data=s.data.view(np.uint16)) if s.name == "low_rank/float32" else s
        for s in whole.sections
    )
    with pytest.raises(ReplayMismatch, match=r"2 bytes.*float32"):
        decoded(case.made, [Payload(cut)], case.layout, 100)
