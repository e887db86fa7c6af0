"""The ways to bring a state forward that ``bench_replay`` compares.

Every arm starts from the same snapshot and ends with the same bits. All but ``published`` read
the same records of a real run, decode included; ``published`` reads the files its authors' code
would have written.
"""

from __future__ import annotations

import ctypes
import hashlib
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benches.harness import pin, timed
from benches.runs import Places, plan_from
from lowdiff.compressors import from_settings
from lowdiff.core.layout import flat
from lowdiff.core.memory import byte_view
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.replay.replayer import ReplayOptions, replay
from lowdiff.types import Block, Differential

BASE_STEP = 0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True, slots=True)
class Sample:
    """One arm's round.

    Attributes:
        seconds: From the snapshot in memory to the last step.
        cpu_seconds: Processor time meanwhile; less than ``seconds`` where the machine was busy.
        page_faults: Minor faults meanwhile.
        digest: SHA-256 of parameters and optimizer state afterwards; empty if nothing was made.
    """

    seconds: float
    cpu_seconds: float
    page_faults: int
    digest: str


@dataclass(frozen=True, slots=True)
class Task:
    """What an arm is told.

    Attributes:
        arm: Key of ``ARMS``.
        where: The run.
        published: Folder of the published procedure's files.
        cores: Cores it may use; also its number of worker threads.
        fused: Whether the optimizer runs fused kernels.
    """

    arm: str
    where: Places
    published: Path
    cores: Sequence[int]
    fused: bool


class Start:
    """The state of the snapshot, fresh for one round, and the way to the last step."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.catalog, self.plan = plan_from(task.where, BASE_STEP)
        fence = self.catalog.incarnations[self.plan.base.incarnation]
        self.fence = self.catalog.incarnations[self.plan.incarnation]
        self.state = load_snapshot(self.plan.base, fence, len(task.cores))

    def differentials(self) -> Iterator[Differential]:
        """The records, read and decoded one by one."""
        codec = Codec()
        for step in self.plan.steps:
            yield read_differential(step.shards[0], codec)


class Loop:
    """A whole model and its optimizer, as a script that resumes would hold them."""

    def __init__(self, start: Start) -> None:
        self.layout = start.fence.layout
        self.compressor = from_settings(
            start.fence.compressor["name"], start.fence.compressor["settings"]
        )
        self.named = {n: nn.Parameter(t) for n, t in start.state.tensors().items()}
        self.optimizer = torch.optim.AdamW(self.named.values(), fused=start.task.fused or None)
        self.optimizer.load_state_dict(start.state.optimizer_state_dict())

    def step(self, differential: Differential, gradients: Iterable[torch.Tensor]) -> None:
        """One optimizer step; ``gradients`` are flat and zero, in layout order."""
        self.optimizer.param_groups[0].update(differential.optimizers[0].consumed[0])
        payloads = [differential.payload]
        for i, (parameter, gradient) in enumerate(zip(self.named.values(), gradients, strict=True)):
            block = Block(i, 0, gradient.numel())
            self.compressor.decoder(payloads, self.layout)(block, gradient)
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()

    def digest(self) -> str:
        """Of the state now."""
        return digest((n, p, self.optimizer.state[p]) for n, p in self.named.items())


_Prepared: TypeAlias = tuple[Callable[[], None], Callable[[], str]]


def naive(start: Start) -> _Prepared:
    """A gradient of fresh zeros for every parameter and step."""
    loop = Loop(start)

    def run() -> None:
        for differential in start.differentials():
            loop.optimizer.zero_grad()
            loop.step(differential, (torch.zeros(p.numel()) for p in loop.named.values()))

    return run, loop.digest


def kept(start: Start) -> _Prepared:
    """The same with memory kept: gradients zeroed in place, and an allocator that never lets go.

    glibc is told to serve even the largest blocks from its heap and never to trim that, so that
    the optimizer's temporaries, too, come from pages that were touched before.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_MAX, 0) == 1
    assert libc.mallopt(_M_TRIM_THRESHOLD, -1) == 1
    loop = Loop(start)
    gradients = [torch.zeros(p.numel()) for p in loop.named.values()]

    def run() -> None:
        for differential in start.differentials():
            loop.step(differential, (gradient.zero_() for gradient in gradients))

    return run, loop.digest


