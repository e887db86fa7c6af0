"""Bringing a rolling snapshot to its one step: each block is replayed from its own.

Every unit of blocks starts at the lowest step of its blocks. The others hold values of the future
until replay reaches their step; then they get the stored ones back. What was computed for them
before that does not count, and what counts is computed with the live run's bits, because every
element keeps its place in the tensor that the kernels walk. So a cycle may cut blocks anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch


from lowdiff.persistence.catalog import SnapshotSet
from lowdiff.persistence.snapshots import shard_file
from lowdiff.recovery.blocks import Unit
from lowdiff.recovery.kernels import StepChooser
from lowdiff.recovery.load import load_snapshot, or_damaged
from lowdiff.recovery.optimizers import settle_kernels
from lowdiff.recovery.plan import PlannedStep
from lowdiff.recovery.replay import Replayer, ReplayOptions, windows
from lowdiff.recovery.state import OptimizerState, RecoveredState, is_aligned
from lowdiff.recovery.unit import Scratch, Step, UnitState
from lowdiff.types import Block, Differential, Fence


@dataclass(frozen=True, slots=True)
class _Stored:
    """A range of one parameter, and the step that it is of.

    Attributes:
        scalars: Entries of the optimizer's state that are not element by element.
    """

    step: int
    start: int
    stop: int
    scalars: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Paste:
    """What a range gets back once replay has reached its step.

    Attributes:
        values: Pairs of a view of the state and what was stored there.
    """

    name: str
    scalars: Mapping[str, Any]
    values: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def load_base(
    snapshot: SnapshotSet, fence: Fence, cycle: Sequence[PlannedStep], options: ReplayOptions
) -> RecoveredState:
    """Read a snapshot, and bring it to its step if it is a rolling one.

    Args:
        snapshot: Which one.
        fence: Fence of the incarnation that took it.
        cycle: The differentials after its first base, up to its step; none for an atomic one.
        options: How to replay.

    Raises:
        DamagedFile: If a shard or a record is not what was written.
        ReplayMismatch: If the parameters differ from what the live run recorded at the step.
    """
    state, blocks = load_snapshot(snapshot, fence, options.readers)
    state.move(options.device)
    if not snapshot.is_rolling:
        return state
    settle_kernels()
    # Every rank completes the base by itself, and movements are those of later steps.
    alone = replace(options, group=None, movements=None)
    state.has_mixed_residuals = True
    stored = _stored(snapshot, blocks, fence)
    for optimizer in state.optimizers:
        for name, entries in optimizer.state.items():
            # In the order of an atomic snapshot; the values are those of the last step in the end.
            scalars = {
                key: value for found in stored.get(name, ()) for key, value in found.scalars.items()
            }
            optimizer.state[name] = {**scalars, **entries}
    completion = _Completion(state, fence, stored, alone)
    with completion as running, closing(windows(cycle, fence)) as read:
        for window in read:
            running.run(window)
    return state


def _stored(snapshot: SnapshotSet, blocks: Sequence[Any], fence: Fence) -> dict[str, list[_Stored]]:
    """Parameter name -> its ranges, over all shards; what is in none is of the snapshot's step."""
    found: dict[str, list[_Stored]] = {}
    for manifest, listed in zip(snapshot.manifests, blocks, strict=True):
        if manifest.first_base is None:
            continue
        path = shard_file(snapshot.folder, manifest.rank)
        with or_damaged(path, "its blocks cannot be read"):
            for entry in listed:
                for index, start, stop in entry["blocks"]:
                    spec = fence.layout.parameters[index]
                    step = entry["step"]
                    if not (
                        0 <= start <= stop <= spec.numel
                        and manifest.first_base <= step <= snapshot.step
                    ):
                        raise ValueError(f"{spec.name} has no range {start} to {stop} of {step}")
                    scalars = [state.get(spec.name, {}) for state in entry["state"]]
                    merged = {key: value for found in scalars for key, value in found.items()}
                    found.setdefault(spec.name, []).append(_Stored(step, start, stop, merged))
    return found


class _Completion(Replayer):
    """Replays the units of a rolling snapshot, each from its own step on."""

    def __init__(
        self,
        state: RecoveredState,
        fence: Fence,
        stored: Mapping[str, Sequence[_Stored]],
        options: ReplayOptions,
    ) -> None:
        super().__init__(state, fence, options)
        self._last = state.step
        chooser = StepChooser()
        self._units = [_RollingUnit(unit, state, fence, stored, chooser) for unit in self._planned]

    def _check(self, shard: Differential, sums: Sums) -> None:
        # Before the last step some blocks still hold values of later steps.
        if shard.step == self._last:
            super()._check(shard, sums)

    def _take_scalars(self, shards: Sequence[Differential]) -> None:
        """Those of the snapshot are of its step."""


