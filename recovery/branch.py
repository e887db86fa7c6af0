"""A new run that starts from a recovered step of an old one, and shares nothing with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from crc32c import crc32c
from safetensors.torch import save

from lowdiff.errors import ConfigError
from lowdiff.layout import shaped
from lowdiff.persistence.durable import (
    fsync_directory,
    make_directory,
    unwritable,
    write_file,
    write_json,
)
from lowdiff.persistence.fences import create_run, new_run_id, write_fence
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.snapshots import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    SCALARS,
    Manifest,
    manifest_file,
    shard_file,
)
from lowdiff.persistence.values import encode
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    TENSOR_ITEM,
    RecoveredState,
    is_aligned,
)
from lowdiff.types import ParameterSpec


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which gets its name once it is complete and durable.

    Raises:
        ConfigError: If something of that name exists.
        StorageError: If it cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; give the name of a new folder")
    partial = target.with_name(f"{target.name}.{uuid4().hex[:8]}.partial")
    try:
        make_directory(partial)
        yield partial
        partial.rename(target)
        fsync_directory(target.parent)
    except (OSError, RuntimeError) as error:  # torch may report a full disk as RuntimeError
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def start_run(state: RecoveredState, run: str | Path) -> Path:
    """Write a run folder whose first and only snapshot is ``state``.

    A ``Checkpointer`` on it goes on after the state's step, with any number of ranks. Of the
    error-feedback residual it has what the old run's atomic snapshot of that very step held, and
    starts from zeros otherwise: exact state, not the old run's exact continuation.

    Args:
        state: What to start from.
        run: A folder that does not exist.

    Raises:
        ConfigError: If it exists.
        StorageError: If it cannot be written.
    """
    target = Path(run).absolute()
    run_id = new_run_id()
    fence = replace(
        state.fence,
        run_id=run_id,
        incarnation=0,
        parent=None,
        base_step=state.step,
        constants="",  # each shard of the one snapshot holds them
        world_size=len(state.items),
    )
    with new_directory(target) as partial:
        folder = RunFolder(partial)
        create_run(folder, run_id)
        snapshot = folder.snapshot(0, state.step)
        make_directory(snapshot)
        for rank in range(fence.world_size):
            data = save(_shard(state, rank), {"format": "pt", "writer": "lowdiff"})
            write_file(shard_file(snapshot, rank), data)
            manifest = Manifest(
                run_id, 0, state.step, rank, fence.world_size, len(data), crc32c(data)
            )
            write_json(manifest_file(snapshot, rank), manifest.document())
            write_fence(folder, replace(fence, rank=rank))
    return target


def _shard(state: RecoveredState, rank: int) -> dict[str, torch.Tensor]:
    """Everything that one rank's shard holds; parameters are dealt out in turn."""
    world_size = len(state.items)
    tensors: dict[str, torch.Tensor] = {}
    scalars: list[dict[str, dict[str, Any]]] = [{} for _ in state.optimizers]
    for i, spec in enumerate(state.fence.layout.parameters):
        if i % world_size == rank:
            tensors[PARAMETER + spec.name] = _logical(state.parameters[spec.name], spec)
            for index, optimizer in enumerate(state.optimizers):
                entries = optimizer.state.get(spec.name, {})
                for key, value in entries.items():
                    if is_aligned(key, value, spec.numel):
                        name = f"{OPTIMIZER}{index}/{spec.name}/{key}"
                        tensors[name] = _logical(value, spec)
                    else:
                        scalars[index].setdefault(spec.name, {})[key] = value
            for name, average in state.averages.items():
                if spec.name in average:
                    tensors[f"{AVERAGE_ITEM}{name}/{spec.name}"] = _logical(
                        average[spec.name], spec
                    )
    is_exact = state.step == state.base_step and not state.has_mixed_residuals
    if is_exact and rank < len(state.residuals):
        specs = {spec.name: spec for spec in state.fence.layout.parameters}
        for name, residual in state.residuals[rank].items():
            # A compressor may keep state of its own beside the parameters' residuals.
            own = _logical(residual, specs[name]) if name in specs else residual
            tensors[RESIDUAL + name] = own
    items = dict(state.items[rank])
    for name in [n for n in items if n.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM))]:
        tensors[name] = state.resolved(name, {name: items.pop(name)}).contiguous().clone()
    document: Mapping[str, Any] = {
        "groups": [optimizer.groups for optimizer in state.optimizers],
        "state": scalars,
        "held": list(state.held),
        "items": items,
    }
    data = bytearray(encode(document, name="snapshot"))
    tensors[SCALARS] = torch.frombuffer(data, dtype=torch.uint8)
    return tensors


def _logical(values: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    return shaped(values, spec).contiguous()
