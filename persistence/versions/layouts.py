"""Layouts of others for weights that change from step to step, and converting between them and lowdiff's own.

``slime`` (docs/en/advanced of its repository, 2026): a folder ``weight_v000012`` for each version, in the form of a Hugging
Face checkpoint. The first is whole; in the others each tensor is bytes, zstd of ``u32 count | u32 positions | values``
(``delta_encoding: overwrite``), and the file's metadata gives the digest of each tensor's new bytes (``xxh3-128``).

``trl`` (its experimental asynchronous GRPO, 2026): ``anchors/step_000010.safetensors`` is whole, and
``deltas/step_000011.safetensors`` has ``NAME.indices`` (int32) and ``NAME.values`` for each tensor that changed. All tensors are
bfloat16. The metadata tells version, base and SHA-256 of all tensors' new bytes in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.persistence.files.durable import fsync_directory, make_directory, replaced, write_file
from lowdiff.persistence.files.paths import entries_of
from lowdiff.persistence.format.image import ImageEntry
from lowdiff.persistence.versions.changes import changed_positions
from lowdiff.persistence.versions.parts import Piece, metadata_of, pieces_of, read_part
from lowdiff.persistence.versions.subscriber import Subscriber
from lowdiff.persistence.versions.target import FolderTarget
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter

Weights = Mapping[str, Tensor]

_U32 = struct.Struct("<I")
_MOST_NARROW = {"slime": 1 << 32, "trl": 1 << 31}


class Layout(ABC):
    """A folder of versions in somebody's layout.

    Args:
        folder: The folder.
        anchor_every: Versions from one whole one to the next, where the layout has several.
    """

    name = ""

    def __init__(self, folder: Path, anchor_every: int = 100) -> None:
        self.folder = folder
        self.anchor_every = anchor_every
        self._before: Weights | None = None
        self._number = 0
        self._anchor = 0

    @abstractmethod
    def versions(self) -> Iterator[tuple[int, Weights]]:
        """Yield a number, which grows, and the weights of each version that is there, in order.

        Raises:
            DamagedFile: If one is not what its digests say.
        """

    def write(self, step: int, weights: Weights) -> None:
        """Write the next version.

        Args:
            step: Its step, which is told where the layout has a place for it.
            weights: All tensors, tied ones under each name.

        Raises:
            ConfigError: If the layout cannot hold them.
            StorageError: If they cannot be written.
        """
        if self._before is None:
            make_directory(self.folder)
            self._number = self._newest()
        for name, own in weights.items():
            if own.bits.size >= _MOST_NARROW[self.name]:
                raise ConfigError(
                    f"{name} has {own.bits.size} elements, more than {self.name} counts"
                )
        before = self._before
        is_whole = before is None or self._is_anchor_due() or _forms(before) != _forms(weights)
        number = self._number + 1
        self._write(number, step, weights, None if is_whole else before)
        self._number, self._before = number, dict(weights)
        self._anchor = number if is_whole else self._anchor

    def _is_anchor_due(self) -> bool:
        return self._number - self._anchor + 1 >= self.anchor_every

    @abstractmethod
    def _newest(self) -> int:
        """Return the highest number that is there, 0 for none."""

    @abstractmethod
    def _write(self, number: int, step: int, weights: Weights, before: Weights | None) -> None:
        """Write one version, whole or by what changed."""


class Slime(Layout):
    """slime's layout; see the module."""

    name = "slime"
    _FOLDER = re.compile(r"weight_v(\d{6})")
    _FILE = "model.safetensors"
    _INDEX = "model.safetensors.index.json"

    def _numbers(self) -> list[int]:
        names = (path.name for path in entries_of(self.folder))
        return sorted(int(m[1]) for m in map(self._FOLDER.fullmatch, names) if m)

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _write(self, number: int, step: int, weights: Weights, before: Weights | None) -> None:
        told = {"version": f"{number:06d}", "step": str(step)}
        metadata: dict[str, str] = {}
        pieces = _whole(weights)
        if before is not None:
            told |= {
                "base_version": f"{number - 1:06d}",
                "delta_encoding": "overwrite",
                "compression_format": "zstd",
                "checksum_format": "xxh3-128",
            }
            pieces = []
            for name, own in weights.items():
                positions = changed_positions(before[name].bits, own.bits)
                if positions.size:
                    values = own.bits[positions].tobytes()
                    text = _U32.pack(positions.size) + positions.astype("<u4").tobytes() + values
                    blob = zstandard.ZstdCompressor().compress(text)
                    pieces.append((ImageEntry(name, "U8", (len(blob),)), memoryview(blob)))
                    metadata[name] = own.digest
        index = {
            "metadata": told,
            "weight_map": {entry.name: self._FILE for entry, _ in pieces},
        }
        # The folder gets its name once all of it is there.
        partial = self.folder / f".partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        make_directory(partial)
        _write_file(partial / self._FILE, pieces, metadata)
        write_file(partial / self._INDEX, json.dumps(index, indent=1).encode())
        partial.rename(self.folder / f"weight_v{number:06d}")
        fsync_directory(self.folder)

    def versions(self) -> Iterator[tuple[int, Weights]]:
        """See `Layout`."""
        weights: dict[str, Tensor] = {}
        last = ""
        for number in self._numbers():
            folder = self.folder / f"weight_v{number:06d}"
            told = _index(folder / self._INDEX)
            pieces, metadata = _read(self.folder, folder / self._FILE)
            if "delta_encoding" not in told:
                weights = _tensors(pieces, folder)
            else:
                if (
                    told["delta_encoding"] != "overwrite"
                    or told.get("compression_format") != "zstd"
                ):
                    raise DamagedFile(folder, f"only overwrite and zstd are read, not {told}")
                if told.get("base_version") != last:
                    raise DamagedFile(folder, f"its base {told.get('base_version')} is not {last}")
                weights = dict(weights)
                for entry, data in pieces:
                    try:
                        weights[entry.name] = _overwritten(weights[entry.name], data)
                    except (KeyError, ValueError, zstandard.ZstdError) as error:
                        raise DamagedFile(folder, f"{entry.name!r:.100}: {error}") from error
                    if metadata.get(entry.name) != weights[entry.name].digest:
                        raise DamagedFile(folder, f"{entry.name!r:.100} has another digest")
            last = f"{number:06d}"
            yield number, weights