class _RollingUnit(UnitState):
    """One unit whose blocks are of several steps.

    It works on a state of its own, with the tensors of the common one: other units may hold other
    ranges of the same parameter, with the scalars of other steps.
    """

    def __init__(
        self,
        unit: Unit,
        state: RecoveredState,
        fence: Fence,
        stored: Mapping[str, Sequence[_Stored]],
        chooser: StepChooser,
    ) -> None:
        parts = [
            (fence.layout.parameters[block.parameter].name, found)
            for block in unit.blocks
            for found in _parts(unit, block, state, stored)
        ]
        self._begins = min((found.step for _, found in parts), default=state.step)
        self._ends = state.step
        self._alone = _alone_state(unit, state, parts)
        self._fence = fence
        super().__init__(unit, self._alone, fence, chooser)
        self._pastes: dict[int, list[_Paste]] = {}
        for name, found in parts:
            if found.step > self._begins:
                paste = _paste(unit.optimizer, name, found, self._alone)
                self._pastes.setdefault(found.step, []).append(paste)

    def step(
        self, step: Step, scratch: Scratch, see_gradients: Callable[[], None] | None = None
    ) -> None:
        """Apply one differential, if it is later than the unit's first step."""
        number = step.shards[0].step
        if number > self._begins:
            super().step(step, scratch, see_gradients)
            if number in self._pastes:
                self._take_back(self._pastes.pop(number))

    def add_digests(self, shards: Sequence[Differential], digester: object, sums: object) -> None:
        """Add to the digests of the last step only: before it, not all values are of one step."""
        if shards[0].step == self._ends:
            super().add_digests(shards, digester, sums)

    def _take_back(self, pastes: Sequence[_Paste]) -> None:
        super().collect(self._alone)
        for paste in pastes:
            for target, values in paste.values:
                target.copy_(values)
            if paste.scalars:
                entries = self._alone.optimizers[self.unit.optimizer].state
                entries.setdefault(paste.name, {}).update(paste.scalars)
        # An optimizer that has seen nothing.
        super().__init__(self.unit, self._alone, self._fence, self._chooser)

    def collect(self, state: RecoveredState) -> None:
        """Put the optimizer's state for these blocks where the full state lives."""
        super().collect(self._alone)
        own = self._alone.optimizers[self.unit.optimizer].state
        target = state.optimizers[self.unit.optimizer].state
        for block in self.unit.blocks:
            spec = self._fence.layout.parameters[block.parameter]
            for key, value in own.get(spec.name, {}).items():
                entries = target.setdefault(spec.name, {})
                if not is_aligned(key, value, spec.numel):
                    entries[key] = value
                elif entries.setdefault(key, value) is not value:
                    entries[key][block.start : block.stop] = value[block.start : block.stop]


def _parts(
    unit: Unit, block: Block, state: RecoveredState, stored: Mapping[str, Sequence[_Stored]]
) -> Iterator[_Stored]:
    """What of a parameter's stored ranges lies in one block of a unit."""
    start, stop = block.start, block.stop
    spec = state.fence.layout.parameters[block.parameter]
    known = stored.get(spec.name)
    if known is None:  # of a shard that is atomic
        # Its counters, too: they move on with those of the unit's other parameters, of lower steps.
        entries = state.optimizers[unit.optimizer].state.get(spec.name, {})
        scalars = {k: v for k, v in entries.items() if not is_aligned(k, v, spec.numel)}
        yield _Stored(state.step, start, stop, scalars)
        return
    for found in known:
        first, end = max(start, found.start), min(stop, found.stop)
        if first < end or (start == stop and found.start == found.stop):
            yield replace(found, start=first, stop=end)


def _alone_state(
    unit: Unit, state: RecoveredState, parts: Sequence[tuple[str, _Stored]]
) -> RecoveredState:
    """A state with this unit's parameters only; each with the scalars of its lowest step."""
    names = list(dict.fromkeys(name for name, _ in parts))
    full = state.optimizers[unit.optimizer]
    entries = {name: dict(full.state[name]) for name in names if name in full.state}
    for name, found in sorted(parts, key=lambda part: -part[1].step):
        if found.scalars:
            entries.setdefault(name, {}).update(found.scalars)
    others = [OptimizerState(optimizer.groups, {}) for optimizer in state.optimizers]
    others[unit.optimizer] = OptimizerState(full.groups, entries)
    return replace(state, optimizers=others)


def _paste(optimizer: int, name: str, found: _Stored, own: RecoveredState) -> _Paste:
    tensors = [own.parameters[name]]
    tensors += [
        value
        for key, value in own.optimizers[optimizer].state.get(name, {}).items()
        if is_aligned(key, value, tensors[0].numel())
    ]
    tensors += [average[name] for average in own.averages.values() if name in average]
    views = [tensor[found.start : found.stop] for tensor in tensors]
    return _Paste(name, found.scalars, tuple((view, view.clone()) for view in views))
