"""Following the versions of a target: what an inference server does."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowdiff.core.events import Code, inform
from lowdiff.errors import ConfigError, DamagedFile, OtherFormat
from lowdiff.persistence.files.durable import replaced
from lowdiff.persistence.format.image import ImageEntry
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.persistence.versions.changes import apply
from lowdiff.persistence.versions.manifest import Listing, Manifest, manifest_name, part_name
from lowdiff.persistence.versions.parts import divided, pieces_of, read_part
from lowdiff.persistence.versions.target import Target, target_of
from lowdiff.persistence.versions.weights import Tensor

if TYPE_CHECKING:
    import torch

#: Tensors of lowdiff's own, which others read.
Tensors = Mapping[str, Tensor]


class Subscriber:
    """Follow the newest version of a target.

    ::

        for version in lowdiff.Subscriber("runs/weights"):
            version.apply(model)

    The target may not be there yet, and the run that publishes may die and go on. Versions that came meanwhile are
    passed over: the newest one is yielded. A version is taken whole or not at all: its tensors are made anew beside
    those of the version before, and compared with their digests; where a change is damaged or gone, the next anchor is
    waited for. Nothing is written to the target, and nothing in it is code.

    Args:
        target: Folder or URL.
        look_seconds: Time between two looks at the target.
        idle_seconds: How long an iteration waits for a version before it ends; None: for ever.

    Attributes:
        version: The version that was yielded last; None before the first.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        look_seconds: float = 0.5,
        idle_seconds: float | None = None,
    ) -> None:
        self._target: Target = target_of(target)
        self._look_seconds, self._idle_seconds = look_seconds, idle_seconds
        self.version: Version | None = None
        #: Manifests that were read, and versions that cannot be had.
        self._manifests: dict[int, Manifest] = {}
        self._damaged: set[int] = set()
        #: Models that have a version -> its publisher and number.
        self._applied: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Version]:
        """Yield the newest version, each time that there is a newer one."""
        waited = 0.0
        while True:
            version = self.newest()
            if version is not None:
                waited = 0.0
                yield version
            elif self._idle_seconds is not None and waited >= self._idle_seconds:
                return
            else:
                if not waited:
                    have = (
                        "the first version" if self.version is None else f"one after {self.version}"
                    )
                    inform(
                        f"waiting for {have} in {self._target.name}", event="waiting_for_version"
                    )
                time.sleep(self._look_seconds)
                waited += self._look_seconds

    def newest(self) -> Version | None:
        """Return the newest version, if it is newer than the last one; else None.

        Raises:
            StorageError: If the target does not answer.
        """
        listing = Listing.of(self._target.sizes())
        held = 0 if self.version is None else self.version.number
        if listing.newest < held:  # somebody emptied the target
            self._manifests.clear()
            self._damaged.clear()
            held = 0
        for number in reversed(listing.manifests):
            if number <= held:
                break
            if number in listing.withdrawn or number in self._damaged:
                continue
            try:
                version = self._reach(number)
            except (DamagedFile, OtherFormat) as error:
                if isinstance(error, DamagedFile) and error.is_unreadable:
                    continue  # it may be read at the next look
                self._damaged.add(number)
                if number in Listing.of(self._target.sizes()).manifests:  # else retention took it
                    Code.VERSION_DAMAGED.warn(f"version {number} is passed over: {error}")
                continue
            self._manifests = {n: m for n, m in self._manifests.items() if n >= version.anchor}
            self.version = version
            return version
        return None

    def _manifest(self, number: int) -> Manifest:
        if number not in self._manifests:
            data = self._target.read(manifest_name(number))
            self._manifests[number] = Manifest.of_bytes(data, number, self._place(number))
        return self._manifests[number]

    def _base_of(self, manifest: Manifest) -> Manifest:
        """Return the version before one; a number is the publisher's own, who may have found an empty target.

        Raises:
            DamagedFile: If it is damaged or gone, or another publisher's.
        """
        assert manifest.base is not None
        if manifest.base in self._damaged:
            raise DamagedFile(self._place(manifest.base), "what follows it cannot be reached")
        if self._manifest(manifest.base).publisher != manifest.publisher:
            del self._manifests[manifest.base]  # it may be that of an earlier target
            if self._manifest(manifest.base).publisher != manifest.publisher:
                raise DamagedFile(self._place(manifest.base), "it is that of another publisher")
        return self._manifests[manifest.base]

    def _reach(self, number: int) -> Version:
        """Make a version of the one that is held, or of an anchor.

        Raises:
            DamagedFile: If something on the way is damaged or gone.
            OtherFormat: If another lowdiff wrote it.
        """
        path = [self._manifest(number)]
        held = self.version
        if held is not None and held.publisher != path[0].publisher:
            held = None
        while path[-1].base is not None and (held is None or path[-1].base != held.number):
            path.append(self._base_of(path[-1]))
        is_from_anchor = path[-1].base is None
        before = {} if is_from_anchor or held is None else held._own
        made: dict[str, Tensor] = {}
        digests: dict[str, str] = {}
        for manifest in reversed(path):
            self._take(manifest, before, made)
            digests.update(manifest.digests)
        for name, digest in digests.items():
            if made[name].digest != digest:
                raise DamagedFile(
                    self._place(number), f"{name!r:.100} has other bits than published"
                )
        anchor = path[-1].version if is_from_anchor or held is None else held.anchor
        aliases = path[-1].aliases if is_from_anchor or held is None else held.aliases
        whole = {**before, **made}
        if any(tied not in whole for tied in aliases.values()):
            raise DamagedFile(self._place(number), "a tensor is tied to none")
        last = path[0]
        return Version(
            number, last.step, last.incarnation, last.run_id, last.publisher, anchor, frozenset(made), aliases, whole,
            self._applied, None if held is None else (held.publisher, held.number),
        )  # fmt: skip

    def _place(self, number: int) -> str:
        return f"{self._target.name}/{manifest_name(number)}"

    def _take(self, manifest: Manifest, before: Tensors, made: dict[str, Tensor]) -> None:
        """Put the tensors that a version holds among those that are made.

        Raises:
            DamagedFile: If they are not what its manifest says.
        """
        left = set(manifest.digests)
        for number, size in enumerate(manifest.parts):
            name = part_name(manifest.version, number)
            place = f"{self._target.name}/{name}"
            data = self._target.read(name)
            if len(data) != size:
                raise DamagedFile(place, f"{len(data)} bytes instead of {size}")
            for entry, bits in read_part(data, place):
                if entry.name not in left:
                    raise DamagedFile(place, f"{entry.name!r:.100} is not in the manifest")
                left.remove(entry.name)
                try:
                    made[entry.name] = _made(manifest, entry, bits, before, made)
                except (BadEncoding, ValueError, KeyError) as error:
                    raise DamagedFile(place, f"{entry.name!r:.100}: {error}") from error
        if left:
            raise DamagedFile(self._place(manifest.version), f"{min(left)!r:.100} is in no part")


