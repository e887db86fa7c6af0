"""A few blocks of the layout and the real torch optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lowdiff.compressors.sections import floats
from lowdiff.compressors.sparse import IndexedDecoder
from lowdiff.core import devices
from lowdiff.core.digest import KINDS, Looker, Shift, entries_of
from lowdiff.core.layout import flat, flat_like, shaped, torch_dtype
from lowdiff.core.memory import byte_view
from lowdiff.core.numerics import arithmetic_of
from lowdiff.core.sums import MODULUS, Sums, unsigned
from lowdiff.errors import LowDiffError, ReplayMismatch
from lowdiff.protocols import Decoder
from lowdiff.recovery.replay.averages import BlockAverage
from lowdiff.recovery.replay.blocks import Unit, aligned
from lowdiff.recovery.replay.checksums import Checksums, EntryLook, Look
from lowdiff.recovery.replay.kernels import StepChooser
from lowdiff.recovery.replay.optimizers import (
    build,
    granularity,
    independent,
    placed_scalar,
    usable_on,
)
from lowdiff.recovery.state import RecoveredState, is_aligned
from lowdiff.types import (
    AverageStep,
    Bits,
    Block,
    Differential,
    Fence,
    Layout,
    OptimizerSpec,
    OptimizerStep,
    ParameterSpec,
    Payload,
    Written,
)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerCall:
    """One optimizer step of a loop body, read and ready to be replayed.

    Attributes:
        optimizers: What each optimizer did.
        absent: Parameters without a gradient.
        decode: Writes a block of the gradient.
        written: What something else than the optimizer wrote, of all ranks.
        averages: What averages did behind it.
    """

    optimizers: tuple[OptimizerStep, ...]
    absent: frozenset[int]
    decode: Decoder
    written: Written
    averages: Mapping[str, AverageStep]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One differential, read and ready to be replayed.

    Attributes:
        shards: One per rank, in rank order.
        calls: Its optimizer steps, in their order.
        summed_states: Layout indices of the parameters of whose optimizer state there is a checksum.
    """

    shards: tuple[Differential, ...]
    calls: tuple[OptimizerCall, ...]
    summed_states: frozenset[int]

    @classmethod
    def of(
        cls, shards: tuple[Differential, ...], decoder: Callable[[list[Payload]], Decoder]
    ) -> Step:
        """Put the ranks' records of one step together.

        Args:
            shards: One per rank, in rank order.
            decoder: Of the ranks' payloads of one gradient.

        Raises:
            ReplayMismatch: If the ranks made different numbers of optimizer steps.
        """
        by_rank = [shard.steps for shard in shards]
        if len({len(calls) for calls in by_rank}) > 1:
            raise ReplayMismatch(
                f"the ranks made different numbers of optimizer steps in step {shards[0].step}",
                step=shards[0].step,
            )
        return cls(
            shards,
            tuple(
                OptimizerCall(
                    calls[0].optimizers,
                    # Ranks may train different shards.
                    frozenset(i for call in calls for i in call.absent),
                    decoder([call.payload for call in calls]),
                    _joined([call.written for call in calls]),
                    calls[0].averages,
                )
                for calls in zip(*by_rank, strict=True)
            ),
            frozenset(i for shard in shards for i in shard.state_digests),
        )

    @property
    def is_digested(self) -> bool:
        """Whether the live run took checksums of it."""
        return any(shard.digests or shard.state_digests for shard in self.shards)


def _joined(written: Sequence[Written]) -> Written:
    """Join what ranks found written, each to its own share, in one value."""
    averages: dict[str, dict[int, Bits]] = {}
    for of_rank in written:
        for name, values in of_rank.averages.items():
            averages.setdefault(name, {}).update(values)
    return Written(
        {i: values for of_rank in written for i, values in of_rank.before.items()},
        {i: values for of_rank in written for i, values in of_rank.after.items()},
        averages,
    )


#: What torch and Python say of values of the wrong type, shape or number when they are stepped.
UNREPLAYABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
#: What they say where memory or threads are not to be had.
_OUT_OF_MEANS = ("allocate memory", "start new thread")


def is_out_of_means(error: BaseException) -> bool:
    """Whether an error says that the machine has nothing left, and so nothing about the run."""
    is_out = any(words in str(error) for words in _OUT_OF_MEANS)
    return is_out or isinstance(error, torch.OutOfMemoryError)


