"""What a commit costs where there is next to nothing to commit: the fixed cost of a step.

    python -m benches.bench_small_steps --out DIR [--smoke]

A model of 10,000 parameters is stepped by AdamW with ``TopK(0.01)``, in one process without DDP. Counted
is the processor time of the training thread in ``optimizer.step()`` with lowdiff's hooks and in
``commit()``, less that of ``optimizer.step()`` of a twin without lowdiff, which steps in turn with it.
Writer and kernel work beside it and are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from matplotlib.axes import Axes
from torch import nn

import lowdiff
from benches import ending
from benches.harness import BLUE, INK, Result, arguments, machine, write
from benches.runs import Places, places
from lowdiff.compressors import TopK

TARGET_MS = 1.0
_WARM_UP_STEPS = 50


class Trainee:
    """A small model, its optimizer, and the same batch for ever."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(90, 90), nn.ReLU(), nn.Linear(90, 20))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(4, 90)

    def backward(self) -> None:
        """Make the gradients of a step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()


def thread_milliseconds(work: Callable[[], object]) -> float:
    """Processor time of this thread."""
    started = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started)


def measure(args: argparse.Namespace, where: Places) -> Result:
    """Step both in turn."""
    facts = machine()
    torch.set_num_threads(1)
    kept, bare = Trainee(args.seed), Trainee(args.seed)
    checkpointer = lowdiff.Checkpointer(
        where.run, staging=where.staging, compressor=TopK(0.01), snapshot_every=10**9
    )
    checkpointer.attach(kept.model, kept.optimizer)

    def step_and_commit() -> None:
        kept.optimizer.step()
        checkpointer.commit()

    samples: dict[str, list[float]] = {"kept": [], "bare": []}
    for _ in range(_WARM_UP_STEPS + args.steps):
        kept.backward()
        samples["kept"].append(thread_milliseconds(step_and_commit))
        bare.backward()
        samples["bare"].append(thread_milliseconds(bare.optimizer.step))
    checkpointer.close()
    state = lowdiff.recover(where.run, staging=where.staging).model_state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.model.state_dict().items())
    counted = {name: values[_WARM_UP_STEPS:] for name, values in samples.items()}
    extra = [own - alone for own, alone in zip(counted["kept"], counted["bare"], strict=True)]
    low, median, high = statistics.quantiles(extra, n=4)
    return Result(
        name="small_steps",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": sum(p.numel() for p in kept.model.parameters()),
            "optimizer": "AdamW",
        },
        seed=args.seed,
        machine=facts,
        samples=counted,
        summary={
            "commit_ms": median,
            "commit_ms_lower_quartile": low,
            "commit_ms_upper_quartile": high,
            "bit_identical": True,  # asserted above
            "optimizer_ms": statistics.median(counted["bare"]),
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """How the cost is distributed."""
    pairs = zip(result.samples["kept"], result.samples["bare"], strict=True)
    extra = [own - alone for own, alone in pairs]
    axes.hist(extra, bins=60, range=(0.0, 3 * result.summary["commit_ms"]), color=BLUE)
    axes.set_xlabel("milliseconds of the training thread per step", color=INK)
    axes.set_ylabel("steps", color=INK)
    axes.set_title(
        f"A commit of {result.settings['parameters']:,} parameters: "
        f"{result.summary['commit_ms']:.2f} ms",
        loc="left", color=INK, fontsize=11.5, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="commits that count")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps = 20
    with places(args.out) as where:
        result = measure(args, where)
    write(result, args.out, draw)
    value = result.summary["commit_ms"]
    print(f"commit_ms {value:.2f}, target {TARGET_MS}: {'met' if value <= TARGET_MS else 'MISSED'}")


if __name__ == "__main__":
    ending.run(main)
