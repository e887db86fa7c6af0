"""Where this life's staging lies and how long its log may become, agreed on by all ranks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowdiff.agreement import Ranks
from lowdiff.attached import Attached
from lowdiff.compressors.feedback import NUM_SLOTS
from lowdiff.errors import ConfigError, StorageError
from lowdiff.given import Given
from lowdiff.layout import shares_of
from lowdiff.persistence.budget import (
    Room,
    StagingNeed,
    existing_part,
    fits_twice,
    log_cap,
    room_at,
)
from lowdiff.persistence.durable import make_directory
from lowdiff.persistence.paths import staging_in
from lowdiff.persistence.trust import make_root, shared_staging_root
from lowdiff.settings import Settings
from lowdiff.types import Layout

_logger = logging.getLogger(__name__)

_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 64 << 20
#: Chunks without which a log cannot work: one that is written, one that is read, one to spare.
_LEAST_CHUNKS = 3
#: Of a replica's queue: each takes one step of a large model, or many of a small one.
_QUEUE_CHUNKS = 6
#: Where a loop body may make several optimizer steps, a chunk has room for so many: as fit into the
#: bytes, but no fewer than the least and no more than the most.
_BODY_BYTES = 32 << 20
_LEAST_STEPS, _MOST_STEPS = 4, 1024
#: What a section of the log takes beside its values.
_SECTION_BYTES = 64
#: Tensors of a parameter's size that an optimizer may make in its first step.
_STATE_TENSORS = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """What this rank may use.

    Attributes:
        root: Folder of the staging folders of all runs.
        chunk_bytes: Length of one chunk of the log.
        log_bytes: Most that all chunks may take together.
        optimizer_steps: Most optimizer steps of one loop body that are logged; see `Settings`.
    """

    root: Path
    chunk_bytes: int
    log_bytes: int
    optimizer_steps: int


def agree_on_memory(settings: Settings, given: Given, ranks: Ranks, *, has_staged: bool) -> Memory:
    """Measure what there is and what is needed; say so.

    Where the default folder has no room, the run folder serves instead, with a notice; and where a
    killed life left steps there, once more.

    Args:
        settings: Say which folder.
        given: What will be staged.
        ranks: Those on one machine share its memory.
        has_staged: Whether this machine holds staged records of the run, which must be found.

    Raises:
        StorageError: If it cannot fit.
        ConfigError: If the folder is a file.
    """
    num_steps = 1
    if settings.has_several_steps:
        num_steps = _steps_of_a_body(given, ranks.world_size)
    if settings.has_replica:
        need, chunk_bytes = replica_need(given, ranks.world_size, num_steps)
    else:
        kept = settings.compressor.residual_layout(given.attached.layout)
        staged = kept.parameters if settings.residual == "exact" else ()
        residual_bytes = NUM_SLOTS * sum(spec.nbytes for spec in staged)
        need, chunk_bytes = _need(given, ranks.world_size, residual_bytes)
    root, instead = settings.staging_root, staging_in(settings.run)
    if settings.staging is None and root == instead:
        _logger.warning(
            "staging in %s, where the life before this one left steps, which may be slower than %s; "
            "that is tried again after a life that was closed",
            root,
            shared_staging_root(),
        )
    cap, is_tight, error = _cap(root, need, ranks)
    errors = [text for text in ranks.gather(error) if text]
    if errors and settings.staging is None:
        # Where steps are staged they are looked for, so there it has to fit; and all ranks of a life
        # stage in one place, or the next would look for some of them in the other.
        if not any(ranks.gather(has_staged and root != instead)):
            root = instead
            _logger.warning("%s; staging in %s instead, which may be slower", errors[0], root)
        with ranks.together():
            make_directory(root.parent)
            make_root(root)
        cap, is_tight, error = _cap(root, need, ranks)
    with ranks.together():
        if error:
            raise StorageError(error)
        if not has_staged and is_tight:
            _logger.warning(
                "staging in %s has no room for a second life: after a crash the next one must fit "
                "beside what this one leaves there, until it has begun. Enlarge it (docker: "
                "--shm-size), or be ready to move what is left with `lowdiff recover --as-run`",
                root,
            )
    if settings.has_several_steps:
        _logger.info(
            "rank %d: %d optimizer steps of one loop body are logged; a body with more costs a full "
            "snapshot",
            ranks.rank,
            num_steps,
        )
    return Memory(root, chunk_bytes, cap, num_steps)


def _cap(root: Path, need: StagingNeed, ranks: Ranks) -> tuple[int, bool, str]:
    """How long this rank's log may become, whether a second life has no room, or why neither."""
    with ranks.together():
        room = _room(root)
        device = os.stat(existing_part(root)).st_dev
    told = ranks.gather([socket.gethostname(), device, *_numbers(need)])
    here = [
        StagingNeed(*numbers)
        for host, place, *numbers in told
        if [host, place] == told[ranks.rank][:2]
    ]
    try:
        cap = log_cap(here, need, room)
    except StorageError as error:
        return 0, True, str(error)
    _logger.info(
        "rank %d: staging at %s takes up to %.1f MiB (residual %.1f, snapshot about %.1f, replica "
        "%.1f, log %.1f), shared with %d other rank(s); %.1f MiB are free",
        ranks.rank,
        root,
        *(
            x / 2**20
            for x in (
                need.least_bytes - need.least_log_bytes + cap,
                need.residual_bytes,
                need.snapshot_bytes,
                need.replica_bytes,
                cap,
            )
        ),
        len(here) - 1,
        room.free_bytes / 2**20,
    )
    return cap, not fits_twice(here, room), ""


