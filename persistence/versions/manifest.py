"""Manifests of versions, and the names of files in a target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.document import check_types, json_bytes, parse_json

#: Names the run of a target.
PUBLISHER = "publisher.json"
#: A stranger's manifest may be no larger.
MOST_BYTES = 256 << 20

_NAME = re.compile(r"v(\d{10})(\.json|\.withdrawn|-p\d{4}\.safetensors)")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def manifest_name(version: int) -> str:
    """Name of a version's manifest."""
    return f"v{version:010d}.json"


def withdrawn_name(version: int) -> str:
    """Name of what withdraws a version."""
    return f"v{version:010d}.withdrawn"


def part_name(version: int, part: int) -> str:
    """Name of a version's part."""
    return f"v{version:010d}-p{part:04d}.safetensors"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a target holds.

    Attributes:
        manifests: Versions that are there, withdrawn or not, ascending.
        withdrawn: Versions that are withdrawn.
        others: All names that belong to a version, by version.
    """

    manifests: tuple[int, ...]
    withdrawn: frozenset[int]
    names: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, names: Mapping[str, int]) -> Listing:
        """Sort names; those that are not a version's are left out."""
        found: dict[int, list[str]] = {}
        manifests, withdrawn = [], set()
        for name, size in names.items():
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            version = int(match[1])
            found.setdefault(version, []).append(name)
            if match[2] == ".json" and size <= MOST_BYTES:
                manifests.append(version)
            elif match[2] == ".withdrawn":
                withdrawn.add(version)
        by_version = {version: tuple(own) for version, own in found.items()}
        return cls(tuple(sorted(manifests)), frozenset(withdrawn), by_version)

    @property
    def newest(self) -> int:
        """The highest number that was ever used, 0 for none."""
        return max(self.names, default=0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version is.

    Attributes:
        version: Its number.
        base: The version whose content it changes; None for an anchor.
        run_id: The run.
        incarnation: The incarnation that made the step.
        step: The step.
        publisher: Who published it: host, process and a random name.
        parts: Bytes of each part.
        digests: Name of each tensor that it holds -> digest of its content, see `Tensor.digest`.
        aliases: Of an anchor: name of a tensor -> name of the tensor that it is tied to.
    """

    version: int
    base: int | None
    run_id: str
    incarnation: int
    step: int
    publisher: str
    parts: tuple[int, ...]
    digests: Mapping[str, str]
    aliases: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return the manifest's file."""
        return json_bytes(asdict(self))

    @classmethod
    def of_bytes(cls, data: bytes | bytearray, version: int, place: str) -> Manifest:
        """Parse and check a manifest.

        Args:
            data: Of its file.
            version: Which it is to be.
            place: Names the file in errors.

        Raises:
            DamagedFile: If it is no manifest of this version.
            OtherFormat: If a lowdiff of another format version wrote it.
        """
        document = parse_json(bytes(data), place)
        try:
            check_types(cls, document)
            parts, digests, aliases = (document[key] for key in ("parts", "digests", "aliases"))
            _require(type(parts) is list and all(type(p) is int and p >= 0 for p in parts), "parts")
            _require(len(parts) <= 10_000, "parts")
            _require(
                _is_names(digests) and all(map(_DIGEST.fullmatch, digests.values())), "digests"
            )
            _require(_is_names(aliases), "aliases")
            manifest = cls(**{**document, "parts": tuple(parts)})
        except (TypeError, KeyError) as error:
            raise DamagedFile(place, f"not a manifest ({error})") from error
        base = manifest.base
        if manifest.version != version or (base is not None and not 0 < base < version):
            raise DamagedFile(place, f"it is that of version {manifest.version}, based on {base}")
        return manifest


def _require(condition: bool, name: str) -> None:
    if not condition:
        raise TypeError(f"{name} is not as it should be")


def _is_names(value: Any) -> bool:
    return type(value) is dict and all(type(text) is str for text in value.values())
