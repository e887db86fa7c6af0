"""Frozen parameters, stored once per run under the hash of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.durable import make_directory, replaced
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import ImageTensor, image_header, in_file_order

_PIECE_BYTES = 4 << 20


def write_constants(folder: RunFolder, tensors: Sequence[ImageTensor]) -> str:
    """Store tensors durably, unless the run has them.

    Returns:
        Name of the file: its SHA-256 in hexadecimal; ``""`` without tensors.
    """
    if not tensors:
        return ""
    ordered = in_file_order(tensors)
    parts: list[bytes | memoryview] = [image_header(ordered), *(t.data for t in ordered)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    target = folder.constants(digest.hexdigest())
    size = sum(memoryview(part).nbytes for part in parts)
    if not target.is_file() or target.stat().st_size != size:
        make_directory(target.parent)
        # Ranks that share the folder write the same bytes, each to a temporary file of its own.
        with replaced(target) as file:
            for part in parts:
                file.write(part)
    return digest.hexdigest()


def sweep_constants(folder: RunFolder) -> None:
    """Remove partial files of frozen parameters that a killed attach or fetch left.

    Only for the holder of the run, before any of its ranks writes frozen parameters.
    """
    for left in folder.constants("*").parent.glob("*.partial"):
        left.unlink(missing_ok=True)


def check_constants(folder: RunFolder, content_hash: str) -> Path:
    """Return the file with this content.

    Raises:
        DamagedFile: If the file is missing or has another content.
    """
    path = folder.constants(content_hash)
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except FileNotFoundError as error:
        raise DamagedFile(path, "the file is missing although a fence names it") from error
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    if digest.hexdigest() != content_hash:
        raise DamagedFile(path, "its content does not have the hash that is its name")
    return path
