"""How long the staging log of this life may become, agreed on by all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from lowdiff.commit.standby import Node
from lowdiff.compressors.feedback import NUM_SLOTS
from lowdiff.core.events import Code, inform
from lowdiff.core.layout import shares_of, trained_by
from lowdiff.errors import ConfigError
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given
from lowdiff.peers.placement import Peers, peers_of
from lowdiff.persistence.files.lease import this_machine
from lowdiff.persistence.staging.budget import (
    StagingNeed,
    existing_part,
    fits_twice,
    log_cap,
    room_at,
)
from lowdiff.settings import Settings
from lowdiff.types import Layout

_MIB = 1 << 20
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
#: Files that hold items with strategy survivors, all of them together with one that is being written.
_ITEM_FILES = 5
#: Images of a rank's share of a snapshot that a copy has at a time.
_NUM_COPIED = 2
#: Tensors of a parameter's size that an optimizer may make in its first step.
_STATE_TENSORS = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """What this rank may use.

    Attributes:
        chunk_bytes: Length of one chunk of the log.
        log_bytes: Most that all chunks may take together.
        optimizer_steps: Most optimizer steps of one loop body that are logged; see `Settings`.
        image_bytes: Length of a snapshot's share.
        node: Which ranks are on other nodes.
        peers: For which of these it keeps copies, and which keep its own.
    """

    chunk_bytes: int
    log_bytes: int
    optimizer_steps: int
    image_bytes: int
    node: Node
    peers: Peers


def agree_on_memory(
    settings: Settings, given: Given, ranks: Ranks, node: Node, *, has_staged: bool
) -> Memory:
    """Measure what there is and what is needed; say so.

    Args:
        settings: Say which folder.
        given: What will be staged; objects were given their state before, as they are asked for it here.
        ranks: Those on one machine share its memory.
        node: Which ranks are on other nodes.
        has_staged: Whether this machine holds staged records of the run, which must be found.

    Raises:
        ConfigError: If it cannot fit.
    """
    num_steps = 1
    if settings.has_several_steps:
        largest = max(1, _largest_share(given.attached.layout, ranks.world_size))
        num_steps = max(_LEAST_STEPS, min(_MOST_STEPS, _BODY_BYTES // largest))
    root = settings.staging_root
    num_guests = len(node.others) if node.first == ranks.rank else 0
    layout = given.attached.layout
    trained = [trained_by(layout, rank).indices for rank in range(ranks.world_size)]
    peers = peers_of(ranks.rank, node.of_rank, settings.copies, trained)
    if peers.sent and settings.logs_steps:
        raise ConfigError(
            "copies of compressed gradients are made by ranks that hold the same shards, and no rank on "
            f"another node holds those of rank(s) {', '.join(map(str, peers.sent))}; build the mesh so that "
            'replicate= goes over nodes, or leave gradients as they are: strategy="replica", no compressor'
        )
    need, chunk_bytes = _need(settings, given, ranks.world_size, num_steps, num_guests)
    need = _with_copies(settings, need, len(peers.wards))
    cap, is_tight = _cap(root, need, ranks)
    cap //= 1 + len(peers.wards)  # each copy has a log as long
    if not has_staged and is_tight:
        Code.STAGING_TIGHT.warn(
            f"staging in {root} has no room for a second life: after a crash the next one must "
            "fit beside what this one leaves there, until it has begun. Enlarge it (docker: "
            "--shm-size), or be ready to move what is left with `lowdiff recover --as-run`",
        )
    if settings.has_several_steps:
        inform(
            f"{num_steps} optimizer steps of one loop body are logged; a body with more costs a "
            "full snapshot",
            rank=ranks.rank,
        )
    return Memory(chunk_bytes, cap, num_steps, need.snapshot_bytes, node, peers)


def _with_copies(settings: Settings, need: StagingNeed, num_wards: int) -> StagingNeed:
    """Add what is kept for ranks on other nodes: of each what it stages itself; its residual if that is sent."""
    if settings.strategy == "replica":
        kept = (
            need.snapshot_bytes + need.replica_bytes // 2
        )  # the replica's state, and the trainer's image
    else:
        kept = _NUM_COPIED * need.snapshot_bytes
    if settings.replicates_residual:
        kept += need.residual_bytes
    return replace(
        need,
        copies_bytes=num_wards * kept,
        log_bytes=(1 + num_wards) * need.log_bytes,
        least_log_bytes=(1 + num_wards) * need.least_log_bytes,
    )


def node_of(settings: Settings, ranks: Ranks) -> Node:
    """Find which ranks share a staging root, unless the user says which share a node.

    Raises:
        ConfigError: If the folder is a file.
    """
    root = settings.staging_root
    with ranks.together():
        if root.exists() and not root.is_dir():
            raise ConfigError(
                f"staging={root} is no folder; give one in memory (tmpfs), or leave it out"
            )
        device = os.stat(existing_part(root)).st_dev
    place = [this_machine(), device, os.path.realpath(root)]
    places = ranks.gather(place if settings.node is None else settings.node)
    distinct = [place for rank, place in enumerate(places) if places.index(place) == rank]
    return Node(ranks.rank, tuple(distinct.index(place) for place in places))


def _cap(root: Path, need: StagingNeed, ranks: Ranks) -> tuple[int, bool]:
    """Return how long this rank's log may become, and whether a second life has no room."""
    with ranks.together():
        room = room_at(root)
        place = [socket.gethostname(), os.stat(existing_part(root)).st_dev]
    told = ranks.gather([place, *astuple(need)])
    here = [StagingNeed(*numbers) for theirs, *numbers in told if theirs == place]
    with ranks.together():
        cap = log_cap(here, need, room)
    inform(
        f"staging at {root} takes up to "
        f"{(need.least_bytes - need.least_log_bytes + cap) / _MIB:.1f} MiB (residual "
        f"{need.residual_bytes / _MIB:.1f}, snapshot about {need.snapshot_bytes / _MIB:.1f}, "
        f"replica {need.replica_bytes / _MIB:.1f}, copies {need.copies_bytes / _MIB:.1f}, log "
        f"{cap / _MIB:.1f}), shared with "
        f"{len(here) - 1} other rank(s); {room.free_bytes / _MIB:.1f} MiB are free",
        rank=ranks.rank,
    )
    return cap, not fits_twice(here, room)