def _made(
    manifest: Manifest, entry: ImageEntry, data: memoryview, before: Tensors, made: Tensors
) -> Tensor:
    """Make one tensor of a version."""
    if manifest.base is None:
        return Tensor.of_bytes(entry.dtype, entry.shape, data)
    old = made[entry.name] if entry.name in made else before[entry.name]
    return apply(old, data)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The weights of one step of a run.

    Attributes:
        number: Of the version; not its step.
        step: The step.
        incarnation: Which made it.
        run_id: The run.
        publisher: Who published it.
        anchor: The anchor that it goes back to.
        changed: Names of the tensors that were made anew since the version that was held before.
        aliases: Names of tied tensors -> the name that has their values.
    """

    number: int
    step: int
    incarnation: int
    run_id: str
    publisher: str
    anchor: int
    changed: frozenset[str]
    aliases: Mapping[str, str]
    _own: Tensors
    #: Models -> publisher and number of the version that they have.
    _applied: MutableMapping[Any, tuple[str, int]]
    _before: tuple[str, int] | None

    def __str__(self) -> str:
        return f"version {self.number} (step {self.step})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, tied ones under each of theirs. Their bits cannot be written to."""
        return {name: own.frozen() for name, own in self._all().items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, on the CPU, under the names that were published."""
        return {name: own.to_torch().clone() for name, own in self._all().items()}

    def apply(self, model: Any) -> None:
        """Copy the weights into a model.

        A model that has the version before gets what changed; any other one gets everything. Nothing is copied unless
        everything fits. Values are converted to the model's dtypes, as ``Tensor.copy_`` does.

        Args:
            model: A ``torch.nn.Module``, or a mapping of names to torch tensors or NumPy arrays.

        Raises:
            ConfigError: If the model lacks a tensor, has another shape of it, or has one that was not published.
        """
        targets = model if isinstance(model, Mapping) else model.state_dict()
        own = self._all()
        _refuse_others(own, targets)
        is_known = False
        if not isinstance(model, Mapping):
            is_known = self._before is not None and self._applied.pop(model, None) == self._before
        for name, tensor in own.items():
            if not is_known or self.aliases.get(name, name) in self.changed:
                _copy(tensor, targets[name])
        if not isinstance(model, Mapping):
            self._applied[model] = (self.publisher, self.number)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file; its name appears only once it is complete. Tied tensors are in it under each name.

        Returns:
            The file.
        """
        target = Path(path)
        own = [(ImageEntry(name, t.dtype, t.shape), t.data) for name, t in self._all().items()]
        told = {"step": str(self.step), "version": str(self.number)}
        whole = [piece for part in divided(own) for piece in part]
        with replaced(target) as file:
            for data in pieces_of(whole, told):
                file.write(data)
        return target

    def _all(self) -> dict[str, Tensor]:
        return {**self._own, **{name: self._own[tied] for name, tied in self.aliases.items()}}


def _refuse_others(own: Tensors, targets: Mapping[str, Any]) -> None:
    """Check that tensors fit.

    Raises:
        ConfigError: Naming one that does not.
    """
    missing, more = sorted(own.keys() - targets.keys()), sorted(targets.keys() - own.keys())
    if missing or more:
        raise ConfigError(
            f"the model has {len(more)} tensors that were not published ({', '.join(more[:3]) or 'none'}), and lacks "
            f"{len(missing)} ({', '.join(missing[:3]) or 'none'}); publish with names=..., or build the model that was "
            "trained"
        )
    for name, tensor in own.items():
        if tuple(targets[name].shape) != tensor.shape:
            raise ConfigError(
                f"{name} has shape {tuple(targets[name].shape)} in the model, and {tensor.shape} in the version"
            )


def _copy(tensor: Tensor, target: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = tensor.to_numpy(target.dtype)
        return
    import torch

    with torch.no_grad():
        target.copy_(tensor.to_torch())
