"""Writing so that a final name means complete bytes, also after a power failure."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from crc32c import crc32c

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.format.framing import FORMAT_VERSION, FileHeader, RecordRef, check_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def fsync_directory(path: Path) -> None:
    """Make renames and creations inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents, each durably named in its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def make_durable(path: Path, header: FileHeader, doubtful: Sequence[RecordRef]) -> None:
    """Fsync a segment that somebody else has written, whose own fsync may have failed.

    When bytes do not reach the disk, Linux says so once, and takes their pages for clean from then
    on: the next fsync, in whichever process, writes nothing and succeeds. So what may have met that
    is written once more first, in its place.

    Args:
        path: The segment. Nobody is adding to it.
        header: Its header.
        doubtful: Those of its records of which nobody knows that they are durable. They passed
            their checksums and are in memory: mapped pages could change when they are read again.
    """
    descriptor = os.open(path, os.O_RDWR if doubtful else os.O_RDONLY)
    try:
        if doubtful:
            write_at(descriptor, 0, header.pack())
        for record in doubtful:
            write_at(descriptor, record.offset, record.header.pack() + record.body)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """Put all of data into a file, from an offset on."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)


def remove_folder(path: Path) -> None:
    """Delete a folder and all that is in it, whoever has it open.

    Network file systems and FUSE keep a file that somebody has open, under another name in its folder,
    until it is closed. There an almost empty folder stays, and nothing is wrong.

    Raises:
        OSError: If something stays for any other reason.
    """
    shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        left = [entry.name.startswith((".nfs", ".fuse_hidden")) for entry in path.iterdir()]
        if not left or not all(left):
            shutil.rmtree(path)  # says why


@contextmanager
def replaced(path: Path, *, exclusive: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to, which then takes the place of ``path``, atomically and durably.

    Raises:
        FileExistsError: If it must be ``exclusive``, the first of its name, and is not.
        StorageError: If it must be, and its file system has no hard links.
    """
    # Random, because ranks in containers on a shared folder may have the same process id.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            _link(partial, path)
            os.remove(partial)
        else:
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def _link(partial: Path, path: Path) -> None:
    """Give a complete file its name, unless there is one: nothing else does both at once."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StorageError(
            f"{path} could not be written: {error.strerror}; its file system has no hard links, "
            "which keep two trainers from beginning at once. Choose a run folder on another one"
        ) from error


def unwritable(path: Path, why: object) -> StorageError:
    """The error for something a user asked for by name."""
    return StorageError(
        f"{path} could not be written: {why}; free space there, correct its permissions, or give "
        "another path"
    )


def write_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Replace ``path`` atomically and durably; see `replaced`."""
    with replaced(path, exclusive=exclusive) as file:
        file.write(data)


def write_json(path: Path, content: dict[str, Any], *, exclusive: bool = False) -> None:
    """Write a small checked JSON document: format version first, checksum last; see `replaced`."""
    document = {"format": FORMAT_VERSION, **content}
    checksum = crc32c(_canonical(document))
    data = json.dumps({**document, "crc32c": checksum}, indent=1).encode() + b"\n"
    write_file(path, data, exclusive=exclusive)


def read_json(path: Path) -> dict[str, Any]:
    """Read what ``write_json`` wrote.

    Raises:
        DamagedFile: If it is not JSON of ours or fails its checksum.
        OtherFormat: If a lowdiff of another format version wrote it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    return parse_json(data, path)


def parse_json(data: bytes, path: Path | str) -> dict[str, Any]:
    """What the bytes of a document say that ``write_json`` wrote; `path` is where they are from.

    Raises:
        DamagedFile: If it is not JSON of ours or fails its checksum.
        OtherFormat: If a lowdiff of another format version wrote it.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    try:
        version, checksum = document["format"], document.pop("crc32c")
        good = type(version) is int and checksum == crc32c(_canonical(document))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(path, f"not a lowdiff JSON document ({error})") from error
    # First, because a flipped bit in the version must not pass for a later lowdiff's work.
    if not good:
        raise DamagedFile(path, "the document fails its checksum")
    check_version(path, version)
    del document["format"]
    return dict(document)


def check_types(kind: type[DataclassInstance], content: Mapping[str, Any]) -> None:
    """Compare the plain fields of a document with those of the dataclass it is to become.

    Numbers count something everywhere: they are not negative and fit 63 bits.

    Raises:
        TypeError: If one has another type, or is out of range.
    """
    for name, types in _types_of(kind):
        value = content.get(name)
        if types and type(value) not in types:
            raise TypeError(f"{name} is {value!r:.40}")
        if type(value) is int and not 0 <= value < 1 << 63:
            raise TypeError(f"{name} is {value!r:.40}")


@cache
def _types_of(kind: type[DataclassInstance]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Of every field its name, and the types it may have where it is a plain one."""
    return tuple((field.name, _PLAIN.get(str(field.type), ())) for field in fields(kind))


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "bool": (bool,),
}


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
