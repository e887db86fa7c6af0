from __future__ import annotations

from dataclasses import replace

import pytest

from benches.bench_convergence import Cell, Ended, tuned

pytestmark = pytest.mark.slow

TOPK = Cell("text", "topk 1 %", seed=0, steps=1200, rate=1.0, warmup=0)


def loss_of(cell: Cell) -> float:
    """A training that without a warm-up is best at a quarter of the rate, and with one at eight times."""
    return abs(cell.rate - 8) if cell.warmup else 9 + abs(cell.rate - 0.25)


def rates_until_tuned(first: Cell) -> tuple[Cell, dict[int, list[float]]]:
    known: dict[Cell, Ended] = {}
    while True:
        found = tuned(known, first)
        if isinstance(found, Cell):
            steps = {cell.warmup for cell in known}
            return found, {w: sorted(c.rate for c in known if c.warmup == w) for w in steps}
        known |= {cell: Ended(loss_of(cell), 0.1, "") for cell in found}


def test_the_best_rate_is_looked_for_without_and_with_a_warm_up() -> None:
    best, tried = rates_until_tuned(TOPK)
    assert (best.rate, best.warmup) == (8.0, 300)
    assert tried == {0: [0.125, 0.25, 0.5, 1.0, 2.0], 300: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]}


def test_a_compressor_without_a_density_has_no_warm_up() -> None:
    best, tried = rates_until_tuned(replace(TOPK, arm="powersgd 4"))
    assert (best.rate, best.warmup) == (0.25, 0)
    assert tried == {0: [0.125, 0.25, 0.5, 1.0, 2.0]}
