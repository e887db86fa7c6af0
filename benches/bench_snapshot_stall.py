"""What full snapshots cost each step: taken at once, spread over a cycle, and by others.

    python -m benches.bench_snapshot_stall --out DIR [--smoke]

AdamW on 30 million parameters with made-up gradients; forward and backward pass are a pause, in
which the writer has the time that it would have. Four arms, one after the other: no snapshots,
atomic ones, rolling ones, and ``torch.distributed.checkpoint.async_save`` at the same steps. The
stall of a step is what its snapshot costs the training thread, copying and waiting; what the
differentials cost is the same in the first three arms, and is in the samples too.

At the end the last step is rebuilt from the rolling snapshot in the middle of the run: it must have
the bits of the live state.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matplotlib.axes import Axes
from torch import nn

import lowdiff
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    RED,
    Result,
    arguments,
    machine,
    write,
)
from benches.runs import Places, places, plan_from
from lowdiff.compressors import TopK
from lowdiff.persistence.values import same
from lowdiff.recovery.engine import carry_out
from lowdiff.recovery.replay import ReplayOptions

TARGET_WORST, TARGET_COPY = 1 / 20, 1.1
COLOURS = {"none": MUTED, "atomic": RED, "rolling": GREEN, "async_save": BLUE}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained.

    Attributes:
        shapes: Of the parameters.
        every: Steps between snapshots.
        pause_seconds: In place of a forward and a backward pass.
    """

    shapes: tuple[tuple[int, ...], ...]
    steps: int
    every: int
    pause_seconds: float


#: As in a transformer of 10 layers: 30 million elements, a third of them in one embedding.
FULL = Size(((20_000, 512), *((512, 512),) * 76, *((512,),) * 60), 200, 100, 0.3)
SMOKE = Size(((200, 64), *((64, 64),) * 8, *((64,),) * 6), 20, 10, 0.0)


