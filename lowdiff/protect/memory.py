"""What a strategy's staging takes: a demand is asked, a need is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lowdiff.core.layout import shares_of
from lowdiff.core.placement import Node, Peers
from lowdiff.model.items import ItemTracker
from lowdiff.model.tracked import Given
from lowdiff.persistence.staging.budget import StagingNeed
from lowdiff.recovery.state import FROZEN_ITEM
from lowdiff.settings import Settings
from lowdiff.types import Layout

_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 64 << 20
#: Chunks without which a log cannot work: one that is written, one that is read, one to spare.
LEAST_CHUNKS = 3
#: What a section of a log takes beside its values.
SECTION_BYTES = 64
#: Tensors of a parameter's size that an optimizer may make in its first step.
_STATE_TENSORS = 2
#: Of a record: what optimizers used, states of generators, checksums.
_SCALAR_BYTES = 16 << 10


@dataclass(frozen=True)
class Demand:
    """What one rank's staging is to hold.

    Attributes:
        settings: Of the run.
        given: What is trained; objects were given their state before, as they are asked for it here.
        world_size: Number of ranks.
        num_steps: Optimizer steps of one loop body that are kept together.
        num_guests: Ranks on other nodes whose share may have to be saved here.
        peers: For which ranks copies are kept.
    """

    settings: Settings
    given: Given
    world_size: int
    num_steps: int
    num_guests: int
    peers: Peers

    @cached_property
    def model_bytes(self) -> int:
        """Of all trained parameters."""
        return sum(spec.nbytes for spec in self.given.attached.layout.parameters)

    @cached_property
    def exchanged_bytes(self) -> int:
        """Of the parameters whose gradients this rank exchanges."""
        return sum(spec.nbytes for spec in self.given.attached.exchanged.parameters)

    @cached_property
    def state_bytes(self) -> int:
        """Of parameters, their averages and optimizer state, of which the first step may make more."""
        optimizers = self.given.attached.optimizers
        entries = (entry for optimizer in optimizers for entry in optimizer.state.values())
        values = (value for entry in entries for value in entry.values())
        held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        averages = len(self.given.averages) * self.model_bytes
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        made = _STATE_TENSORS + max(map(_more_state, groups), default=0)
        return self.model_bytes + max(made * self.model_bytes, held) + averages

    @cached_property
    def item_bytes(self) -> int:
        """Of items that are tensors."""
        return sum(tensor.nbytes for tensor in self.given.tracker.tensors.values())

    @cached_property
    def largest_share(self) -> int:
        """Bytes of the parameters of the rank that has most."""
        return largest_share(self.given.attached.layout, self.world_size)

    @property
    def image_bytes(self) -> int:
        """Of the largest share of a snapshot, where ranks divide the state evenly."""
        per_byte = self.state_bytes / max(self.model_bytes, 1)
        return int(self.largest_share * per_byte) + self.item_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What it takes.

    Attributes:
        staging: By kind.
        chunk_bytes: Length of one chunk of the log.
    """

    staging: StagingNeed
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What this rank may use, as all ranks agreed.

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


def largest_share(layout: Layout, world_size: int) -> int:
    """Return the bytes of the parameters of the rank that has most."""
    parameters, shares = layout.parameters, shares_of(layout, world_size)
    return max(sum(parameters[i].nbytes for i in own) for own in shares)


def _more_state(group: Mapping[str, Any]) -> int:
    """Return how many tensors more an optimizer's group asks for, as Adam's ``amsgrad`` and a centered RMSprop do."""
    is_centered = bool(group.get("centered")) and bool(group.get("momentum"))
    return bool(group.get("amsgrad")) + is_centered


def rest_bytes(tracker: ItemTracker) -> int:
    """Return what a step's record holds beside gradients, at most: items that may change, generators, scalars."""
    tensors = tracker.tensors.items()
    moving = (tensor.nbytes for name, tensor in tensors if not name.startswith(FROZEN_ITEM))
    return _SCALAR_BYTES + sum(moving)


def least_chunk(content_bytes: int = 0) -> int:
    """Return the length of a chunk with room for what comes in one piece."""
    return content_bytes + _MIN_CHUNK_BYTES


def chunk_for(record_bytes: int) -> int:
    """Return the length of a chunk that holds a record, or several where they are small."""
    return max(record_bytes + record_bytes // 8, _MIN_CHUNK_BYTES)


def chunk_of(share_bytes: int) -> int:
    """Return the length of a chunk that holds many records, given how long it would like to be."""
    return min(max(share_bytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)


def spare_chunk() -> int:
    """Return the length of the longest chunk."""
    return _MAX_CHUNK_BYTES
