"""Small JSON documents: format version first, checksum last, and fields of known types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from lowdiff.errors import DamagedFile, OtherFormat
from lowdiff.persistence.files.durable import write_file
from lowdiff.persistence.format.framing import FORMAT_VERSION

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_INT_BOUND = 1 << 64


def write_json(path: Path, content: dict[str, Any], *, exclusive: bool = False) -> None:
    """Write a JSON document; see `json_bytes` and `replaced`."""
    write_file(path, json_bytes(content), exclusive=exclusive)


def write_twice(path: Path, content: dict[str, Any], *, exclusive: bool = False) -> None:
    """Write a JSON document that never changes, and a copy beside it: without it nothing of a run can be read."""
    write_json(path, content, exclusive=exclusive)
    write_json(copy_of(path), content)


def copy_of(path: Path) -> Path:
    """Return where the copy of a document lies."""
    return path.with_suffix(".copy")


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return a JSON document: format version first, checksum last."""
    document = {"format": FORMAT_VERSION, **content}
    checksum = crc32c(_canonical(document))
    return json.dumps({**document, "crc32c": checksum}, indent=1).encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read a document of `write_json`.

    Raises:
        DamagedFile: If the file is not JSON of lowdiff or fails its checksum.
        OtherFormat: If a lowdiff of another format version wrote it.
    """
    return _good(path)[1]


def read_either(
    path: Path, damage: list[DamagedFile] | None = None, *, with_copy: bool = False
) -> dict[str, Any]:
    """Read a document of `write_twice`, or its copy if the document is damaged.

    Args:
        path: Of the document.
        damage: Gets the error of a document whose copy served.
        with_copy: Whether to look at the copy of a good document, too, whose error then joins these.

    Raises:
        DamagedFile: If both are damaged, or there is no copy.
        OtherFormat: If a lowdiff of another format version wrote it.
    """
    return _either(path, damage, with_copy=with_copy)[1]


def good_bytes(path: Path) -> bytes:
    """Return the bytes of a document of `write_twice`, or of its copy if the document is damaged; see `read_either`."""
    return _either(path)[0]


def _either(
    path: Path, damage: list[DamagedFile] | None = None, *, with_copy: bool = False
) -> tuple[bytes, dict[str, Any]]:
    try:
        good = _good(path)
    except DamagedFile as error:
        damaged = error
    else:
        if with_copy and damage is not None:
            damage += _damage_of_copy(path, good[0])
        return good
    try:
        good = _good(copy_of(path))
    except (FileNotFoundError, DamagedFile):
        raise damaged  # noqa: B904  with the cause that it has
    if damage is not None:
        damage.append(DamagedFile(path, f"{damaged.what}; its copy serves"))
    return good


def _damage_of_copy(path: Path, content: bytes) -> list[DamagedFile]:
    copy = copy_of(path)
    try:
        is_same = _good(copy)[0] == content
    except FileNotFoundError:
        return []  # earlier versions wrote none
    except DamagedFile as error:
        return [error]
    return [] if is_same else [DamagedFile(copy, f"it is no copy of {path.name}")]


def _good(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a document, and what they say."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    return data, parse_json(data, path)


def parse_json(data: bytes, path: Path | str) -> dict[str, Any]:
    """Parse the bytes of a document of ``write_json``; ``path`` names their origin in errors.

    Raises:
        DamagedFile: If the bytes are not JSON of lowdiff or fail their checksum.
        OtherFormat: If a lowdiff of another format version wrote it.
    """
    try:
        document = json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_float)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    try:
        version, checksum = document["format"], document.pop("crc32c")
        good = type(version) is int and checksum == crc32c(_canonical(document))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(path, f"not a lowdiff JSON document ({error})") from error
    # Check this first: a flipped bit in the version must not look like a later format.
    if not good:
        raise DamagedFile(path, "the document fails its checksum")
    if version != FORMAT_VERSION:
        raise OtherFormat(path, version, FORMAT_VERSION)
    del document["format"]
    return dict(document)


def _int(text: str) -> int:
    number = int(text)
    if abs(number) >= _INT_BOUND:  # no float holds it, and no field of 64 bits
        raise ValueError(f"{text:.40} is no number of lowdiff")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is no number of lowdiff")
    return number


def check_types(kind: type[DataclassInstance], content: Mapping[str, Any]) -> None:
    """Compare the plain fields of a document with the dataclass that it becomes.

    All numbers are counts: they are not negative and fit 63 bits.

    Raises:
        TypeError: If a field has another type, or is out of range.
    """
    for name, types in _types_of(kind):
        value = content.get(name)
        if types and type(value) not in types:
            raise TypeError(f"{name} is {value!r:.40}")
        if type(value) is int and not 0 <= value < 1 << 63:
            raise TypeError(f"{name} is {value!r:.40}")


@cache
def _types_of(kind: type[DataclassInstance]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Return every field's name, and its allowed types if it is a plain one."""
    return tuple((field.name, _PLAIN.get(str(field.type), ())) for field in fields(kind))


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "bool": (bool,),
}


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
