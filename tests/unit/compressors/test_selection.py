"""The largest magnitudes, exactly, ties to the lowest index: a function of the values alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lowdiff.compressors.sparse import MagnitudeSelector

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Selection samples vectors of at least so many elements first.
SAMPLED = 1 << 15
SELECTOR = MagnitudeSelector()

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def reference(values: torch.Tensor, k: int) -> npt.NDArray[np.int64]:
    """Sort all by magnitude, NaN before everything, then by index; keep the first ``k``."""
    wide = values.double().abs().numpy()
    magnitude = np.where(np.isnan(wide), -1, np.nan_to_num(wide, posinf=np.inf))
    order = np.lexsort((np.arange(values.numel()), -magnitude, ~np.isnan(wide)))
    return np.sort(order[:k])


def assert_selects(values: torch.Tensor, k: int) -> None:
    chosen = SELECTOR.select(values, k)
    assert chosen.dtype == torch.int64
    assert chosen.shape == (k,)
    np.testing.assert_array_equal(chosen.numpy(), reference(values, k))


def counts(n: int) -> list[int]:
    return sorted({k for k in (1, 2, n // 100, n // 3, n // 2, n - 1, n) if 1 <= k <= n})


@pytest.mark.slow
@dtypes
@given(data=st.data())
def test_any_small_vector(dtype: torch.dtype, data: st.DataObject) -> None:
    special = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-320, 6e-8, 65504])
    numbers = data.draw(st.lists(special | st.floats(width=16), min_size=1, max_size=60))
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert_selects(values, data.draw(st.integers(1, len(numbers))))


@pytest.mark.cases(2)
@dtypes
@given(
    n=st.integers(1, 70_000),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "few levels", "mostly zero", "heavy tail", "descending"]),
)
@example(n=SAMPLED - 1, share=0.01, seed=0, kind="normal")
@example(n=SAMPLED, share=0.01, seed=0, kind="normal")
@example(n=SAMPLED + 1, share=1.0, seed=0, kind="few levels")
@example(n=2 * SAMPLED, share=0.0, seed=0, kind="mostly zero")
@example(n=70_000, share=0.999, seed=0, kind="heavy tail")
def test_any_long_vector(dtype: torch.dtype, n: int, share: float, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {
        "normal": lambda: rng.standard_normal(n),
        "few levels": lambda: rng.integers(-3, 4, n) / 2,
        "mostly zero": lambda: rng.standard_normal(n) * (rng.random(n) < 0.001),
        "heavy tail": lambda: np.exp(rng.normal(0, 5, n)) * rng.choice([-1, 1], n),
        "descending": lambda: np.arange(n, 0, -1, dtype=np.float64),
    }
    values = torch.from_numpy(np.asarray(made[kind](), np.float64)).to(dtype)
    assert_selects(values, max(1, round(share * n)))


@pytest.mark.cases(56)
@dtypes
@pytest.mark.parametrize("n", [1, 2, 63, 1000, SAMPLED - 1, SAMPLED, 70_000])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.0, np.inf, np.nan])
def test_of_equal_magnitudes_the_first_are_taken(dtype: torch.dtype, n: int, value: float) -> None:
    values = torch.full((n,), value, dtype=dtype)
    values[::2] *= -1  # the sign does not matter
    for k in counts(n):
        assert SELECTOR.select(values, k).tolist() == list(range(k))


@dtypes
@pytest.mark.parametrize("n", [100, 70_000])
def test_nan_comes_before_infinity_and_infinity_before_all_others(
    dtype: torch.dtype, n: int
) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[[7, 50, 90]] = torch.tensor([np.nan, -np.inf, -np.nan], dtype=dtype)
    assert SELECTOR.select(values, 2).tolist() == [7, 90]
    assert SELECTOR.select(values, 3).tolist() == [7, 50, 90]
    assert_selects(values, 10)


@dtypes
def test_every_bit_pattern_has_its_place(dtype: torch.dtype) -> None:
    """All 65,536 patterns of a 16-bit type, or as many spread over a wider one."""
    width = dtype.itemsize
    spread = torch.arange(-(2**15), 2**15, dtype=torch.int64) << (8 * width - 16)
    values = spread.to(INTEGERS[width]).view(dtype)
    keys = values.view(INTEGERS[width]).long() & torch.iinfo(INTEGERS[width]).max
    order = np.lexsort((np.arange(values.numel()), -keys.numpy()))
    for k in (1, 2, 128, 2047, 2048, 4096, 65_535):
        assert SELECTOR.select(values, k).tolist() == sorted(order[:k])


@dtypes
def test_large_values_that_hide_from_the_sample_are_found(dtype: torch.dtype) -> None:
    n = 70_000
    for period, phase in [(2, 1), (3, 1), (3, 2), (4, 3), (8, 5), (1 << 10, 1)]:
        values = torch.ones(n, dtype=dtype)
        values[phase::period] = 2
        assert_selects(values, (n - phase + period - 1) // period)


@dtypes
def test_small_values_that_fill_the_sample_do_not_narrow_the_choice(dtype: torch.dtype) -> None:
    n = 3 * SAMPLED
    values = torch.full((n,), 0.5, dtype=dtype)
    values[::3] = 100  # exactly what a sample with stride 3 sees
    assert_selects(values, n // 3 + 5)
    assert_selects(values, n // 3 - 5)


def test_the_result_does_not_depend_on_what_was_selected_before() -> None:
    selector = MagnitudeSelector()
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(n, generator=generator) for n in (70_000, 10, 3000, 70_000, 1)]
    first = [selector.select(v, counts(v.numel())[-1] // 2 + 1) for v in vectors]
    for vector, chosen in zip(vectors, first, strict=True):
        k = chosen.numel()
        assert torch.equal(chosen, MagnitudeSelector().select(vector, k))
        assert torch.equal(selector.select(vector.double(), k), chosen)


def test_the_input_is_left_as_it_is_and_the_result_owns_its_memory() -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    first = SELECTOR.select(values, 700)
    kept = first.clone()
    assert torch.equal(values, before)
    SELECTOR.select(torch.randn(70_000), 700)
    assert torch.equal(first, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@dtypes
def test_on_cuda_the_same_magnitudes_are_chosen(dtype: torch.dtype) -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in counts(values.numel()):
        chosen = SELECTOR.select(values.cuda(), k).cpu()
        assert torch.equal(chosen, chosen.unique())
        ours, theirs = values[chosen].abs().sort(), values[reference(values, k)].abs().sort()
        assert torch.equal(ours.values, theirs.values)
