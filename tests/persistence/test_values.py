"""Plain values come back with their types and bits; other objects and damaged bytes are refused."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lowdiff.errors import ConfigError
from lowdiff.persistence.forms import BadEncoding
from lowdiff.persistence.values import decode, encode, same

NUMERIC = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
NUMPY_DTYPES = [np.dtype(order + name) for order in "<>" for name in NUMERIC]
TORCH_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
TENSOR_DTYPES = [d for d in TORCH_DTYPES if not str(d).startswith("torch.q")]
NAN_BITS = [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001, 0x7FF80000DEADBEEF]
# Once a process, whoever makes the first tensor of that type.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class Point(NamedTuple):
    x: int
    y: int


class Colour(IntEnum):
    RED = 1


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


def test_the_caller_places_each_tensor_by_the_device_it_was_on() -> None:
    seen = []

    def place(tensor: torch.Tensor, device: str) -> torch.Tensor:
        seen.append(device)
        return tensor + 1

    stored = encode({"lr": torch.tensor(0.5), "nested": (torch.zeros(2),)})
    decoded = decode(stored.replace(b"\xa3cpu", b"\xa3mps", 1), place=place)
    assert seen == ["mps", "cpu"]
    assert same(decoded, {"lr": torch.tensor(1.5), "nested": (torch.ones(2),)})


def test_an_error_of_the_caller_in_placing_is_not_taken_for_damage() -> None:
    def place(tensor: torch.Tensor, device: str) -> torch.Tensor:
        raise ValueError(f"no {device} here")

    with pytest.raises(ValueError, match="no cpu here") as caught:
        decode(encode((torch.zeros(1),)), place=place)
    assert type(caught.value) is ValueError


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
        (np.longdouble(1), r"longdouble"),
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


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def chained(o: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    warmup = lr_scheduler.LinearLR(o, total_iters=3)
    rest = [lr_scheduler.MultiStepLR(o, [2, 4, 4]), lr_scheduler.CosineAnnealingLR(o, 5)]
    return lr_scheduler.SequentialLR(o, [warmup, *rest], milestones=[3, 8])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5, 9]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": chained,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_restored_from_bytes_goes_on_as_if_never_stopped(name: str) -> None:
    def advance(o: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
        rates = []
        for step in range(num_steps):
            o.step()
            scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
            rates.append(o.param_groups[0]["lr"])
        return rates

    live = optimizer()
    live_scheduler = SCHEDULERS[name](live)
    advance(live, live_scheduler, 4)
    state = live_scheduler.state_dict(), live.state_dict()
    stored = encode(state)
    assert same(decode(stored), state)

    resumed = optimizer()
    resumed_scheduler = SCHEDULERS[name](resumed)
    scheduler_state, optimizer_state = decode(stored)
    resumed.load_state_dict(optimizer_state)
    resumed_scheduler.load_state_dict(scheduler_state)
    assert advance(resumed, resumed_scheduler, 20) == advance(live, live_scheduler, 20)


def test_the_state_of_an_optimizer_with_a_tensor_rate_comes_back() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=False, foreach=False)
    weight.sum().backward()
    adam.step()
    assert same(decode(encode(adam.state_dict())), adam.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_another_device_is_the_same_and_can_be_moved_back() -> None:
    rate = torch.tensor(0.1, device="cuda:0")
    decoded = decode(encode(rate))
    assert decoded.device.type == "cpu"
    assert same(decoded, rate)
    assert decode(encode(rate), place=lambda t, device: t.to(device)).device == rate.device


def test_the_states_of_random_generators_come_back() -> None:
    generator = np.random.default_rng(0)
    random_numbers = random.Random(0)
    states = (random_numbers.getstate(), torch.get_rng_state(), generator.bit_generator.state)
    decoded = decode(encode(states))
    expected = random_numbers.random(), generator.random()
    random_numbers.setstate(decoded[0])
    generator.bit_generator.state = decoded[2]
    assert (random_numbers.random(), generator.random()) == expected
    assert torch.equal(decoded[1], states[1])


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
from lowdiff.persistence.values import decode, encode, same
import numpy as np
value = {"a": [1, (2, {3})], "b": np.arange(3)}
assert same(decode(encode(value)), value)
try:
    encode(object())
except ConfigError:
    assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
