"""Objects that are no plain values, and bytes that no value has, are refused by name."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import BadEncoding, decode, encode, same


class Point(NamedTuple):
    x: int
    y: int


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr_lambdas": [print]}, r"^scheduler\['lr_lambdas'\]\[0\]: builtin_function_or_method "),
        ([0, (1, {2: object()})], r"^scheduler\[1\]\[1\]\[2\]: object cannot be stored"),
        ({"p": Point(1, 2)}, r"^scheduler\['p'\]: .*Point .* convert it to a plain tuple"),
        (Colour.RED, r"^scheduler: .*Colour .* convert it to a plain int"),
        (torch.nn.Parameter(torch.zeros(1)), r"Parameter .* convert it to a plain Tensor"),
        (np.array([None]), r"numpy\.ndarray \(dtype object.*\) cannot be stored"),
        (np.zeros(2, "U3"), r"numpy\.ndarray"),
        (np.zeros(2, "M8[s]"), r"numpy\.ndarray"),
        (np.zeros(2, [("a", "f4")]), r"numpy\.ndarray"),
        (np.zeros(2).view(np.recarray), r"convert it to a plain ndarray"),
        (np.datetime64(1, "s"), r"datetime64"),
        (np.longdouble(1), r"longdouble|float128"),
        (torch.zeros(2).to_sparse(), r"layout torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"device meta"),
        (torch.zeros([1] * 65), r"torch\.Tensor"),
        ({"members": {1, frozenset({Point(1, 2)})}}, r"^scheduler\['members'\]\[<frozenset>\]\["),
        ({print: 1}, r"^scheduler\[<builtin_function_or_method>\]: builtin"),
        (defaultdict(lambda: 0), r"^scheduler: collections\.defaultdict \(default_factory <func"),
        (defaultdict(object), r"^scheduler: collections\.defaultdict"),
        (deque([object()]), r"^scheduler\[0\]: object"),
        (slice(0, print), r"^scheduler\['stop'\]: "),
        ({"x" * 1000: print}, r"^scheduler\['x{40}'\]: "),
        ({2**100_000: print}, r"^scheduler\[<int>\]: "),
        (bytearray(b"a"), r"bytearray"),
        (torch.Generator(), r"Generator"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        encode(value, name="scheduler")
    assert "leave it out of state_dict()" in str(caught.value)


def nested(levels: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = [
    lambda v: [v],
    lambda v: {"k": v},
    lambda v: {0: v},
    lambda v: (v,),
    lambda v: frozenset([v]),
    lambda v: deque([v]),
    lambda v: slice(v),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_64_levels_come_back_and_65_are_refused(wrap: Any) -> None:
    deepest = nested(64, wrap)
    stored = encode(deepest)
    assert same(decode(stored), deepest)
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        encode(wrap(deepest))
    with pytest.raises(BadEncoding, match="nested more than 64 levels deep"):
        decode(b"\x91" + stored)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        encode(loop)


SAMPLE = {
    "step": 7,
    "big": -(2**70),
    "lr": [0.1, math.inf],
    "c": 1j,
    "milestones": Counter({30: 1, 80: 2}),
    "groups": OrderedDict([(0, ("a", b"b", None, True))]),
    "sets": [{1, 2}, frozenset({"x"})],
    "window": deque([1.5], maxlen=3),
    "state": defaultdict(dict, {1: {}}),
    "where": [range(3), slice(1, None)],
    "numpy": [np.float32(1), np.arange(3, dtype=np.int16)],
    "torch": [torch.ones(2, dtype=torch.bfloat16), torch.Size([1]), torch.int8],
    "device": torch.device("cpu"),
}


def test_every_truncation_raises_bad_encoding() -> None:
    stored = encode(SAMPLE)
    for length in range(len(stored)):
        with pytest.raises(BadEncoding):
            decode(stored[:length])


def test_a_byte_too_many_raises_bad_encoding() -> None:
    with pytest.raises(BadEncoding, match="1 bytes follow"):
        decode(encode(SAMPLE) + b"\xc0")


def test_a_changed_byte_decodes_or_raises_bad_encoding() -> None:
    stored = encode(SAMPLE)
    survivors = 0
    for i, byte in enumerate(stored):
        for changed in {byte ^ 1, byte ^ 0x10, byte ^ 0x80, 0x00, 0x91, 0xC0, 0xFF} - {byte}:
            try:
                decode(stored[:i] + bytes([changed]) + stored[i + 1 :])
                survivors += 1
            except BadEncoding:
                pass
    assert survivors  # such as another digit of a number: that is what checksums are for


@given(st.binary(max_size=60))
def test_noise_decodes_or_raises_bad_encoding(noise: bytes) -> None:
    try:
        decode(noise)
    except BadEncoding:
        pass


parts = st.recursive(
    st.none()
    | st.integers(-2, 3)
    | st.sampled_from([2**40, 2**63 - 1, 0.5])
    | st.sampled_from(["", "int", "<f4", "float32", "qint8", "cpu", "a\0b", "_inductor"])
    | st.sampled_from([b"", b"\x01", bytes(8)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.just("k"), inner, max_size=1)
        | st.tuples(st.integers(0, 40), inner).map(
            lambda e: msgpack.ExtType(e[0], msgpack.packb(e[1]))
        )
    ),
    max_leaves=8,
)


@given(st.integers(0, 40), st.lists(parts, max_size=5))
def test_any_parts_decode_or_raise_bad_encoding(code: int, given_parts: list[Any]) -> None:
    stored = msgpack.packb(msgpack.ExtType(code, msgpack.packb(given_parts)))
    try:
        decode(stored)
    except BadEncoding:
        pass


@given(
    st.sampled_from([(16, "<f4"), (17, "<f4"), (32, "float32")]),
    st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**62, 2**63 - 1]), max_size=70),
    st.integers(0, 16),
)
def test_any_shape_decodes_or_raises_bad_encoding(
    kind: tuple[int, str], shape: list[int], num_bytes: int
) -> None:
    code, dtype = kind
    device = ["cpu"] if code == 32 else []
    payload = msgpack.packb([dtype, *device, shape, bytes(num_bytes)])
    try:
        assert decode(msgpack.packb(msgpack.ExtType(code, payload))).nbytes == num_bytes
    except BadEncoding:
        pass


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xc1",
        b"\xa1\xff",
        b"\x81\x01\x01",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\xd6\xff\x00\x00\x00\x00",
        msgpack.packb(msgpack.ExtType(99, b"\x90")),
        msgpack.packb(msgpack.ExtType(15, b"\x90")),
        msgpack.packb(msgpack.ExtType(3, b"\x01")),
        msgpack.packb(msgpack.ExtType(3, b"\x90\x90")),
        msgpack.packb(msgpack.ExtType(4, b"\x92\x01\x01")),
        msgpack.packb(msgpack.ExtType(4, b"\x91\x90")),
        msgpack.packb(msgpack.ExtType(6, b"\x91\x01")),
        msgpack.packb(msgpack.ExtType(6, b"\x94\x01\x01\x01\x01")),
        msgpack.packb(msgpack.ExtType(9, b"\x91\xa4eval")),
        msgpack.packb(msgpack.ExtType(10, b"\x92\x00\x01")),
        msgpack.packb(msgpack.ExtType(11, b"\x93\x00\x01\x00")),
        msgpack.packb(msgpack.ExtType(11, b"\x91\x03")),
        msgpack.packb(msgpack.ExtType(2, b"\x91\xa21j")),
        msgpack.packb(msgpack.ExtType(33, b"\x91\xc3")),
        msgpack.packb(msgpack.ExtType(35, b"\x91\xa5turbo")),
        msgpack.packb(msgpack.ExtType(32, msgpack.packb(["qint8", "cpu", [1], b"a"]))),
        msgpack.packb(msgpack.ExtType(32, msgpack.packb(["uint8", "cpu", [1] * 65, b"a"]))),
    ],
    ids=[
        "nothing",
        "reserved byte",
        "text that is no UTF-8",
        "int key of a map",
        "key twice",
        "timestamp",
        "unknown torch type",
        "unknown type",
        "parts in no array",
        "bytes after the parts",
        "member twice",
        "member without a hash",
        "key without a value",
        "key twice in parts",
        "unknown factory",
        "deque over its length",
        "range of step 0",
        "range of one part",
        "text as a complex number",
        "bool as a size",
        "unknown device",
        "quantised tensor",
        "65 dimensions",
    ],
)
def test_what_encode_never_writes_raises_bad_encoding(stored: bytes) -> None:
    with pytest.raises(BadEncoding):
        decode(stored)


@pytest.mark.parametrize(
    "stored",
    [
        b"\xdd\x00\x00\xff\xff" * 60 + bytes(1 << 16),
        b"\xdf\x00\x00\x7f\xff\xa1a" * 60 + bytes(1 << 16),
        b"\xdd\xff\xff\xff\xff" * 60,
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x03",
        msgpack.packb(msgpack.ExtType(17, msgpack.packb(["<f4", [2**30], b""]))),
        msgpack.packb(msgpack.ExtType(32, msgpack.packb(["float32", "cpu", [2**30], b""]))),
    ],
    ids=["arrays", "maps", "huge arrays", "bytes", "extension", "numpy", "tensor"],
)
def test_lengths_that_only_headers_claim_allocate_nothing(stored: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadEncoding):
            decode(stored)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(stored) + (1 << 17)
    finally:
        tracemalloc.stop()
