"""Plain Python values as bytes and back, with their exact types and without pickle.

An encoding is MessagePack. None, bool, float, str, bytes, list, int of up to 64 bits and dict with
str keys are its own types; every other type is an extension whose payload is an array of parts
(``_Form``). The same value has the same bytes in every process. Two references to one object come
back as two objects.

torch is imported only when one of its objects is met, so the writer process can use this module.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack
import numpy as np

from lowdiff.errors import ConfigError
from lowdiff.types import ItemRef

if TYPE_CHECKING:
    import torch

    #: Moves a decoded CPU tensor to the device whose name was recorded, or leaves it.
    Place: TypeAlias = Callable[[torch.Tensor, str], torch.Tensor]

_MAX_DEPTH = 64  # far below Python's recursion limit, far above any state_dict
_MAX_DIMS = 64  # NumPy's own limit
_FIRST_TORCH_CODE = 32
_TENSOR_CODE = 32

_LEAVES = frozenset({type(None), bool, float, str, bytes})
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict}
_NUMERIC = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_NUMPY_DTYPES = {d.str: d for order in "<>" for d in (np.dtype(order + n) for n in _NUMERIC)}

_Where: TypeAlias = "tuple[_Where | None, object]"  # the labels from a part up to the root
_Labelled: TypeAlias = Iterable[tuple[object, object]]


class BadEncoding(ValueError):
    """Bytes are not an encoding; whoever knows the file turns this into ``DamagedFile``."""


def encode(value: object, name: str = "value") -> bytes:
    """Encode a value of plain types; tensors are copied to the CPU, without ``requires_grad``.

    Args:
        value: Anything built from None, bool, int, float, complex, str, bytes, list, tuple, dict,
            set, frozenset, ``OrderedDict``, ``Counter``, ``defaultdict`` of a builtin, deque,
            range, slice, numeric NumPy scalars and arrays, dense tensors, ``torch.Size``,
            ``torch.dtype`` and ``torch.device``. Subclasses are refused: they would come back
            as their base.
        name: What the user calls the value, for messages.

    Raises:
        ConfigError: If a part is of another type; the message says which.
    """
    try:
        return _packed(value, (None, name), 0)
    except ConfigError:
        raise
    except (ValueError, OverflowError) as e:
        raise ConfigError(f"{name} cannot be stored: {e}; no part may reach 4 GiB") from e


def decode(data: bytes | memoryview, *, place: Place | None = None) -> Any:
    """Rebuild the value; executes nothing that the bytes could choose.

    Memory is bounded by the length of ``data`` times a constant. Tensors and arrays own their
    memory and are writable.

    Args:
        data: What :func:`encode` returned, or anything else.
        place: Called with every tensor, on the CPU, and the name of the device it was on; what
            it returns takes the tensor's place. By default tensors stay on the CPU.

    Raises:
        BadEncoding: If ``data`` is not exactly one encoding.
    """
    reader = _Reader(data, place)
    value = reader.read(0)
    reader.expect_end()
    return value


def same(a: object, b: object) -> bool:
    """Whether two encodable values are equal down to types, order and bits.

    NaN equals NaN of the same bits, 0.0 does not equal -0.0, 1 does not equal True. Tensors on
    different devices are the same if their bits are. What cannot be encoded is the same only as
    itself.
    """
    return bool(_exact(a) == _exact(b))


@dataclass(frozen=True, slots=True)
class _Form:
    """How values of one type become parts, and parts a value.

    Attributes:
        code: MessagePack extension code. Part of the file format: never reused.
        split: Labels, for messages, and parts of a value; None if it cannot be stored.
        join: The value of given parts. They may be anything: it raises one of
            ``_JOIN_FAILURES`` if they fit no value.
        types: Types of the parts, or None if any number of any type is good.
        ordered: Whether the order of the parts means something.
    """

    code: int
    split: Callable[[Any], _Labelled | None]
    join: Callable[[list[Any]], Any]
    types: tuple[type, ...] | None = None
    ordered: bool = True


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
    # The number of dimensions first: the product of a million large ones takes for ever.
    good = len(shape) <= _MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
    if not good or math.prod(shape) * item_bytes != len(data):
        raise BadEncoding(f"{len(data)} bytes of data do not fill the shape")


_INT = _Form(
    1,
    lambda i: [("", i.to_bytes(i.bit_length() // 8 + 1, "little", signed=True))],
    lambda parts: int.from_bytes(parts[0], "little", signed=True),
    (bytes,),
)
_ARRAY_PARTS = (str, list, bytes)
_NUMPY_SCALAR = _Form(16, _split_array, lambda parts: _join_array(parts)[()], _ARRAY_PARTS)
_FORMS: dict[type, _Form] = {
    int: _INT,
    complex: _Form(
        2,
        lambda c: [("real", c.real), ("imag", c.imag)],
        lambda parts: complex(*parts),
        (float, float),
    ),
    tuple: _Form(3, enumerate, tuple),
    set: _Form(4, enumerate, _join_set, ordered=False),
    frozenset: _Form(5, enumerate, lambda parts: frozenset(_join_set(parts)), ordered=False),
    dict: _Form(6, _pairs, lambda parts: _filled({}, parts)),
    OrderedDict: _Form(7, _pairs, lambda parts: _filled(OrderedDict(), parts)),
    Counter: _Form(8, _pairs, lambda parts: _filled(Counter(), parts)),
    defaultdict: _Form(
        9,
        _split_defaultdict,
        lambda parts: _filled(
            defaultdict(None if parts[0] is None else _FACTORIES[parts[0]]), parts[1:]
        ),
    ),
    deque: _Form(10, lambda d: [("maxlen", d.maxlen), *enumerate(d)], _join_deque),
    range: _Form(11, _split_bounds, lambda parts: range(*parts), (int, int, int)),
    slice: _Form(12, _split_bounds, lambda parts: slice(parts[0], parts[1], parts[2])),
    **{dtype.type: _NUMPY_SCALAR for dtype in _NUMPY_DTYPES.values()},
    np.ndarray: _Form(17, _split_array, _join_array, _ARRAY_PARTS),
    ItemRef: _Form(18, lambda r: [("name", r.name)], lambda parts: ItemRef(*parts), (str,)),
}


@lru_cache(maxsize=1)
def _torch_forms() -> dict[type, _Form]:
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
        return flat.view(dtypes[name]).view(shape).detach()  # detached: for autograd not a view

    def join_size(parts: list[Any]) -> torch.Size:
        if any(type(n) is not int for n in parts):
            raise BadEncoding("a size that is no int")
        return torch.Size(parts)

    return {
        torch.Tensor: _Form(_TENSOR_CODE, split_tensor, join_tensor, (str, str, list, bytes)),
        torch.Size: _Form(33, enumerate, join_size),
        torch.dtype: _Form(34, lambda d: [("", names[d])], lambda parts: dtypes[parts[0]], (str,)),
        torch.device: _Form(
            35, lambda d: [("", str(d))], lambda parts: torch.device(*parts), (str,)
        ),
    }


def _form_of(kind: type) -> _Form | None:
    # While torch is not imported, no value can be one of its objects.
    return _FORMS.get(kind) or ("torch" in sys.modules and _torch_forms().get(kind)) or None


@lru_cache(maxsize=2)
def _forms_by_code(with_torch: bool) -> dict[int, _Form]:
    forms = {**_FORMS, **_torch_forms()} if with_torch else _FORMS
    return {form.code: form for form in forms.values()}


def _packed(value: object, where: _Where, depth: int) -> bytes:
    packer = _packer()
    _pack(packer, value, where, depth)
    return bytes(packer.bytes())


def _packer() -> Any:
    # surrogatepass: file names that are not UTF-8 reach Python as lone surrogates.
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
        _pack_form(packer, value, where, depth)


def _pack_form(packer: Any, value: Any, where: _Where, depth: int) -> None:
    form = _form_of(type(value))
    parts = None if form is None else form.split(value)
    if form is None or parts is None:
        raise _refusal(value, where)
    parts = list(parts)
    nested = _packer()
    nested.pack_array_header(len(parts))
    if form.ordered:
        for label, part in parts:
            _pack(nested, part, (where, label), depth + 1)
        packer.pack_ext_type(form.code, nested.bytes())
    else:
        # The order of a set of str differs from process to process.
        members = sorted(_packed(part, (where, part), depth + 1) for _, part in parts)
        packer.pack_ext_type(form.code, nested.bytes() + b"".join(members))


def _refusal(value: object, where: _Where) -> ConfigError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    facts = [a for a in ("dtype", "layout", "device", "default_factory") if hasattr(value, a)]
    if facts:
        name += f" ({', '.join(f'{fact} {getattr(value, fact)}' for fact in facts)})"
    base = next((b for b in kind.__mro__[1:] if b in _LEAVES or b is list or _form_of(b)), None)
    advice = (
        "give plain values (numbers, str, bytes, containers, numeric arrays, dense tensors)"
        if base is None
        else f"convert it to a plain {base.__name__}"
    )
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
    if type(label) is int and label.bit_length() <= 64:  # the repr of a huge int is an error
        return repr(label)
    return repr(label) if type(label) in _LEAVES else f"<{type(label).__qualname__}>"


class _Reader:
    """Reads one array or value of MessagePack, item by item.

    ``msgpack.unpackb`` would allocate whatever length nested headers claim, and would lose
    duplicate keys.
    """

    def __init__(self, data: bytes | memoryview, place: Place | None) -> None:
        self._data = memoryview(data).cast("B")
        self._place = place
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
        return self._joined(value.code, _Reader(value.data, self._place).read_parts(depth + 1))

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
        """Type of the next object with its value, or its length if it is a list or a dict."""
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
        form = _forms_by_code(code >= _FIRST_TORCH_CODE).get(code)
        if form is None:
            raise BadEncoding(f"unknown type {code}")
        if form.types is not None and tuple(map(type, parts)) != form.types:
            raise BadEncoding(f"wrong parts for a value of type {code}")
        try:
            value = form.join(parts)
        except BadEncoding:
            raise
        except _JOIN_FAILURES as e:
            raise BadEncoding(f"parts that make no value of type {code}: {e}") from e
        if code == _TENSOR_CODE and self._place is not None:
            return self._place(value, parts[1])
        return value


def _exact(value: Any) -> Hashable:
    """A hashable stand-in that is equal exactly for values that are the same."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind in _LEAVES or kind is int:
        return kind, value
    if kind is list:
        return kind, tuple(map(_exact, value))
    form = _form_of(kind)
    parts = None if form is None else form.split(value)
    if form is None or parts is None:
        return kind, id(value)
    if form.code == _TENSOR_CODE:
        parts = [(label, part) for label, part in parts if label != "device"]
    exact = tuple(_exact(part) for _, part in parts)
    return kind, exact if form.ordered else frozenset(Counter(exact).items())
