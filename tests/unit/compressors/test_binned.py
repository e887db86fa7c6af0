"""Values in 2 or 4 bits: what is sent, what is owed, what is stored, and how many bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.compressors import TopK
from lowdiff.compressors.binned import binned, packed, restored, unpacked
from lowdiff.errors import ReplayMismatch
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections
from lowdiff.types import Payload
from tests.unit.compressors.topk_rank import Rank, a_layout, decoded, exact

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


# Bytes


@pytest.mark.parametrize(
    ("density", "value_bits", "most"),
    [(0.01, 2, 0.016), (0.03, 2, 0.040), (0.1, 2, 0.10), (0.01, 4, 0.016), (0.03, 4, 0.040)],
)
def test_a_record_takes_few_bytes_an_element(density: float, value_bits: int, most: float) -> None:
    """Positions of independent normal numbers: no gaps are harder to code."""
    numel = 1 << 19
    rank = Rank(TopK(density, value_bits=value_bits), a_layout((numel, torch.float32)))
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2, 3):  # the first has no residual
        rank.reducer.begin(step)
        rank.reducer.consume(rank.backward([torch.randn(numel, generator=generator)]))
        rank.residual.settle()
        rank.residual.advance()
        stored = len(encode_sections(rank.reducer.payload().sections, Codec()))
        assert stored / numel <= most
