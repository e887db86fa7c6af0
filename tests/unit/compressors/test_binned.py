"""Values in 2 or 4 bits: what is sent, what is owed, what is stored, and in how many bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors import CyclicTopK, RandomK, TopK
from lowdiff.compressors.binned import Sent, add, binned, num_bins, packed, restored, unpacked
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.settings import SparseSettings
from lowdiff.core.layout import layout_of
from lowdiff.errors import ReplayMismatch
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections
from lowdiff.types import Payload
from tests.contract.compressors import decoded, exact, reduced

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


class Alone:
    """One rank and one float32 parameter."""

    def __init__(self, compressor: SparseSettings, numel: int) -> None:
        parameter = torch.nn.Parameter(torch.zeros(numel))
        self.compressor, self.layout = compressor, layout_of([("p", parameter)])
        self.residual = RotatingResidual.zeros(self.layout, CPU)
        self.reducer = compressor.bind(self.layout, self.residual, None)  # type: ignore[attr-defined]
        self.step = 0

    def feed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the hook makes of a gradient, after a step that consumed it."""
        self.step += 1
        self.reducer.begin(self.step)
        averaged = reduced(self.reducer, [gradient], [[0]])[0]
        self.reducer.consume([averaged])
        self.residual.settle()
        self.residual.advance()
        return averaged

    def owed(self) -> torch.Tensor:
        return self.residual.pair(0)[0].clone()


# Bytes


@pytest.mark.parametrize(
    ("compressor", "most"),
    [
        (TopK(0.01, value_bits=2), 0.016),
        (TopK(0.03, value_bits=2), 0.040),
        (TopK(0.1, value_bits=2), 0.10),
        (TopK(0.01, value_bits=4), 0.016),
        (TopK(0.03, value_bits=4), 0.040),
        (CyclicTopK(0.01, value_bits=2), 0.016),
        (RandomK(0.01, value_bits=2), 0.003),
    ],
    ids=str,
)
def test_a_record_takes_few_bytes_an_element(compressor: SparseSettings, most: float) -> None:
    """Gradients of independent normal numbers: no positions are harder to code."""
    numel = 1 << 19
    alone, generator = Alone(compressor, numel), torch.Generator().manual_seed(0)
    for _ in range(3):  # the first has no residual
        alone.feed(torch.randn(numel, generator=generator))
        stored = len(encode_sections(alone.reducer.payload().sections, Codec()))
        assert stored / numel <= most


# The coding


