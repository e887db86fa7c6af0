"""What a version of the weights takes beside a whole file of them, and what publishing costs the training.

    python -m benches.bench_publish --out DIR [--smoke]

A GPT learns for a while, then makes steps at a learning rate as reinforcement learning has it (1e-6) and at one of
pre-training. After each step its weights, rounded to bfloat16, are published into a folder and followed, and a whole
safetensors file of them is written, fsynced and loaded, in turns. A third kind has one random value in a hundred moved
to its neighbour. Every followed model has the bits that were published.

Then the same training runs with a Checkpointer that publishes and with one that does not, in turns of a few steps. The
training thread's share is the time in the only call that publishing makes there. The overhead is that of the whole
step: the publisher follows the run on the same cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from safetensors.torch import load_file, save_file

import lowdiff
from benches import ending
from benches.bench_overhead import Trainee
from benches.corpus import batch_for_step, load_corpus
from benches.gpt import GPTConfig
from benches.harness import (
    BLUE,
    INK,
    MUTED,
    PALE,
    Result,
    abba,
    arguments,
    machine,
    overhead,
    timed,
    write,
)
from lowdiff.compressors import TopK
from lowdiff.persistence.versions.target import FolderTarget
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.testing import wait_until

TARGET_BYTES, TARGET_SHARE = 0.014, 0.002
_MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64, dropout=0.0)
#: Learning rate of each kind; None moves values by hand.
KINDS: dict[str, float | None] = {"one_in_100": None, "rl": 1e-6, "pretraining": 3e-4}

Batches = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def batches(args: argparse.Namespace, config: GPTConfig) -> Batches:
    """Return a function that gives the next batch."""
    tokens, step = load_corpus().train, 0

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal step
        step += 1
        return batch_for_step(
            tokens, step=step, rank=0, world_size=1, seed=args.seed, batch_size=args.rows,
            context=config.context,
        )  # fmt: skip

    return next_batch


def rounded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters in bfloat16, each once."""
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def versions(args: argparse.Namespace, kind: str, config: GPTConfig) -> dict[str, list[float]]:
    """Publish and follow step after step; bytes and seconds of each."""
    batch = batches(args, config)
    trainee = Trainee(config, batch(), seed=args.seed, fused=False)
    for _ in range(args.warm_up_steps):
        trainee.step(batch())
    rate = KINDS[kind]
    for group in trainee.optimizer.param_groups:
        group["lr"] = rate or 0.0
    found: dict[str, list[float]] = {
        key: [] for key in ("changed", "bytes", "whole_bytes", "publish", "save", "apply", "load")
    }
    dice = torch.Generator().manual_seed(args.seed)
    weights = rounded(trainee.model)
    with tempfile.TemporaryDirectory(prefix="files-", dir=args.out) as folder:
        target, file = Path(folder, "target"), Path(folder, "whole.safetensors")
        subscriber = lowdiff.Subscriber(target)
        follower = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        with VersionWriter(FolderTarget(target), "run", anchor_every=10**6) as writer:
            for step in range(args.steps + 1):
                before = weights
                if rate is None:
                    weights = (
                        {name: moved(t, dice) for name, t in before.items()} if step else before
                    )
                elif step:
                    trainee.step(batch())
                    weights = rounded(trainee.model)
                made = {name: Tensor.of_torch(tensor) for name, tensor in weights.items()}
                took = {
                    "publish": timed(lambda: writer.publish(step, 0, made)),  # noqa: B023
                    "save": timed(lambda: save(weights, file)),  # noqa: B023
                    "apply": timed(lambda: subscriber.newest().apply(follower)),  # type: ignore[union-attr]
                    "load": timed(lambda: load(file, follower)),
                }
                for name, tensor in follower.items():
                    assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))
                if not step:
                    continue  # the anchor
                parts = target.glob(f"v{step + 1:010d}*")
                moved_values = sum(
                    int((weights[n].view(torch.int16) != before[n].view(torch.int16)).sum())
                    for n in weights
                )
                found["changed"].append(moved_values / sum(t.numel() for t in weights.values()))
                found["bytes"].append(sum(path.stat().st_size for path in parts))
                found["whole_bytes"].append(file.stat().st_size)
                for key, seconds in took.items():
                    found[key].append(seconds)
    return found


