"""Reading a snapshot into a state: in one pass, checked before anything of it is believed."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lowdiff.core.layout import flat, flat_like
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    SCALARS,
    Manifest,
    check_shard,
    shard_file,
)
from lowdiff.persistence.format.values import decode, encode
from lowdiff.persistence.run.catalog import SnapshotSet
from lowdiff.persistence.run.frozen_parameters import check_constants
from lowdiff.recovery.images import ImageReader
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    STATEFUL_ITEM,
    TENSOR_ITEM,
    OptimizerState,
    RecoveredState,
)
from lowdiff.types import Fence, ParameterSpec

_logger = logging.getLogger(__name__)

#: What reading tensors and scalars raises where they are not those of a snapshot.
_UNFIT = (LookupError, TypeError, ValueError, AttributeError, EOFError)


def load_snapshot(snapshot: SnapshotSet, fence: Fence, num_threads: int) -> RecoveredState:
    """Read and check every shard of a snapshot.

    Args:
        snapshot: Which one.
        fence: Fence of the incarnation that took it.
        num_threads: That read at once.

    Raises:
        DamagedFile: If a shard is not what was written.
    """
    state = empty_state(snapshot.step, fence)
    state.residual_marks = [None] * fence.world_size
    constants = load_constants(RunFolder(snapshot.run), fence)
    for manifest in snapshot.manifests:
        shard = _checked(snapshot.folder, manifest, fence, num_threads)
        with or_damaged(shard_file(snapshot.folder, manifest.rank)):
            shard.add_to(state, constants)
    for name in fence.averages:
        item = STATEFUL_ITEM + name
        if len({int(decode(i[item])["n_averaged"]) for i in state.items if item in i}) > 1:
            raise DamagedFile(
                snapshot.folder,
                f"its shards hold {name!r} after different numbers of updates; update an "
                "AveragedModel on every rank in the same steps",
            )
    missing = sorted({spec.name for spec in fence.layout.parameters} - set(state.parameters))
    if missing:
        raise DamagedFile(snapshot.folder, f"parameters {missing[:3]} are in no shard")
    return state


def empty_state(step: int, fence: Fence) -> RecoveredState:
    """A state to which shards are added."""
    return RecoveredState(step, fence, base_step=step)


def load_shard(path: Path, step: int, fence: Fence) -> RecoveredState:
    """What one rank's image holds, without the frozen parameters that are stored apart.

    Raises:
        DamagedFile: If it is no image.
    """
    state = empty_state(step, fence)
    state.residual_marks = [None]
    with or_damaged(path):
        _Shard.read(path, fence).add_to(state, {})
    state.averages = {name: state.averages.get(name, {}) for name in fence.averages}
    return state


def _checked(folder: Path, manifest: Manifest, fence: Fence, num_threads: int) -> _Shard:
    """A shard as it was written."""
    path = shard_file(folder, manifest.rank)
    try:
        return _Shard.read(path, fence, manifest, num_threads)
    except (*_UNFIT, OSError) as error:
        why = f"{error!r:.200}"
    # Not in the clause above, whose error holds on to what was read.
    check_shard(folder, manifest)  # says what is wrong with the bytes
    _logger.warning("%s was misread (%s); reading it once more", path, why)
    with or_damaged(path):
        return _Shard.read(path, fence, manifest, num_threads)


@contextmanager
def or_damaged(path: Path) -> Iterator[None]:
    """Whatever reading an image raises is told as damage of its file.

    Raises:
        DamagedFile: Instead of that.
    """
    try:
        yield
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    except _UNFIT as error:
        raise DamagedFile(path, f"not a snapshot shard ({error!r:.200})") from error


def load_constants(folder: RunFolder, fence: Fence) -> dict[str, bytes]:
    """The frozen parameters that all snapshots of an incarnation share, as items."""
    if not fence.constants:
        return {}
    path = check_constants(folder, fence.constants)
    try:
        return {name: encode(tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, ValueError) as error:
        raise DamagedFile(path, f"not a file of tensors ({error!r})") from error


@dataclass(slots=True)
class _Shard:
    """What one rank's image holds.

    Attributes:
        parameters: By name, as all tensors here flat and in the order of the parameter's memory.
        entries: Of optimizers' state: optimizer, parameter, key and tensor.
        averages: By name, then by parameter.
        residual: By parameter, or by a name of the compressor's own.
        items: Tensors that are items, encoded.
        scalars: Everything that is no tensor, encoded.
    """

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    entries: list[tuple[int, str, str, torch.Tensor]] = field(default_factory=list)
    averages: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    residual: dict[str, torch.Tensor] = field(default_factory=dict)
    items: dict[str, bytes] = field(default_factory=dict)
    scalars: bytes | None = None

    @classmethod
    def read(
        cls, path: Path, fence: Fence, manifest: Manifest | None = None, num_threads: int = 1
    ) -> _Shard:
        """Read an image.

        Args:
            path: Its file.
            fence: Of the incarnation that it is of.
            manifest: What it must be; None if that is known already.
            num_threads: That read at once.
        """
        shard = cls()
        specs = {spec.name: spec for spec in fence.layout.parameters}
        with path.open("rb", buffering=0) as file:
            # The length first, by which memory was found to suffice.
            if manifest is not None and os.fstat(file.fileno()).st_size != manifest.bytes:
                raise ValueError("another length than was written")
            # Encoding takes copies: items while nothing else is there.
            image = ImageReader(file.fileno(), num_threads, first=_is_item)
            for name, tensor in image:
                shard._take(name, tensor, specs)
                del tensor  # the next ones are read before it is bound to another
        if manifest is not None and image.checksum != manifest.checksum:
            raise ValueError("other bytes than were written")
        return shard

    def add_to(self, state: RecoveredState, constants: Mapping[str, bytes]) -> None:
        """Add this to a state. Its tensors become the state's, which replay changes in place."""
        if self.scalars is None:
            raise KeyError(SCALARS)
        scalars = decode(self.scalars)
        state.held = tuple(scalars["held"])
        if not state.optimizers:
            state.optimizers = [OptimizerState(list(groups), {}) for groups in scalars["groups"]]
        for optimizer, entries in zip(state.optimizers, scalars["state"], strict=True):
            for name, values in entries.items():
                optimizer.state.setdefault(name, {}).update(values)
        for index, name, key, tensor in self.entries:
            state.optimizers[index].state.setdefault(name, {})[key] = tensor
        state.parameters |= self.parameters
        for average, followed in self.averages.items():
            state.averages.setdefault(average, {}).update(followed)
        state.items.append({**constants, **scalars["items"], **self.items})
        state.residuals.append(self.residual)

    def _take(
        self, full_name: str, tensor: torch.Tensor, specs: Mapping[str, ParameterSpec]
    ) -> None:
        prefix, _, name = full_name.partition("/")
        if prefix + "/" == PARAMETER:
            self.parameters[name] = _flat(tensor, specs[name])
        elif prefix + "/" == OPTIMIZER:
            index, parameter, key = entry_of(name, specs)
            self.entries.append((index, parameter, key, _flat(tensor, specs[parameter])))
        elif _is_item(full_name):
            self.items[full_name] = encode(tensor)
        elif prefix + "/" == AVERAGE_ITEM:
            average, _, parameter = name.partition("/")
            self.averages.setdefault(average, {})[parameter] = _flat(tensor, specs[parameter])
        elif prefix + "/" == RESIDUAL:
            # A compressor may keep state of its own beside the parameters' residuals.
            spec = specs.get(name)
            self.residual[name] = flat(tensor) if spec is None else _flat(tensor, spec)
        elif full_name == SCALARS:
            self.scalars = tensor.numpy().tobytes()


def _is_item(name: str) -> bool:
    return name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM))


def entry_of(name: str, parameters: Container[str]) -> tuple[int, str, str]:
    """What ``INDEX/PARAMETER/KEY`` names: which optimizer, and which entry of a parameter's state.

    Parameters and keys may have slashes in their names; of two ways to read one, the longer name of a
    parameter counts.

    Raises:
        KeyError: If it names none of the parameters.
    """
    index, _, rest = name.partition("/")
    parameter, _, _ = rest.rpartition("/")
    while parameter not in parameters:
        if not parameter:
            raise KeyError(name)
        parameter, _, _ = parameter.rpartition("/")
    return int(index), parameter, rest[len(parameter) + 1 :]


def _flat(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name} has shape {tuple(tensor.shape)} instead of {spec.shape}")
    return flat_like(tensor, spec)
