"""Encode plain Python values with their exact types and without pickle, and decode them.

An encoding is MessagePack. None, bool, float, str, bytes, list, int of up to 64 bits and dict with
str keys are MessagePack types. Every other type is an extension whose payload is an array of parts
(`StoredType`). The same value has the same bytes in every process. Two references to one object are
decoded as two objects.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, cast

import msgpack

from lowdiff.errors import ConfigError
from lowdiff.persistence.format.value_types import (
    JOIN_FAILURES,
    TENSOR_CODE,
    BadEncoding,
    stored_type,
    stored_type_of_code,
)

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
    memory and are writable; tensors are on the CPU.

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
        except JOIN_FAILURES as e:
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
    if conversion.code == TENSOR_CODE:
        parts = [(label, part) for label, part in parts if label != "device"]
    exact = tuple(_exact(part) for _, part in parts)
    return kind, exact if conversion.ordered else frozenset(Counter(exact).items())
