"""Encode plain Python values with their exact types and without pickle, and decode them.

An encoding is MessagePack. None, bool, float, str, bytes, list, int of up to 64 bits and dict with
str keys are MessagePack types. Every other type is an extension whose payload is an array of parts
(`StoredType`). The same value has the same bytes in every process. Two references to one object are
decoded as two objects. torch is imported only for torch objects, so the writer process can use this
module.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgpack
import numpy as np

from lowdiff.core.memory import byte_view, in_memory_order
from lowdiff.errors import ConfigError
from lowdiff.types import ItemRef

if TYPE_CHECKING:
    import torch

#: The first of the codes of torch's types.
_TENSOR_CODE = 32
_MAX_DIMS = 64  # NumPy's own limit
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict}
_NUMERIC = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_NUMPY_DTYPES = {d.str: d for order in "<>" for d in (np.dtype(order + n) for n in _NUMERIC)}

_Labelled: TypeAlias = Iterable[tuple[object, object]]


class BadEncoding(ValueError):
    """Bytes that are not an encoding; callers that know the file raise ``DamagedFile`` instead."""


@dataclass(frozen=True, slots=True)
class StoredType:
    """Conversion between values of one type and their parts.

    Attributes:
        code: MessagePack extension code. Part of the file format: never reused.
        split: Returns labels, for messages, and parts of a value; None if it cannot be stored.
        join: Returns the value of some parts. The parts may be anything: ``join`` raises one of
            `_JOIN_FAILURES` if they fit no value.
        types: Types of the parts, or None for any number of parts of any type.
        ordered: Whether the order of the parts matters.
    """

    code: int
    split: Callable[[Any], _Labelled | None]
    join: Callable[[list[Any]], Any]
    types: tuple[type, ...] | None = None
    ordered: bool = True


#: Errors that ``StoredType.join`` raises.
_JOIN_FAILURES = (TypeError, ValueError, LookupError, OverflowError, RuntimeError)


def _pairs(mapping: dict[Any, Any]) -> Iterator[tuple[object, object]]:
    for key, value in mapping.items():
        yield key, key
        yield key, value


def _filled(mapping: Any, parts: list[Any]) -> Any:
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        if key in mapping:
            raise BadEncoding("a key comes twice")
        mapping[key] = value
    return mapping


def _split_defaultdict(value: defaultdict[Any, Any]) -> _Labelled | None:
    factory = value.default_factory
    name = next((n for n, f in _FACTORIES.items() if f is factory), None)
    if name is None and factory is not None:
        return None
    return [("default_factory", name), *_pairs(value)]


def _join_set(parts: list[Any]) -> set[Any]:
    members = set(parts)
    if len(members) != len(parts):
        raise BadEncoding("a member of a set comes twice")
    return members


def _join_deque(parts: list[Any]) -> deque[Any]:
    joined = deque(parts[1:], parts[0])
    if len(joined) != len(parts) - 1:
        raise BadEncoding(f"{len(parts) - 1} items in a deque of {parts[0]}")
    return joined


def _split_bounds(value: range | slice) -> _Labelled:
    return [("start", value.start), ("stop", value.stop), ("step", value.step)]


def _split_array(array: Any) -> _Labelled | None:
    if array.dtype.str not in _NUMPY_DTYPES:
        return None
    return [("dtype", array.dtype.str), ("shape", list(array.shape)), ("data", array.tobytes())]


def _join_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    dtype = _NUMPY_DTYPES[parts[0]]
    _check_shape(parts[1], dtype.itemsize, parts[2])
    return np.ndarray(tuple(parts[1]), dtype, parts[2]).copy()


def _check_shape(shape: list[Any], item_bytes: int, data: bytes) -> None:
    # Check the number of dimensions first, because multiplying a million large sizes takes too
    # long.
    good = len(shape) <= _MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
    if not good or math.prod(shape) * item_bytes != len(data):
        raise BadEncoding(f"{len(data)} bytes of data do not fill the shape")


_INT = StoredType(
    1,
    lambda i: [("", i.to_bytes(i.bit_length() // 8 + 1, "little", signed=True))],
    lambda parts: int.from_bytes(parts[0], "little", signed=True),
    (bytes,),
)
_ARRAY_PARTS = (str, list, bytes)
_NUMPY_SCALAR = StoredType(16, _split_array, lambda parts: _join_array(parts)[()], _ARRAY_PARTS)
_PLAIN_TYPES: dict[type, StoredType] = {
    int: _INT,
    complex: StoredType(
        2,
        lambda c: [("real", c.real), ("imag", c.imag)],
        lambda parts: complex(*parts),
        (float, float),
    ),
    tuple: StoredType(3, enumerate, tuple),
    set: StoredType(4, enumerate, _join_set, ordered=False),
    frozenset: StoredType(5, enumerate, lambda parts: frozenset(_join_set(parts)), ordered=False),
    dict: StoredType(6, _pairs, lambda parts: _filled({}, parts)),
    OrderedDict: StoredType(7, _pairs, lambda parts: _filled(OrderedDict(), parts)),
    Counter: StoredType(8, _pairs, lambda parts: _filled(Counter(), parts)),
    defaultdict: StoredType(
        9,
        _split_defaultdict,
        lambda parts: _filled(
            defaultdict(None if parts[0] is None else _FACTORIES[parts[0]]), parts[1:]
        ),
    ),
    deque: StoredType(10, lambda d: [("maxlen", d.maxlen), *enumerate(d)], _join_deque),
    range: StoredType(11, _split_bounds, lambda parts: range(*parts), (int, int, int)),
    slice: StoredType(12, _split_bounds, lambda parts: slice(parts[0], parts[1], parts[2])),
    **{dtype.type: _NUMPY_SCALAR for dtype in _NUMPY_DTYPES.values()},
    np.ndarray: StoredType(17, _split_array, _join_array, _ARRAY_PARTS),
    ItemRef: StoredType(18, lambda r: [("name", r.name)], lambda parts: ItemRef(*parts), (str,)),
}


@lru_cache(maxsize=1)
def _torch_types() -> dict[type, StoredType]:
    import torch

    from lowdiff.core import devices

    dtypes = {
        str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype
    }
    names = {dtype: name for name, dtype in dtypes.items()}

    def split_tensor(tensor: torch.Tensor) -> _Labelled | None:
        dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        if not dense or tensor.is_quantized or tensor.dim() > _MAX_DIMS:
            return None
        host = tensor
        is_as_in_memory = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not (
            is_as_in_memory and devices.may_look(tensor)
        ):  # calls that most tensors do not need
            host = in_memory_order(tensor)
        return [
            ("dtype", names[tensor.dtype]),
            ("device", devices.place_of(tensor)),
            ("shape", list(tensor.shape)),
            ("data", bytes(byte_view(host))),
        ]

    def join_tensor(parts: list[Any]) -> torch.Tensor:
        name, place, shape, data = parts
        _check_shape(shape, dtypes[name].itemsize, data)
        if name.startswith("q"):
            raise BadEncoding("a quantised tensor, without its scale")
        flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        byte_view(flat)[:] = data
        own = flat.view(dtypes[name]).view(shape).detach()  # detached, so not a view for autograd
        return devices.belonging(own, place)

    def join_size(parts: list[Any]) -> torch.Size:
        if any(type(n) is not int for n in parts):
            raise BadEncoding("a size that is no int")
        return torch.Size(parts)

    return {
        torch.Tensor: StoredType(_TENSOR_CODE, split_tensor, join_tensor, (str, str, list, bytes)),
        torch.Size: StoredType(33, enumerate, join_size),
        torch.dtype: StoredType(
            34, lambda d: [("", names[d])], lambda parts: dtypes[parts[0]], (str,)
        ),
        torch.device: StoredType(
            35, lambda d: [("", str(d))], lambda parts: torch.device(*parts), (str,)
        ),
    }


def stored_type(kind: type) -> StoredType | None:
    """Return how values of a type are stored; None if they cannot be stored."""
    # While torch is not imported, no value can be a torch object.
    return _PLAIN_TYPES.get(kind) or ("torch" in sys.modules and _torch_types().get(kind)) or None


def stored_type_of_code(code: int) -> StoredType | None:
    """Return how values of an extension code are stored; None for an unknown code."""
    return _stored_types_by_code(with_torch=code >= _TENSOR_CODE).get(code)


@lru_cache(maxsize=2)
def _stored_types_by_code(with_torch: bool) -> dict[int, StoredType]:
    types = {**_PLAIN_TYPES, **_torch_types()} if with_torch else _PLAIN_TYPES
    return {stored.code: stored for stored in types.values()}


_MAX_DEPTH = 64  # far below Python's recursion limit, far above any state_dict

_LEAVES = frozenset({type(None), bool, float, str, bytes})

#: Types whose values are the same where they are equal; floats are not, because of the zeros.
_EQUAL = frozenset({type(None), bool, int, str, bytes})

_Where: TypeAlias = "tuple[_Where | None, object]"  # labels from a part up to the root


def encode(value: object, name: str = "value") -> bytes:
    """Encode a value of plain types; tensors are copied to the CPU, without ``requires_grad``.

    Args:
        value: Anything built from None, bool, int, float, complex, str, bytes, list, tuple, dict,
            set, frozenset, ``OrderedDict``, ``Counter``, ``defaultdict`` of a builtin, deque,
            range, slice, numeric NumPy scalars and arrays, dense tensors, ``torch.Size``,
            ``torch.dtype`` and ``torch.device``. Subclasses are refused, because they would be
            decoded as their base class.
        name: The user's name of the value, for messages.

    Raises:
        ConfigError: If a part is of another type; the message names it.
    """
    try:
        return _packed(value, (None, name), 0)
    except ConfigError:
        raise
    except (ValueError, OverflowError) as e:
        raise ConfigError(f"{name} cannot be stored: {e}; no part may reach 4 GiB") from e


def decode(data: bytes | memoryview) -> Any:
    """Rebuild the value; never executes anything that the bytes could choose.

    Memory is bounded by the length of ``data`` times a constant. Tensors and arrays own their
    memory and are writable; tensors are on the CPU, and `devices.place_of` tells where they were.

    Args:
        data: Result of :func:`encode`, or arbitrary bytes.

    Raises:
        BadEncoding: If ``data`` is not exactly one encoding.
    """
    reader = _Reader(data)
    value = reader.read(0)
    reader.expect_end()
    return value


def same(a: object, b: object) -> bool:
    """Return whether two encodable values are equal down to types, order and bits.

    NaN equals NaN of the same bits, 0.0 does not equal -0.0, 1 does not equal True. Tensors on
    different devices are equal if their bits are. A value that cannot be encoded equals only
    itself.
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if a is b or (kind in _EQUAL and a == b):
        return True
    if kind is list or kind is tuple:
        left, right = cast(Sequence[object], a), cast(Sequence[object], b)
        return len(left) == len(right) and all(map(same, left, right))
    if kind is dict:
        old, new = cast(dict[object, object], a), cast(dict[object, object], b)
        if all(type(key) is str for key in (*old, *new)):
            pairs = zip(old.values(), new.values(), strict=True)  # most are the very same objects
            return [*old] == [*new] and all(x is y or same(x, y) for x, y in pairs)
    return bool(_exact(a) == _exact(b))


