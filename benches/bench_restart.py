"""How long a restart takes, against its parts and against a plain load of the same state.

    python -m benches.bench_restart --out DIR [--smoke]

A GPT of 30 million parameters is stepped by fused AdamW under a ``Checkpointer``. Then, each time in
a new process with the files evicted from the page cache: recovery of a step that lies 5 to 200
differentials after its snapshot; the load of that snapshot and as many fused steps alone; and
``torch.distributed.checkpoint.load`` of the same state; and the pass in which ``attach`` compares the
live model and optimizer with what it recovered. Differentials are on disk, not in staging. Beside that a
run of a small GPT is resumed by one rank and by two, from a snapshot alone: what a rank reads of it. Last,
whole trainings of a GPT of 60 million parameters are started: the time until their first step has ended,
ten steps after the snapshot, against the same script that resumes by ``torch.load``; ``restart_first_step.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed.checkpoint as dcp
from matplotlib.axes import Axes

import lowdiff
from benches import ending
from benches.gpt import GPT, GPTConfig
from benches.harness import BLUE, INK, PALE, RED, Result, arguments, machine, write
from benches.replay_arms import digest
from benches.restart_arms import Restart, Turn, take_turn
from benches.restart_first_step import first_steps, over_torch_save
from benches.restart_shares import of_two_over_one, shares
from benches.runs import Places, in_new_process, logged_steps, places
from lowdiff.recovery.inspect.export import export

_MODEL = GPTConfig(vocabulary=50304, context=256, layers=8, heads=6, width=384)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64)
_ARMS = ("recover", "parts", "dcp_load", "compare")
TARGET_STEPS, TARGET_RATIO = 20, 1.2


def _model(args: argparse.Namespace) -> GPTConfig:
    return _SMOKE_MODEL if args.smoke else _MODEL


def make_run(args: argparse.Namespace, where: Places, counts: Sequence[int]) -> dict[int, str]:
    """Step a model under a checkpointer; the state's digest after each count of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = GPT(_model(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: dict[int, str] = {}

    # One step more than needed, because close takes a snapshot of the last.
    until = max(counts) + 1
    for done in logged_steps(model, optimizer, where, density=args.density, until=until):
        if done in counts:
            named = model.named_parameters()
            found[done] = digest((n, p, optimizer.state[p]) for n, p in named)
    shutil.rmtree(where.staging)  # a restart of the node: what counts is on disk
    where.staging.mkdir()
    return found


def turn(task: Restart) -> Turn:
    """Run an arm in a new process."""
    found = in_new_process(take_turn, task)
    assert isinstance(found, Turn)
    print(f"{task.arm:<10} {task.num_steps:>4} {found.seconds:.3f} s ({found.cpu_seconds:.3f} cpu)")
    return found


def measure(args: argparse.Namespace, where: Places) -> Result:
    """Make the run, let the arms take turns at every count, and compare."""
    facts = machine()
    counts = args.counts
    target = TARGET_STEPS if TARGET_STEPS in counts else counts[0]
    live = make_run(args, where, counts)
    distributed = where.run.parent / "distributed"
    state = lowdiff.recover(where.run, 0, staging=where.staging)
    elements = state.fence.layout.elements
    export(state, distributed)
    del state
    assert dcp.FileSystemReader(distributed).read_metadata().state_dict_metadata
    cores = sorted(os.sched_getaffinity(0))[: args.workers]
    turns: dict[str, dict[int, list[Turn]]] = {arm: {n: [] for n in counts} for arm in _ARMS}
    for number in range(args.rounds):
        tasks = [
            Restart(arm, where, n, distributed, cores, _model(args))
            for n in counts
            for arm in _ARMS
        ]
        for task in tasks if number % 2 else reversed(tasks):
            turns[task.arm][task.num_steps].append(turn(task))
    for n in counts:
        assert {t.digest for t in turns["recover"][n]} == {live[n]}, f"step {n} differs"

    read = shares(where, _SMOKE_MODEL if args.smoke else GPTConfig(), args.seed)

    firsts = {
        ranks: first_steps(where.run.parent, ranks, args.restarts, smoke=args.smoke)
        for ranks in ((1,) if args.smoke else (1, 2))
    }

    def median(arm: str, n: int) -> float:
        return statistics.median(t.seconds for t in turns[arm][n])

    def cpu(arm: str, n: int) -> float:
        return statistics.median(t.cpu_seconds for t in turns[arm][n])

    return Result(
        name="restart",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": elements,
            "optimizer": "AdamW(fused=True)",
        },
        seed=args.seed,
        machine=facts,
        samples={
            **{
                arm: {str(n): [asdict(t) for t in found] for n, found in own.items()}
                for arm, own in turns.items()
            },
            "shares": {key: [asdict(t) for t in found] for key, found in read.items()},
            **{
                f"first_step_of_{ranks}": {
                    arm: [asdict(turn) for turn in own] for arm, own in found.items()
                }
                for ranks, found in firsts.items()
            },
        },
        summary={
            "ratio_to_parts": median("recover", target) / median("parts", target),
            "ratio_to_dcp_load": median("recover", target) / median("dcp_load", target),
            "cpu_ratio_to_parts": cpu("recover", target) / cpu("parts", target),
            "compare_seconds": median("compare", target),
            "bit_identical": True,  # asserted above
            "first_step_over_torch_save": max(map(over_torch_save, firsts.values())),
            **{
                f"first_step_seconds_{arm}_{ranks}": statistics.median(t.seconds for t in own)
                for ranks, found in firsts.items()
                for arm, own in found.items()
            },
            "bytes_read_rank_of_2_over_1": of_two_over_one(read, makers=2),
            "bytes_read_rank_of_2_over_1_made_by_1": of_two_over_one(read, makers=1),
            **{f"recover_{n}_seconds": median("recover", n) for n in counts},
            **{f"ratio_to_parts_{n}": median("recover", n) / median("parts", n) for n in counts},
            **{
                f"ratio_to_dcp_load_{n}": median("recover", n) / median("dcp_load", n)
                for n in counts
            },
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """Seconds over the number of differentials, an arm a line."""
    counts = result.settings["counts"]
    labels = {
        "recover": ("lowdiff.recover", BLUE),
        "parts": ("snapshot load + the steps alone", PALE),
        "dcp_load": ("torch.distributed.checkpoint load", RED),
    }
    for arm, (label, colour) in labels.items():
        own = result.samples[arm]
        medians = [statistics.median(t["seconds"] for t in own[str(n)]) for n in counts]
        axes.plot(counts, medians, "o-", color=colour, label=label, markersize=4)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("differentials after the snapshot", color=INK)
    axes.set_ylabel("seconds, files evicted", color=INK)
    axes.legend(frameon=False)
    axes.set_title(
        f"Restart of {result.settings['parameters'] / 1e6:.1f} M parameters: the same bits",
        loc="left", color=INK, fontsize=11.5, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm and count")
    parser.add_argument("--restarts", type=int, default=5, help="restarts of each whole training")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=2, help="cores and replay threads")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[5, 20, 50, 100, 200], help="differentials"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.counts, args.restarts = 1, [2, 4], 1
    with places(args.out) as where:
        result = measure(args, where)
    write(result, args.out, draw)
    value = result.summary["ratio_to_parts"]
    verdict = "met" if value <= TARGET_RATIO else "MISSED"
    print(f"ratio_to_parts {value:.2f}, target {TARGET_RATIO}: {verdict}")


if __name__ == "__main__":
    ending.run(main)
