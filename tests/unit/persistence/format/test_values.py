"""Plain values come back with their types and bits."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.format.values import decode, encode, same

NUMERIC = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
NUMPY_DTYPES = [np.dtype(order + name) for order in "<>" for name in NUMERIC]
TORCH_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
TENSOR_DTYPES = [d for d in TORCH_DTYPES if not str(d).startswith("torch.q")]
NAN_BITS = [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001, 0x7FF80000DEADBEEF]
# Once a process, whoever makes the first tensor of that type.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def bits_of(number: float) -> bytes:
    return struct.pack("<d", number)


floats = st.floats() | st.integers(0, 2**64 - 1).map(double)
hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | floats
    | st.builds(complex, floats, floats)
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashables, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.sets(hashables, max_size=4)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5))
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=12,
)


@given(values)
def test_any_value_comes_back_the_same(value: Any) -> None:
    decoded = decode(encode(value))
    assert same(decoded, value)
    assert encode(decoded) == encode(value)


EXAMPLES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2**2000,
    -(2**2000),
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    1e-320,
    0.1,
    complex(-0.0, math.inf),
    "",
    "ünïcode \U0001f600",
    "not UTF-8: \udcff",
    b"",
    b"\x00\xff",
    [],
    [1, [2, [3.0]]],
    (),
    (1, ("a", [2])),
    {},
    {"b": 1, "a": 2},
    {1: "int", "1": "str", None: 0, (1, "t"): [], 2.5: {}, b"1": 1, frozenset({1}): 2},
    set(),
    {3},
    frozenset({(1, 2)}),
    OrderedDict(),
    OrderedDict([("z", 1), ("a", 2)]),
    OrderedDict([(2, 1), (1, 2)]),
    Counter(),
    Counter({30: 1, 80: 2}),
    deque(),
    deque([1, 2], maxlen=2),
    deque([3], maxlen=0),
    defaultdict(None, {1: 2}),
    defaultdict(int, {"a": 1}),
    defaultdict(float),
    defaultdict(list, {"a": [1]}),
    defaultdict(dict, {0: {"momentum": 0.9}}),
    range(5),
    range(0),
    range(10, -(2**70), -3),
    slice(None, 3, None),
    slice("a", None, 2.0),
    np.float32(0.1),
    np.float64(-0.0),
    np.bool_(True),
    np.uint64(2**64 - 1),
    np.complex64(1 - 2j),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda"),
    torch.device("cuda", 1),
]


def name_of(value: Any) -> str | None:
    """An id that is the same in every process; None leaves it to pytest."""
    return None if type(value) in (object, set, frozenset) else repr(value)[:40]


@pytest.mark.parametrize("value", EXAMPLES, ids=name_of)
def test_every_type_comes_back_as_itself(value: Any) -> None:
    decoded = decode(encode(value))
    assert type(decoded) is type(value)
    assert repr(decoded) == repr(value)
    assert same(decoded, value)


def test_same_tells_every_two_examples_apart() -> None:
    for i, a in enumerate(EXAMPLES):
        assert [j for j, b in enumerate(EXAMPLES) if same(a, b)] == [i]


def test_encodings_of_different_examples_differ() -> None:
    assert len({encode(value) for value in EXAMPLES}) == len(EXAMPLES)


@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
def test_the_bits_of_a_nan_come_back(bits: int) -> None:
    assert bits_of(decode(encode(double(bits)))) == bits_of(double(bits))
    assert [same(double(bits), double(other)) for other in NAN_BITS].count(True) == 1


def test_two_nans_in_a_set_stay_two() -> None:
    assert len(decode(encode({double(NAN_BITS[0]), double(NAN_BITS[0])}))) == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0, 0.0),
        (0, False),
        (0.0, -0.0),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1}, {True}),
        ({1}, frozenset({1})),
        (deque([1]), deque([1], maxlen=1)),
        (defaultdict(int), defaultdict(float)),
        (range(0), range(1, 1)),
        (np.float32(1), np.float64(1)),
        (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (np.array(0.0), np.array(-0.0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(1), np.zeros(1, np.float32)),
        (object(), object()),
    ],
    ids=name_of,
)
def test_same_tells_types_order_and_bits_apart(a: Any, b: Any) -> None:
    assert same(a, a)
    assert not same(a, b)
    assert not same([a], [b])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=lambda d: d.str)
def test_arrays_of_every_dtype_and_shape_come_back(dtype: Any, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(0).integers(0, 2, dtype.itemsize * math.prod(shape), np.uint8)
    array = np.ndarray(shape, dtype, raw.tobytes())
    decoded = decode(encode(array))
    assert decoded.dtype.str == array.dtype.str
    assert decoded.shape == shape
    assert decoded.tobytes() == array.tobytes()
    assert decoded.flags.writeable
    assert same(decoded, array)


@pytest.mark.parametrize("name", NUMERIC)
def test_scalars_of_every_dtype_come_back(name: str) -> None:
    scalar = np.ones((), name)[()]
    decoded = decode(encode(scalar))
    assert type(decoded) is type(scalar)
    assert decoded.tobytes() == scalar.tobytes()


@pytest.mark.cases(201)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    num_bytes = dtype.itemsize * math.prod(shape)
    raw = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    decoded = decode(encode(tensor))
    assert type(decoded) is torch.Tensor
    assert decoded.dtype is dtype
    assert decoded.shape == shape
    assert torch.equal(decoded.contiguous().view(-1).view(torch.uint8), raw)
    assert same(decoded, tensor)
    assert decoded.is_leaf
    assert decoded._base is None
    assert decoded.untyped_storage().nbytes() == num_bytes


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_comes_back(dtype: torch.dtype) -> None:
    assert decode(encode(dtype)) is dtype


def test_tensors_that_are_views_come_back_as_what_they_show() -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    pair = torch.tensor([1 + 2j, 3 - 4j])
    for view in (grid.T, grid[1:, ::2], pair.conj(), pair.conj().imag, grid[0].expand(5, 4)):
        assert torch.equal(decode(encode(view)), view)
        assert same(decode(encode(view)), view)


def test_a_tensor_on_the_graph_comes_back_without_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert not decode(encode(weight * 2)).requires_grad


def test_decoded_memory_is_shared_with_nothing() -> None:
    stored = bytearray(encode([torch.zeros(4), np.zeros(4)]))
    tensor, array = decode(memoryview(stored))
    again = decode(bytes(stored))
    stored[:] = b"\xff" * len(stored)
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [1, 1, 1, 1]
    assert again[0].tolist() == again[1].tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_another_device_comes_back_on_the_cpu_and_is_the_same() -> None:
    rate = torch.tensor(0.1, device="cuda:0")
    decoded = decode(encode(rate))
    assert decoded.device.type == "cpu"
    assert same(decoded, rate)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"lr": 0.5, "n": [1, None, True]}, "82a26c72cb3fe0000000000000a16e9301c0c3"),
        ([2**64 - 1, -(2**63)], "92cfffffffffffffffffd38000000000000000"),
        (2**64, "c70c0191c409000000000000000001"),
        (1 - 2j, "c7130292cb3ff0000000000000cbc000000000000000"),
        ((1, "a"), "d6039201a161"),
        ({"pear", "fig", "apple"}, "d80493a3666967a470656172a56170706c65"),
        (frozenset({(1,)}), "c7050591d5039101"),
        ({1: "a"}, "d6069201a161"),
        (OrderedDict(a=1), "d60792a16101"),
        (Counter({30: 2}), "c70308921e02"),
        (defaultdict(dict), "c7060991a464696374"),
        (deque([1], maxlen=3), "c7030a920301"),
        (range(1, 9, 2), "d60b93010902"),
        (slice(None, 2), "d60c93c002c0"),
        (np.int16(5), "c70a1093a33c693290c4020500"),
        (np.array([1, 2], ">u2"), "c70d1193a33e75329102c40400010002"),
        (
            torch.tensor([1.0], dtype=torch.bfloat16),
            "c7142094a862666c6f61743136a36370759101c402803f",
        ),
        (torch.Size([2, 3]), "c70321920203"),
        (torch.float16, "c7092291a7666c6f61743136"),
        (torch.device("cuda:1"), "d72391a6637564613a31"),
    ],
    ids=lambda v: "" if type(v) is str else name_of(v),
)
def test_the_format_is_pinned(value: Any, stored: str) -> None:
    assert encode(value).hex() == stored
    assert same(decode(bytes.fromhex(stored)), value)


def test_values_are_encoded_and_decoded_without_torch() -> None:
    code = """
import sys
from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import decode, encode, same
import numpy as np
value = {"a": [1, (2, {3})], "b": np.arange(3)}
assert same(decode(encode(value)), value)
try:
    encode(object())
except ConfigError:
    assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