def _packed(value: object, where: _Where, depth: int) -> bytes:
    packer = _packer()
    _pack(packer, value, where, depth)
    return bytes(packer.bytes())


def _packer() -> Any:
    # surrogatepass: Python represents file names that are not UTF-8 by lone surrogates.
    return msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")


def _pack(packer: Any, value: Any, where: _Where, depth: int) -> None:
    kind = type(value)
    if kind in _LEAVES or (kind is int and -(1 << 63) <= value < 1 << 64):
        packer.pack(value)
    elif depth == _MAX_DEPTH:
        raise ConfigError(
            f"{_path(where)} is nested more than {_MAX_DEPTH} levels deep and cannot be stored; "
            "store something flatter, and nothing that contains itself"
        )
    elif kind is list:
        packer.pack_array_header(len(value))
        for i, item in enumerate(value):
            _pack(packer, item, (where, i), depth + 1)
    elif kind is dict and all(type(key) is str for key in value):
        packer.pack_map_header(len(value))
        for key, item in value.items():
            packer.pack(key)
            _pack(packer, item, (where, key), depth + 1)
    else:
        _pack_parts(packer, value, where, depth)


def _pack_parts(packer: Any, value: Any, where: _Where, depth: int) -> None:
    conversion = stored_type(type(value))
    parts = None if conversion is None else conversion.split(value)
    if conversion is None or parts is None:
        raise _refusal(value, where)
    parts = list(parts)
    nested = _packer()
    nested.pack_array_header(len(parts))
    if conversion.ordered:
        for label, part in parts:
            _pack(nested, part, (where, label), depth + 1)
        packer.pack_ext_type(conversion.code, nested.bytes())
    else:
        # The order of a set of str differs from process to process, so members are sorted.
        members = sorted(_packed(part, (where, part), depth + 1) for _, part in parts)
        packer.pack_ext_type(conversion.code, nested.bytes() + b"".join(members))


