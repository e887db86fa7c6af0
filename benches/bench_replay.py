"""How fast differentials are replayed: by blocks, and as a loop over whole models would do it.

    python -m benches.bench_replay --out DIR [--smoke]

A real run is made first: a GPT of 20 million parameters stepped with synthetic gradients under a
``Checkpointer``. Then the arms take turns to bring the same snapshot to the last step, each time in
a new process, as after a crash, pinned to one core (``blocks_two_workers``: two). Reading and
decoding the records counts; loading the snapshot does not. Figures are ratios of medians. The
last state of every arm must equal the live one bit for bit, every time.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.axes import Axes

from benches import ending
from benches.gpt import GPT, GPTConfig
from benches.harness import (
    BLUE,
    INK,
    MUTED,
    PALE,
    Result,
    arguments,
    machine,
    two_core_scaling,
    write,
)  # fmt: skip
from benches.replay_arms import (
    ARMS,
    BASE_STEP,
    Sample,
    Start,
    Task,
    digest,
    published_file,
    save_published,
    take_turn,
)  # fmt: skip
from benches.runs import Places, in_new_process, logged_steps, places
from lowdiff.recovery.plan import bytes_of

# GPT-2's vocabulary, padded: at this size most of a model is its embedding, and one tensor is
# larger than 32 MiB, above which glibc never keeps memory, as all matrices of large models are.
_MODEL = GPTConfig(vocabulary=50304, context=256, layers=9, heads=4, width=256)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64)
TARGETS = {
    "speedup_vs_kept_memory": 1.2,
    "two_workers_vs_one": 1.8,
    "speedup_vs_published": 5.0,
}


def make_run(args: argparse.Namespace, where: Places) -> tuple[str, int]:
    """Step a model with synthetic gradients under a checkpointer; final digest and parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = GPT(_SMOKE_MODEL if args.smoke else _MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused or None)

    for _ in logged_steps(model, optimizer, where, density=args.density, until=args.steps):
        pass
    named = dict(model.named_parameters())
    elements = sum(p.numel() for p in named.values())
    return digest((n, p, optimizer.state[p]) for n, p in named.items()), elements


def turn(task: Task) -> Sample:
    """Run an arm in a new process, as after a crash: nothing is warm but the files' pages."""
    sample = in_new_process(take_turn, task)
    assert isinstance(sample, Sample)
    print(f"{task.arm:<20} {sample.seconds:.3f} s")
    return sample


def measure(args: argparse.Namespace, where: Places, published: Path) -> Result:
    """Make the run, let the arms take turns, and compare."""
    facts = machine()
    cores = sorted(os.sched_getaffinity(0))
    live, elements = make_run(args, where)
    cores_of = {arm: cores[:1] for arm in ARMS} | {"blocks_two_workers": cores[:2]}
    tasks = [Task(arm, where, published, cores_of[arm], args.fused) for arm in ARMS]
    start = Start(tasks[0])
    published_bytes = save_published(published, start)
    durable_bytes = bytes_of(start.plan.steps) // args.steps
    assert len(start.plan.steps) == args.steps
    assert published_file(published, BASE_STEP + args.steps).exists()
    del start

    samples: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        # Back and forth, so that a steady drift cancels.
        for task in tasks if number % 2 else reversed(tasks):
            samples[task.arm].append(turn(task))

    digests = {arm: {s.digest for s in found} for arm, found in samples.items() if arm != "decode"}
    for arm, found in digests.items():
        assert found == {live}, f"{arm} did not reproduce the live state"
    seconds = {arm: statistics.median(s.seconds for s in samples[arm]) for arm in ARMS}
    scaling = two_core_scaling()
    updates = elements * args.steps
    one, two = seconds["blocks"], seconds["blocks_two_workers"]
    return Result(
        name="replay",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": elements,
            "optimizer": "AdamW",
            "world_size": 1,
            "cores": {arm: list(own) for arm, own in cores_of.items()},
        },
        seed=args.seed,
        machine=facts,
        samples={arm: [asdict(s) for s in found] for arm, found in samples.items()},
        summary={
            "speedup_vs_naive": seconds["naive"] / one,
            "speedup_vs_kept_memory": seconds["kept"] / one,
            "speedup_vs_kept_memory_without_decode": (seconds["kept"] - seconds["decode"])
            / (one - seconds["decode"]),
            "speedup_two_workers": seconds["kept"] / two,
            "two_workers_vs_one": one / two,
            "two_core_scaling": scaling,
            "speedup_vs_published": seconds["published"] / one,
            "speedup_two_workers_vs_published": seconds["published"] / two,
            "bit_identical": True,  # asserted above
            **{f"{arm}_ns_per_element": 1e9 * s / updates for arm, s in seconds.items()},
            "differential_bytes": durable_bytes,
            "published_bytes": published_bytes,
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """A bar per arm, its rounds as dots, and how much of it is decoding."""
    labels = {
        "published": "published procedure",
        "naive": "naive loop",
        "kept": "loop, memory kept",
        "blocks": "blocks, one worker",
        "blocks_two_workers": "blocks, two workers",
    }
    updates = result.settings["parameters"] * result.settings["steps"]
    for row, arm in enumerate(reversed(labels)):
        values = [1e9 * s["seconds"] / updates for s in result.samples[arm]]
        colour = BLUE if arm.startswith("blocks") else PALE
        axes.barh(row, statistics.median(values), color=colour, height=0.62)
        axes.plot(values, [row] * len(values), "o", color=INK, markersize=3, alpha=0.5)
    decode = result.summary["decode_ns_per_element"]
    axes.axvline(decode, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate(
        "decode", xy=(decode, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -1),
        textcoords="offset points", color=MUTED, va="top", fontsize=9,
    )  # fmt: skip
    axes.set_yticks(range(len(labels)), list(reversed(labels.values())))
    axes.set_xlabel("nanoseconds per element and step, on one core (two workers: two)", color=INK)
    axes.set_title(
        f"Replay of {result.settings['steps']} differentials of "
        f"{result.settings['parameters'] / 1e6:.1f} M parameters: the same bits in all arms",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="differentials to replay")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.rounds = 4, 1
    with places(args.out) as where:
        published = where.run.parent / "published"
        published.mkdir()
        result = measure(args, where, published)
    write(result, args.out, draw)
    for key, target in TARGETS.items():
        value = result.summary[key]
        print(f"{key} {value:.2f}, target {target}: {'met' if value >= target else 'MISSED'}")


if __name__ == "__main__":
    ending.run(main)
