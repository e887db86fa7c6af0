"""Whole buckets give the bits of single parameters: entries, gradients and residual, whichever operations select."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors import TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual, Scaled
from lowdiff.compressors.flat.selection import Selection, TorchSelection, table_of
from lowdiff.compressors.flat.sent import Reading, TorchReading
from lowdiff.compressors.flat.topk import FlatTopKReducer
from lowdiff.core.layout import INT_OF_BYTES, layout_of, torch_dtype
from lowdiff.types import Layout, Section
from tests.contract.compressors import decoded

#: NumPy's, of the interpreter: infinities are subtracted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
#: Where Triton has wheels `.ci/run` installs it, and no test is skipped.
_IS_REQUIRED = bool(os.environ.get("REQUIRE_KERNELS")) and (
    platform.machine() == "x86_64" and sys.version_info < (3, 15)
)


def needs_triton() -> None:
    """Skip a test where Triton is not there, unless it must be, or compiles for a device."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; make gpu compares their bits")
    if not _IS_REQUIRED:
        pytest.importorskip("triton")


Ways = tuple[Selection, Reading]


def by_triton() -> Ways:
    """Kernels in Triton's interpreter, on blocks of a few elements: with room for a part of what may be selected."""
    needs_triton()
    from lowdiff.compressors.flat.operators import Sizes, TritonSelection
    from lowdiff.compressors.flat.reading import TritonReading

    return TritonSelection(Sizes(block=128, chunk=64, room=16, few=32)), TritonReading()


def by_torch() -> Ways:
    return TorchSelection(), TorchReading()


WAYS = [by_torch, by_triton]
#: Of gradients and residuals.
KINDS = (
    *("normal", "zeros", "negative zeros", "equal", "few", "coarse", "infinite", "nan", "tiny"),
    *("all nan", "large"),
)
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 300, 700)


def values(kind: str, count: int, seed: int) -> torch.Tensor:
    """Numbers as float32."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator)
    drawn = torch.rand(count, generator=generator)
    if kind == "zeros":
        found.zero_()
    if kind == "negative zeros":
        found.fill_(-0.0)
    if kind == "equal":
        found.fill_(2.0)
    if kind == "few":
        found[drawn < 0.98] = 0
    if kind == "coarse":
        found = found.mul(2).round()
    if kind == "infinite":
        found[drawn < 0.1] = torch.inf
        found[drawn > 0.9] = -torch.inf
    if kind == "nan" and count:
        found[int(drawn[0] * count)] = torch.nan
    if kind == "all nan":
        found.fill_(torch.nan)
    if kind == "tiny":
        found.mul_(1e-39)
    if kind == "large":
        found.mul_(3e38)
    return found


@dataclass(frozen=True)
class Case:
    """Some steps on one bucket.

    Attributes:
        num_buckets: How many the parameters are divided over.
        passes: Per backward pass: kind and seed of its gradients, loss scale, and what follows it: nothing, an
            optimizer that consumes the first half of the parameters, or a commit.
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    compressor: TopK
    passes: tuple[tuple[str, int, float, str], ...]
    num_buckets: int = 1

    @property
    def layout(self) -> Layout:
        return layout_of(
            (f"p{i}", torch.nn.Parameter(torch.zeros(n, dtype=self.dtype)))
            for i, n in enumerate(self.lengths)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    narrow = draw(st.sampled_from([None, None, torch.bfloat16, torch.float16]))
    if dtype != torch.float32 and narrow != dtype:
        narrow = None
    compressor = TopK(
        draw(st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0])),
        dense_below=draw(st.sampled_from([0, 64])),
        warmup=draw(st.sampled_from([0, 3])),
        value_dtype=narrow,
        value_bits=draw(st.sampled_from([None, None, 2, 4])) if narrow is None else None,
    )
    one_pass = st.tuples(
        st.sampled_from([k for k in KINDS if dtype != torch.float16 or k != "all nan"]),
        st.integers(0, 99),
        st.sampled_from([1.0, 1.0, 1024.0, 0.25, 3.7]),
        st.sampled_from(["nothing", "half", "commit", "commit"]),
    )
    lengths = tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=5)))
    return Case(
        lengths,
        dtype,
        compressor,
        tuple(draw(st.lists(one_pass, min_size=1, max_size=5))),
        draw(st.integers(1, min(3, len(lengths)))),
    )


def exact(tensor: torch.Tensor) -> list[int]:
    """Bits, with all NaN alike: what these are otherwise, processors differ in."""
    alike = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    found: list[int] = alike.view(INT_OF_BYTES[tensor.element_size()]).tolist()
    return found


def stored(section: Section, compressor: TopK) -> tuple[str, list[int]]:
    """A section of a payload, with all NaN alike."""
    kind, _, dtype = section.name.rpartition("/")
    data = torch.from_numpy(section.data.copy())
    if not kind.endswith("values"):
        return section.name, data.tolist()
    narrow = compressor.narrow if kind == "narrow/values" else None
    return section.name, exact(data.view(narrow or torch_dtype(dtype)))