def _refusal(value: object, where: _Where) -> ConfigError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    facts = [a for a in ("dtype", "layout", "device", "default_factory") if hasattr(value, a)]
    if facts:
        name += f" ({', '.join(f'{fact} {getattr(value, fact)}' for fact in facts)})"
    base = next((b for b in kind.__mro__[1:] if b in _LEAVES or b is list or stored_type(b)), None)
    if base is None:
        advice = (
            "give plain values (numbers, str, bytes, containers, numeric arrays, dense tensors)"
        )
    elif hasattr(value, "to_local"):  # a sharded tensor
        advice = "give this rank's part of it, value.to_local()"
    else:
        advice = f"convert it to a plain {base.__name__}"
    return ConfigError(
        f"{_path(where)}: {name} cannot be stored without pickle; {advice}, or leave it out of "
        "state_dict()"
    )


def _path(where: _Where) -> str:
    labels: list[object] = []
    rest: _Where | None = where
    while rest is not None:
        rest, label = rest
        labels.append(label)
    return f"{labels.pop()}{''.join(f'[{_short(label)}]' for label in reversed(labels))}"


def _short(label: object) -> str:
    if type(label) is str or type(label) is bytes:
        return repr(label[:40])
    if type(label) is int and label.bit_length() <= 64:  # repr() of a huge int raises an error
        return repr(label)
    return repr(label) if type(label) in _LEAVES else f"<{type(label).__qualname__}>"


