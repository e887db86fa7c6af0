"""What a checkpoint at every step costs without compression: a replica, and gradients kept, beside training alone.

    python -m benches.bench_lowdiff_plus --out DIR [--smoke]

The arms take turns step by step, in ABBA order, in one process, on equal models and equal batches; a
twin of the arm without checkpoints is measured in the same way (A/A) and subtracted. The trainer has
one core and one thread, replica and writers the others. For comparison a few steps each are followed by
``torch.save`` and by ``torch.distributed.checkpoint.async_save``, which waits for the save before. Two ranks that
share all cores follow (``benches.kept_ranks``).

At the end all processes are killed, the state is read back from memory into fresh tensors, and compared with the
live state bit for bit: the replica's is timed against a plain copy of as many bytes, the one that gradients lead to
against reading their image and the optimizer's steps alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matplotlib.axes import Axes

import lowdiff
import lowdiff.testing
from benches import ending
from benches.bench_overhead import Batch, Trainee, pair_arguments
from benches.corpus import batch_for_step, load_corpus
from benches.gpt import GPTConfig
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    RED,
    Pair,
    Result,
    abba,
    dots,
    excess,
    machine,
    overhead,
    pin,
    timed,
    write,
)  # fmt: skip
from benches.peers.dcp import completion, reused_memory
from benches.runs import Places, places
from lowdiff.persistence.format.values import same
from lowdiff.recovery.engine import recover
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.state import RecoveredState

TARGET = 0.05
RESTART_TARGET = 1.5
#: Of gradients: one rank, two ranks, recovery, memory over what `attach` planned.
GRADIENTS_TARGETS = {
    "gradients_upper95": 0.04,
    "gradients_two_ranks_upper95": 0.06,
    "gradients_recovery_over_steps": 1.3,
    "gradients_bytes_over_plan": 1.05,
}
_ROOT = Path(__file__).resolve().parents[1]
#: Steps between images of gradients, of which all but so many are replayed at the end.
_KEPT_EVERY, _SMOKE_KEPT_EVERY = 20, 12
_NOT_REPLAYED = 1
#: Steps after the second image, within which memory before the first one is used again.
_REUSED_AFTER = 4
_MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64, dropout=0.0)
_REPEATS = 15


class Bench:
    """The models, and how they take turns."""

    def __init__(self, args: argparse.Namespace, where: Places) -> None:
        self.config = _SMOKE_MODEL if args.smoke else _MODEL
        self._args = args
        self._tokens = load_corpus().train
        self._batches = 0
        first = self.batch()
        self.plain, self.twin, self.checked, self.kept, self.saved = (
            Trainee(self.config, first, seed=args.seed, fused=args.fused) for _ in range(5)
        )
        self.checkpointer = lowdiff.Checkpointer(
            where.run,
            snapshot_every=args.snapshot_every,
            staging=where.staging,
            on_error="raise",
        )
        self.checkpointer.attach(self.checked.model, self.checked.optimizer)
        self.checked.end_step = self.checkpointer.commit
        self.kept_every = _SMOKE_KEPT_EVERY if args.smoke else _KEPT_EVERY
        self.keeping = lowdiff.Checkpointer(
            where.run.with_name("kept"),
            strategy="gradients",
            snapshot_every=self.kept_every,
            staging=where.staging / "kept",
            on_error="raise",
        )
        with planned() as plan:
            self.keeping.attach(self.kept.model, self.kept.optimizer)
        self.planned_bytes = plan[0]
        self.kept.end_step = self.keeping.commit

    def turns(self) -> tuple[list[Pair], list[Pair], list[Pair]]:
        """Two pairs each with a replica, with gradients kept, and of the twin, on the same two batches."""
        two = [self.batch(), self.batch()]

        def arm(trainee: Trainee) -> Callable[[], float]:
            batches = iter(two)
            return lambda: trainee.step(next(batches))

        replica, kept, twin = (
            list(abba(arm(trainee), arm(self.plain)))
            for trainee in (self.checked, self.kept, self.twin)
        )
        return replica, kept, twin

    def others(self, folder: Path, steps: int, cores: Sequence[int]) -> dict[str, list[float]]:
        """Seconds of steps that are followed by a full save, by the way of saving.

        The threads that save have all cores, as replica and writer have those that training leaves.
        """
        pin(cores)
        trainee = self.saved
        saving: Any = None

        def state() -> dict[str, Any]:
            return {"m": trainee.model.state_dict(), "o": trainee.optimizer.state_dict()}

        found: dict[str, list[float]] = {"torch.save": [], "async_save": []}
        for _ in range(steps):
            batch = self.batch()
            found["torch.save"].append(
                trainee.step(batch) + timed(lambda: torch.save(state(), folder / "state.pt"))
            )
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        stager = reused_memory()
        for number in range(steps):
            batch = self.batch()
            begun = time.perf_counter()
            trainee.step(batch)
            if saving is not None:
                saving.result()
            place = folder / f"dcp-{number % 2}"
            saving = completion(dcp.async_save(state(), checkpoint_id=place, async_stager=stager))
            found["async_save"].append(time.perf_counter() - begun)
        if saving is not None:
            saving.result()
        dist.destroy_process_group()
        return found

    @property
    def keeping_step(self) -> int:
        """The step of the arm that keeps gradients."""
        return int(self.keeping.stats()["committed_step"])

    def batch(self) -> Batch:
        """The next batch."""
        self._batches += 1
        return batch_for_step(
            self._tokens,
            step=self._batches,
            rank=0,
            world_size=1,
            seed=self._args.seed,
            batch_size=self._args.sequences,
            context=self.config.context,
        )


@contextmanager
def planned() -> Iterator[list[int]]:
    """What `attach` says inside that staging takes, in bytes."""
    found: list[int] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = re.search(r"takes up to ([0-9.]+) MiB", record.getMessage())
            if said is not None:
                found.append(int(float(said[1]) * (1 << 20)))

    logger, handler = logging.getLogger("lowdiff"), Listening()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def copied(state: RecoveredState) -> list[torch.Tensor]:
    """Every tensor of a state, in memory of its own, as loading it makes them."""
    tensors = list(state.parameters.values())
    for entries in state.optimizers[0].state.values():
        tensors += [value for value in entries.values() if isinstance(value, torch.Tensor)]
    return cloned(tensors)


def cloned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A plain copy."""
    return [tensor.clone() for tensor in tensors]


