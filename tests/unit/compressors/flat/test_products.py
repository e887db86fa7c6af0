"""PowerSGD over whole buckets: near to the CPU's, decoded bit for bit, and the same for a matrix in any bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowdiff import testing
from lowdiff.compressors import PowerSGD
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual, Scaled
from lowdiff.core.layout import layout_of, torch_dtype
from lowdiff.types import Layout, Payload
from tests.contract.compressors import decoded
from tests.unit.compressors.flat.test_selection import needs_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
SHAPES = ((40, 70), (7,), (33, 50), (64, 30, 2))
RANK = 3


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    """Round a fused product and sum once, as processors do; Triton's interpreter rounds twice."""
    needs_triton()
    from triton.runtime import interpreter

    def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        # A long double holds the product whole.
        wide = x.data.astype(np.longdouble) * y.data.astype(np.longdouble) + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), x.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
        yield


def layout(dtype: torch.dtype = torch.float32) -> Layout:
    return layout_of(
        (f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for i, shape in enumerate(SHAPES)
    )


@dataclass
class Rank:
    """One rank's reducer.

    Attributes:
        flat: Whether it takes whole buckets.
    """

    flat: bool
    layout: Layout = field(default_factory=layout)
    step: int = 0

    def __post_init__(self) -> None:
        from lowdiff.compressors.flat.matrices import Tiling
        from lowdiff.compressors.flat.matrix_operators import Products
        from lowdiff.compressors.flat.powersgd import FlatPowerSGDReducer

        self.compressor = PowerSGD(RANK, dense_below=0)
        kept = self.compressor.residual_layout(self.layout)
        self.residual = RotatingResidual.zeros(kept, CPU)
        self.reducer: Any = (
            FlatPowerSGDReducer(
                *(self.compressor, self.layout, self.residual, None),
                products=Products(Tiling(rows=8, columns=16, length=32, split=16, elements=128)),
            )
            if self.flat
            else self.compressor.bind(self.layout, self.residual, None)
        )

    def backward(
        self, gradients: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]] = ((0, 1, 2, 3),)
    ) -> list[torch.Tensor]:
        """Averages of one backward pass."""
        found = [torch.empty(0)] * len(gradients)
        for bucket in buckets:
            buffer = torch.cat([gradients[i] for i in bucket])
            views = list(buffer.split([gradients[i].numel() for i in bucket]))
            self.reducer.reduce(bucket, views, buffer).wait()
            for i, view in zip(bucket, views, strict=True):
                found[i] = view
        return found

    def begin(self) -> None:
        self.step += 1
        self.reducer.begin(stamp_of(0, self.step))

    def commit(
        self, gradients: Sequence[torch.Tensor | None], factors: Any = ()
    ) -> list[torch.Tensor]:
        """End a step whose optimizer consumes these; what recovery decodes."""
        self.reducer.consume(gradients, factors=factors)
        self.residual.settle({i for i, g in enumerate(gradients) if g is not None})
        payload = self.reducer.payload()
        self.residual.advance()
        if all(g is None for g in gradients) or self.reducer.depart().has_missed:
            return []
        return decoded(self.compressor, [payload], self.layout, 100)

    def owed(self) -> dict[int, torch.Tensor]:
        return {i: owed.clone() for i, owed in self.residual.current().items()}


def gradients_of(
    step: int, dtype: torch.dtype = torch.float32, by: float = 1.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = [spec.numel for spec in layout().parameters]
    return [(torch.randn(n, generator=generator) * by).to(dtype) for n in sizes]


def assert_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"number {number}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_are_near_to_the_cpus_and_decode_to_what_was_consumed(dtype: torch.dtype) -> None:
    ours, theirs = Rank(True, layout(dtype)), Rank(False, layout(dtype))
    loose: dict[str, Any] = (
        {"rtol": 0.02, "atol": 0.05} if dtype != torch.float32 else {"rtol": 2e-3, "atol": 1e-5}
    )
    for step, scale in enumerate((1.0, 1.0, 1024.0, 3.7), start=1):
        found = []
        for rank in (ours, theirs):
            rank.residual.loss_scale = Scaled(scale)
            rank.begin()
            averages = rank.backward(gradients_of(step, dtype, scale))
            found.append([a.float() / scale for a in averages])
            assert_bits(rank.commit(averages), averages)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, **loose)
        for i, owed in ours.owed().items():
            torch.testing.assert_close(owed.float(), theirs.owed()[i].float(), **loose)


@pytest.mark.parametrize("buckets", [((3, 2, 1, 0),), ((2,), (0, 1), (3,)), ((1, 3), (2, 0))])
def test_the_bits_of_a_matrix_depend_on_no_bucket(buckets: tuple[tuple[int, ...], ...]) -> None:
    one, other = Rank(True), Rank(True)
    for step in (1, 2):
        found = []
        for rank, divided in ((one, ((0, 1, 2, 3),)), (other, buckets)):
            rank.begin()
            averages = rank.backward(gradients_of(step), divided)
            rank.commit(averages)
            found.append(averages)
        assert_bits(*found)
        assert_bits([*one.owed().values()], [*other.owed().values()])


def test_a_later_pass_and_an_optimizer_of_its_own_leave_what_they_leave_on_cpus() -> None:
    ours, theirs = Rank(True), Rank(False)
    for step in (1, 2):
        for rank in (ours, theirs):
            rank.begin()
            first = rank.backward(gradients_of(10 * step))
            rank.reducer.consume([first[0], None, None, None])
            rank.residual.settle({0})
            second = rank.backward(gradients_of(10 * step + 1))
            rank.commit([None, *second[1:]])
        for i, owed in ours.owed().items():
            torch.testing.assert_close(owed, theirs.owed()[i], rtol=1e-3, atol=1e-4)