class _Reader:
    """Reads one array or value of MessagePack, item by item.

    ``msgpack.unpackb`` would allocate any length that nested headers claim, and would drop
    duplicate keys.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._unpacker = msgpack.Unpacker(
            None, raw=False, unicode_errors="surrogatepass", max_buffer_size=max(len(data), 1)
        )
        self._unpacker.feed(self._data)

    def read(self, depth: int) -> Any:
        kind, value = self._next()
        if kind in _LEAVES or kind is int:
            return value
        if depth == _MAX_DEPTH:
            raise BadEncoding(f"nested more than {_MAX_DEPTH} levels deep")
        if kind is list:
            return [self.read(depth + 1) for _ in range(value)]
        if kind is dict:
            return self._read_map(value, depth + 1)
        if kind is not msgpack.ExtType:
            raise BadEncoding(f"a {kind.__name__}, which no encoding holds")
        return self._joined(value.code, _Reader(value.data).read_parts(depth + 1))

    def read_parts(self, depth: int) -> list[Any]:
        kind, num_parts = self._next()
        if kind is not list:
            raise BadEncoding(f"a {kind.__name__} where parts belong")
        parts = [self.read(depth) for _ in range(num_parts)]
        self.expect_end()
        return parts

    def expect_end(self) -> None:
        left = len(self._data) - self._unpacker.tell()
        if left:
            raise BadEncoding(f"{left} bytes follow the value")

    def _next(self) -> tuple[type, Any]:
        """Return the next object's type, and its value, or its length if it is a list or a dict."""
        unpacker = self._unpacker
        try:
            first = self._data[unpacker.tell()]
            if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
                return list, unpacker.read_array_header()
            if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
                return dict, unpacker.read_map_header()
            value = unpacker.unpack()
        except (IndexError, ValueError, msgpack.UnpackException) as e:
            raise BadEncoding(f"no value at byte {unpacker.tell()}: {e}") from e
        return type(value), value

    def _read_map(self, num_items: int, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(num_items):
            kind, key = self._next()
            if kind is not str or key in result:
                raise BadEncoding("a key that is no str, or comes twice")
            result[key] = self.read(depth)
        return result

    def _joined(self, code: int, parts: list[Any]) -> Any:
        conversion = stored_type_of_code(code)
        if conversion is None:
            raise BadEncoding(f"unknown type {code}")
        if conversion.types is not None and tuple(map(type, parts)) != conversion.types:
            raise BadEncoding(f"wrong parts for a value of type {code}")
        try:
            return conversion.join(parts)
        except BadEncoding:
            raise
        except _JOIN_FAILURES as e:
            raise BadEncoding(f"parts that make no value of type {code}: {e}") from e


def _exact(value: Any) -> Hashable:
    """Return a hashable stand-in; stand-ins are equal exactly for equal values."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind in _LEAVES or kind is int:
        return kind, value
    if kind is list:
        return kind, tuple(map(_exact, value))
    conversion = stored_type(kind)
    parts = None if conversion is None else conversion.split(value)
    if conversion is None or parts is None:
        return kind, id(value)
    if conversion.code == _TENSOR_CODE:
        parts = [(label, part) for label, part in parts if label != "device"]
    exact = tuple(_exact(part) for _, part in parts)
    return kind, exact if conversion.ordered else frozenset(Counter(exact).items())