def moved(tensor: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Move one value in a hundred to its neighbour."""
    chosen = torch.rand(tensor.shape, generator=dice) < 0.01
    step = 2 * torch.randint(0, 2, tensor.shape, generator=dice) - 1
    return (tensor.view(torch.int16) + chosen * step).to(torch.int16).view(torch.bfloat16)


def save(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write a whole file, as durable as a version is."""
    partial = file.with_suffix(".partial")
    save_file(weights, partial)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(file)
    descriptor = os.open(file.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(file: Path, into: dict[str, torch.Tensor]) -> None:
    """Load a whole file into a model's tensors."""
    for name, tensor in load_file(file).items():
        into[name].copy_(tensor)


class Arm:
    """A training that checkpoints every step, and perhaps publishes it."""

    def __init__(self, args: argparse.Namespace, folder: Path, publish: bool) -> None:
        config = _SMOKE_MODEL if args.smoke else _MODEL
        self._batch, self._steps = batches(args, config), args.turn
        self.trainee = Trainee(config, self._batch(), seed=args.seed, fused=False)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run",
            compressor=TopK(density=0.01),
            snapshot_every=10**6,
            staging=folder / "staging",
            publish=lowdiff.Publisher(folder / "target") if publish else None,
        )
        self.checkpointer.attach(self.trainee.model, self.trainee.optimizer)
        self.trainee.end_step = self.checkpointer.commit
        self.seconds = 0.0

    def turn(self) -> float:
        """Make a few steps; seconds."""
        took = sum(self.trainee.step(self._batch()) for _ in range(self._steps))
        self.seconds += took
        return took


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Train with and without publishing in turns."""
    spent = 0.0
    original = PublisherProcess.tend

    def tend(self: PublisherProcess) -> None:
        nonlocal spent
        started = time.perf_counter()
        original(self)
        spent += time.perf_counter() - started

    pairs: dict[str, list[tuple[float, float]]] = {"publishing": [], "null": []}
    with tempfile.TemporaryDirectory(prefix="files-", dir=args.out) as folder:
        arms = {
            name: Arm(args, Path(folder, name), publish=name == "published")
            for name in ("published", "plain", "twin")
        }
        PublisherProcess.tend = tend  # type: ignore[method-assign]
        try:
            arms["published"].turn()  # starts the process
            wait_until(arms["published"].checkpointer, lambda stats: stats["published_step"] > 0)
            for arm in arms.values():
                arm.turn()
            spent, arms["published"].seconds = 0.0, 0.0
            begun = arms["published"].checkpointer.stats()
            for _ in range(args.pairs):
                pairs["publishing"] += abba(arms["published"].turn, arms["plain"].turn)
                pairs["null"] += abba(arms["twin"].turn, arms["plain"].turn)
            ended = arms["published"].checkpointer.stats()
            share = spent / arms["published"].seconds
        finally:
            PublisherProcess.tend = original  # type: ignore[method-assign]
        for arm in arms.values():
            arm.checkpointer.close()
    made = {key: ended[key] - begun[key] for key in ("published_versions", "publish_seconds")}
    steps = 2 * args.pairs * args.turn
    return {"pairs": pairs, "training_thread_share": share, "steps": steps, **made}


def measure(args: argparse.Namespace) -> Result:
    """Measure everything."""
    facts = machine()
    config = _SMOKE_MODEL if args.smoke else _MODEL
    samples: dict[str, Any] = {kind: versions(args, kind, config) for kind in KINDS}
    samples["training"] = trained = training(args)
    summary: dict[str, Any] = {}
    for kind in KINDS:
        of = samples[kind]
        median = {key: statistics.median(values) for key, values in of.items()}
        end = "" if kind == "one_in_100" else f"_{kind}"
        summary[f"bytes_over_full{end}"] = median["bytes"] / median["whole_bytes"]
        summary[f"changed_share{end}"] = median["changed"]
        summary[f"publish_over_save{end}"] = median["publish"] / median["save"]
        summary[f"apply_over_load{end}"] = median["apply"] / median["load"]
        summary[f"publish_seconds{end}"] = median["publish"]
        summary[f"apply_seconds{end}"] = median["apply"]
    cost = overhead(trained["pairs"]["publishing"], trained["pairs"]["null"], seed=args.seed)
    summary |= {
        "training_thread_share": trained["training_thread_share"],
        "overhead_median": cost.median,
        "overhead_upper95": cost.upper95,
        "versions_per_step": trained["published_versions"] / trained["steps"],
        "bit_identical": True,  # asserted at every version
    }
    return Result(
        name="publish",
        settings={key: value for key, value in vars(args).items() if key != "out"},
        seed=args.seed,
        machine=facts,
        samples=samples,
        summary=summary,
    )


def draw(axes: Axes, result: Result) -> None:
    """Bytes of each version over those of a whole file, step by step."""
    labels = {"one_in_100": "1 % moved by hand", "rl": "learning rate 1e-6", "pretraining": "3e-4"}
    for (kind, label), colour in zip(labels.items(), (MUTED, BLUE, INK), strict=True):
        of = result.samples[kind]
        shares = [100 * b / w for b, w in zip(of["bytes"], of["whole_bytes"], strict=True)]
        axes.plot(range(1, len(shares) + 1), shares, color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("version", color=INK)
    axes.set_ylabel("% of a whole file", color=INK)
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.set_title(
        f"A version takes {100 * result.summary['bytes_over_full_rl']:.2f} % of a whole file at an RL learning rate",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=6, help="rows of a batch")
    parser.add_argument("--warm-up-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="versions of each kind")
    parser.add_argument("--turn", type=int, default=3, help="steps of a turn")
    parser.add_argument("--pairs", type=int, default=10, help="rounds of two pairs, each kind")
    args = parser.parse_args(argv)
    if args.smoke:
        args.warm_up_steps, args.steps, args.turn, args.pairs = 3, 3, 2, 2
    args.out.mkdir(parents=True, exist_ok=True)
    result = measure(args)
    write(result, args.out, draw)
    if args.smoke:
        return
    for key, target in (
        ("bytes_over_full", TARGET_BYTES),
        ("training_thread_share", TARGET_SHARE),
    ):
        good = result.summary[key] <= target
        print(f"{key} {result.summary[key]:.4f}, at most {target}: {'met' if good else 'MISSED'}")


if __name__ == "__main__":
    ending.run(main)