def take_memory_anew() -> None:
    """Give freed memory back to the kernel, so that whatever follows takes its own from there.

    As a new trainer does. Else it is chance whether glibc has kept some, which halves a copy's time.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def restart(trainee: Trainee, where: Places) -> tuple[float, float]:
    """Seconds to read the newest step from the replica's memory, and to copy as much as it is."""

    def recovered() -> tuple[RecoveredState, list[torch.Tensor]]:
        options = ReplayOptions(num_workers=1)
        state = recover(where.run, staging=where.staging, options=options)
        return state, copied(state)

    reading, copying = [], []
    tensors: list[torch.Tensor] = []
    again: list[torch.Tensor] = []
    for _ in range(_REPEATS):
        tensors, again = [], []
        take_memory_anew()
        begun = time.perf_counter()
        state, tensors = recovered()
        reading.append(time.perf_counter() - begun)
        take_memory_anew()
        begun = time.perf_counter()
        again = cloned(tensors)
        copying.append(time.perf_counter() - begun)
    assert same(again, tensors)
    assert_recovered(state, trainee)
    return statistics.median(reading), statistics.median(copying)


def assert_recovered(state: RecoveredState, trainee: Trainee) -> None:
    """The state has the bits of a live one."""
    live = dict(trainee.model.named_parameters())
    for name, tensor in state.tensors().items():
        assert same(tensor, live[name].detach()), f"{name} was not recovered"
    recovered_state, expected = state.optimizer_state_dict(), trainee.optimizer.state_dict()
    assert same(recovered_state["state"], expected["state"]), "the optimizer was not recovered"