#: What is done to gradients between hook and optimizer -> the factors that are known of it, whether the first such step
#: is missed, and whether later ones are stored as factors.
CHANGES: dict[str, tuple[tuple[float, ...], bool, bool]] = {
    "nothing": ((0.1, 0.3), False, True),
    "known": ((1 / 1024, 0.37), False, True),
    "unscaled and clipped by somebody": ((1 / 1024,), True, True),
    "by hand": ((), True, False),
    "overflow": ((), True, False),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in CHANGES),
        *(("unscaled and clipped by somebody", half) for half in (torch.bfloat16, torch.float16)),
    ],
)
def test_what_was_changed_since_the_hook_is_noticed_and_then_stored(
    kind: str, dtype: torch.dtype
) -> None:
    factors, is_missed, is_factor = CHANGES[kind]
    rank = Rank(True, layout(dtype))
    for step in (1, 2, 3, 4):
        rank.begin()
        averages = rank.backward(gradients_of(step, dtype))
        known = [] if step == 1 else [torch.tensor(f, dtype=torch.float32) for f in factors]
        is_changed = kind != "nothing" and step > 1
        if is_changed and "by somebody" in kind:
            known.append(torch.tensor(0.1 * step))
        for own in averages:
            if is_changed and kind == "by hand":
                own.add_(torch.randn(own.numel()).to(dtype), alpha=0.1)
            elif is_changed and kind == "overflow":
                own[3] = torch.nan
            elif is_changed:
                for factor in known:
                    own.mul_(factor)
        given = tuple(known[: len(factors)])
        consumed = [own.clone() for own in averages]
        if not is_changed:
            given = () if step == 1 else given[:0]
        rebuilt = rank.commit(averages, given)
        assert rank.reducer.depart().has_missed == (is_missed and step == 2), step
        if not rank.reducer.depart().has_missed:
            assert_bits(rebuilt, consumed)
        whole = rank.reducer.payload().section("whole/parameters")
        assert (whole.data.tolist() == [1]) == (not is_changed or is_factor or step == 2), step


def test_nothing_is_missed_of_a_step_that_a_kernel_skipped() -> None:
    rank = Rank(True)
    rank.begin()
    averages = rank.backward(gradients_of(1))
    averages[0].fill_(torch.nan)
    rank.reducer.consume(averages)
    rank.reducer.skip([0, 1, 2, 3])
    rank.reducer.payload()
    assert not rank.reducer.depart().has_missed


@pytest.mark.parametrize("kind", ["zeros", "of rank one", "nan", "infinite"])
def test_matrices_that_are_no_ordinary_ones_do_what_they_do_on_cpus(kind: str) -> None:
    ours, theirs = Rank(True), Rank(False)
    for step in (1, 2, 3):
        found = []
        for rank in (ours, theirs):
            gradients = gradients_of(step)
            if step == 2:
                strange = torch.zeros(40, 70)
                if kind == "of rank one":
                    strange = torch.arange(40.0).outer(torch.arange(70.0)) / 100
                    rank.residual.current()[0].zero_()
                if kind == "nan":
                    strange = gradients[0].view(40, 70)
                    strange[3, 4] = torch.nan
                if kind == "infinite":
                    strange = gradients[0].view(40, 70)
                    strange[3, 4] = torch.inf
                gradients[0] = strange.flatten().contiguous()
            rank.begin()
            averages = rank.backward(gradients)
            is_finite = all(bool(a.isfinite().all()) for a in averages)
            assert is_finite == (step != 2 or kind not in ("nan", "infinite"))
            rank.commit(averages if is_finite else [None] * 4)  # as behind a gradient scaler
            found.append(averages)
            assert all(bool(owed.isfinite().all()) for owed in rank.owed().values())
        if step != 2 or kind in ("zeros", "of rank one"):
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_an_expanded_range_has_the_bits_of_the_whole() -> None:
    from lowdiff.compressors.flat.matrix_operators import Products

    factors = torch.randn(RANK * (40 + 70), generator=torch.Generator().manual_seed(1))
    for dtype in ("float32", "bfloat16"):
        whole = torch.empty(40 * 70, dtype=torch_dtype(dtype))
        Products().expand(factors, 40, 70, RANK, 0, whole)
        for first, last in ((0, 1), (69, 71), (130, 1700), (2799, 2800), (5, 5)):
            part = torch.empty(last - first, dtype=whole.dtype)
            Products().expand(factors, 40, 70, RANK, first, part)
            assert_bits([part], [whole[first:last]])


def test_what_departed_of_a_step_is_whole_though_others_have_begun() -> None:
    def payloads(*, late: bool) -> list[Payload]:
        torch.manual_seed(0)
        rank, found = Rank(True), []
        for step in (1, 2):
            rank.begin()
            averages = rank.backward(gradients_of(step))
            for own in averages:
                own.mul_(0.5)
            rank.reducer.consume(averages, factors=(torch.tensor(0.5),))
            rank.residual.settle({*range(len(averages))})
            found.append(rank.reducer.depart())
            if not late:
                found[-1] = SimpleNamespace(payload=partial(_same, found[-1].payload()))
            for own in averages:
                own.fill_(99.0)
            rank.residual.advance()
        return [departed.payload() for departed in found]

    at_once = payloads(late=False)
    with testing.late_copies(least_seconds=0.2, most_seconds=0.2):
        later = payloads(late=True)
    for ours, theirs in zip(later, at_once, strict=True):
        assert [s.name for s in ours.sections] == [s.name for s in theirs.sections]
        for own, other in zip(ours.sections, theirs.sections, strict=True):
            assert np.array_equal(own.data, other.data), own.name


def _same(payload: Payload) -> Payload:
    return payload
