"""Noticing on an accelerator what replay could not reproduce: sums that the device takes, and that arrive late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch

from lowdiff.core import devices
from lowdiff.core.digest import SUM64, entries_of, in_order, state_digest
from lowdiff.core.layout import shares_of
from lowdiff.core.memory import byte_view
from lowdiff.core.sums import Sums, unsigned
from lowdiff.model.binding import Attached
from lowdiff.model.sharding import local_of
from lowdiff.model.watch import Seen, in_turns
from lowdiff.types import AverageStep, Written


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Sums of some tensors.

    Attributes:
        known: Of each that is on the host; None where it is on the device.
        there: Those of the others, in their order, on the device.
    """

    known: Sequence[int | None]
    there: torch.Tensor

    def numbers(self, arrived: torch.Tensor) -> list[int]:
        """Return all of them, given those of the device."""
        rest = iter(unsigned(arrived))
        return [next(rest) if number is None else number for number in self.known]


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """All looks of one step, on their way to the host; what completes them is here.

    Attributes:
        own: Per optimizer, layout indices of what this rank looks at.
        followed: Name of each average -> those that it follows.
        states: Layout indices and keys of what optimizers keep that was looked at.
        averages: What averages did in the step.
        updated: Names of those that were updated.
        before: What the step before left: parameters by optimizer, then averages, then states.
        after: The same at the end of this step.
        between: Looks around optimizers: which one, and whether it was about to step.
        is_live: Whether what something else wrote is of interest.
        fetch: ``before``, ``after`` and the looks ``between``, in this order.
    """

    own: Sequence[Sequence[int]]
    followed: Mapping[str, Sequence[int]]
    states: Sequence[tuple[int, Sequence[str]]]
    averages: Mapping[str, AverageStep]
    updated: frozenset[str]
    before: Sight
    after: Sight
    between: Sequence[tuple[int, bool]]
    is_live: bool
    fetch: devices.Fetch

    def arrived(self) -> tuple[Seen, bool]:
        """Return what was seen, and whether something else than optimizers wrote; waits for it."""
        before, after, *between = self.fetch.arrived()
        left, found = iter(self.before.numbers(before)), iter(self.after.numbers(after))
        was = [[*islice(left, len(indices))] for indices in self.own]
        now = [[*islice(found, len(indices))] for indices in self.own]
        has_written = False
        for (optimizer, is_before), sums in zip(self.between, between, strict=True):
            looked = unsigned(sums)
            has_written |= is_before and looked != was[optimizer]
            was[optimizer] = looked
        has_written |= now != was
        done = {}
        for name, indices in self.followed.items():
            old, new = ([*islice(sums, len(indices))] for sums in (left, found))
            has_written |= name not in self.updated and old != new
            if name in self.averages:
                done[name] = replace(self.averages[name], digests=tuple(new))
        states = {
            i: state_digest(dict(zip(keys, found, strict=False)), SUM64) for i, keys in self.states
        }
        digests = sorted(zip(chain(*self.own), chain(*now), strict=True))
        seen = Seen(tuple(number for _, number in digests), states, done, Written())
        return seen, has_written and self.is_live