def replayed(bench: Bench, where: Places, newest: int, update: float) -> tuple[float, float]:
    """Seconds to recover the newest step from kept gradients; to read their image and make the steps alone.

    Args:
        bench: Its gradients are dead by now.
        where: Its folders.
        newest: The newest step.
        update: Seconds of one step of the optimizer.
    """
    run, staging = where.run.with_name("kept"), where.staging / "kept"
    image = newest - newest % bench.kept_every
    options = ReplayOptions(num_workers=1)
    whole, base = [], []
    for _ in range(_REPEATS // 3):
        take_memory_anew()
        begun = time.perf_counter()
        state = recover(run, staging=staging, options=options)
        whole.append(time.perf_counter() - begun)
        assert state.step == newest
        assert_recovered(state, bench.kept)
        del state
        take_memory_anew()
        base.append(timed(lambda: recover(run, image, staging=staging, options=options)))
    steps = newest - image
    return statistics.median(whole), statistics.median(base) + steps * update


def staged_bytes(folder: Path) -> int:
    """What lies in memory files now."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_blocks * 512 if path.is_file() else 0)
        except FileNotFoundError:  # an image that was given back
            continue
    return sum(sizes)


def update_seconds(trainee: Trainee) -> float:
    """What the optimizer alone takes of a step."""
    return statistics.median(timed(trainee.optimizer.step) for _ in range(_REPEATS))


def wait_for_replica(bench: Bench) -> None:
    """Until it has applied every step."""
    while bench.checkpointer.stats()["replica_lag_steps"]:
        time.sleep(0.01)


def after_a_crash(bench: Bench, where: Places) -> tuple[float, float]:
    """End all processes but this one, and see what `restart` finds; checkpointing changed nothing."""
    wait_for_replica(bench)
    for checkpointer in (bench.checkpointer, bench.keeping):
        lowdiff.testing.kill(checkpointer)
    seconds = restart(bench.checked, where)
    for twin, checked in zip(
        bench.twin.model.parameters(), bench.checked.model.parameters(), strict=True
    ):
        assert same(twin.detach(), checked.detach()), "checkpointing changed training"
    for trainee in (bench.plain, bench.twin, bench.checked, bench.kept):
        trainee.assert_sane()
    return seconds


def pairs_of_two_ranks(args: argparse.Namespace, where: Places) -> dict[str, list[Pair]]:
    """Pairs of seconds of a training of two ranks, by arm; see `benches.kept_ranks`."""
    folder = where.run.with_name("two")
    folder.mkdir(parents=True)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(folder), str(where.staging / "two"), str(args.pairs)]
    subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "benches.kept_ranks", *words]
        + (["--smoke"] if args.smoke else []),
        cwd=_ROOT,
        check=True,
    )
    found: dict[str, list[Pair]] = json.loads((folder / "pairs.json").read_text())
    return found


def measure(args: argparse.Namespace, where: Places, cores: Sequence[int]) -> Result:
    """Take all turns, check the outcome, and work out the figures."""
    facts = machine()
    pin(cores[:1])
    torch.set_num_threads(1)
    bench = Bench(args, where)
    bench.turns()  # the replica starts with the first step
    stats = bench.checkpointer.stats()
    keeper = bench.keeping.stats()["writer_pid"]
    for process in (stats["replica_pid"], stats["writer_pid"], keeper):
        pin(cores[1:] or cores, process)
    for _ in range(args.warm_up_pairs // 2):
        bench.turns()
    # Until gradients lie in memory that held others before.
    growing = []
    while bench.keeping_step < 2 * bench.kept_every + _REUSED_AFTER:
        batch = bench.batch()
        growing.append((bench.kept.step(batch), bench.saved.step(batch)))
    wait_for_replica(bench)
    before = bench.checkpointer.stats()
    pairs: list[Pair] = []
    kept_pairs: list[Pair] = []
    null_pairs: list[Pair] = []
    memory, kept_memory, lags = [], [], []
    for done in range(0, args.pairs, 2):
        measured, kept, null = bench.turns()
        pairs += measured
        kept_pairs += kept
        null_pairs += null
        kept_memory.append(staged_bytes(where.staging / "kept"))
        memory.append(staged_bytes(where.staging) - kept_memory[-1])
        lags.append(bench.checkpointer.stats()["replica_lag_steps"])
        if done % 10 == 0:
            print(f"pair {done} of {args.pairs}: {pairs[-1][0]:.3f} s, {pairs[-1][1]:.3f} s")
    after = bench.checkpointer.stats()
    assert after["replica_restarts"] == 0, "the replica died and was started again"
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        others = bench.others(Path(folder), args.others, cores)
    pin(cores[:1])
    while bench.keeping_step % bench.kept_every != bench.kept_every - _NOT_REPLAYED:
        bench.kept.step(bench.batch())
    newest = bench.keeping_step
    reading, copying = after_a_crash(bench, where)
    update = update_seconds(bench.plain)
    replaying, steps_alone = replayed(bench, where, newest, update)
    pin(cores)
    two_ranks = pairs_of_two_ranks(args, where)
    estimate = overhead(pairs, null_pairs, seed=args.seed)
    of_gradients = overhead(kept_pairs, null_pairs, seed=args.seed)
    of_two = {
        arm: overhead(two_ranks[arm], two_ranks["twin"], seed=args.seed)
        for arm in ("replica", "gradients")
    }
    model_bytes = sum(p.nbytes for p in bench.checked.model.parameters())
    step = statistics.median(plain for _, plain in pairs)
    return Result(
        name="lowdiff_plus",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": model_bytes // 4,
            "optimizer": "AdamW, gradients clipped at norm 1",
            "trainer_core": cores[0],
            "replica_cores": list(cores[1:] or cores),
        },
        seed=args.seed,
        machine=facts,
        samples={
            "checkpointed_and_plain_seconds": pairs,
            "gradients_and_plain_seconds": kept_pairs,
            "gradients_in_new_memory_seconds": growing,
            "two_ranks": two_ranks,
            "gradients_staging_bytes": kept_memory,
            "twin_and_plain_seconds": null_pairs,
            **{f"{name}_seconds": values for name, values in others.items()},
            "staging_bytes": memory,
            "lag_steps": lags,
        },
        summary={
            "overhead_median": estimate.median,
            "overhead_upper95": estimate.upper95,
            "null_median": estimate.null_median,
            **{
                f"overhead_of_{name.replace('.', '_')}": statistics.median(values) / step - 1
                for name, values in others.items()
            },
            "step_seconds": step,
            "step_over_update": step / update,
            "replica_seconds_per_step": (after["replica_seconds_per_step"]),
            "largest_lag_steps": max(lags),
            "waiting_seconds": after["waiting_seconds"] - before["waiting_seconds"],
            "training_thread_ms_per_step": 1000
            * (after["training_thread_seconds"] - before["training_thread_seconds"])
            / args.pairs,
            "restart_seconds": reading,
            "copy_seconds": copying,
            "restart_over_copy": reading / copying,
            "gradients_median": of_gradients.median,
            "gradients_upper95": of_gradients.upper95,
            "gradients_in_new_memory": statistics.median(excess(growing)),
            "gradients_two_ranks_median": of_two["gradients"].median,
            "gradients_two_ranks_upper95": of_two["gradients"].upper95,
            "replica_two_ranks_median": of_two["replica"].median,
            "replica_two_ranks_upper95": of_two["replica"].upper95,
            "gradients_recovery_seconds": replaying,
            "gradients_recovery_over_steps": replaying / steps_alone,
            "gradients_bytes_over_plan": max(kept_memory) / bench.planned_bytes,
            "gradients_planned_bytes": bench.planned_bytes,
            "model_bytes": model_bytes,
            "largest_staging_bytes": max(memory),
            # Parameters and two moments; images come and go.
            "largest_staging_over_state": max(memory) / (3 * model_bytes),
            "bit_identical": True,  # asserted above
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """Every pair's excess as a dot, and the medians of other ways to save at every step."""
    summary = result.summary
    plain = statistics.median(p for _, p in result.samples["checkpointed_and_plain_seconds"])
    rows: list[tuple[str, list[float], str]] = [
        ("without against without (A/A)", excess(result.samples["twin_and_plain_seconds"]), MUTED),
        ("replica (LowDiff+)", excess(result.samples["checkpointed_and_plain_seconds"]), BLUE),
        ("gradients", excess(result.samples["gradients_and_plain_seconds"]), BLUE),
        *(
            (name, [s / plain - 1 for s in result.samples[f"{name}_seconds"]], INK)
            for name in ("async_save", "torch.save")
        ),
    ]
    for height, (_, values, colour) in enumerate(rows):
        dots(axes, height, [100 * value for value in values], colour)
    axes.axvline(100 * TARGET, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xscale("symlog", linthresh=10)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_xlabel(
        f"time of a step over that of one without checkpoints, excess in %; a step takes "
        f"{summary['step_seconds']:.2f} s; bar: median",
        color=INK,
    )
    good = summary["overhead_upper95"] <= TARGET
    axes.set_title(
        f"Every step in a replica costs {100 * summary['overhead_median']:.1f} % of it "
        f"(95 % bound: {100 * summary['overhead_upper95']:.1f} %)",
        loc="left", color=GREEN if good else INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = pair_arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--others", type=int, default=10, help="steps with each other way to save")
    parser.add_argument("--snapshot-every", type=int, default=20, help="steps between images")
    args = parser.parse_args(argv)
    if args.smoke:
        args.pairs, args.warm_up_pairs, args.others = 6, 2, 2
    if args.pairs % 2 or args.warm_up_pairs % 2:
        parser.error("pairs come in twos: ABBA")
    args.out.mkdir(parents=True, exist_ok=True)
    with places(Path(args.out)) as where:
        result = measure(args, where, sorted(os.sched_getaffinity(0)))
    write(result, args.out, draw)
    summary = result.summary
    for name, bound, target in (
        ("overhead, upper 95 % bound", summary["overhead_upper95"], TARGET),
        ("restart over a plain copy", summary["restart_over_copy"], RESTART_TARGET),
        *((name, summary[name], target) for name, target in GRADIENTS_TARGETS.items()),
    ):
        verdict = "met" if bound <= target else "MISSED"
        print(f"{name}: {bound:.3f}, target {target}: {verdict}")
    if summary["step_over_update"] < 5 or summary["step_seconds"] < 0.3:
        print("too small a step for figures to quote", file=sys.stderr)


if __name__ == "__main__":
    ending.run(main)