@contextmanager
def replaying(step: int) -> Iterator[None]:
    """Within it, whatever keeps a step from being replayed says which step that is.

    Raises:
        ReplayMismatch: With the step, also in place of what an optimizer says of unfit values.
    """
    try:
        yield
    except ReplayMismatch as error:
        if error.step is not None:
            raise
        raise ReplayMismatch(str(error), step=step) from error
    except LowDiffError:
        raise
    except UNREPLAYABLE as error:
        if is_out_of_means(error):
            raise
        raise ReplayMismatch(
            f"step {step} cannot be replayed ({error!r:.200})", step=step
        ) from error


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
    """One unit, its optimizer over views of the full tensors, and its place in the layout.

    Large because a step of replay looks up everything here, instead of finding it anew.

    Args:
        unit: Its blocks.
        state: Has the tensors.
        fence: Of the incarnation that is replayed.
        chooser: Chooses how the optimizer steps.
        sums: Takes checksums where the tensors are; None where that is the host.
    """

    def __init__(
        self,
        unit: Unit,
        state: RecoveredState,
        fence: Fence,
        chooser: StepChooser | None = None,
        sums: Sums | None = None,
    ) -> None:
        self.unit = unit
        self._sums = sums
        self._chooser = chooser or StepChooser()
        self._layout = fence.layout
        self._environment = fence.environment
        self._spec = fence.optimizers[unit.optimizer]
        self._group_of = {name: g for g, names in enumerate(self._spec.groups) for name in names}
        # Optimizers that couple a tensor's elements need its true shape; others take it flat.
        self._shaped = granularity(self._spec) != "element"
        self._mixed = _mixed_groups(fence.layout, self._spec)
        self._pieces: list[tuple[Block, ParameterSpec, torch.nn.Parameter]] = []
        for block in unit.blocks:
            spec = fence.layout.parameters[block.parameter]
            values = self._shape(spec, state.parameters[spec.name][block.start : block.stop])
            parameter = torch.nn.Parameter(values, requires_grad=False)
            self._pieces.append((block, spec, parameter))
        self._averages = {
            name: BlockAverage(
                (b, p, self._shape(spec, state.averages[name][spec.name][b.start : b.stop]))
                for b, spec, p in self._pieces
                if spec.name in followed
            )
            for name, followed in ((name, set(names)) for name, names in fence.averages.items())
        }
        # What checksums are over: parameters under no name, averages under theirs.
        named: list[tuple[str, Block, torch.Tensor]] = [("", b, p) for b, _, p in self._pieces]
        for name, average in self._averages.items():
            named += [(name, block, tensor) for block, tensor in average.blocks]
        self._places = [(name, block) for name, block, _ in named]
        self._looked = [tensor for _, _, tensor in named]
        self._kind = KINDS[fence.digests]
        starts = [block.start for _, block in self._places]
        self._looker = Looker(dict(enumerate(self._looked)), self._kind, dict(enumerate(starts)))
        self._shifts: dict[int, Shift] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups = sorted({self._group_of[spec.name] for _, spec, _ in self._pieces})
        self._restored = state.optimizers[unit.optimizer]

    def step(
        self,
        step: Step,
        scratch: Scratch,
        see_gradients: Callable[[OptimizerStep], None] | None = None,
    ) -> None:
        """Apply one differential: each optimizer step, and the averages of what it left.

        Args:
            step: What was logged.
            scratch: Memory for the gradients.
            see_gradients: Called before the optimizer, which may write them, has them.
        """
        with arithmetic_of(self._environment):
            for call in step.calls:
                self._call(call, scratch, see_gradients)

    def _call(
        self,
        call: OptimizerCall,
        scratch: Scratch,
        see_gradients: Callable[[OptimizerStep], None] | None,
    ) -> None:
        done = call.optimizers[self.unit.optimizer]
        self._write(call.written.before)
        if done.stepped:
            self._give_gradients(call, scratch)
            if see_gradients is not None:
                see_gradients(done)
            self._step_optimizer(done, call.absent)
        self._write(call.written.after)
        for name, average in call.averages.items():
            if average.updated:
                self._averages[name].update(average)
        for name, values in call.written.averages.items():
            for block, tensor in self._averages[name].blocks:
                _put(values, block, tensor)

    def _write(self, values: Mapping[int, Bits]) -> None:
        """Put in what something else than the optimizer wrote."""
        for block, _, parameter in self._pieces if values else ():
            _put(values, block, parameter)

    def step_measured(self, step: Step, scratch: Scratch) -> Movement:
        """`step`, and how far it went."""
        parameters = [parameter for _, _, parameter in self._pieces]
        before = [parameter.clone() for parameter in parameters]
        moved = Movement()

        def see(done: OptimizerStep) -> None:
            nonlocal moved
            if done.found_inf:
                return  # what a fused kernel skips is as if the scaler had not called the optimizer
            scale = done.grad_scale or 1.0
            for gradient in (p.grad for p in parameters if p.grad is not None):
                squared = (gradient.double() / scale).square().sum().item()
                moved += Movement(0.0, squared, int(gradient.count_nonzero()))

        self.step(step, scratch, see)
        for old, parameter in zip(before, parameters, strict=True):
            update = (parameter - old).double().square().sum().item()
            moved += Movement(update_squared=update)
        return moved

    def _give_gradients(self, call: OptimizerCall, scratch: Scratch) -> None:
        position = 0
        for block, spec, parameter in self._pieces:
            count = block.stop - block.start
            if block.parameter in call.absent:
                parameter.grad = None
                continue
            gradient = scratch.zeros(parameter, position, count)
            if devices.may_look(gradient) or isinstance(call.decode, IndexedDecoder):
                call.decode(block, gradient)
            else:
                host = torch.zeros(count, dtype=gradient.dtype, device="cpu")
                call.decode(block, host)
                gradient.copy_(host)
            parameter.grad = self._shape(spec, gradient)
            position += aligned(count)

    def _step_optimizer(self, done: OptimizerStep, absent: Container[int]) -> None:
        device = self._pieces[0][2].device
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

    def look(self) -> Sequence[int] | torch.Tensor:
        """Checksums of this unit's blocks as they are now, in the order of `add_checksums`; on a device, there."""
        if self._sums is None:
            return [*self._looker.look().values()]
        return self._sums(self._looked, [block.start for _, block in self._places])

    def look_at_states(self, wanted: Container[int]) -> list[EntryLook]:
        """Return checksums of what the optimizer keeps of this unit's blocks as it is now.

        Args:
            wanted: Layout indices of the parameters that are looked at.
        """
        found = []
        for block, spec, parameter in self._pieces:
            if block.parameter not in wanted:
                continue
            entries = self._entries(block, spec, parameter)
            numel = block.stop - block.start
            cut = {key: v for key, v in entries.items() if is_aligned(key, v, numel)}
            # What is kept once for a parameter counts in its first block.
            own = entries_of(cut if block.start else entries, spec)
            if own is None:
                continue
            sizes = {key: value.element_size() for key, value in cut.items()}
            looked = {k: (self._checksum(v, block.start), sizes.get(k, 0)) for k, v in own.items()}
            found.append(EntryLook(block, looked))
        return found

    def _checksum(self, tensor: torch.Tensor, start: int) -> int | torch.Tensor:
        if self._sums is None or devices.may_look(tensor):  # some are kept on the host
            return self._kind.of_bytes(byte_view(tensor), start * tensor.element_size())
        return self._sums([tensor], [start])[0]

    def _entries(
        self, block: Block, spec: ParameterSpec, parameter: torch.nn.Parameter
    ) -> Mapping[str, Any]:
        """What the optimizer keeps of a block; before it is built, what it will begin with."""
        if self._optimizer is not None:
            entries: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            return entries
        return {
            key: self._shape(spec, value[block.start : block.stop])
            if is_aligned(key, value, spec.numel)
            else value
            for key, value in self._restored.state.get(spec.name, {}).items()
        }

    def add_checksums(self, looks: Sequence[Look], found: Checksums) -> None:
        """Add what this unit holds of every parameter's checksum, and of its optimizer state's.

        Args:
            looks: At several steps.
            found: Added to.
        """
        of_tensors = [
            unsigned(look.tensors) if isinstance(look.tensors, torch.Tensor) else look.tensors
            for look in looks
        ]
        for place, (average, block) in enumerate(self._places):
            size = self._looked[place].element_size()
            own = self._shifted([numbers[place] for numbers in of_tensors], block, size)
            for look, value in zip(looks, own, strict=True):
                found.add_tensor(look.step, average, block.parameter, value)
        alike: dict[tuple[Block, str, int], list[tuple[int, int]]] = {}
        for look in looks:
            for of_block in look.states:
                found.begin_state(look.step, of_block.block.parameter)
                for key, (checksum, size) in of_block.entries.items():
                    number = int(checksum) % MODULUS
                    alike.setdefault((of_block.block, key, size), []).append((look.step, number))
        for (block, key, size), seen in alike.items():
            parts = self._shifted([checksum for _, checksum in seen], block, size)
            for (step, _), value in zip(seen, parts, strict=True):
                found.add_state(step, block.parameter, key, value)

    def _shifted(self, parts: Sequence[int], block: Block, element_bytes: int) -> Sequence[int]:
        """Move a block's checksums past what follows the block in its parameter, unless they go by its place."""
        if self._kind.is_placed:
            return parts
        behind = self._layout.parameters[block.parameter].numel - block.stop
        rest = behind * element_bytes
        if not rest:
            return parts
        if rest not in self._shifts:
            self._shifts[rest] = Shift(rest)
        shifted: list[int] = self._shifts[rest](parts).tolist()
        return shifted

    def collect(self, state: RecoveredState) -> None:
        """Put the optimizer's state for these blocks where the full state lives."""
        if self._optimizer is None:
            return
        target = state.optimizers[self.unit.optimizer].state
        for block, spec, parameter in self._pieces:
            entries = self._optimizer.state.get(parameter, {})
            full = target.setdefault(spec.name, {})
            for key, value in entries.items():
                if not is_aligned(key, value, parameter.numel()):
                    full[key] = value
                    continue
                if key not in full or not isinstance(full[key], torch.Tensor):
                    full[key] = value.new_empty(spec.numel)
                destination = full[key][block.start : block.stop]
                # Flat, as its parameter lies in memory: optimizers may lay it out otherwise.
                is_shaped = tuple(value.shape) == spec.shape
                elements = flat_like(value, spec) if is_shaped else flat(value)
                if destination.data_ptr() != elements.data_ptr():
                    destination.copy_(elements)

    def _build(self, consumed: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        # In the live groups' order: a sum over several tensors rounds by it.
        place = {name: i for i, name in enumerate(self._group_of)}
        ordered = sorted(self._pieces, key=lambda piece: place[piece[1].name])
        grouped = [
            (consumed[index], [p for _, spec, p in ordered if self._group_of[spec.name] == index])
            for index in self._groups
        ]
        optimizer = build(self._spec, grouped)
        for block, spec, parameter in self._pieces:
            entries = dict(self._restored.state.get(spec.name, {}))
            for key, value in entries.items():
                if is_aligned(key, value, spec.numel):
                    entries[key] = self._shape(spec, value[block.start : block.stop])  # a view
                elif isinstance(value, torch.Tensor):
                    hyper = consumed[self._group_of[spec.name]]
                    entries[key] = placed_scalar(key, value, hyper, parameter)
            if entries:
                optimizer.state[parameter] = entries
        self._optimizer = optimizer
        return optimizer

    def _shape(self, spec: ParameterSpec, values: torch.Tensor) -> torch.Tensor:
        return shaped(values, spec) if self._shaped else values


def _put(values: Mapping[int, Bits], block: Block, tensor: torch.Tensor) -> None:
    """Overwrite one block of a parameter, or of what follows it, with logged values.

    Raises:
        ReplayMismatch: If they are not of its length.
    """
    patterns = values.get(block.parameter)
    if patterns is None:
        return
    mine = patterns[block.start : block.stop]
    if mine.size != tensor.numel():
        raise ReplayMismatch(f"{patterns.size} values were logged of parameter {block.parameter}")
    flat(tensor).copy_(floats(mine, tensor.dtype))


def _mixed_groups(layout: Layout, spec: OptimizerSpec) -> dict[int, list[tuple[int, torch.dtype]]]:
    """An optimizer's groups of several dtypes: layout index and dtype of each of their parameters."""
    known = {p.name: (index, torch_dtype(p.dtype)) for index, p in enumerate(layout.parameters)}
    members = {
        number: [known[name] for name in names if name in known]
        for number, names in enumerate(spec.groups)
    }
    return {n: found for n, found in members.items() if len({dtype for _, dtype in found}) > 1}
