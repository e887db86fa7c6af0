"""Full snapshots: safetensors images, sharded over ranks, complete when all manifests are there.

The trainer copies tensors straight into an image in staging; the writer copies that image to its
durable place. The image is a valid safetensors file from its first byte, so anyone can load it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.copying import checksum_of, copy_in_parallel
from lowdiff.persistence.durable import check_types, read_json
from lowdiff.persistence.memory import MappedFile

#: Names of tensors in an image start with one of these, or with an item's prefix.
PARAMETER, OPTIMIZER, RESIDUAL = "model/", "optimizer/", "residual/"
#: The tensor that holds everything that is not a tensor, encoded by ``values.encode``.
SCALARS = "lowdiff/scalars"

_HEADER_ALIGNMENT = 64
#: Of a header's own length, before it.
_LENGTH_BYTES = 8
#: As the format says.
_MOST_HEADER_BYTES = 100_000_000
_MARK = struct.Struct("<QI")


@lru_cache
def _item_bytes(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """What an image's header says of one tensor.

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
        return _item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes


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
        first_base: Of a rolling snapshot: the lowest step of which it holds a block. None for an
            atomic one, all of which is of ``step``.
    """

    run_id: str
    incarnation: int
    step: int
    rank: int
    world_size: int
    bytes: int
    checksum: int
    first_base: int | None = None

    def document(self) -> dict[str, Any]:
        """As JSON content; an atomic snapshot's has no base."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse and check one manifest.

        Raises:
            DamagedFile: If it is not whole.
        """
        document = read_json(path)
        try:
            check_types(cls, document)
            return cls(**document)
        except TypeError as error:
            raise DamagedFile(path, f"not a manifest ({error})") from error


def shard_file(folder: Path, rank: int) -> Path:
    """The safetensors file of one rank."""
    return folder / f"rank-{rank:04d}.safetensors"


def manifest_file(folder: Path, rank: int) -> Path:
    """The manifest of one rank."""
    return folder / f"rank-{rank:04d}.json"


def image_header(tensors: Sequence[ImageEntry], reserved_bytes: int = 0) -> bytes:
    """Safetensors header for tensors that follow each other without holes.

    Args:
        tensors: In their order in the file.
        reserved_bytes: Length that it is padded to, if it is shorter; a multiple of 64.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": "lowdiff"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    written = _LENGTH_BYTES + len(text)
    text += b" " * max(-written % _HEADER_ALIGNMENT, reserved_bytes - written)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_image_header(descriptor: int) -> tuple[bytes, list[ImageEntry]]:
    """The inverse of `image_header`: a file's header, and what it says of the tensors behind it.

    Returns:
        The bytes before the first tensor's, and the tensors in the order of theirs.

    Raises:
        OSError: If the file cannot be read.
        ValueError, LookupError, TypeError, AttributeError: If it is no image.
    """
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if not 0 < length <= min(file_bytes, _MOST_HEADER_BYTES):
        raise ValueError(f"its header is said to have {length} bytes")
    header = os.pread(descriptor, _LENGTH_BYTES + length, 0)
    described = json.loads(header[_LENGTH_BYTES:])
    described.pop("__metadata__", None)
    entries = []
    offset = 0
    for name, told in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        entry = ImageEntry(name, told["dtype"], tuple(told["shape"]))
        stop = offset + entry.nbytes
        if told["data_offsets"] != [offset, stop] or any(size < 0 for size in entry.shape):
            raise ValueError(f"{name} is no tensor at bytes {offset} to {stop}: {told}")
        offset = stop
        entries.append(entry)
    if len(header) + offset != file_bytes:
        raise ValueError(f"its tensors end at byte {len(header) + offset} of {file_bytes}")
    return header, entries


def stage_image(
    path: Path, tensors: Sequence[ImageTensor], num_threads: int = 1
) -> tuple[int, int]:
    """Copy tensors into a staged image, by several threads if it is large.

    Returns:
        Its length in bytes and its CRC-32C. The image is whole when this returns.
    """
    # Widest items first keeps every tensor aligned to its own size.
    ordered = sorted(tensors, key=lambda t: (-t.item_bytes, t.name))
    header = image_header(ordered)
    try:
        file = MappedFile(path, len(header) + sum(t.data.nbytes for t in ordered))
    except StorageError:
        path.unlink(missing_ok=True)  # the image before it is durable: its memory may help
        raise
    parts = [memoryview(header), *(tensor.data for tensor in ordered)]
    return copy_in_parallel(file.view, parts, num_threads)


def encode_mark(size: int, checksum: int) -> bytes:
    """Body of the record that says an image is whole."""
    return _MARK.pack(size, checksum)


def decode_mark(data: bytes) -> tuple[int, int]:
    """Length and checksum of the image."""
    size, checksum = _MARK.unpack(data)
    return size, checksum


def check_shard(folder: Path, manifest: Manifest) -> Path:
    """Compare a shard's bytes with its manifest.

    Raises:
        DamagedFile: If they differ, or the file is missing or cannot be read.
    """
    path = shard_file(folder, manifest.rank)
    try:
        with path.open("rb", buffering=0) as file:
            size, checksum = checksum_of(file)
    except FileNotFoundError as error:
        raise DamagedFile(path, "the file is missing although its manifest exists") from error
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    if size != manifest.bytes:
        raise DamagedFile(path, f"{size} bytes found, {manifest.bytes} expected")
    if checksum != manifest.checksum:
        raise DamagedFile(path, "the file fails its checksum")
    return path


def was_removed(path: Path) -> bool:
    """Whether a file vanished while it was read: of a snapshot, retention takes manifests first."""
    if path.parent.parent.name == "segments":
        return not path.exists()
    folder = path if path.is_dir() else path.parent
    return folder.parent.name == "snapshots" and not manifest_file(folder, 0).exists()