def history(case: Case, ways: Ways | None) -> list[Any]:
    """Averages, entries and residuals of a rank, pass by pass; by single parameters without a selection."""
    layout, compressor = case.layout, case.compressor
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), CPU)
    if ways is None:
        reducer: Any = compressor.bind(layout, residual, None)
    else:
        selection, reading = ways
        reducer = FlatTopKReducer(
            compressor, layout, residual, None, selection=selection, reading=reading
        )
    step = 1
    found: list[Any] = []
    reducer.begin(stamp_of(0, step))
    for kind, seed, scale, then in case.passes:
        residual.loss_scale = Scaled(scale)
        sizes = [spec.numel for spec in layout.parameters]
        dtype = torch_dtype(layout.parameters[0].dtype)
        gradients = [torch.empty(0)] * len(sizes)
        for number in range(case.num_buckets):
            bucket = list(range(number, len(sizes), case.num_buckets))[::-1]
            own = [sizes[i] for i in bucket]
            buffer = values(kind, sum(own), seed + number).mul(scale).to(dtype)
            parts = list(buffer.split(own))
            reducer.reduce(bucket, parts, buffer).wait()
            found.append(exact(buffer))
            for i, part in zip(bucket, parts, strict=True):
                gradients[i] = part
        half = set(range(len(sizes) // 2)) if then == "half" else None
        if then != "nothing":
            consumed = [g if half is None or i in half else None for i, g in enumerate(gradients)]
            reducer.consume(consumed)
            residual.settle(half)
        if then == "commit":
            payload = reducer.payload()
            found += [exact(own) for own in decoded(compressor, [payload], layout, 100)]
            # Of a parameter with an entry that is not finite more may be stored, to the same end. Values in few bits
            # are stored otherwise.
            if compressor.value_bits is None and all(
                g is None or bool(g.isfinite().all()) for g in consumed
            ):
                found += [stored(s, compressor) for s in payload.sections if s.data.size]
            residual.advance()
            found += [exact(owed) for owed in residual.current().values()]
            step += 1
            reducer.begin(stamp_of(0, step))
    return found


def check(case: Case, ways: Ways) -> None:
    for number, (ours, theirs) in enumerate(
        zip(history(case, ways), history(case, None), strict=True)
    ):
        assert ours == theirs, f"number {number}"


@pytest.mark.timeout(900)  # Triton's interpreter takes minutes where cores are shared
@pytest.mark.parametrize("make", WAYS)
@given(cases())
def test_a_bucket_gives_the_bits_of_its_parameters(make: Any, case: Case) -> None:
    check(case, make())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", WAYS)
def test_every_kind_of_numbers_gives_the_bits_of_its_parameters(make: Any, kind: str) -> None:
    passes = ((kind, 3, 1.0, "commit"), ("normal", 4, 1.0, "nothing"), (kind, 5, 3.7, "commit"))
    for dtype in (torch.float32, torch.bfloat16):
        for compressor in (TopK(0.02, dense_below=2), TopK(0.1, dense_below=2, value_bits=2)):
            check(Case((300, 0, 64, 1, 700), dtype, compressor, passes), make())


@pytest.mark.parametrize("value_bits", [None, 2, 4])
def test_what_is_owed_of_an_unused_parameter_stays_finite_where_a_new_loss_scale_overflows(
    value_bits: int | None,
) -> None:
    passes = (
        ("large", 0, 1.0, "nothing"),
        ("zeros", 0, 1024.0, "nothing"),
        ("normal", 0, 1.0, "commit"),
    )
    case = Case((2,), torch.float32, TopK(0.001, dense_below=0, value_bits=value_bits), passes)
    check(case, by_torch())


def test_an_exception_between_two_kernels_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = by_triton()
    from lowdiff.compressors.flat import operators

    passes = (("normal", 3, 1.0, "commit"),)
    case = Case((300, 700), torch.float32, TopK(0.02, dense_below=0), passes)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operators, "_gather", interrupted)
        with pytest.raises(KeyboardInterrupt):
            history(case, ways)
    check(case, ways)


def test_tables_are_made_once_for_however_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*given: Any) -> Any:
        nonlocal made
        made += 1
        return table_of(*given)

    monkeypatch.setattr("lowdiff.compressors.flat.topk.table_of", counted)
    lengths = (70,) * 300
    passes = (("normal", 3, 1.0, "commit"),) * 3
    history(Case(lengths, torch.float32, TopK(0.02, dense_below=0), passes, 300), by_torch())
    assert made == len(lengths)


@pytest.mark.parametrize("value_bits", [None, 2])
def test_a_step_that_a_kernel_skipped_decodes_to_zeros(value_bits: int | None) -> None:
    compressor = TopK(0.1, dense_below=0, value_bits=value_bits)
    layout = Case((300, 700), torch.float32, compressor, ()).layout
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), CPU)
    selection, reading = by_torch()
    reducer = FlatTopKReducer(
        compressor, layout, residual, None, selection=selection, reading=reading
    )
    reducer.begin(stamp_of(0, 1))
    buffer = values("normal", 1000, 3)
    gradients = list(buffer.split([300, 700]))
    reducer.reduce([0, 1], gradients, buffer).wait()
    reducer.consume(gradients)
    reducer.skip([0, 1])
    assert not any(own.any() for own in decoded(compressor, [reducer.payload()], layout, 100))


def test_a_total_that_half_width_cannot_hold_is_cut_into_bins_as_it_is() -> None:
    """Gradient and residual together are infinite in float16, and finite in the residual's float32."""
    passes = tuple(("normal", seed, 2.0**14, "commit") for seed in range(4))
    compressor = TopK(0.02, dense_below=0, value_bits=2)
    check(Case((3000, 7000), torch.float16, compressor, passes), by_torch())
