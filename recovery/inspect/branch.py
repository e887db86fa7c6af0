"""A new run that starts from a recovered step of an old one, and shares nothing with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch

from lowdiff.core.layout import shaped
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.durable import fsync_directory, make_directory, replaced, unwritable
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import RESIDUAL, Manifest, manifest_file, shard_file
from lowdiff.persistence.run.fences import create_run, new_life, new_run_id, write_fence
from lowdiff.recovery.images import shard_tensors, write_image
from lowdiff.recovery.state import OptimizerState, RecoveredState


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
    error-feedback residual it has what the old run's snapshot of that very step held, and
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
        life=new_life(),
        world_size=len(state.items),
        lost_tail=None,
    )
    with new_directory(target) as partial:
        folder = RunFolder(partial)
        create_run(folder, run_id)
        snapshot = folder.snapshot(0, state.step)
        make_directory(snapshot)
        for rank in range(fence.world_size):
            with replaced(shard_file(snapshot, rank)) as file:
                written = write_image(file, _shard(state, rank))
            manifest = Manifest(run_id, 0, state.step, rank, fence.world_size, *written)
            write_json(manifest_file(snapshot, rank), manifest.document())
            write_fence(folder, replace(fence, rank=rank))
    return target


def _shard(state: RecoveredState, rank: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Everything that one rank's shard holds, for `write_image`; parameters are dealt out in turn."""
    specs = {spec.name: spec for spec in state.fence.layout.parameters}
    own = list(specs)[rank :: len(state.items)]
    tensors = shard_tensors(
        replace(
            state,
            parameters={name: state.parameters[name] for name in own},
            optimizers=[
                OptimizerState(o.groups, {name: o.state[name] for name in own if name in o.state})
                for o in state.optimizers
            ],
            averages={
                average: {name: followed[name] for name in own if name in followed}
                for average, followed in state.averages.items()
            },
            items=[state.items[rank]],
        )
    )
    if state.step == state.base_step and rank < len(state.residuals):
        for name, residual in state.residuals[rank].items():
            # A compressor may keep state of its own beside the parameters' residuals.
            make = partial(shaped, residual, specs[name]) if name in specs else residual.detach
            tensors[RESIDUAL + name] = make
    return tensors
