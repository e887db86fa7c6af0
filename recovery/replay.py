"""Replaying differentials on a snapshot, block by block, with the real torch optimizer.

Every unit of blocks is stepped through a window of differentials by one worker; the next window
is read and decoded meanwhile, so memory is bounded whatever the number of differentials.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from typing_extensions import Self

from lowdiff.compressors import from_settings
from lowdiff.digests import Digester
from lowdiff.errors import ReplayMismatch
from lowdiff.layout import flat, shaped
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.differentials import read_differential
from lowdiff.protocols import Decoder
from lowdiff.recovery.blocks import Unit, element_units, tensor_units
from lowdiff.recovery.optimizers import build, granularity
from lowdiff.recovery.plan import PlannedStep
from lowdiff.recovery.state import RecoveredState, inherit, is_aligned
from lowdiff.types import Block, Differential, Fence

#: Measured: smaller units pay Python's cost per optimizer step too often, larger ones leave the
#: cache.
BLOCK_ELEMENTS = 1 << 18
_WINDOW_BYTES = 128 << 20
#: glibc hands memory above its mmap threshold back to the kernel at every free; freeing one piece of
#: this size raises the threshold to it, so a unit's temporaries keep their pages.
_KEPT_BYTES = 32 << 20


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


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay; never changes the resulting bits.

    Attributes:
        num_workers: Threads; None takes as many as this process may use cores.
        block_elements: Elements per unit, a multiple of 64.
        whole: Replay every parameter whole on one thread team of the live run's size.
        progress: Called with the number of steps replayed so far.
    """

    num_workers: int | None = None
    block_elements: int = BLOCK_ELEMENTS
    whole: bool = False
    progress: Callable[[int], None] | None = None

    @property
    def workers(self) -> int:
        """Number of worker threads."""
        if self.whole:
            return 1
        return self.num_workers or len(os.sched_getaffinity(0))


def replay(
    state: RecoveredState,
    steps: Sequence[PlannedStep],
    fences: Callable[[int], Fence],
    options: ReplayOptions,
) -> RecoveredState:
    """Bring a state forward, in place.

    Args:
        state: State at the step before ``steps[0]``.
        steps: Consecutive steps.
        fences: Incarnation number -> its fence.
        options: How.

    Raises:
        ReplayMismatch: If the parameters differ from what the live run recorded of them.
        DamagedFile: If a record does not decode.
    """
    done = 0
    for incarnation, group in groupby(steps, key=lambda s: s.incarnation):
        fence = fences(incarnation)
        if fence.world_size != len(state.items) or fence.incarnation != state.fence.incarnation:
            state.items = inherit(state.items, fence.world_size)
        state.fence = fence
        own = list(group)
        with _Replay(state, fence, options) as running:
            for window in _windows(own, fence):
                running.run(window)
                done += len(window)
                if options.progress:
                    options.progress(done)
    return state


def _windows(steps: Sequence[PlannedStep], fence: Fence) -> Iterator[list[Step]]:
    """Decoded steps in windows of bounded size; the next is decoded while one is in use."""
    plans: list[list[PlannedStep]] = []
    size = _WINDOW_BYTES
    for step in steps:
        if size + 3 * step.bytes > _WINDOW_BYTES:
            plans.append([])
            size = 0
        plans[-1].append(step)
        size += 3 * step.bytes
    codec = Codec()
    max_items = 2 * fence.layout.elements  # an index and a value each
    compressor = from_settings(fence.compressor["name"], fence.compressor["settings"])

    def read(step: PlannedStep) -> Step:
        shards = tuple(read_differential(stored, codec, max_items) for stored in step.shards)
        decode = compressor.decoder([shard.payload for shard in shards], fence.layout)
        return Step(shards, frozenset(shards[0].absent), decode)

    def read_all(window: list[PlannedStep]) -> list[Step]:
        return [read(step) for step in window]

    with ThreadPoolExecutor(1, thread_name_prefix="lowdiff-decode") as reader:
        ahead = reader.submit(read_all, plans[0]) if plans else None
        for following in [*plans[1:], None]:
            assert ahead is not None
            window = ahead.result()
            ahead = reader.submit(read_all, following) if following is not None else None
            yield window


