"""One rank's share of the state in a replica's file, and the units that step it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowdiff.compressors import Dense
from lowdiff.core.digest import KINDS, Looker, join
from lowdiff.core.layout import shares_of
from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.framing import StoredRecord
from lowdiff.persistence.format.values import decode, encode
from lowdiff.recovery.images import aligned_tensors
from lowdiff.recovery.load import empty_state, place_of
from lowdiff.recovery.replay.blocks import Unit
from lowdiff.recovery.replay.checksums import Checksums, Look, check_digests, makes_same_bits
from lowdiff.recovery.replay.kernels import StepChooser
from lowdiff.recovery.replay.optimizers import needs_live_threads, without_default_group
from lowdiff.recovery.replay.replayer import ReplayOptions, plan_units
from lowdiff.recovery.replay.sizing import BLOCK_ELEMENTS, threads_put_back
from lowdiff.recovery.replay.unit import Scratch, Step, UnitState
from lowdiff.recovery.replica.file import Contents, ReplicaFile, SlotTooSmall
from lowdiff.recovery.state import (
    OptimizerState,
    RecoveredState,
    change_items,
    is_aligned,
)
from lowdiff.types import Differential, Fence

_SLACK_BYTES = 256
_STEP_SLACK_BYTES = 1 << 16


def share_step(stored: StoredRecord, fence: Fence) -> Step:
    """One rank's record of a step, ready to be applied to that rank's share.

    Raises:
        DamagedFile: If it does not decode.
    """
    differential = read_differential(stored, Codec())
    compressor = Dense(**fence.compressor["settings"])
    return Step.of((differential,), lambda payloads: compressor.decoder(payloads, fence.layout))


class Shard:
    """The state in one file, which steps change in place."""

    def __init__(
        self,
        file: ReplicaFile,
        fence: Fence,
        *,
        journaled: bool,
    ) -> None:
        """Read a file, undoing what its dead owner had not finished.

        Args:
            file: Mapped shared by its owner, privately by everyone else.
            fence: Of the incarnation that the file belongs to.
            journaled: Whether what is done here shall survive this process.

        Raises:
            DamagedFile: If the file does not hold what its fence says, or what its owner wrote.
        """
        self.file = file
        self._fence = fence
        self._shares = shares_of(fence.layout, fence.world_size)
        self._journaled = journaled
        self._chooser = StepChooser()
        base = file.base()
        #: Whether its units are whole tensors, because blocks do not reproduce this run's bits.
        self.is_whole = bool(base.get("whole"))
        self._overrides: dict[str, bytes] = {}
        try:
            self.state = _state(file, fence, base)
            self._take_last_step()
            if (unit := file.unfinished()) is not None:
                file.put_back(self._written(file.units[unit]))
            self._take_units()
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise DamagedFile(file.path, f"it does not fit its run ({error!r})") from error
        # Whoever only reads the state never makes these.
        self._units: list[UnitState] = []
        self._scratch = Scratch(max((unit.scratch_elements for unit in file.units), default=0))

    @property
    def step(self) -> int:
        """The newest finished step."""
        return self.state.step

    def apply(self, step: Step) -> None:
        """Go one step on; units that are there already are left alone.

        On as many threads as gave the live run its bits: its own for whole tensors, one for blocks,
        which are cut where its threads were.

        Raises:
            ReplayMismatch: If the result is not what the live run recorded.
            SlotTooSmall: If a value has grown out of its place, or has none because the optimizer
                began to keep it only now; the file is as after a kill.
        """
        differential = step.shards[0]
        number = differential.step
        assert number == self.step + 1
        checksums = Checksums(KINDS[self._fence.digests])
        is_resumed = bool((self.file.unit_steps >= number).any())
        # A unit that was ahead would give the numbers of those that were behind, so nothing is told of states.
        summed = frozenset[int]() if is_resumed else step.summed_states
        is_compared = step.is_digested and makes_same_bits(self._fence, torch.device("cpu"))
        units = self._units or self._built()
        with threads_put_back(), without_default_group(self._fence.optimizers), torch.no_grad():
            torch.set_num_threads(self._fence.environment.num_threads if self.is_whole else 1)
            for index, unit in enumerate(units):
                is_due = self.file.unit_steps[index] < number
                if is_due:
                    self._step_unit(index, unit, step)
                looked = unit.look() if is_compared or (is_due and self._journaled) else []
                assert not isinstance(looked, torch.Tensor)  # which sums on a device would be
                if is_due:
                    self._finish_unit(index, unit.unit, number, looked)
                if is_compared:
                    states = unit.look_at_states(summed)
                    unit.add_checksums([Look(number, looked, states)], checksums)
        if is_compared:
            check_digests(
                differential,
                self._shares[differential.rank],
                self._shares[differential.rank],
                checksums,
                self.state,
                whose="the replica's parameters",
                recorded_by="those of the trainer",
            )
        # After a resume, units that were ahead begin with their own numbers.
        self._units = [] if is_resumed else units
        values = self._values_after(differential)
        if self._journaled:
            self.file.finish_step(number, values)
        self.state.take(step.shards)

    def _built(self) -> list[UnitState]:
        """The units, over the file's tensors and the numbers as they are now.

        A unit takes its numbers when it first steps, so they are copied: those of a parameter's
        first unit must not move on under its second.
        """
        begun = replace(
            self.state,
            optimizers=[
                OptimizerState(list(o.groups), {name: dict(e) for name, e in o.state.items()})
                for o in self.state.optimizers
            ],
        )
        return [UnitState(unit, begun, self._fence, self._chooser) for unit in self.file.units]

    def _step_unit(self, index: int, unit: UnitState, step: Step) -> None:
        before = list(self._written(unit.unit))
        if self._journaled:
            self.file.save(index, before)
        unit.step(step, self._scratch)
        unit.collect(self.state)
        if self._journaled and len(list(self._written(unit.unit))) > len(before):
            raise SlotTooSmall("optimizer state that begins late has no place")

    def _finish_unit(self, index: int, unit: Unit, number: int, looked: Sequence[int]) -> None:
        if self._journaled:
            self.file.finish(index, number, unit_values(self.state, unit, looked))
        else:
            self.file.unit_steps[index] = number

    def _values_after(self, differential: Differential) -> bytes:
        self._overrides |= differential.items
        return encode(
            {
                "groups": [list(o.after) for o in differential.optimizers],
                "held": list(differential.held),
                "items": self._overrides,
            }
        )

    def _take_last_step(self) -> None:
        last = self.file.last_step()
        if last is None:
            return
        values = decode(last[1])
        self.state.step = last[0]
        for optimizer, groups in zip(self.state.optimizers, values["groups"], strict=True):
            optimizer.groups = groups
        self.state.held = tuple(values["held"])
        self._overrides = values["items"]
        change_items(self.state.items[0], self._overrides)

    def _take_units(self) -> None:
        """Take every unit's numbers, and see that its parameters are as its last step left them.

        A parameter some of whose units are a step ahead keeps the numbers of those behind.
        """
        order = sorted(range(len(self.file.units)), key=lambda u: -int(self.file.unit_steps[u]))
        for index in order:
            unit = self.file.units[index]
            names = [self._fence.layout.parameters[b.parameter].name for b in unit.blocks]
            values = decode(self.file.unit_values(index))
            if values["checksum"] != join(look(self.state, unit), KINDS[self._fence.digests]):
                what = f"parameters of unit {index} ({names[0]!r} ...) fail their checksum"
                raise DamagedFile(self.file.path, what)
            state = self.state.optimizers[unit.optimizer].state
            for name, numbers in zip(names, values["numbers"], strict=True):
                # Keys of numbers come first, as in a state that was loaded from an image.
                state[name] = numbers | state.get(name, {}) | numbers

    def _written(self, unit: Unit) -> Iterator[torch.Tensor]:
        return written_by(self.state, unit)


def contents_of(
    state: RecoveredState, *, whole: bool, block_elements: int = BLOCK_ELEMENTS
) -> Contents:
    """A new file's contents.

    Args:
        state: What one rank owns.
        whole: Whether blocks do not reproduce this run's bits.
        block_elements: Elements per unit, a multiple of 64.
    """
    layout = state.fence.layout
    whole |= needs_live_threads(state.fence.optimizers, state.fence.environment.num_threads)
    options = ReplayOptions(whole=whole, block_elements=block_elements)
    units = plan_units(state, state.fence, options)
    tensors = {name: values for name, _, values in aligned_tensors(state)}
    base = {
        "groups": [list(optimizer.groups) for optimizer in state.optimizers],
        "held": list(state.held),
        "items": dict(state.items[0]),
        "whole": whole,
    }
    values = [unit_values(state, unit, look(state, unit)) for unit in units]
    items_bytes = sum(len(data) for data in state.items[0].values())
    groups_bytes = len(encode(base["groups"])) + 8 * len(layout.parameters)
    return Contents(
        step=state.step,
        tensors=tensors,
        units=units,
        unit_bytes=max(
            (sum(t.nbytes for t in written_by(state, unit)) for unit in units), default=0
        ),
        base=base,
        unit_values=values,
        unit_slot_bytes=max(map(len, values), default=0) + _SLACK_BYTES,
        step_slot_bytes=items_bytes + 2 * groups_bytes + _STEP_SLACK_BYTES,
    )


def written_by(state: RecoveredState, unit: Unit) -> Iterator[torch.Tensor]:
    """The pieces of tensors that a unit's steps write."""
    for block in unit.blocks:
        spec = state.fence.layout.parameters[block.parameter]
        yield state.parameters[spec.name][block.start : block.stop]
        for key, value in state.optimizers[unit.optimizer].state.get(spec.name, {}).items():
            if is_aligned(key, value, spec.numel):
                yield value[block.start : block.stop]
        for followed in state.averages.values():
            if spec.name in followed:
                yield followed[spec.name][block.start : block.stop]


