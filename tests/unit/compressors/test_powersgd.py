"""What is PowerSGD's own: orthogonal factors, blocks, its warm start; and rounding of Quantize."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors import PowerSGD, Quantize, RandomK, TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.powersgd import matrix_of, orthogonalize, write_low_rank
from lowdiff.compressors.randomk import positions
from lowdiff.core.layout import layout_of
from lowdiff.protocols import Compressor
from tests.contract.compressors import reduced

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_rows_become_orthonormal_and_dependent_ones_zero(
    matrix_rank: int, length: int, seed: int, dependent: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(matrix_rank, length, generator=generator)
    if dependent and matrix_rank > 1:
        rows[-1] = rows[0] * 3
    made = orthogonalize(rows.clone())
    kept = made.any(1)
    assert int(kept.sum()) <= length
    if dependent and matrix_rank > 1:
        assert not kept[-1]
    gram = made @ made.T
    torch.testing.assert_close(gram, torch.diag(kept.float()), rtol=0, atol=2e-5)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 5), st.data())
def test_any_range_of_the_product_has_the_bits_of_the_whole(
    n: int, m: int, matrix_rank: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(n * m)
    factors = (
        torch.randn(matrix_rank, n, generator=generator),
        torch.randn(matrix_rank, m, generator=generator),
    )
    start = data.draw(st.integers(0, n * m))
    stop = data.draw(st.integers(start, n * m))
    for dtype in (torch.float32, torch.bfloat16):
        whole, piece = torch.zeros(n * m, dtype=dtype), torch.zeros(stop - start, dtype=dtype)
        write_low_rank(factors, 0, n * m, whole)
        write_low_rank(factors, start, stop, piece)
        assert torch.equal(piece, whole[start:stop])
    torch.testing.assert_close(
        whole.float().view(n, m), factors[0].T @ factors[1], rtol=0.02, atol=0.1
    )


def test_a_matrix_is_the_outermost_dimension_in_memory_against_the_rest() -> None:
    tensors = [
        torch.zeros(6, 5, 3, 2),
        torch.zeros(6, 5, 3, 2).to(memory_format=torch.channels_last),
        torch.zeros(4, 9).T,
        torch.zeros(7),
        torch.zeros(()),
        torch.zeros(0, 3),
    ]
    layout = layout_of((f"p{i}", torch.nn.Parameter(t)) for i, t in enumerate(tensors))
    expected = [(6, 30), (6, 30), (4, 9), (7, 1), (1, 1), (1, 0)]
    assert [matrix_of(spec) for spec in layout.parameters] == expected


class Alone:
    """One rank with one matrix."""

    def __init__(self, compressor: Compressor, *shape: int) -> None:
        layout = layout_of([("w", torch.nn.Parameter(torch.zeros(shape)))])
        kept = compressor.residual_layout(layout)
        self.residual = RotatingResidual.zeros(kept, CPU)
        self.reducer = compressor.bind(layout, self.residual, None)
        self.step = 0

    def feed(self, gradient: torch.Tensor, *, stepped: bool = True) -> torch.Tensor:
        self.step += 1
        self.reducer.begin(self.step)
        averaged = reduced(self.reducer, [gradient.flatten().clone()], [[0]])[0]
        self.reducer.consume([averaged])
        if stepped:
            self.residual.settle()
        self.residual.advance()
        return averaged.view(gradient.shape)


def test_a_matrix_of_low_rank_comes_through_unchanged() -> None:
    alone = Alone(PowerSGD(3, dense_below=0), 40, 60)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(40, 3, generator=generator) @ torch.randn(3, 60, generator=generator)
    for _ in range(2):
        torch.testing.assert_close(alone.feed(gradient), gradient, rtol=1e-4, atol=1e-4)


def test_the_warm_start_finds_the_best_approximation() -> None:
    alone = Alone(PowerSGD(2, dense_below=0), 40, 60)
    gradient = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(gradient)
    best = float(singular[2:].square().sum().sqrt())
    errors = []
    for _ in range(60):
        alone.residual.load([torch.zeros(2400), None])  # without feedback: power iteration alone
        errors.append(float((alone.feed(gradient) - gradient).norm()))
    assert errors[-1] < errors[0]
    assert errors[-1] == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize(
    "compressor",
    [
        PowerSGD(2, dense_below=0),
        Quantize(),
        RandomK(0.5, 0),
        TopK(0.01),  # fewer entries than overflow
        TopK(0.5),
        TopK(0.5, value_dtype=torch.bfloat16),
        TopK(0.5, value_bits=2),
        TopK(0.01, value_bits=4),
    ],
    ids=str,
)
def test_training_recovers_after_an_overflow(compressor: Compressor, stepped: bool) -> None:
    alone = Alone(compressor, 40, 60)
    gradient = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    alone.feed(gradient)
    before = {name: r.clone() for name, r in alone.residual.named().items()}
    bad = gradient.clone()
    bad[3] = float("inf")
    assert not alone.feed(bad, stepped=stepped).isfinite().all()
    after = alone.residual.named()
    if not stepped:
        assert all(torch.equal(after[name], r) for name, r in before.items())
    for _ in range(3):
        assert bool(alone.feed(gradient).isfinite().all())
    assert all(bool(r.isfinite().all()) for r in alone.residual.named().values())


def test_an_overflow_where_nothing_is_drawn_is_seen_at_once() -> None:
    """A scaler looks at what the hook returned, and must skip this step, not a later one."""
    compressor = RandomK(0.1, 0)
    drawn = positions(0, 1, 0, 2400, 240, torch.arange(240).numpy())
    bad = torch.ones(2400)
    bad[int(drawn[0]) + 1] = float("inf")
    assert int(drawn[0]) + 1 not in drawn
    alone = Alone(compressor, 2400)
    assert bool(alone.feed(bad, stepped=False).isnan().any())
    assert bool(alone.feed(torch.ones(2400)).isfinite().all())


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    gradient = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    made = []
    for seed in range(200):
        alone = Alone(Quantize(4, seed=seed), 1, 512)
        made.append(alone.feed(gradient))
        assert torch.equal(made[-1], Alone(Quantize(4, seed=seed), 1, 512).feed(gradient))
    step = gradient.abs().max() / 7
    assert float((torch.stack(made) - gradient).abs().max()) <= float(step) * 1.001
    mean_error = (torch.stack(made).mean(0) - gradient).abs().max()
    assert float(mean_error) < float(step) * 0.2
    nearest = Alone(Quantize(4, rounding="nearest"), 1, 512).feed(gradient)
    assert float((nearest - gradient).abs().max()) <= float(step) * 0.501


@given(st.integers(1, 3000), st.floats(0.001, 1), st.integers(0, 2**62), st.integers(0, 2**39))
def test_random_positions_ascend_and_lie_in_their_ranges(
    numel: int, density: float, seed: int, step: int
) -> None:
    compressor = RandomK(density, 0, seed)
    k = compressor.kept(numel)
    ranges = torch.arange(k).numpy()
    drawn = positions(seed, step, 3, numel, k, ranges)
    assert (drawn >= ranges * numel // k).all()
    assert (drawn < (ranges + 1) * numel // k).all()


def test_random_positions_are_pinned_and_even() -> None:
    """They are neither sent nor stored: another draw would make old runs unreadable."""
    ranges = torch.arange(5).numpy()
    assert positions(7, 3, 1, 100, 5, ranges).tolist() == [10, 20, 59, 60, 81]
    hits = torch.zeros(100)
    for step in range(4000):
        hits[torch.from_numpy(positions(0, step, 0, 100, 5, ranges))] += 1
    assert 120 < hits.min() <= hits.max() < 290