class _Replay:
    """The units of one incarnation and the threads that step them."""

    def __init__(self, state: RecoveredState, fence: Fence, options: ReplayOptions) -> None:
        self._state = state
        self._layout = fence.layout
        self._digester = Digester(fence.layout)
        self._options = options
        self._threads = fence.environment.num_threads if options.whole else 1
        self._units = [_UnitState(unit, state, fence) for unit in plan_units(state, fence, options)]
        self._pool = ThreadPoolExecutor(options.workers, thread_name_prefix="lowdiff-replay")
        self._scratch = _Scratch(max((u.unit.elements for u in self._units), default=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        if exception[0] is None:
            for unit in self._units:
                unit.collect(self._state)

    def run(self, window: Sequence[Step]) -> None:
        """Step every unit through a window, then check the digests of the window's steps."""
        workers = self._options.workers
        queue = iter(self._units)  # next() on a list iterator is atomic
        with _one_thread_each(self._threads):
            jobs = [self._pool.submit(self._work, queue, window) for _ in range(workers)]
            sums: dict[tuple[int, int], int] = {}
            for job in jobs:
                for key, value in job.result().items():
                    sums[key] = Digester.add(sums.get(key, 0), value)
        for step in window:
            for shard in step.shards:
                self._check(shard, sums.get((shard.step, shard.rank), 0))
            self._take_scalars(step.shards)

    def _work(self, queue: Iterator[_UnitState], window: Sequence[Step]) -> _Sums:
        sums: _Sums = {}
        torch.set_num_threads(self._threads)  # per thread; see _one_thread_each
        scratch = _Scratch(self._scratch.elements)
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        with torch.no_grad():
            for unit in queue:
                for step in window:
                    unit.step(step, scratch)
                    unit.add_digests(step.shards, self._digester, sums)
        return sums

    def _check(self, shard: Differential, found: int) -> None:
        if shard.digest is not None and shard.digest.value != found:
            raise ReplayMismatch(
                f"after step {shard.step}, elements {shard.digest.start} to {shard.digest.stop} "
                f"of the parameters differ from what rank {shard.rank} recorded: a parameter was "
                "changed outside the optimizer, or this machine rounds differently"
            )

    def _take_scalars(self, shards: Sequence[Differential]) -> None:
        state = self._state
        first = shards[0]
        state.step = first.step
        for optimizer, step in zip(state.optimizers, first.optimizers, strict=True):
            optimizer.groups = [dict(group) for group in step.after]
        for shard in shards:
            state.items[shard.rank].update(shard.items)
        state.held = first.held
        state.residual_marks = [shard.residual for shard in shards]


_Sums = dict[tuple[int, int], int]


@dataclass(slots=True)
class _Scratch:
    """A worker's gradient memory, reused for every unit and step."""

    elements: int
    _by_dtype: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def zeros(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = torch.empty(self.elements + 64, dtype=dtype)
        return self._by_dtype[dtype][start : start + count].zero_()


class _UnitState:
    """One unit, its optimizer over views of the full tensors, and its place in the layout."""

    def __init__(self, unit: Unit, state: RecoveredState, fence: Fence) -> None:
        self.unit = unit
        self._layout = fence.layout
        self._spec = fence.optimizers[unit.optimizer]
        self._group_of = {name: g for g, names in enumerate(self._spec.groups) for name in names}
        # Optimizers that couple a tensor's elements need its true shape; others take it flat.
        self._shaped = granularity(self._spec) != "element"
        self._parameters = [
            torch.nn.Parameter(self._piece(block, state.parameters[self._name(block)]))
            for block in unit.blocks
        ]
        places = [fence.layout.parameters[b.parameter].offset for b in unit.blocks]
        self._first = places[0] + unit.blocks[0].start
        self._last = places[-1] + unit.blocks[-1].stop
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[int] = sorted({self._group(b.parameter) for b in unit.blocks})
        self._restored = state.optimizers[unit.optimizer]

    def step(self, step: Step, scratch: _Scratch) -> None:
        """Apply one differential."""
        done = step.shards[0].optimizers[self.unit.optimizer]
        if not done.stepped:
            return
        optimizer = self._optimizer or self._build(done.consumed)
        position = 0
        for block, parameter in zip(self.unit.blocks, self._parameters, strict=True):
            count = block.stop - block.start
            if block.parameter in step.absent:
                parameter.grad = None
                continue
            gradient = scratch.zeros(parameter.dtype, position, count)
            step.decode(block, gradient)
            parameter.grad = self._reshaped(block, gradient)
            position += count + (-count % 16)
        for group, index in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(done.consumed[index])
        if done.found_inf is not None:
            # After an explicit unscale_ the scaler hands over found_inf without a scale (R2).
            scale = None if done.grad_scale is None else torch.tensor(done.grad_scale)
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(done.found_inf)  # type: ignore[attr-defined]
        elif hasattr(optimizer, "found_inf"):
            del optimizer.found_inf
        # The bare method: hooks and the profiler's record would cost as much as a small block.
        self._bare_step(optimizer)

    def add_digests(self, shards: Sequence[Differential], digester: Digester, sums: _Sums) -> None:
        """Add what this unit holds of the slices that the live run digested at this step."""
        for shard in shards:
            if (
                shard.digest is None
                or shard.digest.stop <= self._first
                or self._last <= shard.digest.start
            ):
                continue
            for block, parameter in zip(self.unit.blocks, self._parameters, strict=True):
                offset = self._layout.parameters[block.parameter].offset + block.start
                if offset < shard.digest.stop and shard.digest.start < offset + parameter.numel():
                    key = (shard.step, shard.rank)
                    part = digester.partial(
                        flat(parameter), offset, shard.digest.start, shard.digest.stop
                    )
                    sums[key] = Digester.add(sums.get(key, 0), part)

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
                    full[key] = torch.empty(self._numel(block.parameter), dtype=value.dtype)
                destination = full[key][block.start : block.stop]
                if destination.data_ptr() != value.data_ptr():
                    destination.copy_(flat(value))

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
                optimizer.state[parameter] = {
                    key: self._own(block, key, value) for key, value in entries.items()
                }
        self._optimizer = optimizer
        self._bare_step = inspect.unwrap(type(optimizer).step)
        return optimizer

    def _own(self, block: Block, key: str, value: Any) -> Any:
        """A state entry for one block: a view where it has an element per element."""
        if is_aligned(key, value, self._numel(block.parameter)):
            return self._piece(block, value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _piece(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        return self._reshaped(block, values[block.start : block.stop])

    def _reshaped(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        return shaped(values, self._layout.parameters[block.parameter]) if self._shaped else values

    def _name(self, block: Block) -> str:
        return self._layout.parameters[block.parameter].name

    def _group(self, parameter: int) -> int:
        return self._group_of[self._layout.parameters[parameter].name]

    def _numel(self, parameter: int) -> int:
        return self._layout.parameters[parameter].numel


def plan_units(state: RecoveredState, fence: Fence, options: ReplayOptions) -> list[Unit]:
    """Cut the layout as finely as each optimizer allows."""
    owner_of = {
        name: (index, bool(state.optimizers[index].groups[g].get("fused")))
        for index, spec in enumerate(fence.optimizers)
        for g, names in enumerate(spec.groups)
        for name in names
    }
    owners = [owner_of[spec.name] for spec in fence.layout.parameters]
    whole = tensor_units(fence.layout, owners)
    if options.whole:
        return whole
    cut = element_units(
        fence.layout,
        owners,
        num_threads=fence.environment.num_threads,
        block_elements=options.block_elements,
    )
    by_element = {
        index for index, spec in enumerate(fence.optimizers) if granularity(spec) == "element"
    }
    return [u for u in cut if u.optimizer in by_element] + [
        u for u in whole if u.optimizer not in by_element
    ]


@contextmanager
def _one_thread_each(num_threads: int) -> Iterator[None]:
    """Workers set their own team size; the process's default is put back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
