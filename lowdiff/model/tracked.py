"""The objects that a trainer gave to ``attach``, and what watches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.sums import Sums
from lowdiff.errors import ConfigError
from lowdiff.model.averages import Averages, LiveAverage, find_averages
from lowdiff.model.binding import Attached
from lowdiff.model.items import ItemTracker, Stateful
from lowdiff.persistence.format.values import encode


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Everything whose state is checkpointed.

    Attributes:
        attached: Model and optimizers.
        stateful: Further objects by name.
        averages: Those of them that are replayed averages of the parameters.
        tracker: Finds what changed of buffers, generators and stateful objects.
    """

    attached: Attached
    stateful: Mapping[str, Stateful]
    averages: Mapping[str, LiveAverage]
    tracker: ItemTracker


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """One rank's part of a training that runs: what each step reads.

    Attributes:
        attached: Model and optimizers.
        tracker: Their items.
        residual: Error feedback; every rank has its own whole.
        averages: Replayed averages of the parameters.
        shares_constants: Whether frozen parameters as they were at the start are stored apart.
        incarnation: Its number.
        base_step: The step that it starts from.
        rank: This rank.
        world_size: Number of ranks.
        sums: Takes checksums where the model lies; None where the host takes them.
    """

    attached: Attached
    tracker: ItemTracker
    residual: RotatingResidual
    averages: Averages
    shares_constants: bool
    incarnation: int
    base_step: int
    rank: int
    world_size: int
    sums: Sums | None

    def all_items(self) -> dict[str, bytes]:
        """Return every item as it is now, but frozen parameters that all snapshots share."""
        tracker = self.tracker
        tensors = {
            name: encode(tensor.detach().cpu().contiguous(), name=name)
            for name, tensor in tracker.tensors.items()
            if not (self.shares_constants and tracker.is_as_started(name))
        }
        return {**tracker.committed, **tensors}


def watch(attached: Attached, stateful: Mapping[str, Stateful]) -> Given:
    """Look at what is given.

    Raises:
        ConfigError: If an object cannot be saved and restored.
    """
    for name, thing in stateful.items():
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"{name}={type(thing).__name__} has no state_dict and load_state_dict; wrap "
                "it in an object that has both, or leave it out"
            )
    averages = find_averages(stateful, attached)
    for name in averages:
        if "/" in name:  # in snapshots one ends it, and a parameter's name follows
            raise ConfigError(f"the average {name!r} cannot have a slash in its name; leave it out")
    readers = {name: thing.state_dict for name, thing in stateful.items()} | {
        name: partial(average.outline, attached.layout) for name, average in averages.items()
    }
    specs = attached.layout.parameters
    parameters = {specs[i].tensor: p for i, p in attached.parameters.items()}
    tracker = ItemTracker(attached.constants, readers, attached.device, parameters)
    return Given(attached, stateful, averages, tracker)
