"""How long the staging log of this life may become, agreed on by all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import astuple, replace
from pathlib import Path

from lowdiff.core.events import Code, inform
from lowdiff.core.layout import trained_by
from lowdiff.core.placement import Node, peers_of
from lowdiff.errors import ConfigError
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given
from lowdiff.persistence.files.lease import this_machine
from lowdiff.persistence.staging.budget import (
    DoesNotFit,
    StagingNeed,
    existing_part,
    fits_twice,
    log_cap,
    room_at,
)
from lowdiff.protect import strategy_of
from lowdiff.protect.memory import Demand, Memory
from lowdiff.settings import Settings

_MIB = 1 << 20
#: Where a loop body may make several optimizer steps, a chunk has room for so many: as fit into the
#: bytes, but no fewer than the least and no more than the most.
_BODY_BYTES = 32 << 20
_LEAST_STEPS, _MOST_STEPS = 4, 1024


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
        DoesNotFit: If it cannot; on all ranks.
    """
    layout, root = given.attached.layout, settings.staging_root
    trained = [trained_by(layout, rank).indices for rank in range(ranks.world_size)]
    peers = peers_of(ranks.rank, node.of_rank, settings.copies, trained)
    num_guests = len(node.others) if node.first == ranks.rank else 0
    demand = Demand(settings, given, ranks.world_size, 1, num_guests, peers)
    if settings.has_several_steps:
        fitting = _BODY_BYTES // max(1, demand.largest_share)
        demand = replace(demand, num_steps=max(_LEAST_STEPS, min(_MOST_STEPS, fitting)))
    need = strategy_of(settings).need(demand)
    cap, is_tight = _cap(root, need.staging, ranks)
    cap //= 1 + len(peers.wards)  # each copy has a log as long
    if not has_staged and is_tight:
        Code.STAGING_TIGHT.warn(
            f"staging in {root} has no room for a second life: after a crash the next one must "
            "fit beside what this one leaves there, until it has begun. Enlarge it (docker: "
            "--shm-size), or be ready to move what is left with `lowdiff recover --as-run`",
        )
    if settings.has_several_steps:
        inform(
            f"{demand.num_steps} optimizer steps of one loop body are logged; a body with more costs a "
            "full snapshot",
            rank=ranks.rank,
        )
    return Memory(need.chunk_bytes, cap, demand.num_steps, need.staging.snapshot_bytes, node, peers)


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
    """Return how long this rank's log may become, and whether a second life has no room.

    Raises:
        DoesNotFit: If it does not fit on some rank; on all of them.
    """
    with ranks.together():
        room = room_at(root)
        place = [socket.gethostname(), os.stat(existing_part(root)).st_dev]
    told = ranks.gather([place, *astuple(need)])
    here = [StagingNeed(*numbers) for theirs, *numbers in told if theirs == place]
    cap, refusal = 0, ""
    try:
        cap = log_cap(here, need, room)
    except DoesNotFit as error:
        refusal = str(error)
    # The same error on all: they may begin again together with a strategy that needs less.
    for text in filter(None, ranks.gather(refusal)):
        raise DoesNotFit(text)
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
