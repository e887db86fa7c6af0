"""Checksums of what replay made of a step, put together from blocks and compared with the live run's."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowdiff.core import devices
from lowdiff.core.digest import KINDS, Kind, state_digest
from lowdiff.errors import ReplayMismatch
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Block, Differential, Fence


@dataclass(slots=True, eq=False)
class Checksums:
    """Checksums of what replay made; of a parameter of several blocks each adds its part.

    Attributes:
        kind: What they are.
        tensors: ``(step, average, layout index)`` -> checksum; no name for the parameter itself.
        states: ``(step, layout index)`` -> key -> checksum of an optimizer's entry; of those that were looked at.
    """

    kind: Kind
    tensors: dict[tuple[int, str, int], int] = field(default_factory=dict)
    states: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)

    def add_tensor(self, step: int, average: str, index: int, part: int) -> None:
        """Add a block's part of a parameter's checksum, or of what an average holds of it."""
        place = step, average, index
        self.tensors[place] = self.kind.merge(self.tensors.get(place, 0), part)

    def begin_state(self, step: int, index: int) -> None:
        """Note that the optimizer's state of a parameter was looked at, whatever it keeps."""
        self.states.setdefault((step, index), {})

    def add_state(self, step: int, index: int, key: str, part: int) -> None:
        """Add a block's part of the checksum of an entry of the optimizer's state."""
        entries = self.states[step, index]
        entries[key] = self.kind.merge(entries.get(key, 0), part)

    def add(self, others: Checksums) -> None:
        """Add what another worker found."""
        for place, part in others.tensors.items():
            self.add_tensor(*place, part)
        for (step, index), entries in others.states.items():
            self.begin_state(step, index)
            for key, part in entries.items():
                self.add_state(step, index, key, part)


@dataclass(frozen=True, slots=True, eq=False)
class EntryLook:
    """Checksums of what an optimizer keeps of one block after a step.

    Attributes:
        block: The block.
        entries: Key -> checksum, which may still be on a device, and bytes of an element of what is cut into blocks
            as the parameter is; 0 of what is kept once for a parameter.
    """

    block: Block
    entries: Mapping[str, tuple[int | torch.Tensor, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Checksums of a unit's blocks after a step.

    Attributes:
        step: The step.
        tensors: Of parameters and averages, in the order of `UnitState.look`.
        states: See `UnitState.look_at_states`.
    """

    step: int
    tensors: Sequence[int] | torch.Tensor
    states: Sequence[EntryLook]


def makes_same_bits(fence: Fence, device: torch.device) -> bool:
    """Whether a device is of the kind that made an incarnation's steps; another kind rounds differently."""
    return devices.may_look(device) == (fence.environment.device == "cpu")


def check_digests(
    shard: Differential,
    owned: Sequence[int],
    held: Container[int],
    found: Checksums,
    state: RecoveredState,
    *,
    whose: str,
    recorded_by: str,
) -> None:
    """Compare a step with the checksums that the live run recorded.

    Args:
        shard: Holds those of one rank.
        owned: Layout indices of that rank's share, ascending.
        held: Those that were replayed here; others are not compared.
        found: Checksums of what replay made of the step.
        state: What is replayed; notes which optimizer state was compared.
        whose: Parameters, for the error.
        recorded_by: What they differ from then.

    Raises:
        ReplayMismatch: Naming the first difference. Where it is one of optimizer state, that may have come at
            any step since that state was compared, and the error's step is the first of them.
    """
    parameters = state.fence.layout.parameters
    averages = {name: step.digests for name, step in shard.averages.items()}
    for name, digests in {"": shard.digests, **averages}.items():
        followed = set(state.fence.averages.get(name, ()))
        known = [i for i in owned if not name or parameters[i].name in followed]
        if digests and len(digests) != len(known):
            raise ReplayMismatch(
                f"step {shard.step} has {len(digests)} checksums for {len(known)} parameters",
                step=shard.step,
            )
        for i, value in zip(known, digests, strict=False):
            if i in held and value != found.tensors.get((shard.step, name, i), 0):
                average = f" as {name!r} averages it" if name else ""
                raise ReplayMismatch(
                    f"after step {shard.step}, {parameters[i].name!r} of {whose}{average} "
                    f"differs from {recorded_by}",
                    step=shard.step,
                )
    for i, value in shard.state_digests.items():
        kept = found.states.get((shard.step, i))
        if kept is None:
            continue
        name = parameters[i].name
        last = state.compared.get(name, state.base_step)
        if value != state_digest(kept, KINDS[state.fence.digests]):
            raise ReplayMismatch(
                f"after step {shard.step}, the optimizer's state of {name!r} of {whose}, last compared at step "
                f"{last}, differs from {recorded_by}",
                step=last + 1,
            )
        state.compared[name] = shard.step