def blocks(start: Start) -> _Prepared:
    """``lowdiff.recovery``: by blocks, one worker per core."""
    options = ReplayOptions(num_workers=len(start.task.cores))
    incarnations = start.catalog.incarnations

    def run() -> None:
        replay(start.state, start.plan.steps, lambda n: incarnations[n], options)

    def outcome() -> str:
        state = start.state.optimizers[0].state
        return digest((n, p, state[n]) for n, p in start.state.parameters.items())

    return run, outcome


def decoding(start: Start) -> _Prepared:
    """Reads and decodes every record, and drops it: what of the others is not replay."""

    def run() -> None:
        for _ in start.differentials():
            pass

    return run, str


def published(start: Start) -> _Prepared:
    """LowDiff's published recovery: ``torch.load`` a step, scatter-add every rank's list, step.

    Follows ``load_differential_checkpoint`` and ``topk_decompress`` in ``torch/cv.py`` of
    https://github.com/SC25LowDiff/LowDiff line by line, on the CPU.
    """
    loop = Loop(start)

    def decompress(values: Any, indices: Any, shape: torch.Size) -> torch.Tensor:
        tensor = torch.zeros(shape).view(-1)
        for index, value in zip(indices, values, strict=True):
            tensor = tensor.scatter_add_(0, index, value)
        return tensor.view(shape)

    def run() -> None:
        for step in start.plan.steps:
            compressed = torch.load(published_file(start.task.published, step.step))
            for key in compressed:
                entry = compressed[key]
                gradient = decompress(entry["values"], entry["indices"], entry["shape"])
                loop.named[key].grad = gradient
            loop.optimizer.step()

    return run, loop.digest


def published_file(folder: Path, step: int) -> Path:
    """Where the published procedure keeps a step."""
    return folder / f"{step}_batch1.pth.tar"


def save_published(folder: Path, start: Start) -> int:
    """Write every step as the published code does; bytes per step.

    Every rank's list of int64 indices and float32 values, by parameter, in one file on one rank.
    """
    sizes = []
    for differential in start.differentials():
        indices = differential.payload.section("indices/float32")
        values = differential.payload.section("values/float32")
        assert indices is not None
        assert values is not None
        own_indices = torch.from_numpy(indices.data.astype("int64"))
        own_values = torch.from_numpy(values.data.view("float32").copy())
        compressed = {}
        for spec in start.fence.layout.parameters:
            first, last = torch.searchsorted(own_indices, torch.tensor([spec.offset, spec.stop]))
            compressed[spec.name] = {
                "values": [own_values[first:last].clone()],
                "indices": [own_indices[first:last] - spec.offset],
                "shape": torch.Size(spec.shape),
            }
        path = published_file(folder, differential.step)
        torch.save(compressed, path)
        sizes.append(path.stat().st_size)
    return sum(sizes) // len(sizes)


def digest(named: Iterable[tuple[str, torch.Tensor, dict[str, Any]]]) -> str:
    """SHA-256 of parameters and their optimizer state, by name."""
    total = hashlib.sha256()
    for name, parameter, state in sorted(named, key=lambda item: item[0]):
        total.update(name.encode())
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            total.update(byte_view(flat(tensor)))
    return total.hexdigest()


ARMS: dict[str, Callable[[Start], _Prepared]] = {
    "naive": naive,
    "kept": kept,
    "blocks": blocks,
    "blocks_two_workers": blocks,
    "published": published,
    "decode": decoding,
}


def take_turn(task: Task, connection: Connection) -> None:
    """Run one arm once, and send a ``Sample``."""
    pin(task.cores)
    torch.set_num_threads(1)
    run, outcome = ARMS[task.arm](Start(task))
    usage = []

    def run_once() -> None:
        usage.append(resource.getrusage(resource.RUSAGE_SELF))
        run()
        usage.append(resource.getrusage(resource.RUSAGE_SELF))

    seconds = timed(run_once)
    before, after = usage
    connection.send(
        Sample(
            seconds=seconds,
            cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            page_faults=after.ru_minflt - before.ru_minflt,
            digest=outcome(),
        )
    )
