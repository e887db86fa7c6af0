"""Replaying differentials on a snapshot, block by block, with the real torch optimizer.

Every unit of blocks is stepped through a window of differentials by one worker; the next window
is read and decoded meanwhile, so memory is bounded whatever the number of differentials.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from typing_extensions import Self

from lowdiff.compressors import from_settings
from lowdiff.compressors.grouped import decoding
from lowdiff.core import devices
from lowdiff.core.digest import KINDS
from lowdiff.core.events import Code
from lowdiff.core.layout import shares_of
from lowdiff.core.numerics import arithmetic_of, other_torch
from lowdiff.core.sums import sums_on
from lowdiff.errors import ConfigError, ReplayMismatch, RunMismatch
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.sections import max_payload_bytes
from lowdiff.recovery.plan import PlannedStep
from lowdiff.recovery.replay.blocks import Unit, element_units, optimizer_units, tensor_units
from lowdiff.recovery.replay.checksums import Checksums, Look, check_digests, makes_same_bits
from lowdiff.recovery.replay.kernels import StepChooser
from lowdiff.recovery.replay.optimizers import (
    granularity,
    needs_live_threads,
    settle_kernels,
    without_default_group,
)
from lowdiff.recovery.replay.sizing import (
    LocalRanks,
    threads_put_back,
    usable_cores,
)
from lowdiff.recovery.replay.unit import (
    Movement,
    Scratch,
    Step,
    UnitState,
    replaying,
)
from lowdiff.recovery.state import RecoveredState, begin_life
from lowdiff.types import Differential, Fence

#: Decoded bytes of a window; two are in memory, one in use and one being read. The first is small,
#: so that replay starts at once.
_WINDOW_BYTES, _FIRST_WINDOW_BYTES = 32 << 20, 6 << 20
#: glibc hands memory above its mmap threshold back to the kernel at every free; freeing one piece of
#: this size raises the threshold to it, so a unit's temporaries keep their pages. glibc passes over
#: pieces of more than 32 MiB with their header.
_KEPT_BYTES = 24 << 20
#: On an accelerator kernels are queued one by one, which small blocks would not be worth; with the
#: state of an Adam this is 1 GiB. Not measured yet.
_DEVICE_BLOCK_ELEMENTS = 1 << 26
#: Of a unit on a CPU: measured with 20 million elements of AdamW on an AMD EPYC, 2^20 takes 1.2 times as long
#: with one worker, and with a fused optimizer 1.1 times with two, where 2^18, of whose steps more hold Python's
#: lock, takes 1.5 times.
_HOST_BLOCK_ELEMENTS = 1 << 19

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay; never changes the resulting bits, unless on another kind of device.

    Attributes:
        num_workers: Threads; None takes this process's share of the cores that it may use.
        block_elements: Elements per unit, a multiple of 64; None takes 2^19 on a CPU, which was
            measured fastest, and 2^26 on an accelerator, which was not measured.
        whole: Replay every parameter whole on one thread team of the live run's size.
        progress: Called with the number of steps replayed so far.
        movements: If given, filled with how far every step went; costs about half as much again.
        device: Where the optimizer runs; the result is on the CPU. A run comes back bit for bit
            where it was trained, elsewhere last places may differ.
        here: The processes of this machine that recover at once and share its cores and its memory;
            None if this one is alone.
    """

    num_workers: int | None = None
    block_elements: int | None = None
    whole: bool = False
    progress: Callable[[int], None] | None = None
    movements: dict[int, Movement] | None = None
    device: torch.device = _CPU
    here: LocalRanks | None = None

    def __post_init__(self) -> None:
        if self.block_elements is not None and (
            self.block_elements < 64 or self.block_elements % 64
        ):
            raise ConfigError(f"block_elements is a multiple of 64, got {self.block_elements}")
        if self.num_workers is not None and self.num_workers < 1:
            raise ConfigError(f"num_workers counts threads, got {self.num_workers}")

    @property
    def workers(self) -> int:
        """Number of worker threads."""
        return 1 if self.whole or not devices.may_look(self.device) else self.readers

    @property
    def readers(self) -> int:
        """Number of threads that read a snapshot: this process's share of the cores."""
        if self.num_workers is not None:
            return self.num_workers
        return max(1, usable_cores() // (1 if self.here is None else self.here.count))


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
    settle_kernels()
    if steps:
        newest = fences(steps[-1].incarnation)
        needed = needs_live_threads(newest.optimizers, newest.environment.num_threads)
        options = replace(options, whole=options.whole or needed)
    done = 0
    for incarnation, life in groupby(steps, key=lambda s: s.incarnation):
        fence = fences(incarnation)
        if fence.world_size != len(state.items) or fence.incarnation != state.fence.incarnation:
            begin_life(state, fence)
        lost = sorted(set(fence.averages) - set(state.averages))
        if lost:
            raise RunMismatch(
                f"averages {lost} were attached after step {state.step}, and the snapshot that was "
                "taken then is lost; recover a step before or after it"
            )
        state.averages = {name: state.averages[name] for name in fence.averages}
        for count in step_through(state, list(life), fence, options):
            done += count
            if options.progress:
                options.progress(done)
    return state


def step_through(
    state: RecoveredState, steps: Sequence[PlannedStep], fence: Fence, options: ReplayOptions
) -> Iterator[int]:
    """Bring a state, or one rank's share of it, forward in place through steps of one incarnation.

    Yields:
        The number of steps in each window, once that is replayed.
    """
    with Replayer(state, fence, options) as running, closing(windows(steps, fence)) as read:
        for window in read:
            running.run(window)
            yield len(window)


def windows(steps: Sequence[PlannedStep], fence: Fence) -> Generator[list[Step], None, None]:
    """Decoded steps in windows of bounded size; the next is decoded while one is in use.

    What counts is the decoded size: a gradient of zeros or NaN takes next to nothing when stored.
    Must be closed: reading ahead would go on beside another attempt that reads the same records.
    """
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    compressor = from_settings(fence.compressor["name"], fence.compressor["settings"])
    decoder_of = decoding(compressor, fence.layout)

    def read(step: PlannedStep) -> Step:
        shards = tuple(read_differential(stored, codec) for stored in step.shards)
        if any(_updates(shard) != _updates(shards[0]) for shard in shards):
            raise ReplayMismatch(
                f"the ranks updated their averages differently in step {step.step}; update an "
                "AveragedModel on every rank in the same steps",
                step=step.step,
            )
        with replaying(step.step):
            return Step.of(shards, decoder_of)

    unread = iter(steps)

    def read_window(limit_bytes: int) -> list[Step]:
        window: list[Step] = []
        size = 0
        while size < limit_bytes and (step := next(unread, None)) is not None:
            window.append(read(step))
            size += sum(shard.payload_bytes for shard in window[-1].shards)
            size += sum(len(item) for shard in window[-1].shards for item in shard.items.values())
        return window

    with ThreadPoolExecutor(1, thread_name_prefix="lowdiff-decode") as reader:
        limit = min(_FIRST_WINDOW_BYTES, _WINDOW_BYTES)
        window = read_window(limit)
        while window:
            limit = min(2 * limit, _WINDOW_BYTES)
            ahead = reader.submit(read_window, limit)
            yield window
            window = ahead.result()


def _updates(shard: Differential) -> list[dict[str, tuple[bool, int]]]:
    return [
        {name: (average.updated, average.count) for name, average in step.averages.items()}
        for step in shard.steps
    ]


class Replayer:
    """The units of one incarnation and the threads that step them."""

    def __init__(self, state: RecoveredState, fence: Fence, options: ReplayOptions) -> None:
        self._state = state
        self._fence = fence
        self._shares = shares_of(fence.layout, fence.world_size)
        self._options = options
        version = other_torch(fence.environment)
        self._suspected = (
            "something that was not noticed wrote to it, to its gradient or to its optimizer's state"
            if version is None
            else f"torch {version} made the step, this is torch {torch.__version__}"
        )
        self._threads = fence.environment.num_threads if options.whole else 1
        chooser = StepChooser()
        planned = plan_units(state, fence, options)
        self._held = {block.parameter for unit in planned for block in unit.blocks}
        device = options.device
        sums = None if devices.may_look(device) else sums_on(device)
        #: What lies on a device has sums only, so there no CRC-32C is compared.
        self._compares = sums is None or fence.digests == "sum64"
        self._units = [UnitState(unit, state, fence, chooser, sums) for unit in planned]
        self._pool = ThreadPoolExecutor(options.workers, thread_name_prefix="lowdiff-replay")
        self._scratch_elements = max((unit.scratch_elements for unit in planned), default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        if exception[0] is None:
            for unit in self._units:
                unit.collect(self._state)

    def run(self, window: Sequence[Step]) -> None:
        """Step every unit through a window, then check the checksums of the window's steps."""
        queue = iter(self._units)  # next() on a list iterator is atomic
        with threads_put_back(), without_default_group(self._state.fence.optimizers):
            workers = range(self._options.workers)
            jobs = [self._pool.submit(self._work, queue, window) for _ in workers]
            results = [job.result() for job in jobs]
        checksums = Checksums(KINDS[self._fence.digests])
        moved = self._options.movements
        for of_worker, movements in results:
            checksums.add(of_worker)
            if moved is not None:
                for number, movement in movements.items():
                    moved[number] = moved.get(number, Movement()) + movement
        for step in window:
            for shard in step.shards:
                self._check(shard, checksums)
            self._state.take(step.shards)

    def _work(
        self, queue: Iterator[UnitState], window: Sequence[Step]
    ) -> tuple[Checksums, dict[int, Movement]]:
        checksums = Checksums(KINDS[self._fence.digests])
        movements: dict[int, Movement] = {}
        torch.set_num_threads(self._threads)  # per thread; see threads_put_back
        scratch = Scratch(self._scratch_elements)
        torch.empty(_KEPT_BYTES, dtype=torch.uint8, device="cpu")
        # Units see to it as well, but a team of threads flushes denormals as the thread that made it.
        with torch.no_grad(), arithmetic_of(self._fence.environment):
            for unit in queue:
                looks: list[Look] = []
                for step in window:
                    number = step.shards[0].step
                    with replaying(number):
                        if self._options.movements is None:
                            unit.step(step, scratch)
                        else:
                            moved = unit.step_measured(step, scratch)
                            movements[number] = movements.get(number, Movement()) + moved
                    if step.is_digested and self._compares:
                        looks.append(
                            Look(number, unit.look(), unit.look_at_states(step.summed_states))
                        )
                unit.add_checksums(looks, checksums)
        return checksums, movements

    def _check(self, shard: Differential, checksums: Checksums) -> None:
        """Compare one rank's record of a step; a device of another kind may part from it, which is said once."""
        if not self._compares:
            return
        try:
            check_digests(
                shard,
                self._shares[shard.rank],
                self._held,
                checksums,
                self._state,
                whose="the replayed parameters",
                recorded_by=f"what rank {shard.rank} recorded: {self._suspected}, or this machine rounds "
                "differently",
            )
        except ReplayMismatch as mismatch:
            if makes_same_bits(self._fence, self._options.device):
                raise
            self._compares = False
            Code.REPLAYED_ELSEWHERE.warn(
                f"{mismatch}. The run was trained on {self._fence.environment.device} and is replayed on "
                f"{devices.name_of(self._options.device)}, whose last places may differ; later steps are not compared"
            )


def plan_units(state: RecoveredState, fence: Fence, options: ReplayOptions) -> list[Unit]:
    """Cut the parameters that a state holds, as finely as each optimizer allows."""
    owner_of = {
        name: (index, bool(state.optimizers[index].groups[g].get("fused")))
        for index, spec in enumerate(fence.optimizers)
        for g, names in enumerate(spec.groups)
        for name in names
    }
    owners = [owner_of[spec.name] for spec in fence.layout.parameters]
    kinds = [granularity(spec) for spec in fence.optimizers]
    default = _HOST_BLOCK_ELEMENTS if devices.may_look(options.device) else _DEVICE_BLOCK_ELEMENTS
    cut = element_units(
        fence.layout,
        owners,
        num_threads=fence.environment.num_threads if devices.may_look(options.device) else 1,
        block_elements=options.block_elements or default,
    )
    units = {
        "element": tensor_units(fence.layout, owners) if options.whole else cut,
        "tensor": tensor_units(fence.layout, owners),
        "whole": optimizer_units(fence.layout, owners),
    }
    held = {i for i, spec in enumerate(fence.layout.parameters) if spec.name in state.parameters}
    cut_so = [u for kind, made in units.items() for u in made if kinds[u.optimizer] == kind]
    own = (Unit(u.optimizer, tuple(b for b in u.blocks if b.parameter in held)) for u in cut_so)
    return [unit for unit in own if unit.blocks]