class Bag(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        tensors = (torch.randn(shape, generator=chance) for shape in size.shapes)
        self.all = nn.ParameterList(tensors)


class Trainee:
    """Steps of AdamW on gradients that were made before."""

    def __init__(self, size: Size, seed: int) -> None:
        self.model = Bag(size, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        chance = torch.Generator().manual_seed(seed + 1)
        self._gradients = [torch.randn(p.shape, generator=chance) for p in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        self._pause_seconds = size.pause_seconds

    def step(self, step: int) -> None:
        """One optimizer step; from one to the next, gradients differ by a factor."""
        time.sleep(self._pause_seconds)
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            assert parameter.grad is not None
            torch.mul(gradient, 1.0 + step % 7, out=parameter.grad)
        self.optimizer.step()


def lowdiff_arm(size: Size, where: Places, seed: int, snapshot: str) -> tuple[list[float], Any]:
    """Stall of each step, and what the differentials took; checked at the end."""
    trainee = Trainee(size, seed)
    checkpointer = lowdiff.Checkpointer(
        where.run,
        compressor=TopK(0.01),
        snapshot="rolling" if snapshot == "rolling" else "atomic",
        snapshot_every=1 << 40 if snapshot == "none" else size.every,
        staging=where.staging,
        retention=None,
    )
    checkpointer.attach(trainee.model, trainee.optimizer)
    stalls, rest = [], []
    before = checkpointer.stats()
    for step in range(size.steps):
        trainee.step(step)
        checkpointer.commit()
        after = checkpointer.stats()
        keys = "snapshot_seconds", "waiting_seconds", "training_thread_seconds"
        copying, waiting, thread = (after[key] - before[key] for key in keys)
        stalls.append(copying + waiting)
        rest.append([copying, waiting, thread])
        before = after
    live = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    checkpointer.close()
    assert_exact(where, live, 0 if snapshot == "none" else size.every)
    return stalls, rest


def assert_exact(where: Places, live: dict[str, torch.Tensor], base: int) -> None:
    """The last step comes back from an older snapshot."""
    catalog, plan = plan_from(where, base)
    state = carry_out(catalog, plan, ReplayOptions())
    assert same(dict(state.model_state_dict()), live), "the recovered bits differ"


def async_save_arm(size: Size, where: Places, seed: int) -> tuple[list[float], Any]:
    """Stall of each step with PyTorch's own asynchronous checkpoints."""
    trainee = Trainee(size, seed)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    stalls: list[float] = []
    pending: Future[Any] | None = None
    try:
        for step in range(size.steps):
            trainee.step(step)
            started = time.perf_counter()
            if (step + 1) % size.every == 0:
                if pending is not None:
                    pending.result()
                state = {
                    "model": trainee.model.state_dict(),
                    "optimizer": trainee.optimizer.state_dict(),
                }
                saving = dcp.async_save(state, checkpoint_id=str(where.run / f"step-{step + 1}"))
                assert isinstance(saving, Future)
                pending = saving
            stalls.append(time.perf_counter() - started)
        if pending is not None:
            pending.result()
    finally:
        dist.destroy_process_group()
    return stalls, []


def arms(
    size: Size, seed: int
) -> Iterator[tuple[str, Callable[[Places], tuple[list[float], Any]]]]:
    """Name of each arm, and what runs it."""
    for name in ("none", "atomic", "rolling"):
        yield name, partial(lowdiff_arm, size, seed=seed, snapshot=name)
    yield "async_save", partial(async_save_arm, size, seed=seed)


def figures(stalls: dict[str, list[float]], rest: dict[str, Any]) -> dict[str, Any]:
    """The named figures."""
    copying = {name: sum(row[0] for row in rows) for name, rows in rest.items() if rows}
    worst = {name: max(values) for name, values in stalls.items()}
    ratio = worst["rolling"] / worst["atomic"]
    copy_ratio = copying["rolling"] / copying["atomic"]
    return {
        "bit_identical": True,
        "rolling_worst_over_atomic_worst": ratio,
        "rolling_copy_over_atomic_copy": copy_ratio,
        "worst_target_met": ratio <= TARGET_WORST,
        "copy_target_met": copy_ratio <= TARGET_COPY,
        **{f"{name}_worst_seconds": value for name, value in worst.items()},
        **{f"{name}_total_seconds": sum(values) for name, values in stalls.items()},
        **{f"{name}_copy_seconds": value for name, value in copying.items()},
    }


def draw(axes: Axes, result: Result) -> None:
    """Stall of every step, on a logarithmic axis."""
    for name, stalls in result.samples["stall_seconds"].items():
        steps = range(1, len(stalls) + 1)
        # What took no time has no place on a logarithmic axis.
        shown = [max(1e3 * seconds, 1e-3) for seconds in stalls]
        axes.plot(steps, shown, color=COLOURS[name], label=name, lw=1.2, marker=".", ms=3)
    axes.set_yscale("log")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("stall by snapshots [ms]", color=INK)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.13))


def main(argv: Sequence[str] | None = None) -> None:
    """Run all arms and write both files."""
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help="steps of each arm")
    args = parser.parse_args(argv)
    size = SMOKE if args.smoke else FULL
    if args.steps:
        size = Size(size.shapes, args.steps, args.steps // 2, size.pause_seconds)
    facts = machine()
    out: Path = args.out
    torch.set_num_threads(1)
    stalls: dict[str, list[float]] = {}
    rest: dict[str, Any] = {}
    for name, run in arms(size, args.seed):
        with places(out) as where:
            stalls[name], rest[name] = run(where)
        gc.collect()
    result = Result(
        name="snapshot_stall",
        settings={
            "elements": sum(torch.Size(shape).numel() for shape in size.shapes),
            "steps": size.steps,
            "snapshot_every": size.every,
            "pause_seconds": size.pause_seconds,
            "optimizer": "AdamW(fused=True)",
            "density": 0.01,
        },
        seed=args.seed,
        machine=facts,
        samples={"stall_seconds": stalls, "copying_waiting_differentials_seconds": rest},
        summary=figures(stalls, rest),
    )
    write(result, out, draw)


if __name__ == "__main__":
    main()
