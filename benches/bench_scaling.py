"""What checkpointing costs each rank as ranks are added: bytes, and time of the training thread.

    python -m benches.bench_scaling --out DIR [--smoke]

A small network is trained by 1, 2, 4 and 8 Gloo ranks on one machine, once for each way to compress.
Every rank steps two copies of it in turns, ABBA: one under a ``Checkpointer``, one with the same
compression and nothing else (for LowDiff+: plain DDP). The difference is the checkpointing. It is
counted in processor time of the training thread, because ranks, their writers and replicas share the
cores of one machine here: by the wall clock, mostly the scheduler would be measured. At the end rank
0's run is recovered from its first snapshot, and compared with the live parameters bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches import ending
from benches.harness import BLUE, GREEN, INK, MUTED, RED, Result, abba, arguments, machine, write
from benches.hooked import Hooked, in_ranks
from benches.runs import Places, places, plan_from
from lowdiff.compressors import CyclicTopK, PowerSGD, TopK
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.protocols import Compressor
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import carry_out

_COLOURS = {"topk": BLUE, "cyclic_topk": GREEN, "powersgd": MUTED, "lowdiff_plus": RED}
_NEVER = 1 << 40
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank did.

    Attributes:
        thread_seconds: Processor time of the training thread in a step under a checkpointer, less
            that in the step without one beside it.
        wall_seconds: The same by the wall clock.
        steps: Differentials.
        segment_bytes: This rank's segments, all of them.
        snapshot_bytes: Its shard of the newest snapshot.
        staged_bytes: What it copied to staging memory, all steps.
        is_identical: Whether the recovered parameters have the live bits; None but on rank 0.
    """

    thread_seconds: tuple[float, ...]
    wall_seconds: tuple[float, ...]
    steps: int
    segment_bytes: int
    snapshot_bytes: int
    staged_bytes: int
    is_identical: bool | None


def compressor(arm: str) -> Compressor | None:
    """What an arm trains with; None for LowDiff+."""
    made: dict[str, Compressor] = {
        "topk": TopK(density=0.01),
        "cyclic_topk": CyclicTopK(density=0.01),
        "powersgd": PowerSGD(matrix_rank=4),
    }
    return made.get(arm)


