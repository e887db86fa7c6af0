"""Parts of a sealed step that are on their way from an accelerator: each makes the step whole once it is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowdiff.core import devices
from lowdiff.core.nested import each_tensor
from lowdiff.model.device_watch import Looks
from lowdiff.model.item_tensors import Departed as DepartedTensors
from lowdiff.model.items import ItemTracker
from lowdiff.persistence.format.differentials import numbered
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Arriving, Departed
from lowdiff.step.states import Change, Sealed
from lowdiff.types import OptimizerStep, Payload


@dataclass(frozen=True, slots=True, eq=False)
class LatePayload:
    """What the optimizers consumed; whether a payload lacks anything is known once it has arrived.

    Attributes:
        departed: As the reducer had it depart.
        peers: Ranks of which payloads are made as well.
    """

    departed: Departed
    peers: Sequence[int]

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        departed = self.departed
        payload = departed.payload()
        of_peers = {rank: departed.payload(rank) for rank in self.peers}
        missed = {Change.GRADIENT_MISSED} if departed.has_missed else set()
        return replace(
            sealed,
            differential=replace(sealed.differential, payload=payload),
            changes=sealed.changes | missed,
            of_peers=of_peers,
        )

    def learn(self) -> None:
        """See `Late`."""
        self.departed.learn()


@dataclass(frozen=True, slots=True, eq=False)
class LateGradients:
    """Gradients of each optimizer call, which departed when they were consumed.

    Attributes:
        departed: Number of the call and optimizer -> its gradients.
        peers: Ranks of which payloads are made as well.
    """

    departed: Mapping[tuple[int, int], Departed]
    peers: Sequence[int]

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        differential = sealed.differential
        earlier, last = differential.earlier, len(differential.earlier)
        of_peers = {
            rank: Payload(
                tuple(
                    section
                    for number in range(last + 1)
                    for section in numbered(self._payload(number, rank).sections, number)
                )
            )
            for rank in self.peers
        }
        return replace(
            sealed,
            differential=replace(
                differential,
                payload=self._payload(last, None),
                earlier=tuple(
                    replace(call, payload=self._payload(number, None))
                    for number, call in enumerate(earlier)
                ),
            ),
            of_peers=of_peers,
        )

    def _payload(self, number: int, of: int | None) -> Payload:
        """Return a rank's share of what all optimizers consumed in a call."""
        payloads = (
            departed.payload(of) for (call, _), departed in self.departed.items() if call == number
        )
        return Payload(tuple(section for payload in payloads for section in payload.sections))

    def learn(self) -> None:
        """See `Late`: nothing follows from it."""


@dataclass(frozen=True, slots=True, eq=False)
class LateResidual:
    """The copy of this rank's residual that the record names.

    Attributes:
        copy: On its way to staging.
    """

    copy: Arriving

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        self.copy.arrive()
        return sealed

    def learn(self) -> None:
        """See `Late`: nothing follows from it."""


class LateItems:
    """Buffers and other tensors of items; which of them changed is known once they have arrived.

    A frozen parameter that turns out to be written through ``.data`` was not read: a snapshot has to hold the step.

    Args:
        tracker: Knows the tensors of the step before.
        departed: As it had them depart.
    """

    def __init__(self, tracker: ItemTracker, departed: DepartedTensors) -> None:
        self._tracker = tracker
        self._departed = departed
        self._items: dict[str, bytes] | None = None
        self._changes: frozenset[Change] = frozenset()

    def learn(self) -> None:
        """See `Late`: items are a rank's own."""

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`; the same again where what follows was broken off."""
        if self._items is None:
            found = self._tracker.arrived(self._departed)
            items = found.items()
            self._changes = frozenset({Change.OUTSIDE} if found.lost else ())
            self._items = items
            self._tracker.note(found, items)
        differential = sealed.differential
        return replace(
            sealed,
            differential=replace(differential, items={**differential.items, **self._items}),
            changes=sealed.changes | self._changes,
        )


def late_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a plain value that are on an accelerator."""
    found: list[torch.Tensor] = []

    def note(_: str, tensor: torch.Tensor) -> None:
        if devices.comes_late(tensor):
            found.append(tensor)

    each_tensor(value, note)
    return found


class LateGroups:
    """Hyper-parameters that lie on an accelerator, such as a learning rate that kernels read.

    Args:
        tensors: All there are in the record: of what optimizers consumed, and of the step's end also where it is equal.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._fetch = devices.fetch([tensor.reshape(-1) for tensor in tensors])

    def learn(self) -> None:
        """See `Late`: nothing follows from it."""

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        arrived = self._fetch.arrived()
        here = {
            id(tensor): devices.belonging(host.view(tensor.shape), devices.place_of(tensor))
            for tensor, host in zip(self._tensors, arrived, strict=True)
        }

        def completed(done: OptimizerStep) -> OptimizerStep:
            consumed, committed = each_tensor(
                (done.consumed, done.committed), lambda _, tensor: here.get(id(tensor), tensor)
            )
            is_moved = committed is not None and not same(consumed, committed)
            return replace(done, consumed=consumed, committed=committed if is_moved else None)

        differential = sealed.differential
        earlier = tuple(
            replace(call, optimizers=tuple(map(completed, call.optimizers)))
            for call in differential.earlier
        )
        optimizers = tuple(map(completed, differential.optimizers))
        return replace(
            sealed,
            differential=replace(differential, optimizers=optimizers, earlier=earlier),
            groups=[done.after for done in optimizers],
        )


@dataclass(frozen=True, slots=True, eq=False)
class LateLooks:
    """Checksums, and whether something else than optimizers wrote to parameters.

    Attributes:
        looks: Of the step.
    """

    looks: Looks

    def learn(self) -> None:
        """See `Late`: nothing follows from it."""

    def complete(self, sealed: Sealed) -> Sealed:
        """See `Late`."""
        seen, has_written = self.looks.arrived()
        return replace(
            sealed,
            differential=replace(
                sealed.differential,
                digests=seen.digests,
                state_digests=seen.states,
                averages=seen.averages,
            ),
            changes=sealed.changes | ({Change.OUTSIDE} if has_written else set()),
        )
