"""Bytes a day of every compressor: against what its compressor stores, and in the report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowdiff.compressors import Cast, PowerSGD, Quantize, TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import flat, layout_of
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections
from lowdiff.tuner.logged import LOGGED, Logged, logged_cells

SCOPE = {"TopK": TopK, "PowerSGD": PowerSGD, "Quantize": Quantize, "Cast": Cast, "torch": torch}


def stored(written: str) -> float:
    """Bytes per element that one rank stores of a gradient without structure."""
    compressor = eval(written, SCOPE)
    parameter = torch.nn.Parameter(torch.zeros(768, 3072))
    layout = layout_of([("weight", parameter)])
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), torch.device("cpu"))
    reducer = compressor.bind(layout, residual, None)
    reducer.begin(1)
    gradient = flat(
        torch.from_numpy(np.random.default_rng(0).normal(size=(768, 3072)).astype("f4"))
    )
    reducer.reduce([0], [gradient], gradient).wait()
    reducer.consume([gradient])
    return len(encode_sections(reducer.payload().sections, Codec())) / parameter.numel()


@pytest.mark.cases(7)
@pytest.mark.parametrize(
    "one", [one for one in LOGGED if "Cyclic" not in one.compressor], ids=lambda one: one.compressor
)
def test_it_is_what_the_compressor_stores(one: Logged) -> None:
    assert stored(one.compressor) == pytest.approx(one.once + one.each, rel=0.25)


def test_ranks_and_pace_count() -> None:
    (topk,) = (one for one in LOGGED if one.compressor == "TopK(0.01)")
    assert topk.bytes_per_day(1e9, 8, 2.0) == pytest.approx(0.04 * 8e9 * 43_200)
    (low_rank,) = (one for one in LOGGED if one.compressor == "PowerSGD(4)")
    assert low_rank.bytes_per_day(1e9, 8, 2.0) == low_rank.bytes_per_day(1e9, 1, 2.0)


def test_a_model_of_unknown_size_has_no_table() -> None:
    assert logged_cells(0.0, 8, 1.0) == []
    assert ("PowerSGD(4)", "2.51 TB") in logged_cells(1e9, 8, 1.0)
