"""The process that publishes weights, prepared by rank 0."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

import torch

from lowdiff.errors import ConfigError, StorageError
from lowdiff.persistence.files.durable import write_file
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.settings import PublisherSettings
from lowdiff.persistence.store.client import is_url
from lowdiff.persistence.versions.target import target_of
from lowdiff.persistence.versions.weights import is_publishable
from lowdiff.persistence.versions.writer import claim
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.recovery.publish.publishing import published_names
from lowdiff.recovery.replay.optimizers import registrations
from lowdiff.recovery.state import SCALAR_STATE
from lowdiff.settings import Settings
from lowdiff.types import Fence


def publisher_of(
    settings: Settings, fence: Fence, folder: StagingFolder, module: torch.nn.Module
) -> PublisherProcess | None:
    """Prepare the process that publishes weights, which the first step starts; None if nothing is published here.

    Raises:
        ConfigError: If the published names are not one to one, or a tensor has a dtype that cannot be published.
        RunMismatch: If the target is another run's. A target that does not answer is tried again later.
    """
    chosen = settings.publish
    if chosen is None or fence.rank != 0:
        return None
    with suppress(StorageError):
        claim(target_of(chosen.target), fence.run_id)
    names: dict[str, str | None] = {}
    if chosen.names is not None:
        names = published_names(list(fence.names), chosen.names)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_publishable(tensor) and names.get(key, key) is not None:
            raise ConfigError(
                f"{key} is of {tensor.dtype}, which cannot be published; leave it out: publish names gives None for it"
            )
    if chosen.names is not None:
        write_file(folder.publisher_names, json.dumps(names).encode())
    return PublisherProcess(
        PublisherSettings(
            run=str(settings.run),
            staging_root=str(settings.staging_root),
            run_id=fence.run_id,
            incarnation=fence.incarnation,
            rank=fence.rank,
            world_size=fence.world_size,
            trainer_pid=os.getpid(),
            target=str(chosen.target) if is_url(chosen.target) else os.path.abspath(chosen.target),
            dtype=chosen.dtype_name,
            every=chosen.every,
            anchor_every=chosen.anchor_every,
            keep_anchors=chosen.keep_anchors,
            durable=chosen.durable,
            has_names=chosen.names is not None,
            imports=settings.imports,
            optimizers=tuple(registrations(fence.optimizers)),
            scalar_state=tuple(sorted(SCALAR_STATE)),
            import_path=tuple(map(os.path.abspath, sys.path)) if settings.imports else (),
        )
    )