def look(state: RecoveredState, unit: Unit) -> list[int]:
    """Checksums of a unit's blocks of parameters and averages, in the order of `UnitState.look`."""
    named = [(state.fence.layout.parameters[b.parameter].name, b) for b in unit.blocks]
    homes = [state.parameters, *(state.averages[name] for name in state.fence.averages)]
    pieces = [
        (home[name][b.start : b.stop], b.start)
        for home in homes
        for name, b in named
        if name in home
    ]
    looker = Looker(
        dict(enumerate(piece for piece, _ in pieces)),
        KINDS[state.fence.digests],
        dict(enumerate(start for _, start in pieces)),
    )
    return [*looker.look().values()]


def unit_values(state: RecoveredState, unit: Unit, looked: Sequence[int]) -> bytes:
    """Encode what is kept of a unit beside its tensors.

    Args:
        state: Has what an optimizer keeps of the unit's blocks beside tensors of their shape.
        unit: The unit.
        looked: Checksums of its parameters and averages.
    """
    numbers = []
    for block in unit.blocks:
        spec = state.fence.layout.parameters[block.parameter]
        entries = state.optimizers[unit.optimizer].state.get(spec.name, {})
        numbers.append({k: v for k, v in entries.items() if not is_aligned(k, v, spec.numel)})
    return encode({"numbers": numbers, "checksum": join(looked, KINDS[state.fence.digests])})


def _state(file: ReplicaFile, fence: Fence, base: dict[str, Any]) -> RecoveredState:
    state = empty_state(file.base_step, fence)
    state.items, state.residuals = [base["items"]], [{}]
    state.held = tuple(base["held"])
    names = {spec.name for spec in fence.layout.parameters}
    for full_name, tensor in file.tensors().items():
        home, key, _ = place_of(state, full_name, names)
        home[key] = tensor
    for optimizer, groups in zip(state.optimizers, base["groups"], strict=True):
        optimizer.groups = list(groups)
    return state