class DeviceWatch:
    """Looks at one rank's share of the parameters on an accelerator, as `Watch` does on the host.

    The device takes sums, in one launch a look; no look waits. What something else wrote is known once the step's `Looks`
    have arrived, and its values are not logged. Ranks are not compared with each other.

    Args:
        attached: Whose parameters.
        averages: Name of each average -> layout index -> tensor.
        rank: This rank.
        world_size: Number of ranks.
        sums: Of tensors on the accelerator.
        mode: See `Watch`; not empty.
    """

    def __init__(
        self,
        attached: Attached,
        averages: Mapping[str, Mapping[int, torch.Tensor]],
        rank: int,
        world_size: int,
        *,
        sums: Sums,
        mode: str,
    ) -> None:
        self._attached = attached
        self._is_live = mode == "live"
        self._sums = sums
        share = shares_of(attached.layout, world_size)[rank]
        self._own = [
            [i for i in share if attached.owner[i] == index]
            for index in range(len(attached.optimizers))
        ]
        self._turns = in_turns(attached.layout, share)
        self._strides = {i: attached.local(i).stride() for i in attached.parameters}
        self._averages = {
            name: {i: tensors[i] for i in share if i in tensors}
            for name, tensors in averages.items()
        }
        self._updated: set[str] = set()
        self._between: list[tuple[int, bool, torch.Tensor]] = []
        self._seen = self._sight(self._watched())

    def before_step(self, optimizer: int) -> None:
        """See `Watch`."""
        self._look_between(optimizer, is_before=True)

    def after_step(self, optimizer: int) -> None:
        """See `Watch`."""
        self._look_between(optimizer, is_before=False)

    def end_call(self, step: int, averages: Mapping[str, AverageStep]) -> Written:
        """See `Watch`; the next look is soon enough."""
        self._updated |= {name for name, average in averages.items() if average.updated}
        return Written()

    def at_commit(
        self, step: int, averages: Mapping[str, AverageStep], *, whole_state: bool
    ) -> Looks:
        """See `Watch`; returns what will have been seen."""
        self.end_call(step, averages)
        watched = self._watched()
        wanted = chain(*self._own) if whole_state else self._turns[step % len(self._turns)]
        states = self._entries(wanted)
        kept = [tensor for _, entries in states for tensor in entries.values()]
        before, after = self._seen, self._sight([*watched, *kept])
        between = [sums for *_, sums in self._between]
        looks = Looks(
            own=self._own,
            followed={name: [*tensors] for name, tensors in self._averages.items()},
            states=[(i, [*entries]) for i, entries in states],
            averages=averages,
            updated=frozenset(self._updated),
            before=before,
            after=after,
            between=[(optimizer, is_before) for optimizer, is_before, _ in self._between],
            is_live=self._is_live,
            fetch=devices.fetch([before.there, after.there, *between]),
        )
        self._seen, self._between = after, []
        self._updated.clear()
        return looks

    def is_as_committed(self) -> bool:
        """See `Watch`; waits."""
        now, seen = self._sight(self._watched()), self._seen
        return now.known == seen.known[: len(now.known)] and torch.equal(
            now.there, seen.there[: now.there.numel()]
        )

    def digests(self) -> dict[int, int]:
        """See `Watch`; waits."""
        found = self._sums([self._parameter(i) for i in self._strides])
        return dict(zip(self._strides, unsigned(found), strict=True))

    def _look_between(self, optimizer: int, *, is_before: bool) -> None:
        if self._is_live and self._own[optimizer]:
            sums = self._sums([self._parameter(i) for i in self._own[optimizer]])
            self._between.append((optimizer, is_before, sums))

    def _watched(self) -> list[torch.Tensor]:
        """Return parameters by optimizer, then averages."""
        parameters = [self._parameter(i) for indices in self._own for i in indices]
        return [*parameters, *chain(*(tensors.values() for tensors in self._averages.values()))]

    def _sight(self, tensors: Sequence[torch.Tensor]) -> Sight:
        """Sum tensors where they are."""
        device = self._attached.device
        there = [tensor for tensor in tensors if tensor.device == device]
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Sight(
            [
                None if tensor.device == device else SUM64.of_bytes(byte_view(tensor), 0)
                for tensor in tensors
            ],
            self._sums(there) if there else none,
        )

    def _parameter(self, index: int) -> torch.Tensor:
        """Return a parameter in the memory order that it had at attach."""
        tensor, strides = self._attached.local(index), self._strides[index]
        return tensor if tensor.stride() == strides else in_order(tensor, strides)

    def _entries(self, indices: Iterable[int]) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """Return what optimizers keep of parameters, where checksums can be taken of it."""
        attached, found = self._attached, []
        for i in indices:
            state = attached.optimizers[attached.owner[i]].state.get(attached.parameters[i], {})
            local = {key: local_of(v) for key, v in state.items() if isinstance(v, torch.Tensor)}
            entries = entries_of(local, attached.layout.parameters[i])
            if entries is not None:
                found.append((i, entries))
        return found
