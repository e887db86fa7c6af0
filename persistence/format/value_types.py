"""Types that can be stored, the parts of each type, and their extension codes in the file format.

torch is imported only for torch objects, so the writer process can use this module.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lowdiff.types import ItemRef

if TYPE_CHECKING:
    import torch

TENSOR_CODE = 32
_FIRST_TORCH_CODE = 32
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
            `JOIN_FAILURES` if they fit no value.
        types: Types of the parts, or None for any number of parts of any type.
        ordered: Whether the order of the parts matters.
    """

    code: int
    split: Callable[[Any], _Labelled | None]
    join: Callable[[list[Any]], Any]
    types: tuple[type, ...] | None = None
    ordered: bool = True


#: Errors that ``StoredType.join`` raises.
JOIN_FAILURES = (TypeError, ValueError, LookupError, OverflowError, RuntimeError)


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

    dtypes = {
        str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype
    }
    names = {dtype: name for name, dtype in dtypes.items()}

    def split_tensor(tensor: torch.Tensor) -> _Labelled | None:
        dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        if not dense or tensor.is_quantized or tensor.dim() > _MAX_DIMS:
            return None
        cpu = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return [
            ("dtype", names[tensor.dtype]),
            ("device", str(tensor.device)),
            ("shape", list(tensor.shape)),
            ("data", cpu.view(-1).view(torch.uint8).numpy().tobytes()),
        ]

    def join_tensor(parts: list[Any]) -> torch.Tensor:
        name, _, shape, data = parts
        _check_shape(shape, dtypes[name].itemsize, data)
        if name.startswith("q"):
            raise BadEncoding("a quantised tensor, without its scale")
        flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        flat.numpy()[:] = np.frombuffer(data, np.uint8)
        return flat.view(dtypes[name]).view(shape).detach()  # detached, so not a view for autograd

    def join_size(parts: list[Any]) -> torch.Size:
        if any(type(n) is not int for n in parts):
            raise BadEncoding("a size that is no int")
        return torch.Size(parts)

    return {
        torch.Tensor: StoredType(TENSOR_CODE, split_tensor, join_tensor, (str, str, list, bytes)),
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
    return _stored_types_by_code(with_torch=code >= _FIRST_TORCH_CODE).get(code)


@lru_cache(maxsize=2)
def _stored_types_by_code(with_torch: bool) -> dict[int, StoredType]:
    types = {**_PLAIN_TYPES, **_torch_types()} if with_torch else _PLAIN_TYPES
    return {stored.code: stored for stored in types.values()}