@given(
    st.lists(st.floats(width=16), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
    st.sampled_from([2, 4]),
)
def test_a_value_comes_back_as_its_sign_and_the_mean_of_a_range_of_magnitudes(
    numbers: list[float], dtype: torch.dtype, value_bits: int
) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    codes, means = binned(values, value_bits)
    assert (codes.dtype, means.dtype) == (torch.uint8, torch.float64)
    assert means.numel() == num_bins(value_bits)
    assert torch.equal(codes >= num_bins(value_bits), values.signbit())
    bins, magnitudes = codes % num_bins(value_bits), values.abs().double()
    for number, mean in enumerate(means):
        inside = magnitudes[bins == number]
        torch.testing.assert_close(mean, inside.sum() / max(1, inside.numel()), equal_nan=True)
    order = magnitudes.nan_to_num(math.inf, math.inf).argsort(stable=True)
    finite = order[values[order].isfinite()]
    assert (bins[finite].diff() >= 0).all(), "a larger magnitude is never in a lower bin"
    whole = values[values.isfinite()]
    back = restored(codes, means)[values.isfinite()]
    assert torch.equal(back.signbit(), whole.signbit())


@pytest.mark.parametrize(("value_bits", "most"), [(2, 0.26), (4, 0.02)])
def test_bins_are_spaced_by_factors_and_more_bits_are_closer(value_bits: int, most: float) -> None:
    values = 2.0 ** torch.linspace(-3, 3, 4001, dtype=torch.float64)
    codes, means = binned(values, value_bits)
    edges = values[1:][codes.diff() > 0].log2()
    expected = torch.linspace(-3, 3, num_bins(value_bits) + 1, dtype=torch.float64)[1:-1]
    torch.testing.assert_close(edges, expected, rtol=0, atol=0.09)
    missed = (restored(codes, means) - values).square().sum() / values.square().sum()
    assert missed < most


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stays_visible(bad: float) -> None:
    values = torch.tensor([0.5, -0.25, bad, 3.0])
    back = restored(*binned(values, 4))
    assert not back[2].isfinite()
    assert back[:2].isfinite().all()


def test_zeros_among_the_selected_are_sent_as_zeros() -> None:
    """As in an embedding of which a batch uses fewer rows than the density keeps."""
    alone = Alone(TopK(0.1, value_bits=2), 2000)
    gradient = torch.zeros(2000)
    gradient[500:520] = torch.randn(20, generator=torch.Generator().manual_seed(0))
    averaged = alone.feed(gradient)
    assert averaged[500:520].all()
    assert not averaged[:500].any()
    assert not averaged[520:].any()


@given(st.lists(st.integers(0, 15), max_size=20), st.sampled_from([2, 4]))
def test_codes_are_packed_without_gaps(numbers: list[int], value_bits: int) -> None:
    codes = torch.tensor([n % (1 << value_bits) for n in numbers], dtype=torch.uint8)
    whole = packed(codes, value_bits)
    assert whole.numel() == -(-len(numbers) * value_bits // 8)
    word = int.from_bytes(bytes(whole.tolist()), "little")
    mask = (1 << value_bits) - 1
    assert [word >> (value_bits * i) & mask for i in range(len(numbers))] == codes.tolist()
    assert torch.equal(unpacked(whole, value_bits, len(numbers)), codes)


def test_values_are_added_in_rank_order_in_any_range() -> None:
    position, code = torch.tensor([7]), torch.tensor([0], dtype=torch.uint8)
    sent = [Sent(position, code, torch.tensor([mean, 0.0])) for mean in (1e8, -1e8, 1.0)]
    for first, last in [(0, 20), (7, 8), (3, 9)]:
        out = torch.zeros(last - first)
        add(sent, first, out)
        assert out.nonzero().tolist() == [[7 - first]]
        assert out[7 - first] == 1.0, "another order rounds the 1.0 away"


# Error feedback


@pytest.mark.parametrize("value_bits", [2, 4])
def test_what_was_sent_is_subtracted_from_the_residual_bit_for_bit(value_bits: int) -> None:
    alone, generator = Alone(TopK(0.05, value_bits=value_bits), 3000), torch.Generator()
    for _ in range(4):
        gradient = torch.randn(3000, generator=generator)
        total = gradient + alone.owed()
        averaged = alone.feed(gradient)
        kept = total.abs().topk(150).indices
        assert torch.equal(averaged.nonzero().flatten(), kept.sort().values)
        assert averaged[kept].abs().unique().numel() <= num_bins(value_bits)
        assert exact(alone.owed()).tolist() == exact(total - averaged).tolist()
        assert alone.owed()[kept].any()


@pytest.mark.parametrize("kind", [CyclicTopK, RandomK])
def test_an_overflow_where_nothing_is_sent_is_seen_at_once(kind: type[CyclicTopK]) -> None:
    """A scaler looks at what the hook returned, and must skip this step, not a later one."""
    alone = Alone(kind(0.1, value_bits=2), 2400)
    usual = alone.feed(torch.ones(2400))
    assert usual.isfinite().all()
    for position in range(40):
        bad = torch.ones(2400)
        bad[position] = math.inf
        assert not alone.feed(bad).isfinite().all()
        assert alone.owed().isfinite().all()


def test_a_parameter_that_the_step_did_not_use_keeps_what_it_is_owed() -> None:
    alone = Alone(TopK(0.01, value_bits=2), 2000)
    alone.feed(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    owed = alone.owed()
    assert owed.any()
    assert not alone.feed(torch.zeros(2000)).any()
    assert torch.equal(alone.owed(), owed)


# Damage


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1, value_bits=2), CyclicTopK(0.1, value_bits=2), RandomK(0.1, value_bits=2)],
    ids=str,
)
def test_a_payload_that_lacks_a_part_is_an_error_and_not_zeros(compressor: SparseSettings) -> None:
    alone = Alone(compressor, 2000)
    gradient = alone.feed(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    whole = alone.reducer.payload()
    layout = alone.layout

    def rebuilt(payload: Payload) -> torch.Tensor:
        return decoded(compressor, [payload], layout, 300)[0]  # type: ignore[arg-type]

    assert exact(rebuilt(whole)).tolist() == exact(gradient).tolist()
    for section in whole.sections:
        rest = tuple(s for s in whole.sections if s is not section)
        with pytest.raises(ReplayMismatch, match="payload"):
            rebuilt(Payload(rest))
        cut = replace(section, data=section.data[: section.data.size // 2])
        with pytest.raises(ReplayMismatch, match="payload"):
            rebuilt(Payload((*rest, cut)))


def test_positions_outside_of_the_parameters_listed_are_an_error() -> None:
    alone = Alone(TopK(0.1, value_bits=2), 2000)
    alone.feed(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    far = tuple(
        replace(s, data=s.data + 1000) if s.name == "binned/positions" else s
        for s in alone.reducer.payload().sections
    )
    with pytest.raises(ReplayMismatch, match=r"of 200 positions .* are in no parameter"):
        decoded(alone.compressor, [Payload(far)], alone.layout, 300)  # type: ignore[arg-type]
