"""Process groups of lowdiff's own: what it exchanges must not wait behind the training's collectives."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def own_group(training_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A Gloo group of the same ranks, as patient as theirs; only these call it."""
    members = dist.get_process_group_ranks(training_group)
    group: dist.ProcessGroup = dist.new_group(
        members,
        timeout=_patience_of(training_group),
        backend="gloo",
        use_local_synchronization=not _is_world(training_group),
    )
    return group


def leave(group: dist.ProcessGroup | None) -> None:
    """Give up a group's connections and threads; those of a world that is gone went with it.

    A group of part of the world stays until the world ends: PyTorch would give its name, a hash of
    its ranks, to the next one, which would then look for the addresses of this one.
    """
    if group is not None and dist.is_initialized():
        with suppress(KeyError, ValueError):  # it belonged to an earlier world
            if _is_world(group):
                dist.destroy_process_group(group)


def _patience_of(group: dist.ProcessGroup) -> timedelta:
    """How long its ranks wait for one another; at least Gloo's default, where NCCL's is shorter."""
    found = [default_pg_timeout]
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)  # not every backend has any
        found.append(getattr(options, "_timeout", default_pg_timeout))
    return max(found)


def _is_world(group: dist.ProcessGroup) -> bool:
    return bool(len(dist.get_process_group_ranks(group)) == dist.get_world_size())
