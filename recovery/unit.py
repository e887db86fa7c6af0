"""A few blocks of the layout and the real torch optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lowdiff.arithmetic import arithmetic_of
from lowdiff.compressors.sparse import IndexedDecoder
from lowdiff.digests import Digester
from lowdiff.errors import ReplayMismatch
from lowdiff.layout import flat, flat_like, shaped, torch_dtype
from lowdiff.protocols import Decoder
from lowdiff.recovery.averages import BlockAverage
from lowdiff.recovery.blocks import Unit, aligned
from lowdiff.recovery.kernels import StepChooser
from lowdiff.recovery.optimizers import (
    build,
    granularity,
    independent,
    placed_scalar,
    usable_on,
)
from lowdiff.recovery.state import RecoveredState, is_aligned
from lowdiff.types import Block, Differential, Fence, Layout, OptimizerSpec, OptimizerStep


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One differential, read and ready to be replayed.

    Attributes:
        shards: One per rank, in rank order.
        absent: Parameters without a gradient.
        decode: Writes a block of the gradient.
    """

    shards: tuple[Differential, ...]
    absent: frozenset[int]
    decode: Decoder


#: ``(step, rank, average)`` -> sum over elements seen so far; no name for the parameters themselves.
Sums = dict[tuple[int, int, str], int]


#: What torch and Python say of values of the wrong type, shape or number when they are stepped.
UNREPLAYABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def check_digests(shard: Differential, sums: Sums, *, whose: str, recorded_by: str) -> None:
    """Compare a step with the digests of the live run, as in `Sums`.

    Args:
        shard: Holds the digests, if the step has any.
        sums: Of what replay made of it.
        whose: Parameters, for the error.
        recorded_by: What they differ from then.

    Raises:
        ReplayMismatch: Naming the first difference.
    """
    if shard.digest is None:
        return
    recorded = {"": shard.digest.value} | {n: a.digest for n, a in shard.averages.items()}
    for name, value in recorded.items():
        if value is not None and value != sums.get((shard.step, shard.rank, name), 0):
            raise ReplayMismatch(
                f"after step {shard.step}, elements {shard.digest.start} to {shard.digest.stop} of "
                f"{whose}{name and f' as {name!r} averages them'} differ from {recorded_by}"
            )


@dataclass(frozen=True, slots=True)
class Movement:
    """How far some elements went in one step.

    Attributes:
        update_squared: Sum of the squared changes of the parameters.
        gradient_squared: Sum of the squared entries of the consumed gradient, unscaled.
        nonzeros: Number of its entries that are not zero.
    """

    update_squared: float = 0.0
    gradient_squared: float = 0.0
    nonzeros: int = 0

    def __add__(self, other: Movement) -> Movement:
        return Movement(
            self.update_squared + other.update_squared,
            self.gradient_squared + other.gradient_squared,
            self.nonzeros + other.nonzeros,
        )