class Trl(Layout):
    """TRL's layout; see the module."""

    name = "trl"
    _FILE = re.compile(r"step_(\d{6})\.safetensors")

    def _numbers(self) -> dict[int, Path]:
        found = {}
        for kind in ("anchors", "deltas"):
            for path in entries_of(self.folder / kind):
                match = self._FILE.fullmatch(path.name)
                if match:
                    found[int(match[1])] = path
        return found

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _write(self, number: int, step: int, weights: Weights, before: Weights | None) -> None:
        other = next((name for name, own in weights.items() if own.dtype != "BF16"), None)
        if other is not None:
            raise ConfigError(
                f"{other} is {weights[other].dtype}, and TRL's layout holds bfloat16 only; publish with "
                'dtype="bfloat16", and leave integers out by names=...'
            )
        digest = _sha256(weights)
        if before is None:
            metadata = {
                "format": "anchor_checkpoint",
                "version": "1",
                "model_version": str(number),
                "base_model_id": "",
                "checksum_sha256": digest,
            }
            path, pieces = (
                self.folder / "anchors" / f"step_{number:06d}.safetensors",
                _whole(weights),
            )
        else:
            path = self.folder / "deltas" / f"step_{number:06d}.safetensors"
            pieces, changed, count = [], [], 0
            for name in sorted(weights):
                positions = changed_positions(before[name].bits, weights[name].bits)
                if positions.size:
                    changed.append(name)
                    count += positions.size
                    values = np.ascontiguousarray(weights[name].bits[positions])
                    indices = positions.astype("<i4")
                    pieces += [
                        (
                            ImageEntry(f"{name}.indices", "I32", (positions.size,)),
                            indices.data.cast("B"),
                        ),
                        (
                            ImageEntry(f"{name}.values", "BF16", (positions.size,)),
                            values.data.cast("B"),
                        ),
                    ]
            if not pieces:  # safetensors of older versions needs one
                empty = ImageEntry("__empty_delta__", "I32", (1,))
                pieces.append((empty, memoryview(bytes(4))))
            total = sum(own.bits.size for own in weights.values())
            metadata = {
                "format": "sparse_weight_patch",
                "version": "1",
                "model_version": str(number),
                "prev_model_version": str(number - 1),
                "anchor_step": str(self._anchor),
                "base_model_id": "",
                "num_changed_params": str(len(changed)),
                "total_changed_elements": str(count),
                "total_elements": str(total),
                "sparsity": str(1.0 - count / max(total, 1)),
                "checksum_sha256": digest,
                "changed_params": json.dumps(changed),
            }
        make_directory(path.parent)
        _write_file(path, pieces, metadata)

    def versions(self) -> Iterator[tuple[int, Weights]]:
        """See `Layout`."""
        weights: dict[str, Tensor] = {}
        last = -1
        for number, path in sorted(self._numbers().items()):
            pieces, metadata = _read(self.folder, path)
            if path.parent.name == "anchors":
                weights = _tensors(pieces, path)
            else:
                if metadata.get("prev_model_version") != str(last):
                    raise DamagedFile(path, f"its base is not version {last}")
                own = {entry.name: data for entry, data in pieces}
                try:
                    changed = {
                        str(name) for name in json.loads(metadata.get("changed_params", "[]"))
                    }
                    weights = {
                        name: _replaced(tensor, own[f"{name}.indices"], own[f"{name}.values"])
                        if name in changed
                        else tensor
                        for name, tensor in weights.items()
                    }
                except (ValueError, TypeError, LookupError) as error:
                    raise DamagedFile(path, str(error)) from error
            if metadata.get("checksum_sha256") != _sha256(weights):
                raise DamagedFile(path, "its tensors have another digest")
            last = number
            yield number, weights


