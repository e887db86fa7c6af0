"""What changed of a tensor: any two contents, and bytes of strangers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.format.values import BadEncoding
from lowdiff.persistence.versions.changes import apply, encode
from lowdiff.persistence.versions.weights import DTYPES, Tensor

WORDS = st.sampled_from(["<u1", "<u2", "<u4", "<u8"])
CODES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


@given(words=WORDS, seed=st.integers(0, 1000), size=st.integers(1, 300), share=st.floats(0, 1))
def test_a_change_leads_from_one_content_to_the_other(
    words: str, seed: int, size: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    top = np.iinfo(words).max
    old = random.integers(0, top, size, dtype=words, endpoint=True)
    new = np.where(random.random(size) < share, random.integers(0, top, size, dtype=words), old)
    change = encode(old, new)
    tensor = Tensor(CODES[old.itemsize], (size,), old.copy())
    if np.array_equal(old, new):
        assert change == b""
    else:
        assert np.array_equal(apply(tensor, change).bits, new)
        assert len(change) <= new.nbytes + 1 + 9 * new.itemsize
    assert np.array_equal(tensor.bits, old)


def test_one_value_in_a_hundred_costs_little() -> None:
    torch.manual_seed(0)
    weights = (torch.randn(1_000_000) * 0.02).bfloat16()
    changed = torch.rand(weights.shape) < 0.01
    # The neighbouring value, as a small learning rate makes it.
    after = (weights.view(torch.int16) + changed * (2 * torch.randint(0, 2, weights.shape) - 1)).to(
        torch.int16
    )
    old, new = Tensor.of_torch(weights), Tensor.of_torch(after.view(torch.bfloat16))
    assert len(encode(old.bits, new.bits)) <= 0.014 * new.bits.nbytes


@given(data=st.binary(max_size=60), seed=st.integers(0, 50), at=st.integers(0, 200))
def test_bytes_of_strangers_are_refused_or_stay_within_the_tensor(
    data: bytes, seed: int, at: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, 200, dtype="<u2")
    new = old.copy()
    new[random.integers(0, 200, 5)] ^= 1
    whole = bytearray(encode(old, new))
    whole[at % len(whole)] ^= 1 + at % 255
    tensor = Tensor("BF16", (200,), old)
    for change in (data, b"\0" + data, b"\1" + data, bytes(whole), bytes(whole[: at % len(whole)])):
        try:
            made = apply(tensor, change)
        except BadEncoding:
            continue
        assert made.bits.size == 200
        assert made.bits.dtype == old.dtype


@pytest.mark.parametrize("name", sorted(DTYPES.values()))
def test_every_dtype_keeps_its_bits(name: str) -> None:
    torch.manual_seed(1)
    value = (100 * torch.rand(3, 1, 5)).to(getattr(torch, name))
    for tensor in (value, value[0, 0, 0], value.transpose(0, 2), value[:0]):
        made = Tensor.of_torch(tensor)
        assert made.shape == tuple(tensor.shape)
        again = made.to_torch()
        assert again.dtype == tensor.dtype
        flat = tensor.contiguous().reshape(-1)
        assert torch.equal(again.reshape(-1).view(torch.uint8), flat.view(torch.uint8))
        read = Tensor.of_bytes(made.dtype, made.shape, bytearray(made.data))
        assert read.digest == made.digest
