"""Full snapshots: safetensors images, sharded over ranks, complete when all manifests are there.

The trainer copies tensors straight into an image in staging; the writer copies that image to its
durable place. The image is a valid safetensors file from its first byte, so anyone can load it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from crc32c import crc32c

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.files.checked_copy import checksum_of, copy_in_parallel, read_whole
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.format.document import check_types, read_json

#: Names of tensors in an image start with one of these, or with an item's prefix.
PARAMETER, OPTIMIZER, RESIDUAL = "model/", "optimizer/", "residual/"
#: The tensor that holds everything that is not a tensor, encoded by ``values.encode``.
SCALARS = "lowdiff/scalars"

_HEADER_ALIGNMENT = 64
#: Of a header's own length, before it.
_LENGTH_BYTES = 8
#: As the format says.
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 56


@lru_cache
def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype by its code, such as ``"F32"`` or ``"F8_E4M3"``."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """Description of one tensor in an image's header.

    Attributes:
        name: Prefix and name, e.g. ``"model/wte.weight"``.
        dtype: safetensors dtype code, e.g. ``"F32"``.
        shape: Logical shape, row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The header of an image's file.

    Attributes:
        bytes: Its length, behind which the tensors lie without holes.
        checksum: Its CRC-32C.
        entries: In the order of their bytes.
    """

    bytes: int
    checksum: int
    entries: tuple[ImageEntry, ...]


class PartSums:
    """CRC-32C of each part of an image, whose bytes come in pieces of any size.

    Attributes:
        found: Of the header, then of each tensor; complete once all bytes were added.
    """

    def __init__(self, header_bytes: int, entries: Sequence[ImageEntry]) -> None:
        """Begin with the lengths of the parts, which together are all that is added."""
        self._left = [header_bytes, *(entry.nbytes for entry in entries)]
        self._at = 0
        self.found = [0] * len(self._left)

    def add(self, data: memoryview) -> None:
        """Take the next bytes of the image."""
        while data:
            while not self._left[self._at]:
                self._at += 1
            own = data[: self._left[self._at]]
            self.found[self._at] = crc32c(own, self.found[self._at])
            self._left[self._at] -= len(own)
            data = data[len(own) :]


@dataclass(frozen=True, slots=True, eq=False)
class ImageTensor(ImageEntry):
    """One tensor to be copied into an image.

    Attributes:
        data: Its bytes.
    """

    data: memoryview


@dataclass(frozen=True, slots=True)
class Manifest:
    """Says that one rank's shard of a snapshot is durable.

    Attributes:
        bytes: Length of the shard's file.
        checksum: CRC-32C of the whole file.
        parts: CRC-32C of its header, then of each tensor in the order of their bytes, so that a part
            of the file can be believed without the rest.
    """

    run_id: str
    incarnation: int
    step: int
    rank: int
    world_size: int
    bytes: int
    checksum: int
    parts: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse and check one manifest.

        Raises:
            DamagedFile: If it is not whole.
        """
        document = read_json(path)
        try:
            check_types(cls, document)
            parts = document.get("parts")
            if type(parts) is not list or any(type(part) is not int for part in parts):
                raise TypeError(f"parts is {parts!r:.40}")
            return cls(**{**document, "parts": tuple(parts)})
        except TypeError as error:
            raise DamagedFile(path, f"not a manifest ({error})") from error


def shard_file(folder: Path, rank: int) -> Path:
    """The safetensors file of one rank."""
    return folder / f"rank-{rank:04d}.safetensors"


def manifest_file(folder: Path, rank: int) -> Path:
    """The manifest of one rank."""
    return folder / f"rank-{rank:04d}.json"


def is_complete(folder: Path, world_size: int) -> bool:
    """Whether a snapshot has the manifests of all ranks, readable or not."""
    return all(manifest_file(folder, rank).is_file() for rank in range(world_size))


#: What a safetensors file says of itself.
METADATA: Mapping[str, str] = {"format": "pt", "writer": "lowdiff"}