class Trainee:
    """One copy of the network on one rank; its batches are made up."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        width = args.width
        layers = [torch.nn.Linear(width, width) for _ in range(args.layers)]
        self.model = torch.nn.Sequential(*layers)
        self.generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
        self.ddp: Any = None
        self.end_step: Callable[[], object] = lambda: None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._width = width

    def step(self) -> tuple[float, float]:
        """Train a step; seconds of this thread, and by the wall clock."""
        batch = torch.randn(8, self._width, generator=self.generator)
        dist.barrier()
        began = time.thread_time(), time.perf_counter()
        self.optimizer.zero_grad()
        self.ddp(batch).square().mean().backward()
        self.optimizer.step()
        self.end_step()
        return time.thread_time() - began[0], time.perf_counter() - began[1]


def plain(args: argparse.Namespace, arm: str) -> Trainee:
    """With the compression that the other has, and nothing else."""
    trainee = Trainee(args)
    chosen = compressor(arm)
    if chosen is None:
        trainee.ddp = DistributedDataParallel(trainee.model)
    else:
        hooked = Hooked(trainee.model, chosen)
        trainee.ddp, trainee.end_step = hooked.ddp, hooked.end_step
    return trainee


def as_rank(rank: int, world_size: int, args: argparse.Namespace, arm: str, where: Places) -> Share:
    """Train both copies in turns."""
    baseline, checked = plain(args, arm), Trainee(args)
    checked.ddp = DistributedDataParallel(checked.model)
    checkpointer = lowdiff.Checkpointer(
        where.run,
        compressor=compressor(arm),
        snapshot_every=_NEVER,
        staging=where.staging,
        retention=None,
        on_error="raise",
    )
    checkpointer.attach(checked.ddp, checked.optimizer)
    checked.end_step = checkpointer.commit
    thread, wall = [], []
    for number in range(args.pairs // 2):
        times: list[tuple[float, float]] = []

        def timed_step(trainee: Trainee, times: list[tuple[float, float]] = times) -> float:
            times.append(trainee.step())
            return times[-1][0]

        pairs = list(abba(lambda: timed_step(checked), lambda: timed_step(baseline)))
        if 2 * number >= _WARM_UP:
            thread += [arm_seconds - without for arm_seconds, without in pairs]
            walls = [seconds for _, seconds in times]
            wall += [walls[1] - walls[0], walls[2] - walls[3]]
    staged = int(checkpointer.stats()["staged_bytes"])
    checkpointer.close()
    dist.barrier()
    folder = RunFolder(where.run)
    segments = sum(p.stat().st_size for p in folder.segments_of(rank).glob("*.seg"))
    *_, newest = (path for _, _, path in folder.snapshots())
    return Share(
        thread_seconds=tuple(thread),
        wall_seconds=tuple(wall),
        steps=args.pairs,
        segment_bytes=segments,
        snapshot_bytes=(newest / f"rank-{rank:04d}.safetensors").stat().st_size,
        staged_bytes=staged,
        is_identical=_is_identical(checked, where, arm) if rank == 0 else None,
    )


def _is_identical(trainee: Trainee, where: Places, arm: str) -> bool:
    if compressor(arm) is None:
        state = lowdiff.recover(where.run, staging=where.staging)
    else:
        state = carry_out(*plan_from(where, base_step=0), ReplayOptions(num_workers=1))
    live = dict(trainee.model.named_parameters())
    assert state.tensors().keys() == live.keys()
    return all(torch.equal(tensor, live[name]) for name, tensor in state.tensors().items())


def measure(args: argparse.Namespace) -> Result:
    """Train with every number of ranks and every arm."""
    facts = machine()
    shares: dict[str, dict[int, list[Share]]] = {arm: {} for arm in _COLOURS}
    for world_size in args.ranks:
        for arm in _COLOURS:
            with places(args.out) as where:
                found = in_ranks(world_size, as_rank, args, arm, where)
            assert found[0].is_identical, f"{arm} on {world_size} ranks was not recovered"
            shares[arm][world_size] = found
            print(f"{world_size} ranks, {arm}: {1e3 * _thread_seconds(found):.2f} ms a step")
    figures: dict[str, float] = {}
    for arm, own in shares.items():
        for world_size, found in own.items():
            name = f"{arm}_{world_size}_ranks"
            figures[f"{name}_thread_seconds"] = _thread_seconds(found)
            figures[f"{name}_disk_bytes"] = _disk_bytes(found)
            figures[f"{name}_staged_bytes"] = statistics.fmean(
                share.staged_bytes / share.steps for share in found
            )
            figures[f"{name}_snapshot_bytes"] = statistics.fmean(s.snapshot_bytes for s in found)
    elements = args.layers * args.width * (args.width + 1)
    return Result(
        name="scaling",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": elements,
            "optimizer": "AdamW",
            "time": "processor time of the training thread",
        },
        seed=args.seed,
        machine=facts,
        samples={
            arm: {str(n): [asdict(share) for share in found] for n, found in own.items()}
            for arm, own in shares.items()
        },
        summary={"bit_identical": True, **figures},  # asserted above
    )


def _thread_seconds(shares: Sequence[Share]) -> float:
    """Of a step and rank: the median over steps, the mean over ranks."""
    return statistics.fmean(statistics.median(share.thread_seconds) for share in shares)


def _disk_bytes(shares: Sequence[Share]) -> float:
    """Of a step and rank, snapshots aside."""
    return statistics.fmean(share.segment_bytes / share.steps for share in shares)


def draw(key: str, label: str, unit: float) -> Callable[[Axes, Result], None]:
    """A panel: a figure over the number of ranks, an arm a line."""

    def panel(axes: Axes, result: Result) -> None:
        ranks = result.settings["ranks"]
        for arm, colour in _COLOURS.items():
            values = [unit * result.summary[f"{arm}_{n}_ranks_{key}"] for n in ranks]
            axes.plot(ranks, values, "o-", color=colour, label=arm, markersize=4)
        axes.set_xticks(ranks)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks", color=INK)
        axes.set_ylabel(label, color=INK)
        axes.legend(frameon=False, fontsize=8)

    return panel


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pairs", type=int, default=44, help="steps of each copy")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args(argv)
    if args.smoke:
        args.ranks, args.pairs, args.layers, args.width = [1, 2], 6, 2, 48
    result = measure(args)
    panels = (
        draw("thread_seconds", "ms of the training thread, a step and rank", 1e3),
        draw("disk_bytes", "kB in segments, a step and rank", 1e-3),
    )
    write(result, args.out, *panels)


if __name__ == "__main__":
    ending.run(main)