def _need(
    settings: Settings, given: Given, world_size: int, num_steps: int, num_guests: int
) -> tuple[StagingNeed, int]:
    """Return what one rank needs, and the length of its chunks.

    A replica (LowDiff+) needs of the state one copy that is stepped, one that waits for the disk,
    and for as long as the first step takes, or a snapshot of the trainer's, a third.

    Args:
        settings: Whether there is a replica, and where the residual lies.
        given: What is trained.
        world_size: Number of ranks.
        num_steps: Optimizer steps of one loop body that a replica's chunk is to hold.
        num_guests: Ranks on other nodes whose share may have to be saved here (survivors).
    """
    attached = given.attached
    parameters = attached.layout.parameters
    model_bytes = sum(spec.nbytes for spec in parameters)
    entries = (entry for optimizer in attached.optimizers for entry in optimizer.state.values())
    values = (value for entry in entries for value in entry.values())
    held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    state_bytes = max(_STATE_TENSORS * model_bytes, held)
    averages = len(given.averages) * model_bytes
    items = sum(tensor.nbytes for tensor in given.tracker.tensors.values())
    if settings.strategy == "survivors":
        share = _largest_share(attached.layout, world_size)
        factor = (model_bytes + state_bytes + averages) / model_bytes
        image = int(share * factor) + items + _MIN_CHUNK_BYTES
        # Those that survivors save, beside the last regular one.
        changing = _ITEM_FILES * sum(given.tracker.sizes().values())
        need = StagingNeed(0, image, changing, changing, image * (1 + num_guests))
        return need, _MIN_CHUNK_BYTES
    if settings.strategy == "replica":
        largest = _largest_share(attached.layout, world_size)
        factor = (model_bytes + state_bytes + averages) / model_bytes
        share = int(largest * factor) + items
        heads = _SECTION_BYTES * len(parameters) * (num_steps - 1)
        chunk_bytes = num_steps * largest + heads + _MIN_CHUNK_BYTES
        log_bytes = (_QUEUE_CHUNKS if num_steps == 1 else _LEAST_CHUNKS) * chunk_bytes
        return StagingNeed(0, share, log_bytes, _LEAST_CHUNKS * chunk_bytes, 2 * share), chunk_bytes
    kept = settings.compressor.residual_layout(attached.exchanged).parameters
    staged = () if settings.residual == "snapshot" else kept
    own_bytes = sum(spec.nbytes for spec in attached.exchanged.parameters)
    chunk_bytes = min(max(own_bytes // 8, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    need = StagingNeed(
        residual_bytes=NUM_SLOTS * sum(spec.nbytes for spec in staged),
        snapshot_bytes=(model_bytes + state_bytes + averages) // world_size + own_bytes + items,
        log_bytes=4 * own_bytes + _MAX_CHUNK_BYTES,
        least_log_bytes=_LEAST_CHUNKS * chunk_bytes,
    )
    return need, chunk_bytes


def _largest_share(layout: Layout, world_size: int) -> int:
    """Bytes of the parameters of the rank that has most."""
    parameters = layout.parameters
    return max(sum(parameters[i].nbytes for i in own) for own in shares_of(layout, world_size))