def image_header(tensors: Sequence[ImageEntry], metadata: Mapping[str, str] = METADATA) -> bytes:
    """Safetensors header for tensors that follow each other without holes, in this order."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_image_header(descriptor: int) -> ImageHeader:
    """The inverse of `image_header`: what a file says of the tensors behind its header.

    Raises:
        OSError: If it cannot be read.
        EOFError, ValueError, LookupError, TypeError: If it is no image.
    """

    def read(start: int, size: int) -> bytearray:
        data = bytearray(size)
        read_whole(descriptor, start, memoryview(data))
        return data

    return _header(read, os.fstat(descriptor).st_size)


def header_of(image: memoryview) -> ImageHeader:
    """Return the header of an image in memory.

    Raises:
        EOFError, ValueError, LookupError, TypeError: If it is no image.
    """
    return _header(lambda start, size: bytearray(image[start : start + size]), len(image))


def _header(read: Callable[[int, int], bytearray], file_bytes: int) -> ImageHeader:
    length = read(0, _LENGTH_BYTES)
    text_bytes = int.from_bytes(length, "little")
    if not 0 < text_bytes <= min(file_bytes - _LENGTH_BYTES, _MOST_HEADER_BYTES):
        raise ValueError(f"its header is said to have {text_bytes} bytes")
    text = read(_LENGTH_BYTES, text_bytes)
    entries = _entries(text)
    header = ImageHeader(_LENGTH_BYTES + text_bytes, crc32c(text, crc32c(length)), entries)
    if header.bytes + sum(entry.nbytes for entry in entries) != file_bytes:
        raise ValueError(f"its tensors do not end where the file does, at byte {file_bytes}")
    return header


def _entries(text: bytearray) -> tuple[ImageEntry, ...]:
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):  # which would quote all of it
        raise ValueError("its header is no JSON") from None
    if type(described) is not dict:
        raise ValueError("its header is no object")
    described.pop("__metadata__", None)
    for name, told in described.items():
        offsets = told["data_offsets"]
        if type(offsets) is not list or [type(end) for end in offsets[:3]] != [int, int]:
            raise ValueError(f"{name!r:.100} has no place")
    entries = []
    offset = 0
    for name, told in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        entry = _entry(name, told["dtype"], told["shape"])
        if told["data_offsets"] != [offset, offset + entry.nbytes]:
            raise ValueError(f"{name!r:.100} does not begin where the one before it ends")
        offset += entry.nbytes
        entries.append(entry)
    return tuple(entries)


def _entry(name: str, dtype: Any, shape: Any) -> ImageEntry:
    # Types and numbers first: a product of anything may take for ever, or all memory.
    is_good = type(dtype) is str and type(shape) is list and len(shape) <= _MOST_DIMENSIONS
    if not is_good or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name!r:.100} has no shape")
    # What torch computes of strides overflows also where another size is 0.
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise ValueError(f"{name!r:.100} is too large")
    return ImageEntry(name, dtype, tuple(shape))


_Entry = TypeVar("_Entry", bound=ImageEntry)


def in_file_order(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return the tensors of an image in the order in which they lie in its file."""
    # Widest items first keeps every tensor aligned to its own size.
    return sorted(entries, key=lambda entry: (-entry.item_bytes, entry.name))


class ImageFile:
    """The file of a rank's staged images, one after the other; it stays mapped, because to map it costs half a copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: MappedFile | None = None

    def stage(self, tensors: Sequence[ImageTensor], num_threads: int = 1) -> tuple[int, int]:
        """Copy tensors into it, by several threads if it is large.

        Returns:
            Its length in bytes and its CRC-32C. The image is whole when this returns.

        Raises:
            StorageError: If there is not enough memory; then the file is removed.
        """
        ordered = in_file_order(tensors)
        header = image_header(ordered)
        try:
            view = self._sized(len(header) + sum(t.data.nbytes for t in ordered))
        except StorageError:
            self.release()
            # The image before it is durable: its memory may help.
            self._path.unlink(missing_ok=True)
            raise
        parts = [memoryview(header), *(tensor.data for tensor in ordered)]
        return copy_in_parallel(view, parts, num_threads)

    def release(self) -> None:
        """Map it no longer: whoever removes the file has its memory back."""
        self._file = None

    def _sized(self, size: int) -> memoryview:
        if self._file is None or not self._file.is_whole:
            self.release()  # before another one takes as much memory
            self._file = MappedFile(self._path, size)
        elif size != self._file.size:
            self._file.resize(size)
        return self._file.view


def stage_image(
    path: Path, tensors: Sequence[ImageTensor], num_threads: int = 1
) -> tuple[int, int]:
    """Stage an image into a file that is not kept mapped; see `ImageFile`."""
    return ImageFile(path).stage(tensors, num_threads)


def check_shard(folder: Path, manifest: Manifest) -> Path:
    """Compare a shard's bytes with its manifest.

    Raises:
        DamagedFile: If they differ, or the file is missing or cannot be read.
    """
    path = shard_file(folder, manifest.rank)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.bytes:
                raise DamagedFile(path, f"{size} bytes found, {manifest.bytes} expected")
            checksum = checksum_of(file.fileno(), 0, size)
    except FileNotFoundError as error:
        raise DamagedFile(path, "the file is missing although its manifest exists") from error
    except (OSError, EOFError) as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    if checksum != manifest.checksum:
        raise DamagedFile(path, "the file fails its checksum")
    return path


def was_removed(path: Path) -> bool:
    """Whether a file vanished while it was read: of a snapshot, retention takes manifests first."""
    if path.parent.parent.name == "segments":
        return not path.exists()
    folder = path if path.is_dir() else path.parent
    return folder.parent.name == "snapshots" and not manifest_file(folder, 0).exists()