LAYOUTS: Mapping[str, type[Layout]] = {"slime": Slime, "trl": Trl}


def convert(
    source: str,
    target: str,
    *,
    source_layout: str,
    target_layout: str,
    anchor_every: int = 100,
    follow: bool = False,
) -> Iterator[int]:
    """Copy versions from one layout into another; yields the step, or number, of each once it is written.

    From lowdiff's own layout the newest version is taken. From others every version that is there is taken, from the
    first one on.

    Args:
        source: Folder, or in lowdiff's own layout a URL.
        target: Folder.
        source_layout: ``"lowdiff"``, ``"slime"`` or ``"trl"``.
        target_layout: Likewise.
        anchor_every: Versions from one whole one to the next.
        follow: Whether each newer version of lowdiff's own layout is taken as well, for ever.

    Raises:
        ConfigError: If there is no such layout, the source holds no version of it, or the target's layout cannot hold
            the weights.
        DamagedFile: If a version of the source is damaged.
    """
    for name in (source_layout, target_layout):
        if name != "lowdiff" and name not in LAYOUTS:
            raise ConfigError(f"a layout is lowdiff, {' or '.join(LAYOUTS)}, got {name!r}")
    found: Iterator[tuple[int, Weights]]
    if source_layout == "lowdiff":
        subscriber = Subscriber(source, idle_seconds=None if follow else 0)
        found = ((version.step, version.tensors) for version in subscriber)
    else:
        found = LAYOUTS[source_layout](Path(source)).versions()
    # Look before the target is made: the target's name would belong to a mistyped source.
    first = next(found, None)
    if first is None:
        raise ConfigError(
            f"{source} holds no version of layout {source_layout}; name a place that holds one"
        )
    found = chain([first], found)
    del first  # or the first version's weights would stay in memory
    if target_layout != "lowdiff":
        layout = LAYOUTS[target_layout](Path(target), anchor_every)
        for step, weights in found:
            layout.write(step, weights)
            yield step
        return
    run_id = f"converted from {source}"
    place = FolderTarget(Path(target).absolute())
    with VersionWriter(place, run_id, anchor_every=anchor_every) as writer:
        for step, weights in found:
            writer.publish(step, 0, weights)
            yield step


def _forms(weights: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (own.dtype, own.shape) for name, own in weights.items()}


def _whole(weights: Weights) -> list[Piece]:
    return [(ImageEntry(name, own.dtype, own.shape), own.data) for name, own in weights.items()]


def _write_file(path: Path, pieces: list[Piece], metadata: Mapping[str, str]) -> None:
    ordered = sorted(pieces, key=lambda own: (-own[0].item_bytes, own[0].name))
    with replaced(path) as file:
        for data in pieces_of(ordered, metadata):
            file.write(data)


def _read(root: Path, path: Path) -> tuple[list[Piece], dict[str, str]]:
    data = FolderTarget(root).read(str(path.relative_to(root)))
    pieces = list(read_part(data, str(path)))
    return pieces, metadata_of(data, str(path))


def _index(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())["metadata"]
        return dict(told)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DamagedFile(path, f"no index of a checkpoint ({error})") from error


def _tensors(pieces: list[Piece], place: Path) -> dict[str, Tensor]:
    try:
        return {e.name: Tensor.of_bytes(e.dtype, e.shape, data) for e, data in pieces}
    except ValueError as error:
        raise DamagedFile(place, str(error)) from error


def _overwritten(old: Tensor, data: memoryview) -> Tensor:
    most = 4 + old.bits.size * (4 + old.bits.itemsize)
    text = zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
    (count,) = _U32.unpack_from(text)
    if len(text) != 4 + count * (4 + old.bits.itemsize):
        raise ValueError(f"{len(text)} bytes for {count} values")
    body = memoryview(text)[4:]
    return _replaced(old, body[: 4 * count], body[4 * count :])


def _replaced(old: Tensor, indices: memoryview, values: memoryview) -> Tensor:
    positions = np.frombuffer(indices, "<u4")
    if positions.size and positions.max() >= old.bits.size:
        raise ValueError(f"position {positions.max()} of {old.bits.size}")
    bits = old.bits.copy()
    bits[positions] = np.frombuffer(values, old.bits.dtype)
    return Tensor(old.dtype, old.shape, bits)


def _sha256(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].data)
    return digest.hexdigest()
