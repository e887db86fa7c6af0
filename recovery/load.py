"""Reading a snapshot into a state, and writing a state's tensors as a snapshot's."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lowdiff.errors import DamagedFile
from lowdiff.layout import flat, flat_like
from lowdiff.persistence.catalog import SnapshotSet
from lowdiff.persistence.constants import check_constants
from lowdiff.persistence.forms import BadEncoding
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.snapshots import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    SCALARS,
    Manifest,
    check_shard,
    shard_file,
)
from lowdiff.persistence.values import decode, encode
from lowdiff.recovery.images import read_image
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

#: What reading tensors and scalars raises where they are not those of a snapshot.
UNFIT = (
    SafetensorError, BadEncoding, LookupError, TypeError, ValueError, AttributeError, EOFError,
    RecursionError,
)  # fmt: skip


def load_snapshot(snapshot: SnapshotSet, fence: Fence, num_threads: int = 1) -> RecoveredState:
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
    specs = {spec.name: spec for spec in fence.layout.parameters}
    constants = load_constants(RunFolder(snapshot.run), fence)
    for manifest in snapshot.manifests:
        path, tensors = _checked(snapshot.folder, manifest, num_threads)
        _add_image(path, tensors, state, constants)
    for name in fence.averages:
        item = STATEFUL_ITEM + name
        if len({int(decode(i[item])["n_averaged"]) for i in state.items if item in i}) > 1:
            raise DamagedFile(
                snapshot.folder,
                f"its shards hold {name!r} after different numbers of updates; update an "
                "AveragedModel on every rank in the same steps",
            )
    missing = sorted(set(specs) - set(state.parameters))
    if missing:
        raise DamagedFile(snapshot.folder, f"parameters {missing[:3]} are in no shard")
    return state


def empty_state(step: int, fence: Fence) -> RecoveredState:
    """A state to which shards are added."""
    return RecoveredState(
        step=step,
        fence=fence,
        parameters={},
        optimizers=[],
        items=[],
        held=(),
        residual_marks=[],
        residuals=[],
        base_step=step,
    )


def load_shard(path: Path, step: int, fence: Fence) -> RecoveredState:
    """What one rank's image holds, without the frozen parameters that are stored apart.

    Raises:
        DamagedFile: If it is no image.
    """
    state = empty_state(step, fence)
    state.residual_marks = [None]
    _add_image(path, _read(path, 1)[0], state, {})
    state.averages = {name: state.averages.get(name, {}) for name in fence.averages}
    return state


def _checked(
    folder: Path, manifest: Manifest, num_threads: int
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A shard's file, and its tensors; they are what was written."""
    path = shard_file(folder, manifest.rank)
    try:
        tensors, size, checksum = _read(path, num_threads)
        if (size, checksum) != (manifest.bytes, manifest.checksum):
            raise DamagedFile(path, "it changes while it is read")
    except DamagedFile:
        check_shard(folder, manifest)  # which says what is wrong with its bytes, if they are others
        raise
    return path, tensors


def _read(path: Path, num_threads: int) -> tuple[dict[str, torch.Tensor], int, int]:
    try:
        return read_image(path, num_threads)
    except (*UNFIT, OSError) as error:
        raise DamagedFile(path, f"not a snapshot shard ({error!r})") from error


def _add_image(
    path: Path,
    tensors: dict[str, torch.Tensor],
    state: RecoveredState,
    constants: Mapping[str, bytes],
) -> None:
    specs = {spec.name: spec for spec in state.fence.layout.parameters}
    try:
        scalars = decode(tensors.pop(SCALARS).numpy().tobytes())
        _add_shard(state, tensors, scalars, specs, constants)
    except UNFIT as error:
        raise DamagedFile(path, f"not a snapshot shard ({error!r})") from error


def load_constants(folder: RunFolder, fence: Fence) -> dict[str, bytes]:
    """The frozen parameters that all snapshots of an incarnation share, as items."""
    if not fence.constants:
        return {}
    path = check_constants(folder, fence.constants)
    try:
        return {name: encode(tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, ValueError) as error:
        raise DamagedFile(path, f"not a file of tensors ({error!r})") from error


def _add_shard(
    state: RecoveredState,
    tensors: dict[str, torch.Tensor],
    scalars: Mapping[str, Any],
    specs: Mapping[str, ParameterSpec],
    constants: Mapping[str, bytes],
) -> None:
    """Add one rank's shard. Its tensors become the state's, and none is held beside its copy."""
    state.held = tuple(scalars["held"])
    if not state.optimizers:
        state.optimizers = [OptimizerState(list(groups), {}) for groups in scalars["groups"]]
    for optimizer, entries in zip(state.optimizers, scalars["state"], strict=True):
        for name, values in entries.items():
            optimizer.state.setdefault(name, {}).update(values)
    items = {**constants, **scalars["items"]}
    residual = {}
    for full_name in list(tensors):
        tensor = tensors.pop(full_name)
        prefix, _, name = full_name.partition("/")
        if prefix + "/" == PARAMETER:
            state.parameters[name] = _flat(tensor, specs[name])
        elif prefix + "/" == OPTIMIZER:
            index, parameter, key = entry_of(name, specs)
            owner = state.optimizers[index].state.setdefault(parameter, {})
            owner[key] = _flat(tensor, specs[parameter])
        elif full_name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            items[full_name] = encode(tensor)
        elif prefix + "/" == AVERAGE_ITEM:
            average, _, parameter = name.partition("/")
            state.averages.setdefault(average, {})[parameter] = _flat(tensor, specs[parameter])
        elif prefix + "/" == RESIDUAL:
            # A compressor may keep state of its own beside the parameters' residuals.
            spec = specs.get(name)
            residual[name] = flat(tensor) if spec is None else _flat(tensor, spec)
    state.items.append(items)
    state.residuals.append(residual)


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