def _room(root: Path) -> Room:
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"staging={root} is no folder; give one in memory (tmpfs), or leave it out"
        )
    return room_at(root)


def _numbers(need: StagingNeed) -> list[int]:
    return [
        need.residual_bytes,
        need.snapshot_bytes,
        need.log_bytes,
        need.least_log_bytes,
        need.replica_bytes,
    ]


def _need(given: Given, world_size: int, residual_bytes: int) -> tuple[StagingNeed, int]:
    """What one rank needs, and the length of its chunks."""
    attached = given.attached
    model_bytes = sum(p.nbytes for p in attached.layout.parameters)
    chunk_bytes = min(max(model_bytes // 8, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    state_bytes = max(_STATE_TENSORS * model_bytes, _state_bytes(attached))
    averages = len(given.averages) * model_bytes
    items = sum(tensor.nbytes for tensor in given.tracker.tensors.values())
    need = StagingNeed(
        residual_bytes=residual_bytes,
        snapshot_bytes=(model_bytes + state_bytes + averages) // world_size + model_bytes + items,
        log_bytes=4 * model_bytes + _MAX_CHUNK_BYTES,
        least_log_bytes=_LEAST_CHUNKS * chunk_bytes,
    )
    return need, chunk_bytes


def _steps_of_a_body(given: Given, world_size: int) -> int:
    """How many optimizer steps of one loop body the log has room for; the same on all ranks."""
    fitting = _BODY_BYTES // max(1, _largest_share(given.attached.layout, world_size))
    return max(_LEAST_STEPS, min(_MOST_STEPS, fitting))


def _largest_share(layout: Layout, world_size: int) -> int:
    """Bytes of the parameters of the rank that has most."""
    parameters = layout.parameters
    return max(sum(parameters[i].nbytes for i in own) for own in shares_of(layout, world_size))


def replica_need(given: Given, world_size: int, num_steps: int) -> tuple[StagingNeed, int]:
    """What one rank needs with a replica (LowDiff+), and the length of its chunks.

    Of the state, one copy that is stepped, one that waits for the disk, and for as long as the
    first step takes, or a snapshot of the trainer's, a third.

    Args:
        given: What is trained.
        world_size: Number of ranks.
        num_steps: Optimizer steps of one loop body that a chunk is to hold.
    """
    layout = given.attached.layout
    model_bytes = sum(spec.nbytes for spec in layout.parameters)
    largest = _largest_share(layout, world_size)
    state_bytes = max(_STATE_TENSORS * model_bytes, _state_bytes(given.attached))
    factor = 1 + state_bytes / model_bytes + len(given.averages)
    items = sum(tensor.nbytes for tensor in given.tracker.tensors.values())
    share = int(largest * factor) + items
    heads = _SECTION_BYTES * len(layout.parameters) * (num_steps - 1)
    chunk_bytes = num_steps * largest + heads + _MIN_CHUNK_BYTES
    num_chunks = _QUEUE_CHUNKS if num_steps == 1 else _LEAST_CHUNKS
    need = StagingNeed(
        residual_bytes=0,
        snapshot_bytes=share,
        log_bytes=num_chunks * chunk_bytes,
        least_log_bytes=_LEAST_CHUNKS * chunk_bytes,
        replica_bytes=2 * share,
    )
    return need, chunk_bytes


def _state_bytes(attached: Attached) -> int:
    entries: list[Mapping[str, Any]] = [
        entry for optimizer in attached.optimizers for entry in optimizer.state.values()
    ]
    values = [value for entry in entries for value in entry.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