@dataclass(slots=True)
class Scratch:
    """A worker's gradient memory, reused for every unit and step."""

    elements: int
    _by_dtype: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def zeros(self, like: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """``count`` zeros, the same memory as in the last call with this ``start``.

        Args:
            like: Gives dtype and device; all calls name one device.
            start: First element.
            count: Number of elements.
        """
        if like.dtype not in self._by_dtype:
            self._by_dtype[like.dtype] = like.new_empty(self.elements)
        return self._by_dtype[like.dtype][start : start + count].zero_()


class UnitState:
    """One unit, its optimizer over views of the full tensors, and its place in the layout."""

    def __init__(
        self,
        unit: Unit,
        state: RecoveredState,
        fence: Fence,
        chooser: StepChooser | None = None,
    ) -> None:
        self.unit = unit
        self._chooser = chooser or StepChooser()
        self._layout = fence.layout
        self._environment = fence.environment
        self._spec = fence.optimizers[unit.optimizer]
        self._group_of = {name: g for g, names in enumerate(self._spec.groups) for name in names}
        # Optimizers that couple a tensor's elements need its true shape; others take it flat.
        self._shaped = granularity(self._spec) != "element"
        self._mixed = _mixed_groups(fence.layout, self._spec)
        self._parameters = [
            torch.nn.Parameter(
                self._piece(block, state.parameters[self._name(block)]), requires_grad=False
            )
            for block in unit.blocks
        ]
        places = [fence.layout.parameters[b.parameter].offset for b in unit.blocks]
        self._first = places[0] + unit.blocks[0].start
        self._last = places[-1] + unit.blocks[-1].stop
        self._averages = {
            name: self._average(state.averages[name], set(names))
            for name, names in fence.averages.items()
        }
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[int] = sorted({self._group(b.parameter) for b in unit.blocks})
        self._restored = state.optimizers[unit.optimizer]

    def step(
        self, step: Step, scratch: Scratch, see_gradients: Callable[[], None] | None = None
    ) -> None:
        """Apply one differential: the optimizer first, then the averages of what it left.

        Args:
            step: What was logged.
            scratch: Memory for the gradients.
            see_gradients: Called before the optimizer, which may write them, has them.
        """
        done = step.shards[0].optimizers[self.unit.optimizer]
        with arithmetic_of(self._environment):
            if done.stepped:
                self._give_gradients(step, scratch)
                if see_gradients is not None:
                    see_gradients()
                self._step_optimizer(done, step.absent)
            for name, average in step.shards[0].averages.items():
                if average.updated:
                    self._averages[name].update(average)

    def step_measured(self, step: Step, scratch: Scratch) -> Movement:
        """`step`, and how far it went."""
        before = [parameter.clone() for parameter in self._parameters]
        done = step.shards[0].optimizers[self.unit.optimizer]
        scale = done.grad_scale or 1.0
        moved = Movement()

        def see() -> None:
            nonlocal moved
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                squared = (gradient.double() / scale).square().sum().item()
                moved += Movement(0.0, squared, int(gradient.count_nonzero()))

        # What a fused kernel skips is as if the scaler had not called the optimizer at all.
        self.step(step, scratch, None if done.found_inf else see)
        for old, parameter in zip(before, self._parameters, strict=True):
            update = (parameter - old).double().square().sum().item()
            moved += Movement(update_squared=update)
        return moved

    def _give_gradients(self, step: Step, scratch: Scratch) -> None:
        position = 0
        for block, parameter in zip(self.unit.blocks, self._parameters, strict=True):
            count = block.stop - block.start
            if block.parameter in step.absent:
                parameter.grad = None
                continue
            gradient = scratch.zeros(parameter, position, count)
            if gradient.is_cpu or isinstance(step.decode, IndexedDecoder):
                step.decode(block, gradient)
            else:
                host = torch.zeros(count, dtype=gradient.dtype, device="cpu")
                step.decode(block, host)
                gradient.copy_(host)
            parameter.grad = self._reshaped(block, gradient)
            position += aligned(count)

    def _step_optimizer(self, done: OptimizerStep, absent: Container[int]) -> None:
        device = self._parameters[0].device
        consumed = [usable_on(device, hyper) for hyper in done.consumed]
        for number, members in self._mixed.items():
            there = (dtype for index, dtype in members if index not in absent)
            consumed[number] = independent(self._spec, consumed[number], there, device)
        optimizer = self._optimizer or self._build(consumed)
        for group, index in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(consumed[index])
        if done.found_inf is not None:
            # As the scaler makes them, whatever the default dtype. After an explicit unscale_ it hands
            # over found_inf without a scale.
            made = partial(torch.tensor, dtype=torch.float32, device=device)
            scale = None if done.grad_scale is None else made(done.grad_scale)
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
            optimizer.found_inf = made(done.found_inf)  # type: ignore[attr-defined]
        elif hasattr(optimizer, "grad_scale") and hasattr(optimizer, "found_inf"):
            del optimizer.grad_scale, optimizer.found_inf  # as the scaler does after its step
        step_of = self._chooser.choose(optimizer)
        try:
            step_of(optimizer)
        except AssertionError as error:  # how torch refuses some values; ours mean something else
            raise RuntimeError(f"the optimizer refuses: {error}") from error

    def add_digests(self, shards: Sequence[Differential], digester: Digester, sums: Sums) -> None:
        """Add what this unit holds of the slices that the live run digested at this step."""
        for shard in shards:
            if (
                shard.digest is None
                or shard.digest.stop <= self._first
                or self._last <= shard.digest.start
            ):
                continue
            for average, tensors in self._digested(shard):
                key = (shard.step, shard.rank, average)
                for block, tensor in tensors:
                    offset = self._layout.parameters[block.parameter].offset + block.start
                    part = digester.partial(
                        flat(tensor), offset, shard.digest.start, shard.digest.stop
                    )
                    sums[key] = Digester.add(sums.get(key, 0), part)

    def _digested(
        self, shard: Differential
    ) -> Iterator[tuple[str, list[tuple[Block, torch.Tensor]]]]:
        """What the digests of a step are over: parameters under no name, averages under theirs."""
        yield "", list(zip(self.unit.blocks, self._parameters, strict=True))
        for name in shard.averages:
            yield name, self._averages[name].blocks

    def collect(self, state: RecoveredState) -> None:
        """Put the optimizer's state for these blocks where the full state lives."""
        if self._optimizer is None:
            return
        target = state.optimizers[self.unit.optimizer].state
        for block, parameter in zip(self.unit.blocks, self._parameters, strict=True):
            entries = self._optimizer.state.get(parameter, {})
            full = target.setdefault(self._name(block), {})
            for key, value in entries.items():
                if not is_aligned(key, value, parameter.numel()):
                    full[key] = value
                    continue
                if key not in full or not isinstance(full[key], torch.Tensor):
                    full[key] = value.new_empty(self._numel(block.parameter))
                destination = full[key][block.start : block.stop]
                elements = self._in_memory_order(block, value)
                if destination.data_ptr() != elements.data_ptr():
                    destination.copy_(elements)

    def _build(self, consumed: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        grouped = [
            (
                consumed[index],
                [
                    parameter
                    for block, parameter in zip(self.unit.blocks, self._parameters, strict=True)
                    if self._group(block.parameter) == index
                ],
            )
            for index in self._groups
        ]
        optimizer = build(self._spec, grouped)
        for block, parameter in zip(self.unit.blocks, self._parameters, strict=True):
            entries = self._restored.state.get(self._name(block), {})
            if entries:
                hyper = consumed[self._group(block.parameter)]
                optimizer.state[parameter] = {
                    key: self._own(block, key, value, hyper, parameter)
                    for key, value in entries.items()
                }
        self._optimizer = optimizer
        return optimizer

    def _own(
        self,
        block: Block,
        key: str,
        value: Any,
        hyper: Mapping[str, Any],
        parameter: torch.Tensor,
    ) -> Any:
        """A state entry for one block: a view where it has an element per element."""
        if is_aligned(key, value, self._numel(block.parameter)):
            return self._piece(block, value)
        if isinstance(value, torch.Tensor):
            return placed_scalar(key, value, hyper, parameter)
        return value

    def _piece(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        return self._reshaped(block, values[block.start : block.stop])

    def _reshaped(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        return shaped(values, self._layout.parameters[block.parameter]) if self._shaped else values

    def _in_memory_order(self, block: Block, value: torch.Tensor) -> torch.Tensor:
        """A state entry flat, as its parameter lies in memory: optimizers may lay it out otherwise."""
        spec = self._layout.parameters[block.parameter]
        return flat_like(value, spec) if tuple(value.shape) == spec.shape else flat(value)

    def _average(self, tensors: Mapping[str, torch.Tensor], followed: set[str]) -> BlockAverage:
        return BlockAverage(
            (block, parameter, self._piece(block, tensors[self._name(block)]))
            for block, parameter in zip(self.unit.blocks, self._parameters, strict=True)
            if self._name(block) in followed
        )

    def _name(self, block: Block) -> str:
        return self._layout.parameters[block.parameter].name

    def _group(self, parameter: int) -> int:
        return self._group_of[self._layout.parameters[parameter].name]

    def _numel(self, parameter: int) -> int:
        return self._layout.parameters[parameter].numel


def _mixed_groups(layout: Layout, spec: OptimizerSpec) -> dict[int, list[tuple[int, torch.dtype]]]:
    """An optimizer's groups of several dtypes: layout index and dtype of each of their parameters."""
    known = {p.name: (index, torch_dtype(p.dtype)) for index, p in enumerate(layout.parameters)}
    members = {
        number: [known[name] for name in names if name in known]
        for number, names in enumerate(spec.groups)
    }
    return {n: found for n, found in members.items() if len({dtype for _, dtype in found}) > 1}
